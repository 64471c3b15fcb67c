"""The rollout servers of a run: one host process for each, started together, restarted alone, stopped together."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ray

from megatrl.config.recipe import Recipe
from megatrl.errors import MegatrlError, RolloutError
from megatrl.observability.progress import waiting
from megatrl.orchestration.placement import Placement
from megatrl.orchestration.server_pool import ServerPool
from megatrl.orchestration.worker_group import WorkerGroup
from megatrl.rollout.control import ServerControl
from megatrl.rollout.server import RolloutServer, ServerSpec

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


class RemoteServer:
    """A server under a host process on its node. A launch replaces the host, and with it the whole old process tree."""

    def __init__(self, name: str, start_host: Callable[[], WorkerGroup], timeout_s: float) -> None:
        self.name = name
        self._start_host = start_host
        self._timeout_s = timeout_s
        self._host = WorkerGroup(name, [], timeout_s)
        self._is_over = False
        self._is_ready = False
        self._lock = threading.Lock()  # a launch in a thread of the pool must not outrun the end of the run

    def launch(self) -> None:
        with self._lock:
            if self._is_over:
                raise RolloutError(f"{self.name} is not started again: the run has ended")
            self._is_ready = False
            self._host.stop()
            self._host = self._start_host()
            self._host.call("start")

    def wait_ready(self) -> str:
        url = self._host.call("wait_ready", timeout_s=self._timeout_s)[0]
        self._is_ready = True
        return url

    def check(self) -> None:
        self._host.call("check", timeout_s=30)

    def stop(self) -> None:
        with self._lock:
            self._is_over = True
            try:
                if self._is_ready:  # a host that still waits would not listen; the server ends with it anyway
                    self._host.call("stop", timeout_s=30)
            finally:
                self._host.stop()


class ServerGroup(ServerPool):
    """The rollout servers of a run on their nodes. `urls` are those that take requests."""

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
        timeout_s = config.start_timeout_s + 30

        def host_of(index: int) -> WorkerGroup:
            return WorkerGroup.start(
                f"rollout server {index}",
                ServerHost,
                [(specs[index],)],
                placement=placement.group,
                bundles=[placement.server_bundles[index]],
                cpus=1,
                gpus=placement.gpus_per_server,
                environment={},
                timeout_s=timeout_s,
            )

        group = cls(
            [
                RemoteServer(f"rollout server {index}", partial(host_of, index), timeout_s)
                for index in range(config.num_servers)
            ],
            max_restarts=config.max_restarts,
            start_timeout_s=timeout_s,
            restarts_beside_work=recipe.placement.kind != "colocated",
        )
        group.launch()
        return group

    @classmethod
    def none(cls) -> "ServerGroup":
        """No servers, for runs that replay recorded trajectories."""
        return cls([], max_restarts=0, start_timeout_s=1.0)

    def wait_ready(self) -> tuple[str, ...]:
        """Blocks until every server answers; raises with the log's last lines where one does not."""
        is_first = self.is_starting and not self._is_up  # later calls, one for each arm, return at once
        with waiting("rollout servers", deadline_s=self.start_timeout_s) if is_first else contextlib.nullcontext():
            return super().wait_ready()

    def release_memory(self) -> None:
        self._each("release_memory_occupation")

    def resume_memory(self) -> None:
        self._each("resume_memory_occupation")

    def _each(self, method: str) -> None:
        def call(url: str) -> MegatrlError | None:
            try:
                with ServerControl(url) as control:
                    getattr(control, method)()
            except MegatrlError as error:
                return error
            return None

        urls = self.urls
        with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
            failures = [(url, error) for url, error in zip(urls, pool.map(call, urls), strict=True) if error]
        if failures:
            self.notice()
        for url, error in failures:
            if url in self.urls:  # a dead one holds no memory and is restarted at the next publish
                raise error


def server_host(nodes: Sequence[dict]) -> str:
    """The address servers bind to: loopback on one node, the node's own address when the job spans several."""
    alive = [node for node in nodes if node.get("Alive")]
    return LOOPBACK if len(alive) <= 1 else "0.0.0.0"
