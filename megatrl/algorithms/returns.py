"""Returns of the actions of one trajectory."""

from collections.abc import Sequence

import numpy as np

from megatrl.data.samples import FloatArray


def discounted_returns(rewards: Sequence[float] | FloatArray, gamma: float) -> FloatArray:
    """Returns [K]: the sum of gamma^(u-k) * rewards[u] over u >= k."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for k in range(len(rewards) - 1, -1, -1):
        following = rewards[k] + gamma * following
        returns[k] = following
    return returns


def outcome_returns(reward: float, penalties: Sequence[float] | FloatArray, gamma: float) -> FloatArray:
    """Returns [K]: the outcome discounted back from the last action, minus each action's own penalty.

    A penalty lowers only the return of the action that earned it (verl-agent), not of earlier ones.
    """
    rewards = np.zeros(len(penalties))
    rewards[-1:] = reward
    return discounted_returns(rewards, gamma) - np.asarray(penalties, dtype=np.float64)
