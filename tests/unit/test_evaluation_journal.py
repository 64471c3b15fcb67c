"""What an evaluation keeps of its episodes, and how it goes on after an interruption."""

import json
from pathlib import Path

import pytest

from megatrl.data.trajectories import (
    FinishReason,
    Prompt,
    PromptGroup,
    Segment,
    Termination,
    Trajectory,
    TrajectoryId,
    Turn,
)
from megatrl.errors import CheckpointError, ConfigError
from megatrl.observability.trajectories import read_records
from megatrl.orchestration.eval_journal import (
    EPISODES,
    TRAJECTORIES,
    EpisodeJournal,
    agree_on_settings,
    episode_row,
    read_episodes,
)
from megatrl.rollout.selection import SelectionTally

TALLY = SelectionTally(turns=1, candidates=4, distinct_candidates=3, sampled_tokens=9, turned_from_first=1)


def trajectory(position: int, repeat: int, *, success: bool | None = True) -> Trajectory:
    turn = Turn(
        observation_tokens=(1, 2),
        action_tokens=(3, 4),
        behavior_logprobs=(-0.5, -0.5),
        policy_version=0,
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        id=TrajectoryId(prompt_id=f"task-{position}", group_id=str(position), index=repeat, attempt=1),
        segments=(Segment(turns=(turn,)),),
        reward=None if success is None else float(success),
        success=success,
        termination=Termination.SERVER_ERROR if success is None else Termination.COMPLETED,
        error="gone" if success is None else "",
    )


def group(position: int, *outcomes: bool | None) -> PromptGroup:
    members = tuple(trajectory(position, repeat, success=outcome) for repeat, outcome in enumerate(outcomes))
    prompt = Prompt(prompt_id=f"task-{position}", task={}, seed=0)
    return PromptGroup(prompt=prompt, group_id=str(position), trajectories=members)


def journal(directory: Path) -> EpisodeJournal:
    return EpisodeJournal(directory, repeats=2, tally_of=lambda id: TALLY)


def test_a_row_holds_the_outcome_and_what_choosing_cost() -> None:
    row = episode_row(trajectory(3, 1), TALLY)
    assert (row.prompt_id, row.position, row.repeat, row.success, row.attempts) == ("task-3", 3, 1, True, 2)
    assert (row.turns, row.action_tokens, row.sampled_tokens, row.changed_turns) == (1, 2, 9, 1)


def test_what_was_played_is_not_played_again_and_a_failure_of_the_machinery_is(tmp_path: Path) -> None:
    first = journal(tmp_path)
    for each in (group(0, True, False), group(2, False, None)):
        first.add(each)
    first.close()
    second = journal(tmp_path)
    assert [second.played(position) is not None for position in range(3)] == [True, False, False]
    assert second.num_unknown == 1
    second.add(group(2, False, True))
    second.close()
    rows = read_episodes(tmp_path, repeats=2)
    assert [[row.success for row in task] for task in rows] == [[True, False], [False, True]]
    assert len(read_records(tmp_path / TRAJECTORIES)[0]) == 3  # of a task played twice the last one counts


def test_a_killed_writer_leaves_a_torn_line_and_half_a_task_that_are_played_again(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.add(group(0, True, True))
    first.add(group(1, True, True))
    first.close()
    path = tmp_path / EPISODES
    path.write_text(path.read_text()[:-20])
    (tmp_path / TRAJECTORIES).open("a").write('{"half')
    second = journal(tmp_path)
    assert second.played(0) is not None
    assert second.played(1) is None
    second.add(group(1, True, False))
    second.close()
    assert [row.success for task in read_episodes(tmp_path, repeats=2) for row in task] == [True, True, True, False]
    assert len(read_records(tmp_path / TRAJECTORIES)[0]) == 3


def test_a_damaged_line_in_the_middle_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / EPISODES).write_text('{"position": 1}\n')
    with pytest.raises(CheckpointError, match=r"episodes.jsonl:1 is damaged"):
        journal(tmp_path)


def test_other_settings_are_refused_with_every_difference_and_the_same_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = {"episodes": 8, "env": {"kind": "evidence_hunt", "num_hops": 2}, "meter": None}
    agree_on_settings(path, settings)
    agree_on_settings(path, settings)
    assert json.loads(path.read_text()) == settings
    with pytest.raises(ConfigError, match=r"episodes was 8, is 9; env.num_hops was 2, is 3"):
        agree_on_settings(path, {"episodes": 9, "env": {"kind": "evidence_hunt", "num_hops": 3}, "meter": None})
