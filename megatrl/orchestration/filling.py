"""Act and judge: collect groups until a batch is full, reward them, keep the dropped ones visible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatrl.algorithms.dapo import has_equal_rewards
from megatrl.algorithms.rewards import combine_rewards
from megatrl.batching.selection import DroppedGroup, select_groups
from megatrl.config.credit import RewardConfig, SelectionConfig
from megatrl.config.recipe import BatchConfig
from megatrl.data.prompts import PromptStream
from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.errors import EmptyBatchError
from megatrl.orchestration.journal import GroupJournal
from megatrl.orchestration.progress import Progress
from megatrl.rollout.collector import PlayedGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch:
    """The groups of one step. `kept` is trained on; nothing sampled is lost."""

    kept: tuple[PromptGroup, ...]
    dropped: tuple[DroppedGroup, ...]
    rounds: int

    @property
    def groups(self) -> tuple[PromptGroup, ...]:
        return (*self.kept, *(dropped.group for dropped in self.dropped))

    def check(self) -> None:
        """Raises EmptyBatchError, with the count of every reason, where no group at all survived."""
        if not self.kept:
            raise EmptyBatchError(empty_message(self))


class GroupCollector(Protocol):
    """Plays groups of episodes for prompts whose first position in the stream is given."""

    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]: ...


class LiveRollout:
    """Fills batches by playing episodes against the rollout servers."""

    def __init__(
        self,
        collector: GroupCollector,
        batch: BatchConfig,
        reward: RewardConfig,
        selection: SelectionConfig,
        *,
        journal: GroupJournal,
    ) -> None:
        self._collector, self._journal = collector, journal
        self._batch, self._reward, self._selection = batch, reward, selection

    def fill(self, prompts: PromptStream, progress: Progress) -> FilledBatch:
        """Returns up to `batch.num_groups` kept groups after at most `selection.max_rounds` rounds.

        Groups that an interrupted start of the same step has journalled are taken from there. There may be
        none: the caller stores what was played and then calls `check`.
        """
        self._journal.begin(progress)
        kept: list[PromptGroup] = []
        dropped: list[DroppedGroup] = []
        max_rounds = self._selection.max_rounds if self._selection.drop_equal_rewards else 1
        rounds = 0
        while len(kept) < self._batch.num_groups and rounds < max_rounds:
            first = prompts.position
            taken = prompts.take(self._batch.num_groups - len(kept))
            played = self._collector.collect(
                taken, first_position=first, policy_version=progress.policy_version, journal=self._journal
            )
            selection = select_groups(
                combine_rewards(played, self._reward), self._selection, has_equal_rewards=has_equal_rewards
            )
            kept += selection.kept
            dropped += selection.dropped
            rounds += 1
        return FilledBatch(kept=tuple(kept), dropped=tuple(dropped), rounds=rounds)


def empty_message(batch: FilledBatch) -> str:
    """What to tell a person when nothing survived selection."""
    groups = [dropped.group for dropped in batch.dropped]
    outcomes = [{t.success for t in group.trajectories} for group in groups]
    all_right, all_wrong = outcomes.count({True}), outcomes.count({False})
    failed = sum(None in outcome for outcome in outcomes)
    reasons = {reason: sum(d.reason == reason for d in batch.dropped) for reason in {d.reason for d in batch.dropped}}
    return (
        f"no group survived selection after {batch.rounds} rounds: {len(groups)} groups, {all_right} all-right, "
        f"{all_wrong} all-wrong, {failed} with failures; reasons {reasons}. Change the task's difficulty, raise "
        "batch.group_size or selection.max_rounds, or turn selection.drop_equal_rewards off; "
        "the last checkpoint is intact"
    )
