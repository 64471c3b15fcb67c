"""The whole life of a meter on real parts: collect, label, sft, eval, refine, freeze, and a run that reads it.

Megatron ranks train and score, SGLang servers sample and decode; only the source runs are written by hand,
from scripted episodes of two qualities.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import yaml

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.load import load_recipe
from megatrl.data.wire import record_group
from megatrl.envs.registry import prompt_source
from megatrl.errors import ScoringError
from megatrl.meter.collection import task_key
from megatrl.meter.freezing import freeze
from megatrl.meter.frozen import load_frozen_meter
from megatrl.observability.label_store import read_labels
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.orchestration.players import scripted_player
from megatrl.rendering.renderer import load_renderer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4000)]
DEADLINE_S = 900  # for each of seven commands; a busy machine takes minutes where a quiet one takes seconds

ENGINES = {
    "seed": 3,
    "actor": {"device": "cpu", "precision": "fp32", "optimizer": {"lr": 2e-4}, "timeout_s": 200},
    "rollout": {
        "tool_format": "react",
        "max_turns": 4,
        "max_action_tokens": 12,
        "context_tokens": 256,
        "max_observation_tokens": 32,
        "servers": {"device": "cpu", "precision": "fp32", "max_total_tokens": 16384, "start_timeout_s": 400},
    },
    "train": {"num_steps": 1, "max_mismatch": 0.001},
    "checkpoint": {"every_steps": 5},
    "evaluation": {"num_episodes": 0},
    "observe": {"wandb": "off", "tensorboard": False},
}
HUNT = {
    **ENGINES,
    "name": "hunt",
    "model": {"kind": "tiny", "family": "qwen3", "hidden_size": 64, "ffn_size": 128},
    "env": {"kind": "evidence_hunt", "num_questions": 3, "num_documents": 6, "num_hops": 2, "max_turns": 4},
}
FIT = {"num_steps": 80, "sequences_per_step": 48, "optimizer": {"lr": 3e-3}}
LABELS = {"kind": "meter_prompts", "labels": "labels"}
SFT = {
    **ENGINES,
    "name": "meter-sft",
    "model": {"kind": "hf", "path": "runs/hunt/strong/policy"},
    "env": LABELS,
    "start": {"kind": "sft", "sft": FIT},
}
REFINE = {
    **ENGINES,
    "name": "meter-refine",
    "model": {"kind": "hf", "path": "runs/meter-sft/first/policy"},
    "env": LABELS,
    "rollout": {**ENGINES["rollout"], "max_turns": 1},
    "reward": {"success_threshold": 0.5},
    "batch": {"num_groups": 6, "group_size": 8, "microbatch_tokens": 2048},
    "loss": {"kl_coefficient": 0.001},
    "train": {"num_steps": 2, "max_mismatch": 0.001},
    "evaluation": {"num_episodes": 8, "every_steps": 2},
}
DELTATTG = {
    **HUNT,
    "name": "deltattg",
    "model": {"kind": "hf", "path": "runs/hunt/strong/policy"},
    "start": {"kind": "sft", "demonstrations": {"num_episodes": 256}, "sft": {**FIT, "num_steps": 60}},
    "batch": {"num_groups": 8, "group_size": 6, "microbatch_tokens": 2048},
    "group_statistics": {"step_expanded": True},
    "credit": {"kind": "deltattg"},
    "meter": {"kind": "frozen", "path": "meter"},
}
READOUTS = {
    "name": "readouts",
    "recipe": "deltattg.yaml",
    "arms": {readout: {"credit.readout": readout} for readout in ("candidates", "decode")},
}


def write_source(home: Path, name: str, *, seed: int, detour: float, premature: float) -> None:
    """A run directory as `train` leaves it, with scripted episodes in the place of sampled ones."""
    recipe = load_recipe(home / "hunt.yaml", [f"seed={seed}"]).recipe
    run_dir = home / "runs/hunt" / name
    make_tiny(recipe.model, recipe.env, run_dir / "policy")  # type: ignore[arg-type]
    renderer = load_renderer(str(run_dir / "policy"), "chatml", "react")
    prompts = [prompt_source(recipe.env, seed=seed, split="train").prompt(position) for position in range(240)]
    groups = scripted_player(recipe, renderer, detour=detour, premature=premature).collect(
        prompts, first_position=0, policy_version=0
    )
    TrajectoryStore(run_dir).write(1, [record_group(group, step=1) for group in groups])
    (run_dir / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))


def megatrl(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatrl", *arguments],
        cwd=home,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command of the chain printed, run once for all tests below; `home` is where."""
    home = tmp_path_factory.mktemp("meter-life")
    files = {"hunt": HUNT, "sft": SFT, "refine": REFINE, "deltattg": DELTATTG, "readouts": READOUTS}
    for name, content in files.items():
        (home / f"{name}.yaml").write_text(yaml.safe_dump(content))
    write_source(home, "weak", seed=1, detour=0.5, premature=0.3)
    write_source(home, "strong", seed=2, detour=0.1, premature=0.05)
    commands = {
        "collect": ("meter", "collect", "runs/hunt/weak", "runs/hunt/strong", "--out", "c.jsonl.gz"),
        "label": ("meter", "label", "c.jsonl.gz", "--out", "labels", "--validation-fraction", "0.2"),
        "sft": ("meter", "sft", "sft.yaml", "--run-id", "first"),
        "decode": (
            *("meter", "eval", "runs/meter-sft/first", "labels", "--readout", "decode", "--device", "cpu"),
            *("--out", "decoded"),
        ),
        "refine": ("meter", "refine", "refine.yaml", "--run-id", "first"),
        "freeze": ("meter", "freeze", "runs/meter-refine/first", "--out", "meter"),
        "compare": ("compare", "readouts.yaml", "--run-id", "both"),
    }
    return {"home": str(home), **{name: megatrl(home, *arguments) for name, arguments in commands.items()}}


@pytest.fixture(scope="module")
def home(said: dict[str, str]) -> Path:
    return Path(said["home"])


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_sources_become_one_set_of_labels_that_share_no_task(said, home):
    assert "hunt/weak" in said["collect"]
    assert "hunt/strong" in said["collect"]
    labels = read_labels(home / "labels")
    assert labels.sources == ("hunt/weak", "hunt/strong")
    assert set(labels.failure_costs) == {"evidence_hunt"}
    for side in (labels.training, labels.validation):
        wins = sum(example.label.completion for example in side)
        assert wins * 2 == len(side) > 20
    store = TrajectoryStore(home / "runs/hunt/weak").read(1) + TrajectoryStore(home / "runs/hunt/strong").read(1)
    tasks = {record.group.prompt.prompt_id: task_key(record.group, "hunt") for record in store}
    sides = [{tasks[e.trajectory.id.prompt_id] for e in side} for side in (labels.training, labels.validation)]
    assert not sides[0] & sides[1]


def test_sft_teaches_the_answers_and_says_how_well(said, home):
    run = home / "runs/meter-sft/first"
    metrics = json.loads((run / "evaluation/evaluation.json").read_text())["metrics"]
    assert metrics["bit_auc"] > 0.6
    assert metrics["spearman"] > 0.5
    assert "signal_length_correlation" in metrics
    assert json.loads((run / "sft.json").read_text())["loss"] < 1.0
    for plot in ("calibration", "tokens_to_go", "signal_length"):
        assert (run / f"evaluation/{plot}.png").stat().st_size > 5000
    assert "bit_auc" in said["sft"]


def test_both_readouts_of_one_meter_agree_on_the_same_states(home):
    candidates = rows(home / "runs/meter-sft/first/evaluation/forecasts.jsonl")
    decoded = rows(home / "decoded/forecasts.jsonl")
    assert [(r["trajectory"], r["turn"]) for r in candidates] == [(r["trajectory"], r["turn"]) for r in decoded]
    pairs = [(c["forecast"], d["forecast"]) for c, d in zip(candidates, decoded, strict=True)]
    assert all(d["is_valid"] for _, d in pairs)  # the server enforces it
    clear = [(c, d) for c, d in pairs if abs(c["completion_prob"] - 0.5) > 0.01]
    assert [c["completion"] for c, _ in clear] == [d["completion"] for _, d in clear]
    # One says the expectation over the grid, the other its likeliest number: they differ within the spread.
    errors = [
        abs(math.log((1 + c["tokens_to_go"]) / (1 + d["tokens_to_go"])))
        for c, d in pairs
        if c["completion"] and d["completion"]
    ]
    assert len(errors) > 5
    assert median(errors) < 0.3


def test_refinement_goes_through_the_loop_and_logs_what_can_go_wrong_with_it(home):
    lines = {row["step"]: row for row in rows(home / "runs/meter-refine/first/metrics.jsonl")}
    for step in (1, 2):
        assert lines[step]["mismatch/mean"] < 1e-3
        assert lines[step]["publish/is_proven"] == 1
        assert 0 <= lines[step]["rollout/env/valid_rate"] <= 1
        assert 0 <= lines[step]["rollout/env/failure_forecast_rate"] <= 1
        assert "rollout/env/bit_accuracy_success" in lines[step]
        assert "actor/kl" in lines[step]
    assert 0 <= lines[2]["eval/success"] <= 1
    record = TrajectoryStore(home / "runs/meter-refine/first").read(1)[0]
    assert all(t.num_turns == 1 for t in record.group.trajectories)
    rewards = {t.reward for t in record.group.trajectories}
    assert all(reward is not None and 0 <= reward <= 1 for reward in rewards)


def test_a_frozen_meter_holds_everything_and_refuses_what_does_not_belong(home, tmp_path):
    frozen, labels = load_frozen_meter(home / "meter"), read_labels(home / "labels")
    assert frozen.training_hash == labels.content_hash
    assert frozen.prompt == labels.prompt
    assert frozen.cost_in("evidence_hunt") == labels.failure_costs["evidence_hunt"]
    assert (frozen.chat_format, frozen.tool_format) == ("chatml", "react")
    run = home / "runs/meter-refine/first"
    origin = json.loads((run / "meter_source.json").read_text())
    (run / "meter_source.json").write_text(json.dumps({**origin, "labels_hash": "0" * 16}))
    with pytest.raises(ScoringError, match="its costs and prompt would be others"):
        freeze(run, tmp_path / "meter")
    (run / "meter_source.json").write_text(json.dumps(origin))
    with pytest.raises(ScoringError, match="does not say which labels"):
        freeze(home / "runs/hunt/strong", tmp_path / "meter")
    other = make_other_tokenizer(tmp_path)
    with pytest.raises(ScoringError, match="label the collection with this model's tokenizer"):
        freeze(other, tmp_path / "meter", labels_directory=home / "labels")
    assert not (tmp_path / "meter").exists()


def make_other_tokenizer(directory: Path) -> Path:
    (directory / "other.yaml").write_text(yaml.safe_dump({**HUNT, "env": {**HUNT["env"], "num_documents": 9}}))
    recipe = load_recipe(directory / "other.yaml").recipe
    make_tiny(recipe.model, recipe.env, directory / "other")  # type: ignore[arg-type]
    return directory / "other"


def test_a_run_reads_the_frozen_meter_with_either_readout(home):
    records = {arm: TrajectoryStore(home / f"runs/readouts/both/{arm}").read(1) for arm in ("candidates", "decode")}
    forecasts = {
        arm: [f for r in arm_records for note in r.notes if note.meter for f in note.meter.forecasts]
        for arm, arm_records in records.items()
    }
    assert len(forecasts["candidates"]) == len(forecasts["decode"]) > 10  # one start and one seed: the same episodes
    assert {r.failure_cost for r in records["decode"]} == {
        load_frozen_meter(home / "meter").failure_costs["evidence_hunt"]
    }
    pairs = zip(forecasts["candidates"], forecasts["decode"], strict=True)
    clear = [(c.completion, d.completion) for c, d in pairs if abs(c.completion_prob - 0.5) > 0.01]
    assert [c for c, _ in clear] == [d for _, d in clear]
    for arm in records:
        row = next(row for row in rows(home / f"runs/readouts/both/{arm}/metrics.jsonl") if row["step"] == 1)
        assert row["credit/parse_failure_rate"] == 0
        assert {
            "credit/signal_length_correlation",
            "credit/last_action_weight",
            "credit/failure_cost_rate",
        } <= row.keys()
