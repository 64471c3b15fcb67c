"""SIGKILL at every boundary of a step, then a resume: bit for bit the run that was never interrupted.

The real loop with real ranks, TRACE credit and a KL term (so the frozen reference matters) and scripted episodes (so
the sampler does not). Every life is a process group of its own that kills itself whole.
"""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from world import run_world

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.recipe import Recipe
from megatrl.meter.frozen import freeze_meter
from megatrl.meter.prompt import MeterText, build_meter_prompt
from megatrl.rendering.renderer import load_renderer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # one fixture starts every process

NUM_STEPS = 5
RECIPE: dict[str, Any] = {
    "name": "lives",
    "seed": 3,
    "model": {"kind": "tiny", "num_experts": 4, "ffn_size": 32, "hidden_size": 32, "head_dim": 8},
    "env": {"kind": "evidence_hunt", "num_questions": 2, "num_documents": 4, "num_hops": 2, "max_turns": 3},
    "actor": {"device": "cpu", "precision": "fp32", "optimizer": {"lr": 1e-3}, "timeout_s": 60},
    "rollout": {
        "tool_format": "react",
        "max_turns": 3,
        "max_action_tokens": 24,
        "context_tokens": 256,
        "max_observation_tokens": 32,
    },
    "batch": {"num_groups": 3, "group_size": 4, "microbatch_tokens": 512},
    "credit": {"kind": "trace"},
    "loss": {"kl_coefficient": 0.05},
    "train": {"num_steps": NUM_STEPS, "max_mismatch": 100.0},  # scripted actions have logprob 0
    "checkpoint": {"every_steps": 2, "keep": 3},
    "evaluation": {"num_episodes": 0},
    "observe": {"wandb": "off", "tensorboard": False},
}
BACKGROUND = {"checkpoint": {"every_steps": 2, "keep": 3, "asynchronous": True}}
PIPELINE = {"actor": RECIPE["actor"] | {"layout": {"world_size": 2, "pipeline": 2}}}
METER_BOUNDARY = ("scorers", {"method": "score", "nth": 3})

# Of step 3, one after the checkpoint of step 2. Policy version 0 is published before the first step.
BOUNDARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "in-act": ("journal", {"method": "add", "nth": 8}),
    "after-act": ("collector", {"method": "collect", "nth": 3}),
    "after-judge": ("rollout", {"method": "fill", "nth": 3}),
    "after-score": ("scorers", {"method": "reference_logprobs", "nth": 3}),
    "after-credit": ("actor", {"method": "logprobs", "nth": 3, "before": True}),
    "after-learn": ("actor", {"method": "update", "nth": 3}),
    "after-publish": ("weight_sync", {"method": "publish", "nth": 4}),
    "after-record": ("checkpoints", {"method": "step_done", "nth": 3, "before": True}),
    "in-save": ("workers", {"method": "call", "nth": 2, "first_argument": "begin_checkpoint"}),
}
EPISODES_LEFT = {"in-act": 4}  # of step 3 after the resume: one group of four; after every later boundary none


def life(home: Path, name: str, run: str, **more: Any) -> dict[str, Any]:
    recipe = RECIPE | more.pop("changes", {})
    return {"name": name, "run_dir": str(home / run), "start": str(home / "model"), "recipe": recipe, **more}


def killed_and_resumed(home: Path, run: str, boundary: str, **changes: Any) -> list[dict[str, Any]]:
    role, kill = METER_BOUNDARY if boundary == "after-meter" else BOUNDARIES[boundary]
    meter = {"meter": str(home / "meter")} if boundary == "after-meter" else {}
    return [
        life(home, f"{run}-killed", run, resume=False, role=role, kill=kill, changes=changes, **meter),
        life(home, f"{run}-resumed", run, resume=True, changes=changes, **meter),
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("kills")
    recipe = Recipe.model_validate(RECIPE)
    make_tiny(recipe.model, recipe.env, home / "model")  # type: ignore[arg-type]
    renderer = load_renderer(str(home / "model"), recipe.rollout.chat_format, recipe.rollout.tool_format)
    freeze_meter(
        home / "model",  # an untrained model forecasts something, too
        home / "meter",
        prompt=build_meter_prompt(renderer, (1, 4, 16, 64), MeterText(header="", question="forecast")),
        failure_cost=100.0,
        training_hash="none",
        tool_format=recipe.rollout.tool_format,
    )
    return home


@pytest.fixture(scope="module")
def lives(home: Path) -> dict[str, dict[str, Any]]:
    update = {"method": "update", "nth": 5, "before": True}  # of step 5, while the save of step 4 is under way
    meter = {"credit": {"kind": "deltattg"}, "meter": {"kind": "frozen", "path": str(home / "meter")}}
    plan = [
        life(home, "whole", "whole", resume=False),
        *(each for boundary in BOUNDARIES for each in killed_and_resumed(home, boundary, boundary)),
        life(home, "skipping", "skipping", resume=False),
        life(home, "skipped", "skipping", resume=True, before=["mix shards", "lose index"]),
        life(home, "background", "background", resume=False, changes=BACKGROUND),
        life(home, "background-rewound", "background", resume=True, changes=BACKGROUND, before=["forget step 5"]),
        life(home, "hidden-killed", "hidden", resume=False, role="actor", kill=update, changes=BACKGROUND),
        life(home, "hidden-resumed", "hidden", resume=True, changes=BACKGROUND),
        life(home, "two", "two", resume=False, changes=PIPELINE),
        *killed_and_resumed(home, "two-learn", "after-learn", **PIPELINE),
        *killed_and_resumed(home, "two-save", "in-save", **PIPELINE),
        life(home, "meter", "meter-whole", resume=False, changes=meter, meter=str(home / "meter")),
        *killed_and_resumed(home, "meter-killed", "after-meter", **meter),
    ]
    (ended,) = run_world("lives.py", 1, {"lives": plan}, home / "world", timeout_s=400)
    return {each["name"]: each for each in ended}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def states(run: Path) -> list[tuple[int, Any]]:
    """(policy version, hashes of every rank) as they were published, of all lives of a run in order."""
    return [(line["version"], line["ranks"]) for line in lines(run / "states.jsonl")]


def rows(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of every step, without those that measure the machine."""
    skipped = ("seconds/", "memory/", "throughput/")
    return {
        line["step"]: {
            k: v for k, v in line.items() if not k.startswith(skipped) and "per_s" not in k and k != "wall_time_s"
        }
        for line in lines(run / "metrics.jsonl")
    }


def assert_same_run(run: Path, whole: Path, *, resumed_at: int) -> None:
    wanted = dict(states(whole))
    assert len({json.dumps(state) for state in wanted.values()}) == NUM_STEPS + 1, "every step has to move the state"
    found = states(run)
    assert [version for version, _ in found][-(NUM_STEPS - resumed_at + 1) :] == [*range(resumed_at, NUM_STEPS + 1)]
    assert all(state == wanted[version] for version, state in found)
    assert rows(run) == rows(whole)
    assert sorted(rows(run)) == [*range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_run_killed_at_a_boundary_resumes_bit_for_bit(
    home: Path, lives: dict[str, dict[str, Any]], boundary: str
) -> None:
    killed, resumed = lives[f"{boundary}-killed"], lives[f"{boundary}-resumed"]
    assert killed["code"] == -signal.SIGKILL, killed["log"]
    assert "killed here" in killed["log"]
    assert resumed["code"] == 0, resumed["log"]
    assert_same_run(home / boundary, home / "whole", resumed_at=2)
    played = [line for line in lines(home / boundary / "episodes.jsonl") if line["step"] == 3]
    wanted = 12 if boundary == "in-save" else EPISODES_LEFT.get(boundary, 0)  # that one was killed in step 4
    assert played[-1]["played"] == wanted


def test_checkpoints_that_are_damaged_under_an_intact_manifest_are_named_and_skipped(
    home: Path, lives: dict[str, dict[str, Any]]
) -> None:
    resumed = lives["skipped"]
    assert resumed["code"] == 0, resumed["log"]
    assert "checkpoint skipped step=5 reason=actor state in" in resumed["log"]
    assert "shards/.metadata is missing" in resumed["log"]
    assert "checkpoint skipped step=4 reason=actor state in" in resumed["log"]
    assert "shards/__0_0.distcp belongs to another save" in resumed["log"]
    assert "resumed step=2" in resumed["log"]
    assert_same_run(home / "skipping", home / "whole", resumed_at=2)


def test_a_save_in_the_background_changes_nothing_and_holds_the_step_it_was_begun_at(
    home: Path, lives: dict[str, dict[str, Any]]
) -> None:
    assert lives["background"]["code"] == 0, lives["background"]["log"]
    assert lives["background-rewound"]["code"] == 0, lives["background-rewound"]["log"]
    assert "resumed step=4" in lives["background-rewound"]["log"]
    assert_same_run(home / "background", home / "whole", resumed_at=4)


def test_a_run_killed_while_a_save_goes_on_resumes_at_the_one_before(
    home: Path, lives: dict[str, dict[str, Any]]
) -> None:
    assert lives["hidden-killed"]["code"] == -signal.SIGKILL, lives["hidden-killed"]["log"]
    assert lives["hidden-resumed"]["code"] == 0, lives["hidden-resumed"]["log"]
    assert "resumed step=2" in lives["hidden-resumed"]["log"]
    assert_same_run(home / "hidden", home / "whole", resumed_at=2)


def test_a_run_with_a_frozen_meter_resumes_bit_for_bit(home: Path, lives: dict[str, dict[str, Any]]) -> None:
    assert lives["meter"]["code"] == 0, lives["meter"]["log"]
    assert lives["meter-killed-killed"]["code"] == -signal.SIGKILL, lives["meter-killed-killed"]["log"]
    assert lives["meter-killed-resumed"]["code"] == 0, lives["meter-killed-resumed"]["log"]
    assert any(name.startswith("meter/") for name in rows(home / "meter-whole")[1])
    assert_same_run(home / "meter-killed", home / "meter-whole", resumed_at=2)


@pytest.mark.parametrize("run", ["two-learn", "two-save"])
def test_two_ranks_killed_together_resume_bit_for_bit(home: Path, lives: dict[str, dict[str, Any]], run: str) -> None:
    assert lives[f"{run}-killed"]["code"] == -signal.SIGKILL, lives[f"{run}-killed"]["log"]
    assert lives[f"{run}-resumed"]["code"] == 0, lives[f"{run}-resumed"]["log"]
    assert all(len(ranks) == 2 for _, ranks in states(home / run))
    assert_same_run(home / run, home / "two", resumed_at=2)


def test_no_process_of_any_life_stays(home: Path, lives: dict[str, dict[str, Any]]) -> None:
    assert lives
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    assert [line for line in listing.splitlines() if str(home) in line] == []
