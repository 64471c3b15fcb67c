"""Publishing from a sharded actor: a failure on rank 0 leaves no other rank waiting, and what arrives is proven."""

from pathlib import Path

import pytest
from tiny_models import write_tiny_model
from world import free_port, run_world

pytestmark = pytest.mark.slow


def test_a_refused_bucket_on_rank_0_does_not_block_the_other_ranks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, "qwen3_moe")
    layouts = [
        {"world_size": 2, "expert": 2},
        {"world_size": 2, "pipeline": 2},
        {"world_size": 2, "tensor": 2, "sequence_parallel": True},
    ]
    runs = [{"layout": layout, "port": free_port(), "model": str(model)} for layout in layouts]
    first, second = run_world("publish_rank.py", 2, {"runs": runs}, tmp_path / "world", timeout_s=180)
    for result in first:
        assert "phase send, bucket 1" in result["refused"]
        assert result["accepted"] == "proven"
        assert (result["is_equal"], result["names_equal"], result["version"]) == (True, True, "1")
    assert second == [{"refused": "drained", "accepted": "drained"}] * len(runs)
