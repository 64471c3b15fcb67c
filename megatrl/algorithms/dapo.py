"""DAPO's reward shaping and group filter (arXiv 2503.14476)."""

from collections.abc import Sequence

from megatrl.algorithms.group_statistics import is_equal, mean_and_std


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0, floor: bool = True
) -> float:
    """Returns what is added to the reward of a trajectory with `num_tokens` action tokens, <= 0.

    0 up to max_tokens - buffer_tokens, then linear to -factor at max_tokens. Beyond that it stays
    there, or without `floor` continues the line (verl).
    """
    excess = (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
    if excess <= 0:
        return 0.0
    return -factor * (min(excess, 1.0) if floor else excess)


def has_equal_rewards(rewards: Sequence[float]) -> bool:
    """True where a group's rewards are all (nearly) equal, so that group-relative advantages are 0."""
    return len(rewards) < 2 or is_equal(mean_and_std(rewards, "population")[1], list(rewards))
