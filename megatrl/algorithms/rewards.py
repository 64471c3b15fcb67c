"""The reward that learning sees: the environment's outcome plus length shaping."""

from collections.abc import Sequence
from dataclasses import replace

from megatrl.algorithms.dapo import overlong_penalty
from megatrl.config.credit import RewardConfig
from megatrl.data.trajectories import PromptGroup, Trajectory


def combine_rewards(groups: Sequence[PromptGroup], reward: RewardConfig) -> tuple[PromptGroup, ...]:
    """Returns the groups with shaped rewards. Call it once: shaping adds to what is there.

    An unknown outcome stays None and `success` stays what the environment said. Penalties of single
    turns are not part of the outcome; they stay on their turns.
    """
    if reward.overlong is None:
        return tuple(groups)
    return tuple(
        replace(group, trajectories=tuple(_shaped(trajectory, reward) for trajectory in group.trajectories))
        for group in groups
    )


def length_shaping(trajectory: Trajectory, reward: RewardConfig) -> float:
    """Returns what `combine_rewards` adds to a trajectory with a known outcome, <= 0."""
    if reward.overlong is None:
        return 0.0
    return overlong_penalty(
        trajectory.num_action_tokens,
        max_tokens=reward.overlong.max_tokens,
        buffer_tokens=reward.overlong.buffer_tokens,
        factor=reward.overlong.factor,
        floor=reward.overlong.floor,
    )


def task_reward(trajectory: Trajectory, reward: RewardConfig) -> float | None:
    """Returns the environment's own reward of a trajectory that went through `combine_rewards`."""
    return None if trajectory.reward is None else trajectory.reward - length_shaping(trajectory, reward)


def _shaped(trajectory: Trajectory, reward: RewardConfig) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return replace(trajectory, reward=trajectory.reward + length_shaping(trajectory, reward))
