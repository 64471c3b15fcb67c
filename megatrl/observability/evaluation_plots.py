"""Plot of an evaluation: success with its interval, and tokens, for every way to act."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrl.observability.atomic_file import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One way to act."""

    name: str
    success: float
    interval: tuple[float, float]
    action_tokens: float  # of one episode, carried out
    sampled_tokens: float  # of one episode, all candidates


def plot_evaluation(bars: Sequence[Bar], path: Path, *, title: str = "") -> Path:
    """Success with 95 % intervals on the left, tokens of an episode on the right, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places, names = range(len(bars)), [bar.name for bar in bars]
    below = [max(0.0, bar.success - bar.interval[0]) for bar in bars]
    above = [max(0.0, bar.interval[1] - bar.success) for bar in bars]
    left.bar(places, [bar.success for bar in bars], yerr=[below, above], capsize=4, color="#0072B2", width=0.6)
    left.set(ylim=(0, 1.02), ylabel="success (95 % interval)")
    right.bar(places, [bar.sampled_tokens for bar in bars], color="#E69F00", width=0.6, label="sampled")
    right.bar(places, [bar.action_tokens for bar in bars], color="#009E73", width=0.6, label="carried out")
    right.set(ylabel="action tokens of an episode")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xticks(places, names)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=150)
    return path
