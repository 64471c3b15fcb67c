"""What runs achieved, read back from their metrics files: one row for each run, as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatrl.errors import MegatrlError
from megatrl.observability.record import METRICS_FILE
from megatrl.observability.rollout_metrics import EVALUATION_SUCCESS, REWARD, SUCCESS
from megatrl.observability.sinks import STEP, read_metrics

LAST_STEPS = 10
"""A run's training success is its mean over this many last steps."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps at which it was written."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def last_mean(self, count: int) -> float | None:
        """Mean of the last `count` values; None for an empty series."""
        tail = self.values[-count:]
        return math.fsum(tail) / len(tail) if tail else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The metrics of one run. `label` is what tables and plots call it; equal labels are repeats of one method."""

    label: str
    run_dir: Path
    rows: tuple[Mapping[str, float], ...]

    def series(self, name: str) -> Series:
        """The metric `name`, without the steps that have no value of it."""
        points = [(int(row[STEP]), row[name]) for row in self.rows if name in row and math.isfinite(row[name])]
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One row of the table; None where the run has no such number."""

    label: str
    num_steps: int
    eval_success: float | None  # at the last evaluation
    best_eval_success: float | None
    train_success: float | None  # mean over the last steps
    reward: float | None  # mean over the last steps
    num_action_tokens: float | None  # in all
    step_s: float | None  # mean seconds of a step


def load_run(run_dir: Path | str, label: str | None = None) -> RunMetrics:
    """Read a run directory's metrics.

    Raises:
        MegatrlError: there is no metrics file, or it is empty.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise MegatrlError(f"{path} does not exist; {run_dir} is not a run directory, or its first step is not done")
    rows = read_metrics(path)
    if not rows:
        raise MegatrlError(f"{path} has no line yet; the first step is not done")
    return RunMetrics(label=label or run_dir.name, run_dir=run_dir, rows=tuple(rows))


def summarize(run: RunMetrics) -> RunSummary:
    """The run's row."""
    evaluations = run.series(EVALUATION_SUCCESS).values
    tokens = run.series("rollout/num_action_tokens").values
    return RunSummary(
        label=run.label,
        num_steps=int(run.rows[-1][STEP]),
        eval_success=evaluations[-1] if evaluations else None,
        best_eval_success=max(evaluations, default=None),
        train_success=run.series(SUCCESS).last_mean(LAST_STEPS),
        reward=run.series(REWARD).last_mean(LAST_STEPS),
        num_action_tokens=math.fsum(tokens) if tokens else None,
        step_s=run.series("seconds/step").last_mean(len(run.rows)),
    )


_COLUMNS = (
    "run", "steps", "eval success", "best eval", f"train success (last {LAST_STEPS})", "reward",
    "action tokens", "s/step",
)  # fmt: skip


def _cells(row: RunSummary) -> list[str]:
    tokens = "-" if row.num_action_tokens is None else f"{row.num_action_tokens:,.0f}"
    shares = [row.eval_success, row.best_eval_success, row.train_success, row.reward]
    return [
        row.label,
        str(row.num_steps),
        *("-" if value is None else f"{value:.3f}" for value in shares),
        tokens,
        "-" if row.step_s is None else f"{row.step_s:.2f}",
    ]


def rich_table(rows: Sequence[RunSummary], *, title: str = "") -> Table:
    """The rows for a terminal."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def markdown_table(rows: Sequence[RunSummary]) -> str:
    """The rows as a Markdown table, ending with a newline."""
    lines = [_COLUMNS, ["---", *["---:"] * (len(_COLUMNS) - 1)], *(_cells(row) for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
