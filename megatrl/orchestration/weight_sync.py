"""Publishing as the loop sees it, through the deaths of servers."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from megatrl.weight_sync.report import PublishReport

logger = logging.getLogger(__name__)


class WeightSync(Protocol):
    metrics: dict[str, float]

    def publish(self, policy_version: int) -> None: ...


class NullWeightSync:
    """For runs that replay recorded trajectories: there is no server."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def publish(self, policy_version: int) -> None:
        return None


class Sender(Protocol):
    """The actor, as far as publishing goes."""

    def publish(self, policy_version: int, urls: tuple[str, ...]) -> PublishReport: ...


class Receivers(Protocol):
    """The servers, as far as publishing goes; see `ServerPool`."""

    num_restarts: int

    @property
    def urls(self) -> tuple[str, ...]: ...

    def tend(self) -> None: ...

    def notice(self) -> bool: ...

    def wait_reachable(self) -> tuple[str, ...]: ...

    def take_note(self, served: Iterable[str], failures: Mapping[str, str]) -> set[str]: ...


class Devices(Protocol):
    def interrupt_rollout(self) -> AbstractContextManager[None]: ...


class ProvenWeightSync:
    """Moves the actor's weights into the servers; `metrics` tells bytes and seconds by phase."""

    def __init__(self, actor: Sender, servers: Receivers, devices: Devices) -> None:
        self._actor, self._servers, self._devices = actor, servers, devices
        self.metrics: dict[str, float] = {}

    def publish(self, policy_version: int) -> None:
        """Returns when at least one server holds the weights, proven, and no living one lacks them.

        A server that dies is left behind: it is restarted and served by a later publish, or by this one where no
        other is left. Raises WeightSyncError where a living server has no proven weights, and RolloutError where
        servers died more often than `rollout.servers.max_restarts`.
        """
        while True:
            report = self._actor.publish(policy_version, self._servers.wait_reachable())
            dead = self._servers.take_note(report.served, report.failures)
            if not dead:
                report.check()
            if self._servers.urls and dead == report.failures.keys():
                break
            # The living ones may have failed because of the dead: only another try can tell.
            logger.warning("publishing policy_version=%d again; servers that died: %s", policy_version, sorted(dead))
        self.metrics = {
            "publish/bytes": float(report.num_bytes),
            "publish/bytes_ratio": report.bytes_ratio,
            "publish/buckets": float(report.num_buckets),
            "publish/largest_bucket_bytes": float(report.largest_bucket_bytes),
            "publish/is_proven": float(report.is_proven),
            "publish/servers": float(len(report.served)),
            "publish/restarts": float(self._servers.num_restarts),
            **{f"publish/{phase}_s": seconds for phase, seconds in report.phase_s.items()},
        }

    def tend(self) -> None:
        """Between uses: servers that died meanwhile are restarted beside the work. Raises as `publish` does."""
        self._servers.tend()

    def repair(self, policy_version: int) -> bool:
        """After a failed rollout: True where a server had died and others, or itself again, can play in its place.

        Raises as `publish` does.
        """
        if self._servers.urls and not self._servers.notice():
            return False
        if not self._servers.urls:
            with self._devices.interrupt_rollout():
                self.publish(policy_version)
        return True
