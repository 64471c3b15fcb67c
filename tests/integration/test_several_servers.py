"""Two SGLang servers, one of two ranks, and servers that are killed: what each of them holds is what was published."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from megatrl.config.engines import PublishConfig, ServerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import RolloutError
from megatrl.orchestration.devices import OwnedDevices
from megatrl.orchestration.players import WatchedPlayer
from megatrl.orchestration.server_pool import ServerPool
from megatrl.orchestration.weight_sync import ProvenWeightSync
from megatrl.rollout.collector import ServerSamplers
from megatrl.rollout.control import ServerControl
from megatrl.rollout.guardian import session_members
from megatrl.rollout.server import RolloutServer, ServerSpec
from megatrl.weight_sync.broadcast import BroadcastTransport
from megatrl.weight_sync.report import PublishReport
from megatrl.weight_sync.routes import make_publisher
from tests.integration.conftest import CPU_SERVER, make_tiny_qwen3_moe
from tests.integration.test_sglang_server import VOCAB, collector, prompts
from tests.integration.test_weight_sync import Weights, assert_generates_like, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUTES = ["tensor", "broadcast", "disk"]
BUCKET_BYTES = 100_000


class LocalServer:
    """A server process of a pool, without Ray. `old_trees` are the sessions of starts that are over."""

    def __init__(self, name: str, spec: ServerSpec) -> None:
        self.name, self._spec = name, spec
        self.server = RolloutServer(spec)
        self.may_start = threading.Event()
        self.may_start.set()
        self.old_trees: list[int] = []

    def launch(self) -> None:
        assert self.may_start.wait(120)
        self.server.stop()
        self.server = RolloutServer(self._spec)
        self.server.start()

    def wait_ready(self) -> str:
        self.server.wait_ready()
        return self.server.url

    def check(self) -> None:
        self.server.check()

    def stop(self) -> None:
        self.server.stop()

    def kill(self) -> None:
        """SIGKILL to the HTTP server itself; its guardian and its children are left to find out."""
        assert self.server._process is not None
        guardian = self.server._process.pid
        (main,) = map(int, Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split())
        self.old_trees.append(main)
        os.kill(main, signal.SIGKILL)


class Survivor:
    """The session's server in a pool: it is never killed, started or stopped here."""

    name = "survivor"

    def __init__(self, server: RolloutServer) -> None:
        self._server = server

    def launch(self) -> None:
        pass

    def wait_ready(self) -> str:
        return self._server.url

    def check(self) -> None:
        self._server.check()

    def stop(self) -> None:
        pass


class Actor:
    """Publishes version N with the weights of models[N % 2]; `victims` die before the tensor of that number."""

    def __init__(self, route: str, models: Sequence[Path], directory: Path) -> None:
        config = PublishConfig(bucket_bytes=BUCKET_BYTES, timeout_s=60.0, route=route)  # pyright: ignore[reportArgumentType]
        self.publisher = make_publisher(config, read_model_shape(models[0]), CPU_SERVER, (), directory=directory)
        self._weights = [weights_of(path) for path in models]
        self.victims: dict[int, LocalServer] = {}
        self.num_passes = 0

    def publish(self, policy_version: int, urls: tuple[str, ...]) -> PublishReport:
        self.num_passes += 1
        self.publisher.use_servers(urls)
        return self.publisher.publish_to_reachable(self._export(self._weights[policy_version % 2]), policy_version)

    def _export(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for place, item in enumerate(weights.items()):
            if place in self.victims:
                self.victims.pop(place).kill()
            yield item


@pytest.fixture(scope="module")
def models(tiny_moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_moe_path, make_tiny_qwen3_moe(tmp_path_factory.mktemp("other") / "qwen3-moe", seed=1)]


@pytest.fixture(scope="module")
def started(
    models: list[Path], sglang_server: RolloutServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalServer, LocalServer]]:
    """A server that may be killed and one of two ranks, started side by side."""
    logs = tmp_path_factory.mktemp("servers")
    spec = ServerSpec(model_path=str(models[0]), config=CPU_SERVER, log_path=logs / "victim.log")
    two_ranks = replace(spec, config=CPU_SERVER.model_copy(update={"tensor": 2}), log_path=logs / "two-ranks.log")
    servers = LocalServer("victim", spec), LocalServer("two ranks", two_ranks)
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.launch()
        for server in servers:
            server.wait_ready()
        yield servers
    with ServerControl(sglang_server.url) as control:
        control.update_weights_from_disk(str(models[0]), weight_version="0")


def check_publishes(route: str, config: ServerConfig, urls: list[str], models: list[Path], directory: Path) -> None:
    """Two publishes, there and back, each proven, seen in the outputs, and within the bounds on bytes."""
    publish = PublishConfig(bucket_bytes=BUCKET_BYTES, timeout_s=60.0, route=route)  # pyright: ignore[reportArgumentType]
    publisher = make_publisher(publish, read_model_shape(models[0]), config, urls, directory=directory)
    try:
        for version, path in ((1, models[1]), (2, models[0])):
            report = publisher.publish(weights_of(path).items(), version)
            assert report.is_proven
            assert report.served == tuple(urls)
            assert report.num_buckets > 3
            assert 0 < report.largest_bucket_bytes <= 131_072, "the bound, or one embedding of 512 x 64 x 4 bytes"
            assert report.model_bytes == sum(tensor.nbytes for tensor in weights_of(path).values())
            assert 1.0 <= report.bytes_ratio <= 1.1
            for url in urls:
                with ServerControl(url) as control:
                    assert control.weight_version() == str(version)
                    assert_generates_like(control, path)
    finally:
        publisher.close()


@pytest.mark.parametrize("route", ROUTES)
def test_two_servers_are_served_at_once(
    sglang_server: RolloutServer,
    started: tuple[LocalServer, LocalServer],
    models: list[Path],
    tmp_path: Path,
    route: str,
) -> None:
    urls = [sglang_server.url, started[0].server.url]
    check_publishes(route, CPU_SERVER, urls, models, tmp_path)


@pytest.mark.parametrize("route", ROUTES)
def test_each_rank_of_a_server_of_two_proves_its_part(
    started: tuple[LocalServer, LocalServer], models: list[Path], tmp_path: Path, route: str
) -> None:
    server = started[1].server
    with ServerControl(server.url) as control:
        names = control.weights_checksum()
        assert {name.split("/")[0] for name in names} == {"0", "1"}
        part = "model.layers.0.self_attn.qkv_proj.weight"
        assert names[f"0/{part}"] != names[f"1/{part}"], "the ranks hold different parts"
    check_publishes(route, server.spec.config, [server.url], models, tmp_path)


@pytest.fixture
def pool(sglang_server: RolloutServer, started: tuple[LocalServer, LocalServer]) -> Iterator[ServerPool]:
    """The session's server and the one to kill, as a run sees them. The victim outlives the pool."""

    pool = ServerPool([Survivor(sglang_server), started[0]], max_restarts=2, start_timeout_s=300.0)
    for member in pool._members:
        member.starting = pool._threads.submit(member.process.wait_ready)
    pool.wait_ready()
    yield pool
    started[0].may_start.set()
    for member in pool._members:
        if member.starting is not None:
            member.starting.result()
    pool._threads.shutdown()


def test_a_server_killed_between_buckets_costs_the_others_nothing_and_comes_back_proven(
    sglang_server: RolloutServer,
    started: tuple[LocalServer, LocalServer],
    pool: ServerPool,
    models: list[Path],
    tmp_path: Path,
) -> None:
    victim, actor = started[0], Actor("broadcast", models, tmp_path)
    sync = ProvenWeightSync(actor, pool, OwnedDevices())
    sync.publish(10)
    assert len(pool.urls) == 2
    old_url = victim.server.url

    victim.may_start.clear()
    actor.victims = {30: victim}
    sync.publish(11)
    assert actor.num_passes == 2, "the survivor gets the rest of the same pass"
    assert pool.urls == (sglang_server.url,)
    assert sync.metrics["publish/is_proven"] == 1
    assert 1.0 <= sync.metrics["publish/bytes_ratio"] <= 1.2, "one bucket was sent twice"
    with ServerControl(sglang_server.url) as control:
        assert control.weight_version() == "11"
        assert_generates_like(control, models[1])
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{old_url}/model_info", timeout=5, trust_env=False)

    # While it is away requests go to the other one, under the version that one holds.
    groups = collector(list(pool.urls), models[0]).collect(prompts(8), first_position=0, policy_version=11)
    assert {turn.policy_version for g in groups for t in g.trajectories for turn in t.turns} == {11}

    victim.may_start.set()
    for member in pool._members:
        if member.starting is not None:
            member.starting.result(timeout=300)
    sync.tend()
    assert pool.urls == (sglang_server.url,), "it holds the weights of its start and gets no request"
    assert session_members(victim.old_trees[-1]) == [], "nothing of the killed server is left"
    assert victim.server.url != old_url
    sync.publish(12)
    assert pool.urls == (sglang_server.url, victim.server.url)
    for url in pool.urls:
        with ServerControl(url) as control:
            assert control.weight_version() == "12"
            assert_generates_like(control, models[0])
    transport = actor.publisher._transport
    assert isinstance(transport, BroadcastTransport)
    assert transport.num_groups == 3, "formed, formed again without the victim, formed again with it"
    actor.publisher.close()


def test_a_run_on_one_server_waits_for_its_restart_and_plays_the_episodes_again(
    started: tuple[LocalServer, LocalServer], models: list[Path], tmp_path: Path
) -> None:
    victim, actor = started[0], Actor("tensor", models, tmp_path)
    pool = ServerPool([victim], max_restarts=1, start_timeout_s=300.0)
    pool._members[0].starting = pool._threads.submit(victim.wait_ready)
    pool.wait_ready()
    sync = ProvenWeightSync(actor, pool, OwnedDevices())
    sync.publish(21)
    old_url = victim.server.url
    under_way = threading.Event()

    def kill_under_way() -> None:
        assert under_way.wait(60)
        victim.kill()

    killer = threading.Thread(target=kill_under_way)
    killer.start()
    episodes = collector([], models[0], progress=lambda done, total, tokens: under_way.set())
    episodes._samplers = ServerSamplers(lambda: pool.urls, vocab_size=VOCAB)
    player = WatchedPlayer(episodes, sync)
    groups = player.collect(prompts(60), first_position=0, policy_version=21)
    killer.join()
    assert victim.server.url != old_url
    assert len(groups) == 60
    assert {turn.policy_version for g in groups for t in g.trajectories for turn in t.turns} == {21}
    with ServerControl(victim.server.url) as control:
        assert_generates_like(control, models[1])

    # The one restart is used up: the next death, in mid-update, ends the run and says why.
    actor.victims = {30: victim}
    with pytest.raises(RolloutError, match=r"victim is gone and no restart is left .*max_restarts=1[\s\S]*victim\.log"):
        sync.publish(22)
    pool._threads.shutdown()
