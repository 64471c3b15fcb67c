"""Servers of an evaluation. They load the policy's directory themselves: no actor, no publish.

What is measured is then what SGLang's own loader makes of the files that one would deploy, and the ranks of
the actor are started only where a meter is read on them.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrl.config.engines import ActorConfig
from megatrl.config.recipe import Recipe
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.cluster import cluster
from megatrl.orchestration.placement import ray_cluster
from megatrl.orchestration.reaper import no_process_outlives_this_one
from megatrl.orchestration.server_pool import ServerPool
from megatrl.orchestration.servers import ServerGroup

logger = logging.getLogger(__name__)


class ReloadingServers:
    """ServerCare for servers that were started on the weights they serve: a restart brings those back."""

    def __init__(self, servers: ServerPool) -> None:
        self._servers = servers

    def tend(self) -> None:
        """Between uses: those that are back take requests again. Raises RolloutError where no restart is left."""
        self._servers.take_note(self._servers.wait_reachable(), {})

    def repair(self, policy_version: int) -> bool:
        """After a failed rollout: True where a server had died and others, or itself again, can play in its place."""
        if self._servers.urls and not self._servers.notice():
            return False
        self.tend()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """Servers that hold the policy, and the actor's ranks where they were asked for."""

    servers: ServerPool
    actor: ActorGroup | None


@contextlib.contextmanager
def served_policy(recipe: Recipe, policy: Path, logs: Path, *, with_ranks: bool) -> Iterator[ServedPolicy]:
    """Servers on the directory `policy`, ready; everything started here is gone when the block ends."""
    if with_ranks:
        with cluster(recipe, policy, logs) as group:
            group.servers.wait_ready()
            yield ServedPolicy(servers=group.servers, actor=group.actor(recipe))
        return
    logs.mkdir(parents=True, exist_ok=True)
    no_ranks = recipe.model_copy(update={"actor": ActorConfig(device="cpu")})  # its one bundle stays empty
    with no_process_outlives_this_one(), ray_cluster(no_ranks) as placement:
        servers = ServerGroup.start(recipe, policy, placement, logs)
        try:
            servers.wait_ready()
            yield ServedPolicy(servers=servers, actor=None)
        finally:
            servers.stop()
