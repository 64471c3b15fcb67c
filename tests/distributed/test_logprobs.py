"""Log-probabilities over a vocabulary cut across tensor ranks: values, gradients, padding, memory."""

from pathlib import Path
from typing import Any

import pytest
from world import run_world

pytestmark = pytest.mark.slow

VOCABULARIES = (19, 5)  # over 4 ranks both need padding; of 5 the last rank holds nothing but padding


@pytest.fixture(scope="module", params=[1, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out: Path = tmp_path_factory.mktemp("logprobs")
    runs = [
        {"path": str(out / f"{size}{parallel}"), "vocab_size": size, "sequence_parallel": parallel}
        for size in VOCABULARIES
        for parallel in (True, False)
    ]
    ranks = run_world("logprobs_rank.py", request.param, {"runs": runs}, out / "world", timeout_s=120)
    return [(run, result) for rank in ranks for run, result in zip(runs, rank, strict=True)]


def test_values_and_gradients_equal_the_plain_formula_for_every_chunk_size(results: list[Any]) -> None:
    for run, result in results:
        assert len(result["errors"]) == 3
        assert all(max(errors) < 2e-5 for errors in result["errors"].values()), (run, result)
        assert result["without_entropy"][0] < 2e-5, (run, result)
        assert result["without_entropy"][1] is True


def test_large_padding_rows_get_no_probability_no_gradient_and_no_place_in_the_export(results: list[Any]) -> None:
    for run, result in results:
        assert result["padding_gradient"] == 0.0, (run, result)
        assert result["exported_rows"] == run["vocab_size"]


def test_smaller_chunks_never_hold_the_logits_of_all_rows(results: list[Any]) -> None:
    for run, result in results:
        assert (result["most_rows"]["1"], result["most_rows"]["7"]) == (1, 7), run
        assert 7 < result["most_rows"]["1000"] <= 24, run


def test_our_logit_gradient_is_exact_where_megatrons_fused_cross_entropy_rounds_it_to_bf16(results: list[Any]) -> None:
    for run, result in results:
        errors = result["logit_gradients"]
        assert errors["ours"] < 1e-6, (run, errors)
        assert errors["megatron"] < 1e-6, (run, errors)
        assert errors["megatron_fused"] > 1e-4, "Megatron's fused kernel has become exact; it could be used"
