"""Actor ranks and rollout servers of one run, brought up together and taken down together."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrl.actor.worker import WorkerSpec
from megatrl.config.recipe import Recipe
from megatrl.observability.progress import waiting
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.devices import OwnedDevices, SharedDevices
from megatrl.orchestration.placement import Placement, node_address, ray_cluster
from megatrl.orchestration.rank_worker import RankWorker
from megatrl.orchestration.reaper import no_process_outlives_this_one
from megatrl.orchestration.servers import ServerGroup
from megatrl.orchestration.worker_group import WorkerGroup
from megatrl.rollout.ports import free_port

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The processes of a run. Arms of a comparison take turns on one cluster."""

    workers: WorkerGroup
    servers: ServerGroup
    colocated: bool
    timeout_s: float

    def actor(self, recipe: Recipe) -> ActorGroup:
        """The actor under this recipe's loss and sampling temperature."""
        return ActorGroup(self.workers, temperature=recipe.rollout.sampling.temperature, loss=recipe.loss)

    def devices(self, actor: ActorGroup) -> OwnedDevices | SharedDevices:
        return SharedDevices(actor, self.servers) if self.colocated else OwnedDevices()


@contextlib.contextmanager
def cluster(recipe: Recipe, model_path: Path, log_dir: Path, *, serve: bool = True) -> Iterator[Cluster]:
    """Starts Ray, servers and ranks side by side and yields when the ranks are up.

    The servers may still be loading: `servers.wait_ready()` waits for them, so that an SFT start can
    use the time. Everything started here is gone when the block ends. `serve=False` starts no server.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with no_process_outlives_this_one(), ray_cluster(recipe) as placement:
        servers = ServerGroup.start(recipe, model_path, placement, log_dir) if serve else ServerGroup.none()
        workers = _start_workers(recipe, model_path, placement, log_dir)
        try:
            with waiting(f"{len(workers)} actor ranks", deadline_s=recipe.actor.timeout_s):
                workers.call("initialize")
            logger.info("cluster up ranks=%d seconds=%.1f", len(workers), time.monotonic() - begin)
            yield Cluster(
                workers=workers,
                servers=servers,
                colocated=recipe.placement.kind == "colocated",
                timeout_s=recipe.actor.timeout_s,
            )
        finally:
            try:
                workers.stop()
            finally:
                servers.stop()


def _start_workers(recipe: Recipe, model_path: Path, placement: Placement, log_dir: Path) -> WorkerGroup:
    world_size = recipe.actor.layout.world_size
    address, port = node_address(placement.group, placement.actor_bundles[0]), free_port()
    specs = [
        WorkerSpec(
            rank=rank,
            world_size=world_size,
            master_addr=address,
            master_port=port,
            actor=recipe.actor,
            model_path=str(model_path),
            seed=recipe.seed,
            num_steps=recipe.train.num_steps,
        )
        for rank in range(world_size)
    ]
    environment = {"OMP_NUM_THREADS": "1"} if recipe.actor.device == "cpu" else {}
    return WorkerGroup.start(
        "actor",
        RankWorker,
        [(spec, str(log_dir / f"rank-{spec.rank}.log")) for spec in specs],
        placement=placement.group,
        bundles=placement.actor_bundles,
        cpus=1,
        gpus=placement.gpus_per_actor,
        environment=environment,
        timeout_s=recipe.actor.timeout_s,
    )
