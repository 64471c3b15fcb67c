"""A run whose reference has a server of its own: TRACE and a KL term read it in one pass, checkpoints name it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatrl.observability.record import METRICS_FILE
from megatrl.observability.sinks import read_metrics
from megatrl.orchestration.reference import weights_identity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = {
    "name": "served",
    "seed": 5,
    "model": {"kind": "tiny", "num_experts": 4, "ffn_size": 32},
    "env": {"kind": "evidence_hunt", "num_questions": 2, "num_documents": 4, "num_hops": 2, "max_turns": 3},
    "start": {
        "kind": "sft",
        "demonstrations": {"num_episodes": 32},
        "sft": {"num_steps": 10, "sequences_per_step": 16, "optimizer": {"lr": 3e-3}},
    },
    "actor": {"device": "cpu", "precision": "fp32", "optimizer": {"lr": 3e-3}, "timeout_s": 120},
    "rollout": {
        "tool_format": "react",
        "max_turns": 3,
        "max_action_tokens": 12,
        "context_tokens": 256,
        "max_observation_tokens": 32,
        "servers": {"device": "cpu", "precision": "fp32", "max_total_tokens": 16384, "start_timeout_s": 300},
    },
    "batch": {"num_groups": 2, "group_size": 4, "microbatch_tokens": 512},
    "credit": {"kind": "trace"},
    "loss": {"kl_coefficient": 0.01},
    "scoring": {"backend": "sglang"},
    "train": {"num_steps": 3, "max_mismatch": 0.001},
    "checkpoint": {"every_steps": 3},
    "evaluation": {"num_episodes": 0},
    "observe": {"wandb": "off", "tensorboard": False},
}


def test_the_reference_server_keeps_the_start_policy_while_the_policy_moves(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    done = subprocess.run(
        [sys.executable, "-m", "megatrl", "train", "recipe.yaml", "--run-id", "run"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    run_dir = tmp_path / "runs" / "served" / "run"
    rows = [row for row in read_metrics(run_dir / METRICS_FILE) if row["step"] > 0]
    # At the first update the policy is the start policy: actor and server agree token by token. Later it has moved.
    kl = [row["actor/kl"] for row in rows]
    assert 0 <= kl[0] < 1e-9 < 1e-6 < kl[-1], kl
    assert all(math.isfinite(row["credit/turn_credit_mean"]) for row in rows if "credit/turn_credit_mean" in row)
    assert all(row["probe/skipped_missing_gold"] == 0 for row in rows)
    (start,) = (tmp_path / "runs" / "artifacts").glob("start-*")
    (state,) = (run_dir / "checkpoints").rglob("driver.json")
    assert json.loads(state.read_text())["frozen_models"] == {"reference": weights_identity(start)}
    assert (run_dir / "logs" / "reference-server.log").exists()
