"""Megatron in every layout against plain transformers + AdamW: logprobs, loss, gradients, weights.

fp32, 1e-5 relative. Adam's eps is large on purpose: near zero, Adam turns rounding noise into sign flips.
"""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_case
from world import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
ONE = {"world_size": 1}
TP2 = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
TP2_PLAIN = {"world_size": 2, "tensor": 2}
PP2 = {"world_size": 2, "pipeline": 2}
EP2 = {"world_size": 2, "expert": 2}
DP2 = {"world_size": 2}
TP2_EP2 = {"world_size": 2, "tensor": 2, "expert": 2, "sequence_parallel": True}
TP2_PP2 = {"world_size": 4, "tensor": 2, "pipeline": 2, "sequence_parallel": True}
PP2_EP2 = {"world_size": 4, "pipeline": 2, "expert": 2}
TP2_DP2_EP4 = {"world_size": 4, "tensor": 2, "expert": 4, "sequence_parallel": True}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base: Path = tmp_path_factory.mktemp("oracle")
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "moe": ("qwen3_moe", {}),
        "moe_raw_weights": ("qwen3_moe", {"norm_topk_prob": False}),
        "moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
        "moe_single": ("qwen3_moe", {"num_samples": 1, "num_minibatches": 1}),
        "qwen3": ("qwen3", {}),
        "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
        "llama3": ("llama3", {}),
    }
    return {name: str(make_case(base / name, kind, **options)) for name, (kind, options) in models.items()}


def check(runs: list[dict[str, Any]], out: Path, timeout_s: float) -> list[list[dict[str, float]]]:
    """Returns results[rank][run] after checking each against the oracle."""
    world_size = runs[0]["layout"]["world_size"]
    results = run_world("oracle_rank.py", world_size, {"runs": runs}, out, timeout_s=timeout_s)
    wrong = [
        f"rank {rank} {Path(run['case']).parent.name} {run['layout']}: {result}"
        for rank, rank_results in enumerate(results)
        for run, result in zip(runs, rank_results, strict=True)
        if max(result[name] for name in ("logprobs", "loss", "grad_norm", "parameters", "queries")) > TOLERANCE
        or result["names_equal"] != 1.0
        or result["replicas_equal"] != 1.0
    ]
    assert not wrong, "\n".join(wrong)
    return results


def test_one_process_equals_the_oracle_whatever_the_packing(cases: dict[str, str], tmp_path: Path) -> None:
    names = ["moe", "moe_raw_weights", "moe_tied", "qwen3", "qwen3_tied", "llama3"]
    runs: list[dict[str, Any]] = [{"case": cases[name], "layout": ONE} for name in names]
    runs += [
        {"case": cases["moe"], "layout": ONE, "microbatch_tokens": 1},
        {"case": cases["moe"], "layout": ONE, "microbatch_tokens": 100_000},
        {"case": cases["moe"], "layout": ONE, "reorder": True},
        {"case": cases["moe"], "layout": ONE, "distributed_optimizer": False},
        {"case": cases["moe"], "layout": ONE, "recompute": "full"},
        {"case": cases["qwen3"], "layout": ONE, "recompute": "selective"},
    ]
    (results,) = check(runs, tmp_path, timeout_s=240)
    counts = [result["microbatches"] for result in results]
    assert counts[7] == 2 < counts[0] < counts[6], "the packings compared were the same"
    assert all(result["num_logprobs"] == 8 for result in results)


def test_two_processes_equal_the_oracle_in_every_direction(cases: dict[str, str], tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"case": cases["moe"], "layout": layout} for layout in (TP2, PP2, EP2, DP2, TP2_EP2)]
    runs += [
        {"case": cases["qwen3"], "layout": TP2},
        {"case": cases["qwen3"], "layout": TP2_PLAIN, "distributed_optimizer": False},
        {"case": cases["llama3"], "layout": TP2},
        {"case": cases["llama3"], "layout": PP2},
        {"case": cases["qwen3_tied"], "layout": PP2},
        {"case": cases["moe_tied"], "layout": TP2},
        {"case": cases["moe"], "layout": EP2, "distributed_optimizer": False},
        {"case": cases["moe_single"], "layout": DP2},
        {"case": cases["moe_single"], "layout": EP2},
        {"case": cases["moe"], "layout": TP2, "recompute": "full"},
    ]
    results = check(runs, tmp_path, timeout_s=300)
    for single in (12, 13):
        assert sorted(results[rank][single]["num_logprobs"] for rank in (0, 1)) == [0, 1]
        assert results[0][single]["fillers"] == 1, "one data rank was meant to have nothing but a filler"


def test_four_processes_equal_the_oracle(cases: dict[str, str], tmp_path: Path) -> None:
    check(
        [
            {"case": cases["moe"], "layout": TP2_PP2},
            {"case": cases["moe"], "layout": PP2_EP2},
            {"case": cases["moe"], "layout": TP2_DP2_EP4},
            {"case": cases["moe_tied"], "layout": TP2_PP2},
        ],
        tmp_path,
        timeout_s=300,
    )
