"""Numbers of an evaluation: means over repeats, intervals over tasks, and ways to act side by side. Pure functions.

Episodes without a known outcome are counted and enter nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatrl.data.samples import FloatArray
from megatrl.orchestration.eval_journal import EpisodeRow

NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal distribution
_RESAMPLES = 10_000

INTERVALS = (
    "95 % intervals: of success, Wilson's over tasks, with a task's mean over its repeats as one observation (with "
    "more than one repeat it is wider than need be); of differences, percentile bootstrap over the tasks both have, "
    f"{_RESAMPLES} resamples."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """One way to act. Means are over episodes with a known outcome; NaN-free: None where there is none."""

    num_tasks: int  # with a known outcome
    repeats: int
    num_episodes: int  # with a known outcome
    num_unknown: int  # infrastructure failures
    success: float | None  # mean of the repeats' means
    success_std: float | None  # population standard deviation of the repeats' means
    success_interval: tuple[float, float] | None
    reward: float | None
    turns: float | None
    action_tokens: float | None  # of one episode, carried out
    sampled_tokens: float | None  # of one episode, all candidates
    changed_turns: float | None  # share of all turns
    terminations: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize_episodes(rows: Sequence[EpisodeRow]) -> EvaluationSummary:
    """The numbers of all episodes of one way to act."""
    known = [row for row in rows if row.success is not None]
    repeats = 1 + max((row.repeat for row in rows), default=0)
    by_repeat = [[row.success or False for row in known if row.repeat == r] for r in range(repeats)]
    means = [sum(values) / len(values) for values in by_repeat if values]
    tasks = task_means(rows)
    success = math.fsum(means) / len(means) if means else None
    num_turns = sum(row.turns for row in known)
    terminations: dict[str, int] = {}
    for row in rows:
        terminations[row.termination] = terminations.get(row.termination, 0) + 1
    return EvaluationSummary(
        num_tasks=len(tasks),
        repeats=repeats,
        num_episodes=len(known),
        num_unknown=len(rows) - len(known),
        success=success,
        success_std=float(np.std(means)) if means else None,
        success_interval=wilson_interval(math.fsum(tasks.values()) / len(tasks), len(tasks)) if tasks else None,
        reward=_mean([row.reward or 0.0 for row in known]),
        turns=_mean([row.turns for row in known]),
        action_tokens=_mean([row.action_tokens for row in known]),
        sampled_tokens=_mean([row.sampled_tokens for row in known]),
        changed_turns=sum(row.changed_turns for row in known) / num_turns if num_turns else None,
        terminations=dict(sorted(terminations.items())),
    )


def task_means(rows: Sequence[EpisodeRow]) -> dict[int, float]:
    """Position -> mean success over the repeats with a known outcome."""
    by_task: dict[int, list[bool]] = {}
    for row in rows:
        if row.success is not None:
            by_task.setdefault(row.position, []).append(row.success)
    return {position: sum(values) / len(values) for position, values in by_task.items()}


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share observed `count` times. Never empty, also at 0 and 1."""
    z2 = NORMAL_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, center - half), min(1.0, center + half)


def paired_difference(
    rows: Sequence[EpisodeRow], baseline: Sequence[EpisodeRow], *, seed: int = 0
) -> tuple[float, tuple[float, float]] | None:
    """Mean success less that of the baseline over the tasks both have, and its 95 % bootstrap interval."""
    ours, theirs = task_means(rows), task_means(baseline)
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    differences: FloatArray = np.asarray([ours[p] - theirs[p] for p in shared], dtype=np.float64)
    rng = np.random.default_rng(seed)
    chunks = (rng.integers(len(shared), size=(100, len(shared))) for _ in range(_RESAMPLES // 100))
    means = np.concatenate([differences[chunk].mean(axis=1) for chunk in chunks])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(differences.mean()), (float(low), float(high))


HEADER = (
    "actions", "success", "std over repeats", "95 % interval", "difference to the first", "reward", "steps",
    "kept tokens", "sampled tokens", "turns changed", "episodes", "unknown",
)  # fmt: skip


def comparison_rows(arms: Mapping[str, Sequence[EpisodeRow]]) -> list[tuple[str, ...]]:
    """Cells below HEADER, one row for each way to act, in order. Tokens and steps are means over episodes."""
    baseline = next(iter(arms.values()))
    table: list[tuple[str, ...]] = []
    for name, rows in arms.items():
        s = summarize_episodes(rows)
        found = None if rows is baseline else paired_difference(rows, baseline)
        difference = "" if found is None else f"{found[0]:+.3f} [{found[1][0]:+.3f}, {found[1][1]:+.3f}]"
        low_high = "-" if s.success_interval is None else f"[{s.success_interval[0]:.3f}, {s.success_interval[1]:.3f}]"
        cells = (_cell(s.success, 3), _cell(s.success_std, 3) if s.repeats > 1 else "-", low_high, difference or "-")
        means = (_cell(s.reward, 3), _cell(s.turns, 2), _cell(s.action_tokens, 1), _cell(s.sampled_tokens, 1))
        table.append((name, *cells, *means, _cell(s.changed_turns, 3), str(s.num_episodes), str(s.num_unknown)))
    return table


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The comparison as Markdown, with a line that says what its intervals are."""
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{INTERVALS}\n"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
