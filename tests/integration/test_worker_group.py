"""Ray around plain classes: answers in rank order, errors as themselves, deadlines, wanted/available."""

import os
import time

import pytest
import ray

from megatrl.config.recipe import Recipe
from megatrl.errors import DeadlineError, LayoutError, MegatrlError
from megatrl.orchestration.placement import plan_bundles, ray_cluster
from megatrl.orchestration.worker_group import WorkerGroup


def rank_class() -> type:
    """Defined inside a function so that Ray ships it by value: workers cannot import this file."""

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def double(self, value: int) -> int:
            return self.rank * value * 2

        def fail_on_one(self) -> int:
            if self.rank == 1:
                raise LayoutError("tensor 3 does not divide 8 heads")
            time.sleep(60)
            return self.rank

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def die(self) -> None:
            os._exit(3)

    return Rank


def recipe(**sections) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"kind": "tiny"},
            "env": {"kind": "evidence_hunt"},
            "actor": {"device": "cpu", "layout": {"world_size": 2}},
            "rollout": {"servers": {"device": "cpu"}},
            "placement": {"ready_timeout_s": 20.0},
            **sections,
        }
    )


@pytest.fixture
def workers():
    with ray_cluster(recipe()) as placement:
        group = WorkerGroup.start(
            "actor", rank_class(), [(0,), (1,)], placement=placement.group, bundles=placement.actor_bundles,
            cpus=1, gpus=0, environment={}, timeout_s=30.0,
        )  # fmt: skip
        yield group
        group.stop()


def test_answers_come_in_rank_order_and_the_first_failing_rank_ends_the_call(workers):
    assert workers.call("double", 3) == [0, 6]
    assert workers.call_each("double", [(1,), (5,)]) == [0, 10]
    begin = time.monotonic()
    with pytest.raises(LayoutError, match="tensor 3 does not divide 8 heads"):
        workers.call("fail_on_one")
    assert time.monotonic() - begin < 20


def test_a_late_answer_and_a_dead_process_are_errors_that_name_the_rank(workers):
    workers.call("double", 1)
    with pytest.raises(DeadlineError, match=r"actor.sleep did not answer within 1 s on ranks \[0, 1\]"):
        workers.call("sleep", 3.0, timeout_s=1.0)
    with pytest.raises(MegatrlError, match=r"actor rank \d.die: its process died"):
        workers.call("die", timeout_s=60.0)


def test_too_few_resources_end_with_a_table_of_wanted_and_available():
    with (
        pytest.raises(DeadlineError, match=r"wanted: CPU 3, GPU 2.*\n.*alive.*GPU 0"),
        ray_cluster(recipe(actor={"device": "cuda", "layout": {"world_size": 2}}, placement={"ready_timeout_s": 1.0})),
    ):
        pass
    assert not ray.is_initialized()


def test_colocated_roles_share_a_gpu_and_separate_roles_own_theirs():
    cuda = {"actor": {"device": "cuda", "layout": {"world_size": 2}}, "rollout": {"servers": {"num_servers": 2}}}
    shared = plan_bundles(recipe(**cuda, placement={"kind": "colocated"}))
    assert shared.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert (shared.server_bundles, shared.gpus_per_actor, shared.gpus_per_server) == ((0, 1), 0.5, 0.5)
    own = plan_bundles(recipe(**cuda))
    assert own.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert (own.actor_bundles, own.server_bundles) == ((0, 1), (2, 3))
