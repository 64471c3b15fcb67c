"""A replaying actor refuses what it cannot replay, leaves frozen scorers alone, and costs nothing when off."""

from pathlib import Path
from typing import Any

import pytest
from routing_case import make_routing_case
from world import run_world

from megatrl.config.engines import RouterConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("routing_rules")
    case = make_routing_case(out / "case", choices="foreign", router=RouterConfig(replay=True), num_minibatches=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # for tests.fakes
        (result,) = run_world("routing_rules_rank.py", 1, {"case": str(case)}, out / "world", timeout_s=200)
    return result


def test_without_switches_the_routers_are_megatrons_and_no_layer_has_a_hook(seen: dict[str, Any]) -> None:
    assert seen["plain"] == {"routers": ["TopKRouter"], "hooks": 0, "dtypes": ["fp32"]}
    assert seen["replaying"] == {"routers": ["PackedRouter"], "hooks": 8, "dtypes": ["fp32"]}


def test_a_batch_without_choices_is_refused_by_old_logprobs_and_updates(seen: dict[str, Any]) -> None:
    for message in seen["unrecorded"]:
        assert message.startswith("TrajectoryError: actor.router.replay is on but the batch has no routed_experts")
    assert not seen["moved"]


def test_choices_of_another_model_are_refused_with_both_shapes(seen: dict[str, Any]) -> None:
    assert "recorded choices are of 3 layers x 2 experts, the model has 4 x 2" in seen["other_model"]
    assert "recorded choices hold the expert 8, the model has 0 to 7" in seen["too_many"]


def test_recomputing_the_mixture_alone_is_refused(seen: dict[str, Any]) -> None:
    assert "recomputing ['moe'] alone loses the rows' routing" in seen["partial_recompute"]


def test_a_layer_that_fails_leaves_no_routing_behind(seen: dict[str, Any]) -> None:
    assert seen["left_behind"] == [False] * 4


def test_frozen_scorers_choose_freely_and_the_actor_replays_again_afterwards(seen: dict[str, Any]) -> None:
    assert seen["frozen_equal"]
    assert seen["actor_equal"]
    assert seen["meter"] == ["TopKRouter"] * 4


def test_a_tie_that_bf16_cannot_tell_is_told_in_fp32(seen: dict[str, Any]) -> None:
    assert seen["near_tie"]["fp32"] == [1, 0]
    assert len(set(seen["near_tie"]["None"])) == 1, "bf16 told the tie, so nothing was tested"


def test_the_counts_behind_an_expert_bias_are_of_real_tokens_in_training_that_chose_themselves(
    seen: dict[str, Any],
) -> None:
    assert seen["bias_counts"] == {"forward_only": 0.0, "training": 3.0, "replay": 3.0}
