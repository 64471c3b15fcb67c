"""Group-relative advantages of one prompt group (spec: GRPO, Dr.GRPO, step-expanded GRPO).

Shape letters: G = trajectories of the group, K = actions of one trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrl.data.samples import BoolArray, FloatArray
from megatrl.errors import ScoringError

StdEstimator = Literal["bessel", "population"]

# Rewards that spread less than this, relative to their size, carry no signal: dividing their noise
# by their own standard deviation would turn it into advantages of order one.
EQUAL_REWARDS_STD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one prompt group, split into the part of the outcome and the part of penalties.

    The row of action k of trajectory i has advantage `trajectory[i] + penalty[i][k]`.
    """

    trajectory: FloatArray  # [G] 0 where unscorable; the sign is that of reward - mean reward
    penalty: tuple[FloatArray, ...]  # [K_i] each
    is_scorable: BoolArray  # [G] False: entered no statistic
    mean: float  # of the outcome rewards, weighted as configured
    std: float  # of the rows; 0 where the group carries no signal


def mean_and_std(
    values: Sequence[float] | FloatArray, std: StdEstimator, weights: Sequence[float] | FloatArray | None = None
) -> tuple[float, float]:
    """Returns the mean and standard deviation of values that occur `weights` times each.

    var = sum w (x - mean)^2 / (sum w - 1)  (bessel)  or  / sum w  (population).
    No value gives (0, 0); fewer than two occurrences have standard deviation 0.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    total = float(w.sum())
    if total <= 0:
        return 0.0, 0.0
    # Shifting by one member first keeps equal values exactly equal to their mean.
    shift = x[int(np.argmax(w > 0))]
    mean = float(shift + (w * (x - shift)).sum() / total)
    divisor = total - 1 if std == "bessel" else total
    if divisor <= 0:
        return mean, 0.0
    return mean, float(np.sqrt((w * (x - mean) ** 2).sum() / divisor))


def is_equal(std: float, values: Sequence[float] | FloatArray) -> bool:
    """True where a standard deviation is too small, for values of this size, to mean anything."""
    size = float(np.max(np.abs(values), initial=0.0))
    return std <= EQUAL_REWARDS_STD * max(1.0, size)


def normalize(values: Sequence[float] | FloatArray, *, std: StdEstimator, norm_std: bool, eps: float) -> FloatArray:
    """Returns (x - mean) / (std + eps), or x - mean without `norm_std`; exactly 0 for equal values.

    A single value has nothing to be compared with and gives 0.
    """
    x = np.asarray(values, dtype=np.float64)
    mean, deviation = mean_and_std(x, std)
    if len(x) < 2 or is_equal(deviation, x):
        return np.zeros_like(x)
    return (x - mean) / (deviation + eps if norm_std else 1.0)


def group_advantages(
    rewards: Sequence[float | None],
    *,
    num_actions: Sequence[int],
    penalties: Sequence[Sequence[float]] | None = None,
    std: StdEstimator,
    norm_std: bool,
    step_expanded: bool,
    eps: float,
) -> GroupAdvantages:
    """Returns the advantages of one group's trajectories; None or non-finite rewards are left out.

        A_ik = (R_i - p_ik - mean row) / (std of rows + eps) = A_i + P_ik
        A_i  = (R_i - mean R) / (std + eps),   P_ik = (mean p - p_ik) / (std + eps)

    Rows: with `step_expanded` each action is a row (verl-agent), so a trajectory counts
    num_actions times; without, each trajectory is one row with its mean penalty. `norm_std` False
    divides by 1 (Dr.GRPO). Equal and nearly equal rows, and groups with one scorable member, give
    exactly 0. Trajectories without actions cannot be scored.

    Raises ScoringError where a reward is not a number.
    """
    values = _numbers(rewards)
    counts = np.asarray(num_actions, dtype=np.float64)
    given = [[0.0] * int(n) for n in num_actions] if penalties is None else penalties
    rows = [np.asarray(p, dtype=np.float64) for p in given]
    if len(counts) != len(values) or [len(p) for p in rows] != [int(n) for n in num_actions]:
        raise ScoringError(
            f"group with {len(values)} rewards has num_actions {list(num_actions)} and penalties for "
            f"{[len(p) for p in rows]} actions; give one count for each reward and one penalty for each action"
        )
    scorable = np.isfinite(values) & (counts > 0)
    members = np.flatnonzero(scorable)
    advantages = np.zeros(len(values))
    penalty_terms = [np.zeros(len(p)) for p in rows]
    mean, deviation = 0.0, 0.0
    if len(members) >= 2:
        weights = counts[members] if step_expanded else np.ones(len(members))
        mean, reward_std = mean_and_std(values[members], std, weights)
        mean_penalty, _ = mean_and_std([rows[i].mean() for i in members], std, weights)
        if step_expanded:
            deviation = mean_and_std(np.concatenate([values[i] - rows[i] for i in members]), std)[1]
        else:
            deviation = mean_and_std([values[i] - rows[i].mean() for i in members], std)[1]
        scale = deviation + eps if norm_std else 1.0
        if is_equal(deviation, values[members]):
            deviation = 0.0
        else:
            if not is_equal(reward_std, values[members]):
                advantages[members] = (values[members] - mean) / scale
            for i in members:
                penalty_terms[i] = (mean_penalty - rows[i]) / scale
    return GroupAdvantages(
        trajectory=advantages, penalty=tuple(penalty_terms), is_scorable=scorable, mean=mean, std=deviation
    )


def _numbers(rewards: Sequence[float | None]) -> FloatArray:
    values = np.full(len(rewards), np.nan)
    for i, reward in enumerate(rewards):
        if reward is None:
            continue
        if isinstance(reward, (str, bytes)) or not np.isscalar(reward):
            raise ScoringError(f"reward of group member {i} is {reward!r}; a reward is a number or None")
        values[i] = float(reward)  # type: ignore[arg-type]
    values[np.isinf(values)] = np.nan
    return values
