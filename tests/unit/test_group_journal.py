"""Groups of a step that was not finished: written as they complete, taken instead of played on the next start."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from megatrl.data.trajectories import PromptGroup
from megatrl.errors import TrajectoryError
from megatrl.orchestration.journal import GroupJournal
from megatrl.orchestration.progress import Progress
from tests.fakes.recorded_groups import make_group

AT_STEP_3 = Progress(step=2, optimizer_steps=2, policy_version=2, prompt_position=8)


def group(position: int, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> PromptGroup:
    made, id = make_group(position, rewards), str(position)
    members = tuple(replace(each, id=replace(each.id, group_id=id)) for each in made.trajectories)
    return replace(made, group_id=id, trajectories=members)


def journal(path: Path, *, config_hash: str = "c0ffee") -> GroupJournal:
    return GroupJournal(path / "in_flight.jsonl", config_hash=config_hash)


def interrupted(path: Path, *positions: int, at: Progress = AT_STEP_3) -> GroupJournal:
    """A journal whose process was killed after these groups."""
    found = journal(path)
    found.begin(at)
    for position in positions:
        found.add(group(position))
    return found


def test_what_was_played_completely_is_there_on_the_next_start(tmp_path: Path) -> None:
    interrupted(tmp_path, 8, 10)
    again = journal(tmp_path)
    again.begin(AT_STEP_3)
    assert again.played(8) == group(8)
    assert again.played(9) is None
    assert again.played(10) == group(10)
    again.add(group(9))
    third = journal(tmp_path)
    third.begin(AT_STEP_3)
    assert [third.played(position) == group(position) for position in (8, 9, 10)] == [True] * 3


@pytest.mark.parametrize(
    "other",
    [
        replace(AT_STEP_3, policy_version=3),
        replace(AT_STEP_3, step=3),
        replace(AT_STEP_3, prompt_position=9),
    ],
)
def test_groups_of_another_step_version_or_position_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Progress
) -> None:
    interrupted(tmp_path, 8, 9)
    again = journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        again.begin(other)
    assert again.played(9) is None
    assert "journal ignored" in caplog.text
    third = journal(tmp_path)
    third.begin(AT_STEP_3)
    assert third.played(8) is None, "the foreign groups are gone for good"


def test_groups_of_another_recipe_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupted(tmp_path, 8)
    again = journal(tmp_path, config_hash="dead")
    with caplog.at_level(logging.WARNING):
        again.begin(AT_STEP_3)
    assert again.played(8) is None
    assert "journal ignored" in caplog.text


def test_the_step_after_a_finished_one_begins_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = interrupted(tmp_path, 8)
    with caplog.at_level(logging.WARNING):
        found.begin(AT_STEP_3.advance(optimizer_steps=1, prompt_position=12))
    assert found.played(8) is None
    assert caplog.text == ""


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_last_line_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    interrupted(tmp_path, 8, 9)
    path = tmp_path / "in_flight.jsonl"
    path.write_bytes(path.read_bytes()[:-cut] if cut > 1 else path.read_bytes()[:-2])
    again = journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        again.begin(AT_STEP_3)
    assert again.played(8) == group(8)
    assert again.played(9) is None
    assert "torn last line" in caplog.text
    again.add(group(9))
    third = journal(tmp_path)
    third.begin(AT_STEP_3)
    assert third.played(9) == group(9), "the torn line does not join with the next one"


def test_a_damaged_line_ends_what_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupted(tmp_path, 8, 9, 10)
    path = tmp_path / "in_flight.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:2], rows[2].replace('"version"', '"versio"', 1), rows[3]]) + "\n")
    again = journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        again.begin(AT_STEP_3)
    assert [again.played(position) is not None for position in (8, 9, 10)] == [True, False, False]
    assert "damaged line" in caplog.text


@pytest.mark.parametrize("first", ["", "garbage\n", "[]\n", '{"journal": 99}\n', '{"journal": 1, "step": 3}\n'])
def test_a_file_that_does_not_say_which_step_it_is_of_is_ignored(tmp_path: Path, first: str) -> None:
    (tmp_path / "in_flight.jsonl").write_text(first)
    again = journal(tmp_path)
    again.begin(AT_STEP_3)
    assert again.played(8) is None
    assert json.loads((tmp_path / "in_flight.jsonl").read_text())["step"] == 3


def test_a_group_with_an_unknown_outcome_is_played_again(tmp_path: Path) -> None:
    found = journal(tmp_path)
    found.begin(AT_STEP_3)
    found.add(group(8, (1.0, None)))
    assert found.played(8) is None
    again = journal(tmp_path)
    again.begin(AT_STEP_3)
    assert again.played(8) is None


def test_a_group_before_any_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match="begin first"):
        journal(tmp_path).add(group(8))


def test_in_flight_are_the_groups_of_the_step_that_is_being_played_and_none_at_its_end(tmp_path: Path) -> None:
    found = interrupted(tmp_path, 8, 9)
    assert found.in_flight(AT_STEP_3) == ("8", "9")
    assert found.in_flight(AT_STEP_3.advance(optimizer_steps=1, prompt_position=12)) == ()
    assert journal(tmp_path).in_flight(AT_STEP_3) == (), "not read before the step begins"


def test_a_checkpoints_copy_is_adopted_unless_the_run_has_more_of_the_same_step(tmp_path: Path) -> None:
    found = interrupted(tmp_path, 8)
    found.copy_to(tmp_path / "copy.jsonl")
    found.add(group(9))
    kept = journal(tmp_path)
    kept.adopt(tmp_path / "copy.jsonl", AT_STEP_3)
    kept.begin(AT_STEP_3)
    assert kept.played(9) == group(9)
    interrupted(tmp_path, 40, at=replace(AT_STEP_3, step=9, policy_version=9))
    adopted = journal(tmp_path)
    adopted.adopt(tmp_path / "copy.jsonl", AT_STEP_3)
    adopted.begin(AT_STEP_3)
    assert (adopted.played(8), adopted.played(9)) == (group(8), None)
