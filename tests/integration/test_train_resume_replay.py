"""The whole system on real parts: train, lose the process, resume, replay.

One recipe, small enough for seconds: a tiny mixture of experts on two Megatron ranks and one SGLang server under Ray.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatrl.observability.trajectories import TrajectoryStore

pytestmark = pytest.mark.timeout(1500)  # the fixture runs six commands, each with a deadline of its own
NUM_STEPS = 4
DEADLINE_S = 420

RECIPE = {
    "name": "tiny",
    "seed": 3,
    "model": {"kind": "tiny", "num_experts": 4, "ffn_size": 32},
    "env": {"kind": "evidence_hunt", "num_questions": 2, "num_documents": 4, "num_hops": 2, "max_turns": 3},
    "start": {
        "kind": "sft",
        "demonstrations": {"num_episodes": 64},
        "sft": {"num_steps": 30, "sequences_per_step": 32, "optimizer": {"lr": 3e-3}},
    },
    "actor": {
        "device": "cpu",
        "precision": "fp32",
        "layout": {"world_size": 2, "pipeline": 2},
        "optimizer": {"lr": 1e-3},
        "timeout_s": 120,
    },
    "rollout": {
        "tool_format": "react",
        "max_turns": 3,
        "max_action_tokens": 12,
        "context_tokens": 256,
        "max_observation_tokens": 32,
        "servers": {"device": "cpu", "precision": "fp32", "max_total_tokens": 16384, "start_timeout_s": 300},
    },
    "batch": {"num_groups": 3, "group_size": 4, "microbatch_tokens": 512},
    "group_statistics": {"std": "population"},
    "credit": {"kind": "trace"},
    "train": {"num_steps": NUM_STEPS, "max_mismatch": 0.001},
    "checkpoint": {"every_steps": 2, "keep": 5},
    "evaluation": {"every_steps": 4, "num_episodes": 4},
    "observe": {"wandb": "off", "tensorboard": False},
}


COLOCATED = ("--set", "placement.kind=colocated", "--set", "publish.route=broadcast")
"""The killed run takes turns on shared devices and publishes over gloo: neither is part of what it computes."""


OTHER_LAYOUT = tuple(
    word
    for setting in ("actor.layout.pipeline=1", "actor.layout.expert=2", f"train.num_steps={NUM_STEPS + 1}")
    for word in ("--set", setting)
)
"""Saved on two pipeline stages, continued on two expert ranks for one more step."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with recipe.yaml in which three runs take place, once for all tests below."""
    home = tmp_path_factory.mktemp("runs")
    (home / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    megatrl(home, "train", "recipe.yaml", "--run-id", "whole")
    kill_after_checkpoint(home, "train", "recipe.yaml", "--run-id", "killed", *COLOCATED)
    megatrl(home, "train", "recipe.yaml", "--run-id", "killed", "--resume", *COLOCATED)
    megatrl(home, "replay", "runs/tiny/whole", "--from-step", "2", "--out", "replay-from-2")
    megatrl(home, "replay", "runs/tiny/killed", "--out", "replay-killed")
    shutil.copytree(home / "runs/tiny/killed", home / "runs/tiny/resharded")
    megatrl(home, "train", "recipe.yaml", "--run-id", "resharded", "--resume", *OTHER_LAYOUT)
    return home


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatrl", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def megatrl(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=home, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def kill_after_checkpoint(home: Path, *arguments: str) -> None:
    """SIGKILL the driver between steps: when the checkpoint of step 2 is there and step 3 is not written."""
    process = subprocess.Popen(
        command(*arguments), cwd=home, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    pointer = home / "runs/tiny/killed/checkpoints/latest"
    deadline = time.monotonic() + DEADLINE_S
    while not (pointer.exists() and "000002" in pointer.read_text()):
        assert process.poll() is None, f"the run ended with {process.returncode} before its checkpoint"
        assert time.monotonic() < deadline, "no checkpoint of step 2 in time"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


def metrics(path: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def result(path: Path) -> dict[str, object]:
    return json.loads((path / "result.json").read_text())


def prompts(path: Path) -> list[str]:
    store = TrajectoryStore(path)
    return [r.group.prompt.prompt_id for step in range(1, NUM_STEPS + 1) for r in store.read(step)]


def test_every_step_is_recorded_and_actor_and_server_agree_from_the_first(home):
    rows = metrics(home / "runs/tiny/whole")
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert rows[1]["mismatch/mean"] < 1e-3
    assert all(rows[step]["publish/is_proven"] == 1 for step in range(1, NUM_STEPS + 1))
    assert all(rows[step]["rollout/num_trajectories"] == 12 for step in range(1, NUM_STEPS + 1))
    assert 0 <= rows[4]["eval/success"] <= 1


def test_a_killed_and_resumed_run_takes_the_same_prompts_and_records_every_step_once(home):
    whole, killed = home / "runs/tiny/whole", home / "runs/tiny/killed"
    assert prompts(killed) == prompts(whole)
    lines = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines))
    assert lines[-1] == NUM_STEPS
    assert all(row["publish/is_proven"] == 1 for step, row in metrics(killed).items() if step)


def test_fed_the_same_trajectories_a_resumed_actor_repeats_losses_and_weights_bit_for_bit(home):
    whole, replay = home / "runs/tiny/whole", home / "replay-from-2"
    first, second = metrics(whole), metrics(replay)
    compared = [name for name in first[3] if name.startswith(("actor/", "credit/", "mismatch/", "probe/"))]
    assert "actor/loss" in compared
    assert "actor/grad_norm" in compared
    for step in (3, 4):
        assert {n: first[step][n] for n in compared} == {n: second[step][n] for n in compared}
    assert result(whole) == result(replay)
    assert "step=" in (replay / "logs" / "driver.log").read_text()


def test_a_killed_and_resumed_run_ends_with_the_weights_of_one_that_was_never_interrupted(home):
    assert result(home / "replay-killed") == result(home / "runs/tiny/killed")


def test_a_run_goes_on_with_another_layout_and_the_same_reference(home):
    run = home / "runs/tiny/resharded"
    rows = metrics(run)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows[4] == metrics(home / "runs/tiny/killed")[4]
    assert rows[5]["mismatch/mean"] < 1e-3
    assert rows[5]["publish/is_proven"] == 1
    driver = [json.loads((run / f"checkpoints/step-{s:06d}/driver.json").read_text()) for s in (4, 5)]
    assert driver[0]["frozen_models"] == driver[1]["frozen_models"] != {}
    layouts = [json.loads((run / f"checkpoints/step-{s:06d}/actor/actor.json").read_text())["layout"] for s in (4, 5)]
    assert [(layout["pipeline"], layout["expert"]) for layout in layouts] == [(2, 1), (1, 2)]
    assert "is not the one of" not in (run / "logs/driver.log").read_text()


def test_the_final_policy_loads_in_transformers(home):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "runs/tiny/whole/policy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "runs/tiny/whole/policy")
    assert model.config.vocab_size >= len(tokenizer)


def test_no_process_of_a_killed_run_stays(home):
    marker = str(home)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listing.splitlines() if marker in line and "pytest" not in line]
        if not left:
            return
        time.sleep(0.5)
    pytest.fail(f"processes are still running: {left}")
