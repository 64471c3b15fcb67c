"""Replayed expert choices and auxiliary losses in every layout, against transformers with forced gates."""

from pathlib import Path
from typing import Any

import pytest
from routing_case import make_routing_case
from world import run_world

from megatrl.config.engines import RouterConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
NUMBERS = ("logprobs", "loss", "grad_norm", "parameters", "queries", "router")
REPLAY = {"replay": True}
SEQUENCE = {"load_balancing": "sequence", "load_balancing_coefficient": 0.3, "z_loss_coefficient": 0.01}
GLOBAL = {**REPLAY, "load_balancing": "global", "load_balancing_coefficient": 0.3}
BOTH = {**REPLAY, **SEQUENCE}
ONE = {"world_size": 1}
TP2 = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
PP2 = {"world_size": 2, "pipeline": 2}
VPP2 = {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}
EP2 = {"world_size": 2, "expert": 2}
DP2 = {"world_size": 2}
CP2 = {"world_size": 2, "context": 2}
TP2_PP2 = {"world_size": 4, "tensor": 2, "pipeline": 2, "sequence_parallel": True}
PP2_EP2 = {"world_size": 4, "pipeline": 2, "expert": 2}
CP2_TP2 = {"world_size": 4, "context": 2, "tensor": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """name -> the case's file and the router settings it was made for."""
    base: Path = tmp_path_factory.mktemp("routing")
    wanted: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "foreign": ({"choices": "foreign"}, REPLAY),
        "raw_weights": ({"choices": "foreign", "norm_topk_prob": False}, REPLAY),
        "own": ({"choices": "own", "num_minibatches": 1}, REPLAY),
        "sequence": ({"choices": "none"}, SEQUENCE),
        "global": ({"choices": "foreign"}, GLOBAL),
        "both": ({"choices": "foreign"}, BOTH),
    }
    return {
        name: {
            "case": str(make_routing_case(base / name, router=RouterConfig(**router), **options)),
            "router": router,
        }
        for name, (options, router) in wanted.items()
    }


def check(runs: list[dict[str, Any]], out: Path, timeout_s: float) -> list[list[dict[str, float]]]:
    """Returns results[rank][run] after checking each against its oracle, but those without router settings."""
    world_size = runs[0]["layout"]["world_size"]
    results = run_world("oracle_rank.py", world_size, {"runs": runs}, out, timeout_s=timeout_s)
    wrong = [
        f"rank {rank} {Path(run['case']).parent.name} {run}: {result}"
        for rank, rank_results in enumerate(results)
        for run, result in zip(runs, rank_results, strict=True)
        if (run["router"] and max(result[name] for name in NUMBERS) > TOLERANCE) or result["replicas_equal"] != 1.0
    ]
    assert not wrong, "\n".join(wrong)
    return results


def test_one_process_chooses_as_recorded_whatever_the_packing(cases: dict[str, Any], tmp_path: Path) -> None:
    runs = [{**cases[name], "layout": ONE} for name in cases]
    runs += [
        {**cases["both"], "layout": ONE, "microbatch_tokens": 1},
        {**cases["both"], "layout": ONE, "microbatch_tokens": 100_000},
        {**cases["both"], "layout": ONE, "reorder": True},
        {**cases["both"], "layout": ONE, "recompute": "full"},
        {**cases["foreign"], "layout": ONE, "recompute": "selective"},
        {**cases["foreign"], "layout": ONE, "router": {}},
    ]
    (results,) = check(runs, tmp_path, timeout_s=240)
    assert results[-1]["logprobs"] > 0.1, "the recorded choices were the model's own, so nothing was tested"
    assert results[-1]["parameters"] > 1e-3


def test_two_processes_choose_as_recorded_in_every_direction(cases: dict[str, Any], tmp_path: Path) -> None:
    layouts = (TP2, PP2, VPP2, EP2, CP2, DP2)
    runs = [{**cases["both"], "layout": layout} for layout in layouts]
    runs += [
        {**cases["global"], "layout": TP2},
        {**cases["both"], "layout": TP2, "recompute": "full"},
        {**cases["both"], "layout": VPP2, "recompute": "full", "microbatch_tokens": 1},
        {**cases["sequence"], "layout": CP2},
    ]
    check(runs, tmp_path, timeout_s=300)


def test_four_processes_choose_as_recorded(cases: dict[str, Any], tmp_path: Path) -> None:
    layouts = (TP2_PP2, PP2_EP2, CP2_TP2)
    check([{**cases["both"], "layout": layout} for layout in layouts], tmp_path, timeout_s=300)
