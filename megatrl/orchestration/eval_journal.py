"""The episodes of an evaluation on disk as they complete, so that an interrupted one goes on where it stopped."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatrl.data.trajectories import Prompt, PromptGroup, Trajectory, TrajectoryId
from megatrl.data.wire import encode_record, record_group
from megatrl.errors import CheckpointError, ConfigError
from megatrl.observability.atomic_file import replace_text
from megatrl.rollout.selection import SelectionTally

logger = logging.getLogger(__name__)

EPISODES = "episodes.jsonl"
TRAJECTORIES = "trajectories.jsonl"
SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode: a line of episodes.jsonl."""

    prompt_id: str
    position: int  # of the task among the held-out ones
    repeat: int  # from 0
    success: bool | None  # None: ended by an infrastructure failure, neither success nor failure
    reward: float | None
    turns: int
    action_tokens: int  # of the actions carried out
    sampled_tokens: int  # of all candidates
    changed_turns: int  # at which another action than the first sampled was carried out
    termination: str
    attempts: int
    error: str = ""


def episode_row(trajectory: Trajectory, tally: SelectionTally) -> EpisodeRow:
    """What is kept of one episode; `tally` is that of its last attempt."""
    id = trajectory.id
    return EpisodeRow(
        prompt_id=id.prompt_id,
        position=int(id.group_id),
        repeat=id.index,
        success=trajectory.success,
        reward=trajectory.reward,
        turns=trajectory.num_turns,
        action_tokens=trajectory.num_action_tokens,
        sampled_tokens=tally.sampled_tokens,
        changed_turns=tally.turned_from_first,
        termination=str(trajectory.termination),
        attempts=id.attempt + 1,
        error=trajectory.error,
    )


class EpisodeJournal:
    """`episodes.jsonl` and `trajectories.jsonl` of one way to act. A PlayedGroups for a Collector.

    A task is written when all its repeats are played. One with an infrastructure failure is written too, and
    played again when the evaluation is continued: its new rows replace the old ones.
    """

    def __init__(self, directory: Path, *, repeats: int, tally_of: Callable[[TrajectoryId], SelectionTally]) -> None:
        self._tally_of = tally_of
        self._by_position = {rows[0].position: rows for rows in read_episodes(directory, repeats=repeats)}
        directory.mkdir(parents=True, exist_ok=True)
        kept = "".join(_line(row) for rows in self._by_position.values() for row in rows)
        replace_text(directory / EPISODES, kept)  # whole tasks only: a torn line would join with the next
        _cut_torn_line(directory / TRAJECTORIES)
        self._episodes: IO[str] = (directory / EPISODES).open("a", encoding="utf-8")
        self._trajectories: IO[str] = (directory / TRAJECTORIES).open("a", encoding="utf-8")

    @property
    def rows(self) -> tuple[EpisodeRow, ...]:
        """Of all tasks that are played, by position and repeat."""
        return tuple(row for position in sorted(self._by_position) for row in self._by_position[position])

    @property
    def num_unknown(self) -> int:
        return sum(row.success is None for row in self.rows)

    def played(self, position: int) -> PromptGroup | None:
        """A stub for a task whose outcomes are all known; nobody reads its episodes from there."""
        rows = self._by_position.get(position)
        if rows is None or any(row.success is None for row in rows):
            return None
        return _stub(rows[0])

    def add(self, group: PromptGroup) -> None:
        rows = [episode_row(t, self._tally_of(t.id)) for t in group.trajectories]
        self._trajectories.write(f"{encode_record(record_group(group, step=0))}\n")
        self._trajectories.flush()
        self._episodes.write("".join(_line(row) for row in rows))
        self._episodes.flush()
        self._by_position[rows[0].position] = rows

    def close(self) -> None:
        self._episodes.close()
        self._trajectories.close()


def read_episodes(directory: Path, *, repeats: int) -> list[list[EpisodeRow]]:
    """Rows by task, of tasks with all their repeats; the last of rows that were written twice.

    A torn last line is left out, and its task with it.

    Raises CheckpointError for any other line that cannot be read.
    """
    path = directory / EPISODES
    if not path.is_file():
        return []
    tasks: dict[int, dict[int, EpisodeRow]] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = EpisodeRow(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise CheckpointError(f"{path}:{number} is damaged ({error}); remove {path} to play again") from error
        tasks.setdefault(row.position, {})[row.repeat] = row
    return [[rows[r] for r in sorted(rows)] for _, rows in sorted(tasks.items()) if len(rows) == repeats]


def agree_on_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings where there are none yet. Raises ConfigError, with what differs, where there are others."""
    if path.is_file():
        was = _flat(json.loads(path.read_text(encoding="utf-8")))
        now = _flat(json.loads(json.dumps(settings)))
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if names:
            changes = "; ".join(f"{name} was {was.get(name, 'absent')}, is {now.get(name, 'absent')}" for name in names)
            raise ConfigError(
                f"{path.parent} holds episodes of other settings: {changes}. Set them back, or give another --out"
            )
        return
    replace_text(path, json.dumps(settings, indent=1) + "\n")


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(tree, Mapping) or not tree:
        return {prefix.removesuffix("."): json.dumps(tree)}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}


def _line(row: EpisodeRow) -> str:
    return json.dumps(asdict(row)) + "\n"


def _stub(row: EpisodeRow) -> PromptGroup:
    prompt = Prompt(prompt_id=row.prompt_id, task={}, seed=0)
    return PromptGroup(prompt=prompt, group_id=str(row.position), trajectories=())


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
