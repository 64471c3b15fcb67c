"""Which directory a run may write into, and what a resume refuses before anything is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatrl.config.load import load_recipe
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError, ConfigError
from megatrl.orchestration.run_directory import claimed, continued

RECIPE = """\
name: tiny
model: {kind: tiny}
env: {kind: evidence_hunt}
actor: {device: cpu, precision: fp32}
rollout: {servers: {device: cpu, precision: fp32}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path).recipe


def finished_run(home: Path, recipe: Recipe, run_id: str = "one") -> Path:
    run_dir = home / run_id
    (run_dir / "checkpoints" / "step-000002").mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    return run_dir


def test_runs_that_begin_in_the_same_second_get_directories_of_their_own(tmp_path: Path) -> None:
    with claimed(tmp_path, None) as one, claimed(tmp_path, None) as two, claimed(tmp_path, None) as three:
        assert len({one, two, three}) == 3
        assert all(path.is_dir() and path.parent == tmp_path for path in (one, two, three))


@pytest.mark.parametrize("written", ["metrics.jsonl", "grpo/metrics.jsonl", "checkpoints/step-000004/manifest.json"])
def test_a_run_id_that_holds_results_is_refused(tmp_path: Path, written: str) -> None:
    path = tmp_path / "used" / written
    path.parent.mkdir(parents=True)
    path.write_text("")
    with (
        pytest.raises(ConfigError, match=r"used exists \(.*--resume to continue it, or another --run-id"),
        claimed(tmp_path, "used"),
    ):
        pytest.fail("the directory was given out")
    assert path.read_text() == ""


def test_a_run_that_left_no_result_may_begin_again(tmp_path: Path) -> None:
    (tmp_path / "early" / "logs").mkdir(parents=True)
    with claimed(tmp_path, "early") as run_dir:
        assert run_dir == tmp_path / "early"


def test_a_directory_has_one_driver_at_a_time_and_is_free_when_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megatrl.orchestration.run_directory import claimed\n"
        f"with claimed(Path({str(tmp_path)!r}), 'mine'): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use by another process"), claimed(tmp_path, "mine"):
            pytest.fail("two drivers in one directory")
        other.kill()
        other.wait(timeout=20)
    with claimed(tmp_path, "mine"):
        pass


def test_the_newest_run_is_resumed_by_default(tmp_path: Path, recipe: Recipe) -> None:
    finished_run(tmp_path, recipe, "20260101-000000")
    newest = finished_run(tmp_path, recipe, "20260102-000000")
    with continued(tmp_path, None, recipe) as run_dir:
        assert run_dir == newest


def test_a_resume_without_run_or_checkpoint_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    for run_id, text in ((None, "no run was started there"), ("typo", "no run was started there")):
        with pytest.raises(CheckpointError, match=text), continued(tmp_path, run_id, recipe):
            pytest.fail("resumed nothing")
    assert not (tmp_path / "typo").exists()
    (finished_run(tmp_path, recipe) / "checkpoints" / "step-000002").rmdir()
    with pytest.raises(CheckpointError, match="it has no checkpoint yet"), continued(tmp_path, "one", recipe):
        pytest.fail("resumed nothing")


def test_a_resume_names_every_setting_that_changed(tmp_path: Path, recipe: Recipe) -> None:
    finished_run(tmp_path, recipe)
    overrides = ("actor.optimizer.lr=0.5", "credit.kind=trace", "train.num_steps=7", "checkpoint.keep=9")
    changed = load_recipe(tmp_path / "recipe.yaml", overrides).recipe
    with pytest.raises(CheckpointError) as caught, continued(tmp_path, "one", changed):
        pytest.fail("resumed another recipe")
    assert "actor.optimizer.lr was 1e-06, is 0.5" in caught.value.message
    assert 'credit.kind was "none", is "trace"' in caught.value.message
    assert "train.num_steps" not in caught.value.message  # how long a run goes on is not part of what it computes
    more_patient = (
        "train.num_steps=7", "actor.timeout_s=9", "rollout.servers.start_timeout_s=9",
        "actor.layout.world_size=4", "actor.layout.pipeline=2", "scoring.backend=independent",
    )  # fmt: skip
    longer = load_recipe(tmp_path / "recipe.yaml", more_patient).recipe
    with continued(tmp_path, "one", longer) as run_dir:
        assert run_dir == tmp_path / "one"
