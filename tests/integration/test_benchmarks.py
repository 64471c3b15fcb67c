"""The benchmark of the actor runs with tiny sizes and reports what docs/performance.md reads. No times are judged."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import readable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    *("--hidden", "64", "--layers", "2", "--vocab", "256", "--tokens", "400", "--microbatch-tokens", "128"),
    *("--repeats", "2", "--memory-vocab", "3000", "--memory-tokens", "512", "--logit-mib", "1"),
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.actor", "--json", *SIZES],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_both_sides_are_timed_on_the_same_batch(result: dict[str, Any]) -> None:
    speed = result["speed"]
    assert set(speed["median_s"]) == {"ours", "bare", "bare, all logits", "ours, logprobs", "bare, logprobs"}
    assert all(clock[kind] > 0 for clock in speed["median_s"].values() for kind in ("wall", "cpu"))
    assert speed["step_ratio"]["cpu"] == speed["median_s"]["ours"]["cpu"] / speed["median_s"]["bare"]["cpu"]
    assert 0 < speed["action_tokens"] < speed["tokens"] <= 400
    assert speed["microbatches"] > 1
    norms = speed["gradient_norms"]
    assert norms["bare"] > 1e-3
    assert norms["bare, all logits"] == pytest.approx(norms["bare"], rel=1e-4)
    assert norms["ours"] == pytest.approx(norms["bare"], rel=1e-4)


def test_packing_wastes_less_than_a_twentieth_and_unbalanced_packing_more(result: dict[str, Any]) -> None:
    worst = {(row["data_ranks"], row["method"]): row["computed_over_real_worst"] for row in result["packing"]}
    for num_ranks in (2, 4, 8):
        assert 1.0 <= worst[num_ranks, "largest differencing"] <= 1.05
        assert worst[num_ranks, "largest differencing"] <= worst[num_ranks, "longest first"]
    assert worst[8, "first fit"] > 1.05


def test_memory_falls_with_weighted_positions_and_with_recomputation(result: dict[str, Any]) -> None:
    bare, whole, chunks = result["logit_memory"].values()
    assert max(chunks["alive_peak_mib"], whole["alive_peak_mib"]) < bare["alive_peak_mib"]
    all_logits_mib = bare["tokens_of_a_pack"] * 3000 * 4 / 2**20
    assert chunks["largest_tensor_mib"] < all_logits_mib <= bare["largest_tensor_mib"] + 1e-6
    recompute = result["recompute_memory"]
    assert recompute["full"]["alive_peak_mib"] < recompute["none"]["alive_peak_mib"]


def test_the_tables_show_every_number(result: dict[str, Any]) -> None:
    text = readable(result)
    assert f"{result['speed']['step_ratio']['wall']:.3f} by wall time" in text
    assert text.count("largest differencing") == 3
    assert "| full |" in text
