"""Plots of runs. matplotlib is imported only when one is drawn, and never opens a window."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrl.observability.atomic_file import replace_file
from megatrl.observability.rollout_metrics import EVALUATION_SUCCESS, SUCCESS
from megatrl.observability.run_summary import RunMetrics, Series

# Okabe and Ito's palette: told apart also by color-blind readers and in gray.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def plot_success(runs: Sequence[RunMetrics], path: Path | str, *, title: str = "", smoothing: int = 7) -> Path:
    """Draw success over steps to a PNG: training on the left, evaluation with markers on the right.

    Runs of equal label are repeats: their mean is drawn, with a band from the smallest to the largest.
    Training success is a running mean over `smoothing` steps; its raw values show faintly behind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_label: dict[str, list[RunMetrics]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    training, evaluation = figure.subplots(1, 2, sharey=True)
    for index, (label, repeats) in enumerate(by_label.items()):
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
        raw = [run.series(SUCCESS) for run in repeats]
        for each in raw:
            training.plot(each.steps, each.values, color=color, alpha=0.18, linewidth=0.8)
        _line(training, [smoothed(each, smoothing) for each in raw], color=color, linewidth=2.0)
        _line(
            evaluation,
            [run.series(EVALUATION_SUCCESS) for run in repeats],
            color=color, linewidth=1.6, marker=marker, markersize=6,
        )  # fmt: skip
        name = label if len(repeats) == 1 else f"{label} ({len(repeats)} runs)"
        training.plot([], [], color=color, linewidth=2.0, marker=marker, markersize=6, label=name)
    _axes(training, f"training (mean of {smoothing} steps)", by_label)
    _axes(evaluation, "evaluation (held out)", by_label)
    training.set_ylabel("success")
    figure.legend(*training.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    if title:
        figure.suptitle(title)
    path = Path(path)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=150)
    return path


def smoothed(series: Series, window: int) -> Series:
    """Mean of each value with those up to `window` - 1 places before it."""
    values = series.values
    means = []
    for index in range(len(values)):
        part = values[max(0, index + 1 - window) : index + 1]
        means.append(math.fsum(part) / len(part))
    return Series(series.steps, tuple(means))


def across(repeats: Sequence[Series]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that every repeat has, and the mean, smallest and largest value there."""
    tables: list[Mapping[int, float]] = [dict(zip(each.steps, each.values, strict=True)) for each in repeats]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    columns = [[table[step] for table in tables] for step in steps]
    means = [math.fsum(column) / len(column) for column in columns]
    return steps, means, [min(column) for column in columns], [max(column) for column in columns]


def _line(axes: Any, repeats: Sequence[Series], *, color: str, **style: Any) -> None:
    steps, means, lowest, highest = across(repeats)
    axes.plot(steps, means, color=color, **style)
    if len(repeats) > 1:
        axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0)


def _axes(axes: Any, title: str, by_label: Mapping[str, Sequence[RunMetrics]]) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylim(-0.02, 1.02)
    last = max((int(run.rows[-1]["step"]) for runs in by_label.values() for run in runs if run.rows), default=1)
    axes.set_xlim(0, max(1, last) * 1.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
