"""Filling a batch: refilled in a bounded number of rounds, and an error with counts where nothing survives."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatrl.config.credit import RewardConfig, SelectionConfig
from megatrl.config.recipe import BatchConfig
from megatrl.data.prompts import PromptStream
from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.errors import EmptyBatchError
from megatrl.orchestration.filling import LiveRollout
from megatrl.orchestration.journal import GroupJournal
from megatrl.orchestration.progress import Progress
from megatrl.rollout.collector import PlayedGroups
from tests.fakes.recorded_groups import make_group

Rewards = tuple[float | None, ...]
MIXED, RIGHT, WRONG, LOST = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (None, None)


class Numbered:
    def prompt(self, position: int) -> Prompt:
        return Prompt(prompt_id=f"task-{position}", task={}, seed=position)


class Player:
    """Gives the group at a position the rewards that a function of the position says."""

    def __init__(self, rewards: Callable[[int], Rewards]) -> None:
        self._rewards = rewards
        self.rounds: list[tuple[int, int]] = []

    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]:
        self.rounds.append((first_position, len(prompts)))
        return tuple(make_group(p, self._rewards(p)) for p in range(first_position, first_position + len(prompts)))


@pytest.fixture
def journal(tmp_path: Path) -> GroupJournal:
    return GroupJournal(tmp_path / "in_flight.jsonl", config_hash="c0ffee")


def rollout(player: Player, journal: GroupJournal, **selection: object) -> LiveRollout:
    config = SelectionConfig.model_validate({"drop_equal_rewards": True, "max_rounds": 3, **selection})
    return LiveRollout(player, BatchConfig(num_groups=4, group_size=2), RewardConfig(), config, journal=journal)


def test_a_constant_reward_ends_after_exactly_the_allowed_rounds_with_counts(journal: GroupJournal) -> None:
    player, prompts = Player(lambda position: WRONG if position % 3 else RIGHT), PromptStream(Numbered())
    with pytest.raises(EmptyBatchError) as caught:
        rollout(player, journal).fill(prompts, Progress()).check()
    assert player.rounds == [(0, 4), (4, 4), (8, 4)]
    message = caught.value.message
    assert "after 3 rounds: 12 groups, 4 all-right, 8 all-wrong, 0 with failures" in message
    assert "'equal_rewards': 12" in message
    assert "selection.drop_equal_rewards" in message


def test_dropped_groups_are_replaced_and_kept_visible(journal: GroupJournal) -> None:
    player, prompts = Player(lambda position: MIXED if position % 2 else WRONG), PromptStream(Numbered())
    batch = rollout(player, journal).fill(prompts, Progress())
    assert player.rounds == [(0, 4), (4, 2), (6, 1)]
    assert [group.prompt.prompt_id for group in batch.kept] == ["task-1", "task-3", "task-5"]
    assert [dropped.group.prompt.prompt_id for dropped in batch.dropped] == ["task-0", "task-2", "task-4", "task-6"]
    assert (batch.rounds, len(batch.groups), prompts.position) == (3, 7, 7)


def test_a_full_batch_takes_one_round(journal: GroupJournal) -> None:
    player = Player(lambda position: MIXED)
    assert rollout(player, journal).fill(PromptStream(Numbered()), Progress()).rounds == 1
    assert player.rounds == [(0, 4)]


@pytest.mark.parametrize("rewards", [LOST, (1.0, None), ()])
def test_groups_without_enough_known_outcomes_are_a_counted_skip_and_all_of_them_an_error(
    rewards: Rewards, journal: GroupJournal
) -> None:
    player = Player(lambda position: MIXED if position == 2 else rewards)
    batch = rollout(player, journal, drop_equal_rewards=False).fill(PromptStream(Numbered()), Progress())
    assert len(batch.kept) == 1
    assert [dropped.reason for dropped in batch.dropped] == ["too_few_trainable"] * 3
    with pytest.raises(EmptyBatchError, match=r"4 groups, 0 all-right, 0 all-wrong.*'too_few_trainable': 4"):
        rollout(Player(lambda position: rewards), journal, drop_equal_rewards=False).fill(
            PromptStream(Numbered()), Progress()
        ).check()
