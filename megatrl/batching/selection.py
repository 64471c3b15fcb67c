"""Which groups a step trains on, and why the others are dropped."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrl.config.credit import SelectionConfig
from megatrl.data.trajectories import PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    group: PromptGroup
    reason: str  # too_few_trainable, equal_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    kept: tuple[PromptGroup, ...]
    dropped: tuple[DroppedGroup, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """Number of dropped groups for each reason."""
        return dict(Counter(dropped.reason for dropped in self.dropped))


def select_groups(
    groups: Sequence[PromptGroup], config: SelectionConfig, *, has_equal_rewards: Callable[[Sequence[float]], bool]
) -> Selection:
    """Returns the groups to train on, in order, and the dropped ones with their reason.

    `has_equal_rewards` is the rule of the group statistics, so that exactly the groups without advantages drop.

    A group stays whole: members without a known outcome stay in it and get no weight later.
    """
    kept: list[PromptGroup] = []
    dropped: list[DroppedGroup] = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories if t.reward is not None and t.is_trainable]
        if len(rewards) < config.min_group_size:
            dropped.append(DroppedGroup(group=group, reason="too_few_trainable"))
        elif config.drop_equal_rewards and has_equal_rewards(rewards):
            dropped.append(DroppedGroup(group=group, reason="equal_rewards"))
        else:
            kept.append(group)
    return Selection(kept=tuple(kept), dropped=tuple(dropped))
