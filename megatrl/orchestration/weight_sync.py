"""Publishing as the loop sees it."""

from typing import Protocol

from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.servers import ServerGroup


class WeightSync(Protocol):
    metrics: dict[str, float]

    def publish(self, policy_version: int) -> None: ...


class NullWeightSync:
    """For runs that replay recorded trajectories: there is no server."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def publish(self, policy_version: int) -> None:
        return None


class ProvenWeightSync:
    """Moves the actor's weights into the servers; `metrics` tells bytes and seconds by phase."""

    def __init__(self, actor: ActorGroup, servers: ServerGroup) -> None:
        self._actor, self._servers = actor, servers
        self.metrics: dict[str, float] = {}

    def publish(self, policy_version: int) -> None:
        """Raises RolloutError for a dead server and WeightSyncError where the weights are not proven to be there."""
        self._servers.check()
        report = self._actor.publish(policy_version)
        self.metrics = {
            "publish/bytes": float(report.num_bytes),
            "publish/buckets": float(report.num_buckets),
            "publish/is_proven": float(report.is_proven),
            **{f"publish/{phase}_s": seconds for phase, seconds in report.phase_s.items()},
        }
