"""The tree backend on real Megatron models equals the independent one, and its attention equals a dense mask."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_model
from world import run_world

from megatrl.data.queries import PackedQueries
from megatrl.mcore.forest import (
    QUERY_BLOCK,
    attention_blocks,
    dense_attention,
    forest_attention,
    forest_nodes,
    visibility,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
ONE = {"world_size": 1}
TP2 = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
PP2 = {"world_size": 2, "pipeline": 2}
EP2 = {"world_size": 2, "expert": 2}
CP2 = {"world_size": 2, "context": 2}


@pytest.fixture(autouse=True)
def ranks_find_the_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    kinds: tuple[Any, ...] = ("qwen3", "qwen3_moe", "llama3")
    for kind in kinds:
        write_tiny_model(base / kind, kind)
    return {kind: str(base / kind) for kind in kinds}


def run(models: dict[str, str], kind: str, layout: dict[str, Any], *, microbatch_tokens: int = 4096) -> dict[str, Any]:
    return {"model": models[kind], "layout": layout, "seed": 3, "microbatch_tokens": microbatch_tokens}


def check(runs: list[dict[str, Any]], out: Path) -> None:
    for results in run_world("tree_rank.py", runs[0]["layout"]["world_size"], {"runs": runs}, out, timeout_s=200):
        for each, result in zip(runs, results, strict=True):
            assert result["largest"] <= TOLERANCE, (each, result)
            assert result["spread"] > 0.5, "the answers hardly differ, so agreement would prove nothing"
            assert result["tree"] < 0.55 * result["independent"], (each, result)


def test_one_process_agrees_on_every_family_and_in_several_packs(models: dict[str, str], tmp_path: Path) -> None:
    runs = [run(models, kind, ONE) for kind in models] + [run(models, "qwen3", ONE, microbatch_tokens=250)]
    check(runs, tmp_path)


def test_two_processes_agree_in_every_direction_and_context_parallelism_is_refused(
    models: dict[str, str], tmp_path: Path
) -> None:
    runs = [run(models, kind, layout) for kind in ("qwen3_moe", "llama3") for layout in (TP2, PP2)]
    runs += [run(models, "qwen3_moe", EP2), run(models, "qwen3", TP2)]
    check(runs, tmp_path / "agree")
    (refused,) = run_world("tree_rank.py", 2, {"runs": [run(models, "qwen3", CP2)]}, tmp_path / "cp", timeout_s=60)[0]
    assert "the tree backend needs context 1" in refused["refused"]


def forest(rng: np.random.Generator) -> PackedQueries:
    """A root, a long child that takes several blocks, children of children, and a second root."""
    sizes = [30, QUERY_BLOCK + 90, 7, 5, 11, 1]
    parents = [-1, 0, 1, 2, -1, 4]
    prefixes = [0, 21, 400, 403, 0, 11]
    bounds = np.cumsum([0, *sizes])
    return PackedQueries(
        tokens=rng.integers(0, 9, bounds[-1]),
        cu_seqlens=bounds,
        rows=np.array([0]),
        targets=np.array([0]),
        parents=np.array(parents),
        prefix_lengths=np.array(prefixes),
    )


def test_attention_by_blocks_equals_the_dense_mask_and_makes_nothing_of_the_packs_square() -> None:
    queries = forest(np.random.default_rng(0))
    nodes, positions = forest_nodes(queries)
    total = len(queries.tokens)
    torch.manual_seed(0)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    dense = dense_attention(q, k, v, nodes, scale=0.3)
    blocks = attention_blocks(nodes, "cpu")

    largest = 0

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel()) if isinstance(out, torch.Tensor) else largest
            return out

    with Sizes():
        by_blocks = forest_attention(q, k, v, blocks, scale=0.3)
    torch.testing.assert_close(by_blocks, dense, rtol=1e-5, atol=1e-6)
    assert largest < total * total, "a mask or a score of the pack's square was made"
    # Positions go on where the prefix ends, and rows see as many rows as their position says.
    assert positions[30] == 21
    assert visibility(nodes, total).sum(1).tolist() == (positions + 1).tolist()
