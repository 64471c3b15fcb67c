"""What stops an optimizer step on every rank, what is skipped, and what a fresh optimizer forgets."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_case
from world import run_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(run, what each rank saw) for a pipeline, a data-parallel and a bf16 layout."""
    out: Path = tmp_path_factory.mktemp("rules")
    case = str(make_case(out / "moe", "qwen3_moe"))
    runs: list[dict[str, Any]] = [
        {"layout": {"world_size": 2, "pipeline": 2}, "poisoned_rank": 0},
        {"layout": {"world_size": 2}, "poisoned_rank": 1},
        {"layout": {"world_size": 2, "expert": 2}, "poisoned_rank": 1, "precision": "bf16"},
    ]
    for run in runs:
        run["case"] = case
    results = run_world("failure_rank.py", 2, {"runs": runs}, out / "world", timeout_s=200)
    return [(run, [results[rank][i] for rank in range(2)]) for i, run in enumerate(runs)]


def test_a_nan_loss_raises_on_every_rank_and_moves_nothing(seen: Any) -> None:
    for run, ranks in seen:
        for rank in ranks:
            assert rank["nan_loss"].startswith("NonFiniteError: the loss of a minibatch"), run
            assert not rank["moved_by_nan_loss"], run


def test_an_infinite_gradient_on_one_rank_stops_all_ranks_and_names_the_parameter(seen: Any) -> None:
    for run, ranks in seen:
        for rank in ranks:
            assert rank["infinite_gradient"].startswith("NonFiniteError: gradient norm is"), run
            assert not rank["moved_by_infinite_gradient"], run
        assert "linear_proj" in ranks[run["poisoned_rank"]]["infinite_gradient"], run


def test_a_minibatch_without_action_tokens_is_skipped_and_counted(seen: Any) -> None:
    for run, ranks in seen:
        for rank in ranks:
            assert rank["skipped"] == [0, 2, 2.0], run
            assert not rank["moved_by_empty_minibatch"], run


def test_ids_outside_the_vocabulary_are_refused(seen: Any) -> None:
    for _, ranks in seen:
        assert all("outside the model's vocabulary [0, 67)" in rank["bad_id"] for rank in ranks)


def test_a_reloaded_and_reset_actor_repeats_its_first_update_bit_for_bit(seen: Any) -> None:
    for run, ranks in seen:
        for rank in ranks:
            assert rank["moved_by_good_update"], run
            assert rank["reload_restores"], run
            assert rank["repeats_bit_for_bit"], run


def test_the_learning_rate_follows_the_step_and_the_optimizer_in_force(seen: Any) -> None:
    for _, ranks in seen:
        for rank in ranks:
            assert rank["lr"] == pytest.approx(0.01 / 4)
            assert rank["lr_after_reset"] == pytest.approx(0.02 / 2)


def test_supervised_steps_lower_the_supervised_loss_equally_on_all_ranks(seen: Any) -> None:
    for run, ranks in seen:
        losses = ranks[0]["supervised_losses"]
        assert losses[0] > losses[1] > losses[2], run
        assert ranks[1]["supervised_losses"] == losses, run
