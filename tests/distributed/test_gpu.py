"""The CUDA path: Transformer Engine modules, bf16 with master weights, memory hand-over.

Skipped without a CUDA device. These tests have never run on one yet: expect to fix them first.
"""

from pathlib import Path

import pytest
import torch
from oracle import make_case
from world import run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and Transformer Engine"),
]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3", "llama3"])
def test_the_cuda_actor_agrees_with_the_oracle_within_bf16(kind: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, kind, hidden_size=64, head_dim=16)  # type: ignore[arg-type]
    (seen,) = run_world("gpu_rank.py", 1, {"case": str(case)}, tmp_path / "world", timeout_s=250, cuda=True)
    assert seen["attention"] < 2e-2
    assert seen["mean_gap"] < 0.15
    assert seen["left_on_device"] == []
    assert seen["left_after_another_step"] == []
    assert seen["freed_fraction"] > 0.99
    assert seen["same_after_onload"]
    assert seen["moved"]
    assert 0 < seen["grad_norm"] < 1e3
