"""Judging single steps by a meter: the three targets, the tie rules and the accuracies. Pure functions.

Source: the analysis of DeltaTTG on AgentProcessBench. A step is judged right where the forecast improved
across it, and wrong where it got worse; neutral steps are left out. Shape letters: K = steps of a record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrl.data.samples import FloatArray
from megatrl.errors import ScoringError
from megatrl.meter.process_bench import ProcessRecord

Target = Literal["future_score", "steps_to_go", "tokens_to_go"]
TieRule = Literal["negative", "positive", "half", "wrong"]
TIE_RULES: tuple[TieRule, ...] = ("negative", "positive", "half", "wrong")


def target_values(
    record: ProcessRecord, target: Target, count_tokens: Callable[[str], int]
) -> tuple[float | None, ...]:
    """What a meter of this target should say before each step and after the last one, K + 1 values.

    future_score: 1 or 0, the outcome, at every state. steps_to_go: assistant messages still to come;
    tokens_to_go: tokens of their contents and tool calls by `count_tokens`; both None for a failure.
    """
    num_steps = len(record.step_labels)
    if target == "future_score":
        return (float(record.is_success),) * (num_steps + 1)
    if not record.is_success:
        return (None,) * (num_steps + 1)
    sizes = [1 if target == "steps_to_go" else _tokens(record, i, count_tokens) for i in record.step_indices]
    return tuple(float(sum(sizes[step:])) for step in range(num_steps + 1))


def _tokens(record: ProcessRecord, place: int, count_tokens: Callable[[str], int]) -> int:
    message = record.messages[place]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return count_tokens(str(message.get("content") or "")) + sum(
        count_tokens(f"{call.get('name', '')} {call.get('arguments', '')}") for call in calls
    )


def process_signal(values: Sequence[float | None], target: Target, *, failure_cost: float | None = None) -> FloatArray:
    """Improvement across each step, [K], from K + 1 forecasts.

    future_score: the increase. steps_to_go and tokens_to_go: the decrease of min(value, C), where None
    (a forecast of failure, or none) costs C = `failure_cost` in the target's own unit.
    """
    if len(values) < 2:
        raise ScoringError(f"{len(values)} forecasts; a record of K steps needs K + 1, at least 2")
    if target == "future_score":
        if any(value is None for value in values):
            raise ScoringError("a future score is a number at every state; give 0 for a forecast of failure")
        return np.diff(np.asarray(values, dtype=np.float64))
    if failure_cost is None or failure_cost <= 0:
        raise ScoringError(f"failure_cost is {failure_cost}; {target} needs its own C > 0")
    costs = [failure_cost if value is None else min(max(value, 0.0), failure_cost) for value in values]
    return -np.diff(np.asarray(costs, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Share of steps judged as labelled. 0.5 is what a coin gets."""

    num_steps: int
    num_ties: int
    by_tie_rule: Mapping[TieRule, float]


def judgment_accuracy(
    records: Sequence[ProcessRecord], signals: Sequence[FloatArray]
) -> tuple[Accuracy, dict[str, Accuracy]]:
    """(overall, by dataset): steps with label 1 or -1 against the sign of their signal, pooled over steps.

    Ties (signal exactly 0) count by the rule: as a judgment `negative` or `positive`, as `half` a hit,
    or as `wrong`. Raises ScoringError where a record has another number of signals than steps, and
    where every label is neutral.
    """
    hits: dict[str, list[tuple[int, float]]] = {}
    for record, signal in zip(records, signals, strict=True):
        if len(signal) != len(record.step_labels):
            raise ScoringError(f"{record.name} has {len(record.step_labels)} steps but {len(signal)} signals")
        judged = [(label, float(s)) for label, s in zip(record.step_labels, signal, strict=True) if label != 0]
        hits.setdefault(record.dataset, []).extend(judged)
    pooled = [pair for pairs in hits.values() for pair in pairs]
    if not pooled:
        raise ScoringError(f"none of the {len(records)} records has a step labelled 1 or -1; there is nothing to judge")
    return _accuracy(pooled), {dataset: _accuracy(pairs) for dataset, pairs in sorted(hits.items()) if pairs}


def _accuracy(pairs: Sequence[tuple[int, float]]) -> Accuracy:
    by_rule: dict[TieRule, float] = {
        rule: float(np.mean([_hit(label, signal, rule) for label, signal in pairs])) for rule in TIE_RULES
    }
    return Accuracy(num_steps=len(pairs), num_ties=sum(signal == 0.0 for _, signal in pairs), by_tie_rule=by_rule)


def _hit(label: int, signal: float, rule: TieRule) -> float:
    if signal != 0.0:
        return float((signal > 0) == (label > 0))
    return {"negative": float(label < 0), "positive": float(label > 0), "half": 0.5, "wrong": 0.0}[rule]
