"""Plots of a meter: is its probability one, is its number right, and does its signal follow length alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrl.observability.atomic_file import replace_file

_BINS = 10
_POINTS = 4000  # drawn at most: more are a blot, and a slow file

Pairs = Sequence[tuple[float, float]]


def plot_calibration(points: Sequence[tuple[float, bool]], path: Path) -> Path:
    """Share of completions over the forecast probability in ten bins, and how many states fall into each."""
    probabilities = np.asarray([p for p, _ in points], dtype=np.float64)
    happened = np.asarray([h for _, h in points], dtype=np.float64)
    bins = np.clip((probabilities * _BINS).astype(int), 0, _BINS - 1)
    used = [b for b in range(_BINS) if (bins == b).any()]

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="#8C8C00", linewidth=1, label="calibrated")
        means = [probabilities[bins == b].mean() for b in used]
        shares = [happened[bins == b].mean() for b in used]
        counts = [int((bins == b).sum()) for b in used]
        axes.plot(means, shares, color="#0072B2", marker="o", label="this meter")
        for x, y, count in zip(means, shares, counts, strict=True):
            axes.annotate(str(count), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=7)
        axes.set(xlabel="forecast probability of completion", ylabel="share that completed", xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False)

    return _draw(path, draw, "calibration (states in each bin)")


def plot_tokens_to_go(pairs: Pairs, path: Path) -> Path:
    """Forecast against recorded tokens to go, both 1 + tokens on logarithmic axes."""

    def draw(axes: Any) -> None:
        forecast, recorded = _columns(_thinned(pairs))
        top = max(2.0, forecast.max(initial=1.0), recorded.max(initial=1.0)) + 1
        axes.plot([1, top], [1, top], color="#8C8C00", linewidth=1, label="exact")
        axes.scatter(recorded + 1, forecast + 1, s=8, alpha=0.3, color="#0072B2", linewidths=0, label="states")
        axes.set(xscale="log", yscale="log", xlabel="1 + recorded tokens to go", ylabel="1 + forecast tokens to go")
        axes.legend(frameon=False)

    return _draw(path, draw, "tokens to go, where both say completion")


def plot_signal(points: Pairs, path: Path, *, correlation: float | None) -> Path:
    """The step signal Delta_k over the length n_k of the action."""

    def draw(axes: Any) -> None:
        lengths, deltas = _columns(_thinned(points))
        axes.axhline(0, color="#000000", linewidth=0.6)
        top = lengths.max(initial=1.0)
        axes.plot([0, top], [0, top], color="#8C8C00", linewidth=1, label="Delta = n: length alone")
        axes.scatter(lengths, deltas, s=8, alpha=0.3, color="#0072B2", linewidths=0, label="actions")
        axes.set(xlabel="action tokens n", ylabel="signal Delta, tokens")
        axes.legend(frameon=False)

    said = "undefined" if correlation is None else f"{correlation:.2f}"
    return _draw(path, draw, f"signal against length (correlation {said})")


def _columns(pairs: Pairs) -> tuple[Any, Any]:
    array = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _thinned(points: Pairs) -> Pairs:
    step = max(1, -(-len(points) // _POINTS))
    return list(points)[::step]


def _draw(path: Path, draw: Callable[[Any], None], title: str) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.5)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
    return path
