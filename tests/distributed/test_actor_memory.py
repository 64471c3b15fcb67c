"""What an optimizer step holds in memory: logits at weighted positions only, in chunks; recomputed activations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import make_case
from world import run_world

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 4001  # much wider than any layer, so that a block of logits is what is largest
RUNS: dict[str, dict[str, Any]] = {
    "all rows": {"chunk_rows": 1 << 20},
    "7 rows": {"chunk_rows": 7},
    "1 row": {"chunk_rows": 1},
    "entropy": {"chunk_rows": 1 << 20, "entropy": True},
    "full": {"chunk_rows": 7, "recompute": "full"},
    "selective": {"chunk_rows": 7, "recompute": "selective"},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out: Path = tmp_path_factory.mktemp("actor-memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # for the benchmarks' counter of bytes
        case = str(make_case(out / "qwen3", "qwen3", vocab_size=VOCAB_SIZE, tie_word_embeddings=True))
        (results,) = run_world("actor_memory_rank.py", 1, {"case": case, "runs": RUNS}, out / "world", timeout_s=200)
    return results


def test_chunks_change_neither_loss_nor_gradient(seen: dict[str, dict[str, Any]]) -> None:
    whole = np.array(seen["all rows"]["gradient"])
    assert np.abs(whole).max() > 1e-3
    for name in ("7 rows", "1 row"):
        assert seen[name]["loss"] == pytest.approx(seen["all rows"]["loss"], rel=1e-6)
        np.testing.assert_allclose(np.array(seen[name]["gradient"]), whole, rtol=1e-4, atol=1e-6 * np.abs(whole).max())


def test_no_step_ever_makes_the_logits_of_all_positions(seen: dict[str, dict[str, Any]]) -> None:
    for name, result in seen.items():
        assert result["action_logits"] < 0.7 * result["all_logits"], "the batch has too many action tokens to tell"
        assert result["largest"] <= result["action_logits"], name


def test_chunks_never_hold_the_logits_of_all_weighted_positions(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["all rows"]["largest"] == seen["all rows"]["action_logits"]
    weights = seen["1 row"]["largest"]  # the output layer's gradient, which no chunking can avoid
    assert weights < seen["all rows"]["action_logits"]
    assert seen["7 rows"]["largest"] == weights


def test_an_entropy_term_that_is_off_costs_no_memory(seen: dict[str, dict[str, Any]]) -> None:
    # With the term, the logits are kept beside the probabilities: one block more.
    assert seen["entropy"]["peak"] - seen["all rows"]["peak"] >= 0.9 * seen["all rows"]["action_logits"]


def test_recomputation_holds_less_and_changes_no_number(seen: dict[str, dict[str, Any]]) -> None:
    kept = seen["7 rows"]
    assert seen["full"]["peak"] < seen["selective"]["peak"] < kept["peak"]
    for name in ("full", "selective"):
        assert seen[name]["loss"] == kept["loss"]
        assert seen[name]["gradient"] == kept["gradient"]
