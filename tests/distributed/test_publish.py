"""Publishing from sharded actors: all ranks gather one stream, the model arrives, and a failure hangs nobody."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_models import write_tiny_model
from world import run_world

pytestmark = pytest.mark.slow

LAYOUTS = {
    "qwen3_moe": {
        "TP2xPP2": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        "PP2xEP2": {"pipeline": 2, "expert": 2},
        "EP2xETP2": {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True},
    },
    "qwen3": {
        "TP4": {"tensor": 4},  # two key/value heads on four ranks
        "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "PP2xCP2, uneven": {"pipeline": 2, "context": 2, "first_stage_layers": 1},
    },
}


def test_every_layout_publishes_the_model_and_a_refused_bucket_blocks_no_rank(tmp_path: Path) -> None:
    runs, names = [], []
    for kind, layouts in LAYOUTS.items():
        model = tmp_path / kind
        write_tiny_model(model, kind)  # pyright: ignore[reportArgumentType]
        runs += [{"layout": {"world_size": 4} | layout, "model": str(model)} for layout in layouts.values()]
        names += layouts
    first, *others = run_world("publish_rank.py", 4, {"runs": runs}, tmp_path / "world", timeout_s=300)
    for place, name in enumerate(names):
        result = first[place]
        assert "phase send, bucket 1" in result["refused"], name
        assert (result["wrong"], result["wrong_digests"], result["names_equal"]) == ([], [], True), name
        assert result["version"] == "1"
        largest = max(tensor.nbytes for tensor in load_file(Path(runs[place]["model"]) / "model.safetensors").values())
        assert result["accepted"]["largest"] <= max(20_000, largest), name
        assert result["accepted"]["buckets"] == len(result["buckets"]), name
        assert 1.0 <= result["accepted"]["ratio"] <= 1.1, name
        for other in (ranks[place] for ranks in others):
            assert (other["refused"], other["accepted"]) == ("drained", "drained"), name
            assert list(other["tensors"].items()) == list(result["tensors"].items()), f"{name}: another stream"
            assert other["buckets"] == result["buckets"], f"{name}: other buckets"
