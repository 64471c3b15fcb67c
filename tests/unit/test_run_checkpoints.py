"""When a run saves, what it finds on a resume, and what happens to saves that go on in the background."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrl.checkpoint import store as store_module
from megatrl.checkpoint.store import CheckpointStore
from megatrl.config.recipe import Recipe
from megatrl.data.prompts import PromptStream
from megatrl.data.trajectories import Prompt
from megatrl.errors import CheckpointError
from megatrl.orchestration.checkpoints import RunCheckpoints
from megatrl.orchestration.progress import Progress
from tests.fakes.recorded_groups import make_group
from tests.fakes.saving_actor import SavingActor

NUM_STEPS = 8


class Numbered:
    def prompt(self, position: int) -> Prompt:
        return Prompt(prompt_id=f"task-{position}", task={}, seed=position)


def recipe(**checkpoint: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"kind": "tiny"},
            "env": {"kind": "evidence_hunt"},
            "train": {"num_steps": NUM_STEPS},
            "checkpoint": {"every_steps": 2, "keep": 9, **checkpoint},
        }
    )


class Case:
    """One start of a run in `path`."""

    def __init__(self, path: Path, *, resume: bool = False, config: Recipe | None = None, **actor: Any) -> None:
        self.directory = path / "checkpoints"
        self.actor = SavingActor(**actor)
        self.prompts = PromptStream(Numbered())
        self.checkpoints = RunCheckpoints(
            self.directory,
            config or recipe(),
            actor=self.actor,  # type: ignore[arg-type]
            prompts=self.prompts,
            frozen_models={"reference": "aa"},
            restore_from=self.directory if resume else None,
        )

    def steps(self) -> tuple[int, ...]:
        return CheckpointStore(self.directory, run_id="run", keep=9).steps()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.actor.value = step
            self.checkpoints.step_done(after(step))


def after(step: int) -> Progress:
    return Progress(step=step, optimizer_steps=step, policy_version=step, prompt_position=4 * step)


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path, config=recipe(asynchronous=True))
    yield case
    case.checkpoints.close()


def test_due_steps_pinned_steps_and_the_last_are_saved(tmp_path: Path) -> None:
    case = Case(tmp_path, config=recipe(every_steps=3, keep=1, pin_every=4))
    case.train(1, NUM_STEPS)
    assert case.steps() == (4, 6, 8), "4 and 8 are pinned, 6 is the newest other"


def test_a_resume_restores_step_version_prompts_and_actor(tmp_path: Path) -> None:
    Case(tmp_path).train(1, 5)
    again = Case(tmp_path, resume=True)
    assert again.checkpoints.resume_step == 4
    assert again.checkpoints.restore_latest() == after(4)
    assert (again.actor.value, again.prompts.position) == (4, 16)


def test_nothing_to_resume_is_an_error_and_no_beginning(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        Case(tmp_path, resume=True)


def spoil(case: Case, step: int, name: str) -> None:
    """Changes a file under a manifest that agrees."""
    store = CheckpointStore(case.directory, run_id="run", keep=9)
    files = {p.relative_to(store.open(step).path): p.read_text() for p in store.open(step).path.rglob("*.*")}
    value = (store.open(step).path / "actor" / "value").read_text()
    with store.writing(step) as staging:
        (staging / "actor").mkdir()
        (staging / "actor" / "value").write_text("spoilt" if name == "actor" else value)
        driver = files[Path("driver.json")]
        (staging / "driver.json").write_text(driver.replace('"step"', '"stepp"') if name == "driver" else driver)


@pytest.mark.parametrize("name", ["actor", "driver"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    case = Case(tmp_path)
    case.train(1, 4)
    spoil(case, 4, name)
    with caplog.at_level(logging.WARNING):
        again = Case(tmp_path, resume=True)
    assert again.checkpoints.resume_step == 2
    assert "checkpoint skipped step=4" in caplog.text
    assert "step-000004" in caplog.text


def test_when_every_checkpoint_is_damaged_the_run_does_not_begin_again(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(1, 4)
    spoil(case, 2, "actor")
    spoil(case, 4, "actor")
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints .* can be used: .*step-00000[24].*is damaged"
    ):
        Case(tmp_path, resume=True)


def test_a_run_that_does_not_fit_is_refused_and_does_not_fall_back(tmp_path: Path) -> None:
    Case(tmp_path).train(1, 4)
    with pytest.raises(CheckpointError, match=r"was saved with actor\.precision"):
        Case(tmp_path, resume=True, refuses=CheckpointError("it was saved with actor.precision=bf16"))
    other = recipe().model_copy(update={"seed": 5})
    with pytest.raises(CheckpointError, match="config hash was"):
        Case(tmp_path, resume=True, config=other)


def test_another_horizon_of_a_falling_learning_rate_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def falling(num_steps: int) -> Recipe:
        base = recipe().model_dump(mode="json")
        base["actor"]["optimizer"]["decay"] = "linear"
        return Recipe.model_validate(base | {"train": {"num_steps": num_steps}})

    Case(tmp_path, config=falling(NUM_STEPS)).train(1, 4)
    with caplog.at_level(logging.WARNING):
        Case(tmp_path, resume=True, config=falling(NUM_STEPS))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        Case(tmp_path, resume=True, config=falling(20))
    assert "train.num_steps was 8 and is 20" in caplog.text


def test_a_checkpoint_in_the_middle_of_a_step_takes_its_groups_along(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(1, 2)
    state = json.loads((case.directory / "step-000002" / "driver.json").read_text())
    assert state["in_flight"] == [], "none at the boundary of a step"
    journal = case.checkpoints.journal
    journal.begin(after(2))
    journal.add(make_group(8))
    case.checkpoints.save(after(2))
    case.checkpoints.close()
    state = json.loads((case.directory / "step-000002" / "driver.json").read_text())
    assert state["in_flight"] == [make_group(8).group_id]
    journal.path.unlink()  # the checkpoint went to another machine without it

    again = Case(tmp_path, resume=True)
    progress = again.checkpoints.restore_latest()
    again.checkpoints.journal.begin(progress)
    assert again.checkpoints.journal.in_flight(progress) == (make_group(8).group_id,)


def test_a_background_save_appears_after_the_next_step_with_the_state_of_its_own(background: Case) -> None:
    background.train(1, 2)
    assert background.steps() == ()
    background.train(3, 3)
    background.checkpoints.close()
    assert background.steps() == (2,)
    assert (background.directory / "step-000002" / "actor" / "value").read_text() == "2"
    assert background.actor.timeouts == [recipe().checkpoint.timeout_s]


def test_at_most_one_save_is_under_way(tmp_path: Path) -> None:
    case = Case(tmp_path, config=recipe(every_steps=1, asynchronous=True))
    case.train(1, 3)  # the fake refuses a second one
    assert case.steps() == (1, 2)
    case.checkpoints.close()
    assert case.steps() == (1, 2, 3)


def test_the_last_step_is_on_disk_when_the_run_ends(background: Case) -> None:
    background.train(1, NUM_STEPS)
    assert background.steps() == (2, 4, 6, 8)


def test_a_background_save_that_fails_ends_the_run_at_the_next_step_with_its_own_step(background: Case) -> None:
    background.train(1, 4)
    background.actor.finish_error = CheckpointError("rank 1 did not write: disk quota exceeded")
    with pytest.raises(CheckpointError) as caught:
        background.train(5, 5)
    assert "checkpoint of step 4 was not saved in the background: rank 1 did not write" in caught.value.message
    assert "Intact: steps [2]" in caught.value.message
    assert [path.name for path in background.directory.iterdir() if path.name.startswith(".")] == []


def test_a_background_save_that_cannot_be_committed_is_told_with_its_step(
    background: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    background.train(1, 2)

    def broken(*_: Any) -> None:
        raise CheckpointError("the manifest cannot be written")

    monkeypatch.setattr(store_module, "_measure", broken)
    background.train(3, 3)
    with pytest.raises(CheckpointError, match="of step 2 was not saved in the background: the manifest cannot"):
        background.train(4, 4)
    assert background.steps() == ()


def test_a_save_under_way_is_completed_when_the_run_ends_early_and_its_loss_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = Case(tmp_path / "a", config=recipe(asynchronous=True))
    ended.train(1, 2)
    ended.checkpoints.close()
    assert ended.steps() == (2,)
    lost = Case(tmp_path / "b", config=recipe(asynchronous=True), finish_error=CheckpointError("no ranks any more"))
    lost.train(1, 2)
    lost.checkpoints.close()
    assert lost.steps() == ()
    assert "checkpoint lost at the end of the run" in caplog.text
    assert "of step 2" in caplog.text
