"""How good a meter is: its forecasts against what happened. Pure functions, float64."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrl.algorithms.deltattg import signal_length_correlation
from megatrl.data.meter_labels import MeterLabel
from megatrl.data.samples import FloatArray
from megatrl.data.scores import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySignal:
    """The step signal that a meter's forecasts make of one trajectory."""

    deltas: tuple[float, ...]  # [K], tokens
    lengths: tuple[int, ...]  # [K], action tokens
    num_states_at_failure_cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterEvaluation:
    """The metrics of a meter on a data set, and the points behind its plots."""

    metrics: Mapping[str, float]
    forecasts: tuple[Forecast, ...] = ()  # one for each example
    completion: tuple[tuple[float, bool], ...] = ()  # (forecast probability, what happened)
    tokens_to_go: tuple[tuple[float, float], ...] = ()  # (forecast, recorded), both of completion
    signal: tuple[tuple[float, float], ...] = ()  # (action tokens n_k, Delta_k)


def evaluate_examples(
    forecasts: Sequence[Forecast], labels: Sequence[MeterLabel], signals: Sequence[TrajectorySignal]
) -> MeterEvaluation:
    """`evaluate_forecasts`, and of the trajectories: correlation of Delta_k with n_k, share of states at cost C.

    Near 1 the correlation says that long actions earn their credit by length alone (spec 2.16).
    """
    metrics = evaluate_forecasts(forecasts, labels)
    num_states = sum(len(signal.lengths) for signal in signals)
    if num_states:
        metrics["signal_length_correlation"] = signal_length_correlation(
            [np.asarray(signal.deltas) for signal in signals], [signal.lengths for signal in signals]
        )
        at_cost = sum(signal.num_states_at_failure_cost for signal in signals)
        metrics["failure_cost_rate"] = at_cost / num_states
    pairs = list(zip(forecasts, labels, strict=True))
    return MeterEvaluation(
        metrics=metrics,
        forecasts=tuple(forecasts),
        completion=tuple((f.completion_prob, label.completion) for f, label in pairs if f.is_valid),
        tokens_to_go=tuple(
            (f.tokens_to_go, float(label.tokens_to_go))
            for f, label in pairs
            if f.is_valid and f.completion and label.tokens_to_go is not None
        ),
        signal=tuple(
            (float(n), delta) for signal in signals for n, delta in zip(signal.lengths, signal.deltas, strict=True)
        ),
    )


def evaluate_forecasts(forecasts: Sequence[Forecast], labels: Sequence[MeterLabel]) -> dict[str, float]:
    """Valid rate, accuracy of the bit by class, AUC, error and rank correlation of tokens to go, collapse.

    Invalid forecasts count as wrong bits; numbers are compared where both sides say completion. A
    metric without the cases it needs is left out instead of being a made-up value.
    """
    if len(forecasts) != len(labels) or not labels:
        raise ValueError(f"{len(forecasts)} forecasts for {len(labels)} labels; give one for each and at least one")
    metrics = {"valid_rate": float(np.mean([f.is_valid for f in forecasts]))}
    right = [f.is_valid and f.completion == label.completion for f, label in zip(forecasts, labels, strict=True)]
    metrics["bit_accuracy"] = float(np.mean(right))
    for name, wanted in (("success", True), ("failure", False)):
        of_class = [r for r, label in zip(right, labels, strict=True) if label.completion == wanted]
        if of_class:
            metrics[f"bit_accuracy_{name}"] = float(np.mean(of_class))
    valid = [(f, label) for f, label in zip(forecasts, labels, strict=True) if f.is_valid]
    auc = area_under_curve([f.completion_prob for f, _ in valid], [label.completion for _, label in valid])
    if auc is not None:
        metrics["bit_auc"] = auc
    if valid:
        # Near 1 or 0 while the labels are mixed: the meter has collapsed to one class.
        metrics["failure_forecast_rate"] = float(np.mean([not f.completion for f, _ in valid]))
    pairs = [
        (f.tokens_to_go, float(label.tokens_to_go))
        for f, label in valid
        if f.completion and label.tokens_to_go is not None
    ]
    if pairs:
        metrics["median_abs_log_error"] = float(np.median([abs(math.log((1 + a) / (1 + b))) for a, b in pairs]))
        correlation = spearman([a for a, _ in pairs], [b for _, b in pairs])
        if correlation is not None:
            metrics["spearman"] = correlation
    return metrics


def area_under_curve(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Probability that a random positive scores above a random negative, ties 1/2; None without both."""
    ranks = average_ranks(scores)
    positives = np.asarray(labels, dtype=np.bool_)
    num_positive, num_negative = int(positives.sum()), int((~positives).sum())
    if not num_positive or not num_negative:
        return None
    return float((ranks[positives].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation of the average ranks; None where one side does not vary."""
    return pearson(average_ranks(first), average_ranks(second))


def pearson(first: Sequence[float] | FloatArray, second: Sequence[float] | FloatArray) -> float | None:
    """Linear correlation; None for fewer than two pairs or where one side does not vary."""
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if len(one) < 2:
        return None
    one, other = one - one.mean(), other - other.mean()
    scale = math.sqrt(float((one**2).sum()) * float((other**2).sum()))
    return float((one * other).sum()) / scale if scale > 0 else None


def average_ranks(values: Sequence[float] | FloatArray) -> FloatArray:
    """Ranks from 1; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse]
