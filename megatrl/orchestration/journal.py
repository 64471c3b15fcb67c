"""The groups of the step that is being played, on disk as they complete: a killed run does not play them again."""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatrl.data.trajectories import PromptGroup
from megatrl.data.wire import GroupRecord, TornLines, decode_lines, encode_record, record_group
from megatrl.errors import TrajectoryError
from megatrl.orchestration.progress import Progress

logger = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalledStep:
    """Which step the groups of a journal belong to: the first line of its file."""

    step: int
    policy_version: int
    prompt_position: int  # of the stream when the step began
    config_hash: str


class GroupJournal:
    """`in_flight.jsonl`: one line that names the step, then one line for each group that was played completely.

    Groups with an episode that failed for reasons outside the policy are left out: a later start gives
    those another chance.
    """

    def __init__(self, path: Path, *, config_hash: str) -> None:
        self.path = path
        self._config_hash = config_hash
        self._step: JournalledStep | None = None
        self._played: dict[str, PromptGroup] = {}
        self._file: IO[bytes] | None = None

    def begin(self, progress: Progress) -> None:
        """Opens the journal for the step after `progress`; its groups are there already where it was interrupted.

        What another step, policy version or recipe left is removed with a warning, unless it is the step just done.
        """
        self.close()
        wanted = self._step_after(progress)
        self._played = self._read(wanted)
        self._step = wanted
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}")
        with draft.open("wb") as file:  # the whole lines only: a torn one would join with the next
            file.write(_header_line(wanted))
            file.writelines(_group_line(group, wanted.step) for group in self._played.values())
        draft.replace(self.path)
        self._file = self.path.open("ab")
        if self._played:
            logger.info("step=%d was interrupted; %d groups are not played again", wanted.step, len(self._played))

    def played(self, position: int) -> PromptGroup | None:
        """The group at this place of the prompt stream, where it was played before the interruption."""
        return self._played.get(str(position))

    def add(self, group: PromptGroup) -> None:
        """Writes down one group that is complete."""
        if self._file is None or self._step is None:
            raise TrajectoryError("no step has begun in this journal; call begin first")
        if any(each.termination.is_infrastructure_failure for each in group.trajectories):
            return
        self._file.write(_group_line(group, self._step.step))
        self._file.flush()  # to the kernel: a killed process loses nothing; what a dead machine loses is played again
        self._played[group.group_id] = group

    def in_flight(self, progress: Progress) -> tuple[str, ...]:
        """Ids of the groups that are there for the step after `progress`; none at the boundary of a step."""
        return tuple(self._played) if self._step == self._step_after(progress) else ()

    def copy_to(self, path: Path) -> None:
        """Puts the file into a checkpoint."""
        shutil.copyfile(self.path, path)

    def adopt(self, path: Path, progress: Progress) -> None:
        """Takes a checkpoint's copy where the run directory has nothing newer of the same step."""
        if self._header() != self._step_after(progress):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _step_after(self, progress: Progress) -> JournalledStep:
        return JournalledStep(
            step=progress.step + 1,
            policy_version=progress.policy_version,
            prompt_position=progress.prompt_position,
            config_hash=self._config_hash,
        )

    def _header(self) -> JournalledStep | None:
        try:
            with self.path.open("rb") as file:
                body = json.loads(file.readline())
            if body.pop("journal") != _FORMAT:
                return None
            return JournalledStep(**body)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("journal ignored: the first line of %s does not name a step", self.path)
            return None

    def _read(self, wanted: JournalledStep) -> dict[str, PromptGroup]:
        found = self._header()
        if found is None:
            return {}
        if found != wanted:
            is_done = (found.step, found.policy_version) == (wanted.step - 1, wanted.policy_version - 1)
            if not is_done or found.config_hash != wanted.config_hash:
                logger.warning("journal ignored: %s holds %s, this run begins %s", self.path, found, wanted)
            return {}
        torn = TornLines()
        records: list[GroupRecord] = []
        try:
            with self.path.open("rb") as file:
                file.readline()
                for record in decode_lines(file, path=str(self.path), torn=torn):
                    records.append(record)
        except TrajectoryError as error:
            logger.warning("journal read up to a damaged line, the rest is played again: %s", error.message)
        for cut in torn.found:
            logger.warning("journal: the torn last line %s is cut (%d bytes)", cut.where, cut.num_bytes)
        return {record.group.group_id: record.group for record in records}


def _header_line(step: JournalledStep) -> bytes:
    body = {
        "journal": _FORMAT,
        "step": step.step,
        "policy_version": step.policy_version,
        "prompt_position": step.prompt_position,
        "config_hash": step.config_hash,
    }
    return json.dumps(body).encode() + b"\n"


def _group_line(group: PromptGroup, step: int) -> bytes:
    return f"{encode_record(record_group(group, step=step))}\n".encode()
