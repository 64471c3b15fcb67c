"""The rollout servers of a run: one host process for each, started together, watched, stopped."""

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from megatrl.config.recipe import Recipe
from megatrl.errors import MegatrlError
from megatrl.observability.progress import waiting
from megatrl.orchestration.placement import Placement
from megatrl.orchestration.worker_group import WorkerGroup
from megatrl.rollout.control import ServerControl
from megatrl.rollout.server import RolloutServer, ServerSpec

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class ServerHost:
    """Runs one server process on the node that Ray placed it on. The server dies with this process."""

    def __init__(self, spec: ServerSpec) -> None:
        self._server = RolloutServer(spec)

    def start(self) -> str:
        self._server.start()
        return self._server.url

    def wait_ready(self) -> str:
        self._server.wait_ready()
        return self._server.url

    def check(self) -> None:
        self._server.check()

    def stop(self) -> None:
        self._server.stop()


class ServerGroup:
    """All rollout servers. `urls` is known once they are ready."""

    def __init__(self, hosts: WorkerGroup, timeout_s: float) -> None:
        self._hosts = hosts
        self._timeout_s = timeout_s
        self.urls: tuple[str, ...] = ()

    @classmethod
    def start(cls, recipe: Recipe, model_path: Path, placement: Placement, log_dir: Path) -> "ServerGroup":
        """Launches the processes and returns at once."""
        config = recipe.rollout.servers
        host = server_host(ray.nodes())
        specs = [
            ServerSpec(
                model_path=str(model_path),
                config=config,
                host=host,
                log_path=log_dir / f"server-{index}.log",
                context_length=None,
                seed=recipe.seed + index,
                record_routing=recipe.actor.router.replay,
            )
            for index in range(config.num_servers)
        ]
        hosts = WorkerGroup.start(
            "rollout server",
            ServerHost,
            [(spec,) for spec in specs],
            placement=placement.group,
            bundles=placement.server_bundles,
            cpus=1,
            gpus=placement.gpus_per_server,
            environment={},
            timeout_s=config.start_timeout_s + 30,
        )
        group = cls(hosts, config.start_timeout_s + 30)
        hosts.call("start")
        return group

    @classmethod
    def none(cls) -> "ServerGroup":
        """No servers, for runs that replay recorded trajectories."""
        return cls(WorkerGroup("rollout server", [], 1.0), 1.0)

    def wait_ready(self) -> tuple[str, ...]:
        """Blocks until every server answers; raises with the log's last lines where one does not."""
        is_first = len(self._hosts) > 0 and not self.urls  # later calls, one for each arm, return at once
        with waiting("rollout servers", deadline_s=self._timeout_s) if is_first else contextlib.nullcontext():
            self.urls = tuple(self._hosts.call("wait_ready", timeout_s=self._timeout_s))
        return self.urls

    def check(self) -> None:
        """Raises RolloutError, with exit code and log, where a server is gone."""
        self._hosts.call("check", timeout_s=30)

    def release_memory(self) -> None:
        self._each("release_memory_occupation")

    def resume_memory(self) -> None:
        self._each("resume_memory_occupation")

    def _each(self, method: str) -> None:
        def call(url: str) -> None:
            with ServerControl(url) as control:
                getattr(control, method)()

        with ThreadPoolExecutor(max_workers=max(1, len(self.urls))) as pool:
            list(pool.map(call, self.urls))

    def stop(self) -> None:
        """Ends the servers, then their hosts."""
        try:
            self._hosts.call("stop", timeout_s=30)
        except MegatrlError as error:  # gone already, or its host is: nothing is left to stop there
            logger.warning("stopping servers: %s", error)
        self._hosts.stop()


def server_host(nodes: Sequence[dict]) -> str:
    """The address servers bind to: loopback on one node, the node's own address when the job spans several."""
    alive = [node for node in nodes if node.get("Alive")]
    return LOOPBACK if len(alive) <= 1 else "0.0.0.0"
