"""Servers that die: taken out, restarted a bounded number of times, and back only with proven current weights.

Stub servers keep real weights; the pool, the publisher and what stands between them are the real ones.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatrl.config.engines import PublishConfig, ServerConfig, TinyModel
from megatrl.config.model_shape import tiny_model_shape
from megatrl.errors import RolloutError, WeightSyncError
from megatrl.orchestration import server_pool
from megatrl.orchestration.devices import OwnedDevices, SharedDevices
from megatrl.orchestration.server_pool import ServerPool
from megatrl.orchestration.weight_sync import ProvenWeightSync
from megatrl.weight_sync.expected import expected_tensors
from megatrl.weight_sync.report import PublishReport
from megatrl.weight_sync.routes import make_publisher
from tests.fakes.weight_server import WeightServer

MODEL = tiny_model_shape(TinyModel(family="qwen3_moe", num_experts=4), vocab_size=100)
Weights = dict[str, torch.Tensor]


def make_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    specs = expected_tensors(MODEL, torch.float32)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}


class StubProcess:
    """A server process whose deaths and starts the test decides. It always starts with the weights of seed 0."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server: WeightServer | None = None
        self.may_start = threading.Event()
        self.may_start.set()
        self.fails_to_start = False
        self.num_launches = 0
        self.prepare = lambda server: None

    def launch(self) -> None:
        self.num_launches += 1
        self.server = None

    def wait_ready(self) -> str:
        assert self.may_start.wait(20)
        if self.fails_to_start:
            raise RolloutError(
                f"{self.name} ended before it was ready. Log: {self.name}.log. Its last lines:\nno memory"
            )
        server = WeightServer(make_weights(0), num_experts=4)
        server.__enter__()
        self.prepare(server)
        self.server = server
        return server.url

    def check(self) -> None:
        if self.server is None or self.server.is_dead:
            raise RolloutError(
                f"{self.name} is not running: exit code 137. Log: {self.name}.log. Its last lines:\nKilled"
            )

    def kill(self) -> None:
        assert self.server is not None
        self.server.die()

    def stop(self) -> None:
        if self.server is not None and not self.server.is_dead:
            self.server.die()


class Actor:
    """Publishes the weights of the version's seed."""

    def __init__(self) -> None:
        config = PublishConfig(bucket_bytes=40_000, timeout_s=20.0)
        self.publisher = make_publisher(config, MODEL, ServerConfig(device="cpu", precision="fp32"), ())
        self.asked: list[tuple[str, ...]] = []
        self.before_bucket: dict[int, StubProcess] = {}  # in the next publish

    def publish(self, policy_version: int, urls: tuple[str, ...]) -> PublishReport:
        self.asked.append(urls)
        self.publisher.use_servers(urls)
        return self.publisher.publish_to_reachable(self._export(policy_version), policy_version)

    def _export(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        for place, item in enumerate(make_weights(seed).items()):
            if place in self.before_bucket:
                self.before_bucket.pop(place).kill()
            yield item


@contextmanager
def run(num_servers: int, *, max_restarts: int = 3, restarts_beside_work: bool = True):
    processes = [StubProcess(f"server-{index}") for index in range(num_servers)]
    pool = ServerPool(
        processes, max_restarts=max_restarts, start_timeout_s=20.0, restarts_beside_work=restarts_beside_work
    )
    pool.launch()
    actor = Actor()
    try:
        pool.wait_ready()
        yield processes, pool, actor, ProvenWeightSync(actor, pool, OwnedDevices())
    finally:
        for process in processes:
            process.may_start.set()
        pool.stop()


def holds(process: StubProcess, version: int) -> bool:
    server = process.server
    assert server is not None
    wanted = make_weights(version)
    same = server.weights.keys() == wanted.keys() and all(torch.equal(server.weights[n], wanted[n]) for n in wanted)
    return same and server.version == str(version) and not server.is_paused


def url(process: StubProcess) -> str:
    assert process.server is not None
    return process.server.url


def wait_for_starts(pool: ServerPool) -> None:
    for member in pool._members:
        if member.starting is not None:
            member.starting.exception(timeout=20)


def test_a_server_that_dies_in_mid_update_is_out_until_a_publish_has_served_it() -> None:
    with run(2) as (processes, pool, actor, sync):
        sync.publish(1)
        first, second = processes
        second.may_start.clear()
        actor.before_bucket = {20: second}
        sync.publish(2)
        assert holds(first, 2)
        assert pool.urls == (url(first),), "requests go to the one that is left"
        assert len(actor.asked) == 2, "the others are served by the same pass"
        sync.publish(3)
        assert actor.asked[-1] == pool.urls == (url(first),), "nobody waits for a restart while others work"

        second.may_start.set()
        wait_for_starts(pool)
        pool.tend()
        assert pool.urls == (url(first),), "a restarted server holds old weights and gets no request"
        assert not holds(second, 3)
        sync.publish(4)
        assert pool.urls == (url(first), url(second))
        assert holds(first, 4)
        assert holds(second, 4)
        assert sync.metrics["publish/restarts"] == 1
        assert sync.metrics["publish/servers"] == 2


def test_with_a_single_server_the_publish_waits_for_its_restart() -> None:
    with run(1) as ((only,), pool, actor, sync):
        sync.publish(1)
        old = url(only)
        actor.before_bucket = {20: only}
        sync.publish(2)
        assert pool.urls == (url(only),)
        assert url(only) != old
        assert holds(only, 2)
        assert sync.metrics["publish/is_proven"] == 1


def test_a_server_that_died_between_publishes_is_not_published_to() -> None:
    with run(2) as (processes, pool, actor, sync):
        sync.publish(1)
        processes[0].may_start.clear()
        processes[0].kill()
        sync.publish(2)
        assert actor.asked[-1] == pool.urls == (url(processes[1]),)


def test_a_rollout_on_the_only_server_goes_on_after_its_restart_with_the_current_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_pool, "DEATH_NOTICE_S", 0.2)
    with run(1) as ((only,), pool, _, sync):
        sync.publish(1)
        only.kill()
        assert sync.repair(1)
        assert holds(only, 1)
        assert pool.urls == (url(only),)
        assert not sync.repair(1), "nothing to repair while all live"


def test_a_rollout_goes_on_at_once_where_another_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "DEATH_NOTICE_S", 0.2)
    with run(2) as (processes, pool, actor, sync):
        sync.publish(1)
        processes[1].may_start.clear()
        processes[1].kill()
        assert sync.repair(1)
        assert pool.urls == (url(processes[0]),)
        assert len(actor.asked) == 1, "the other holds the version already"


def test_a_death_is_noticed_after_a_rollout_and_the_restart_runs_beside_the_work() -> None:
    with run(2) as (processes, pool, _, sync):
        sync.publish(1)
        processes[1].kill()
        sync.tend()
        assert processes[1].num_launches == 2 or pool.is_starting
        wait_for_starts(pool)
        sync.publish(2)
        assert holds(processes[1], 2)


def test_a_server_that_shares_the_actors_devices_is_restarted_only_for_a_publish() -> None:
    with run(2, restarts_beside_work=False) as (processes, pool, _, sync):
        sync.publish(1)
        processes[1].kill()
        sync.tend()
        assert not pool.is_starting
        assert processes[1].num_launches == 1
        sync.publish(2)
        assert holds(processes[1], 2), "the publish waited for it"


def test_restarts_that_fail_again_and_again_end_the_run_with_server_log_and_limit() -> None:
    with run(1, max_restarts=2) as ((only,), _, _, sync):
        sync.publish(1)
        only.fails_to_start = True
        only.kill()
        with pytest.raises(RolloutError) as caught:
            sync.publish(2)
        assert only.num_launches == 3
        message = caught.value.message
        assert "server-0 is gone and no restart is left (rollout.servers.max_restarts=2 for the whole run)" in message
        assert "Log: server-0.log. Its last lines:\nno memory" in message


def test_without_restarts_the_first_death_ends_the_run_with_its_post_mortem() -> None:
    with run(2, max_restarts=0) as (processes, _, _, sync):
        sync.publish(1)
        processes[0].kill()
        with pytest.raises(RolloutError, match=r"max_restarts=0[\s\S]*exit code 137. Log: server-0.log[\s\S]*Killed"):
            sync.publish(2)


def test_a_restart_that_fails_once_is_tried_again() -> None:
    with run(1) as ((only,), pool, _, sync):
        sync.publish(1)
        only.fails_to_start = True
        only.may_start.clear()
        only.kill()
        pool.tend()
        only.may_start.set()
        wait_for_starts(pool)
        only.fails_to_start = False
        sync.publish(2)
        assert holds(only, 2)
        assert pool.num_restarts == 2


def test_a_living_server_that_refuses_ends_the_run_and_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "DEATH_NOTICE_S", 0.2)
    with run(2) as (processes, pool, _, sync):
        assert processes[1].server is not None
        processes[1].server.reject_update = 2
        with pytest.raises(WeightSyncError, match=r"1 of 2 servers: .*refused by the stub"):
            sync.publish(1)
        assert pool.num_restarts == 0
        assert pool.urls == (url(processes[0]),)


def test_a_server_that_dies_again_in_the_publish_after_its_restart_costs_another_restart() -> None:
    with run(1, max_restarts=2) as ((only,), pool, actor, sync):
        sync.publish(1)
        only.prepare = lambda server: server.die_at_update(2) if only.num_launches == 2 else None
        actor.before_bucket = {20: only}
        sync.publish(2)
        assert holds(only, 2)
        assert pool.num_restarts == 2
        assert len(actor.asked) == 4


def test_a_first_start_that_fails_is_an_error_and_not_repeated() -> None:
    process = StubProcess("server-0")
    process.fails_to_start = True
    pool = ServerPool([process], max_restarts=3, start_timeout_s=5.0)
    pool.launch()
    with pytest.raises(RolloutError, match="no memory"):
        pool.wait_ready()
    assert process.num_launches == 1
    pool.stop()


def test_the_actor_takes_its_memory_back_while_it_publishes_to_a_restarted_server() -> None:
    log: list[str] = []

    class Owner:
        def __init__(self, name: str) -> None:
            self.name = name

        def release_memory(self) -> None:
            log.append(f"{self.name} out")

        def resume_memory(self) -> None:
            log.append(f"{self.name} in")

    devices = SharedDevices(Owner("actor"), Owner("servers"))
    with run(1, restarts_beside_work=False) as ((only,), pool, actor, _):
        sync = ProvenWeightSync(actor, pool, devices)
        sync.publish(1)
        with devices.lend_to_rollout():
            only.kill()
            assert sync.repair(1)
            log.append("episodes")
    assert log == ["actor out", "actor in", "actor out", "episodes", "actor in"]
