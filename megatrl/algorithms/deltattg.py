"""DeltaTTG: a frozen meter's forecasts redistribute a trajectory's advantage over its actions.

Source: DeltaTTG (arXiv 2610.17666); open choices and their defaults are in docs/algorithms.md.
Shape letters: K = turns of one trajectory. Everything is float64 over the whole trajectory, before
any sharding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrl.data.samples import FloatArray
from megatrl.data.scores import Forecast, MeterScore
from megatrl.errors import ScoringError

Target = Literal["ttg", "outcome", "completion_prob", "binary"]
Terminal = Literal["outcome", "meter", "carry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRule:
    """How forecasts become a step signal. The defaults live in DeltaTTGCredit."""

    target: Target
    terminal: Terminal
    cost_transform: Literal["identity", "log1p"]
    parse_failure: Literal["failure_cost", "carry"]
    net_of_spent: bool
    failure_cost: float
    """C in tokens; unused by the targets that are values."""


def forecast_cost(forecast: Forecast, failure_cost: float) -> float:
    """Returns min(max(tokens to go, 0), C) where completion is forecast, C elsewhere, in tokens.

    The clamp keeps a failure forecast from ever being cheaper than a completion.
    """
    if not (forecast.is_valid and forecast.completion):
        return failure_cost
    if not np.isfinite(forecast.tokens_to_go):
        raise ScoringError(
            f"a valid forecast has tokens_to_go={forecast.tokens_to_go!r}; a readout marks such an answer "
            "as invalid (is_valid=False)"
        )
    return min(max(forecast.tokens_to_go, 0.0), failure_cost)


def forecast_value(forecast: Forecast, target: Target) -> float:
    """Returns the value of a state for the ablation targets; 0 where the answer is unparseable.

    outcome and completion_prob read `completion_prob` (a meter trained for `outcome` puts the
    expected final score there); binary reads the completion bit.
    """
    if not forecast.is_valid:
        return 0.0
    value = float(forecast.completion) if target == "binary" else forecast.completion_prob
    if not np.isfinite(value):
        raise ScoringError(f"a valid forecast has completion_prob={value!r}; expected a finite number")
    return value


def step_costs(score: MeterScore, *, success: bool, reward: float, rule: SignalRule) -> FloatArray:
    """Returns [K+1]: the cost of s_1..s_K and of the end. For value targets the cost is -value.

    The end costs, by `terminal`: 0 or C by the recorded outcome (value targets: the reward for
    `outcome`, else 0 or 1); the meter's own forecast there; or the cost of the last state.
    """

    def cost(forecast: Forecast) -> float:
        if rule.target == "ttg":
            return transform(forecast_cost(forecast, rule.failure_cost))
        return -forecast_value(forecast, rule.target)

    def transform(tokens: float) -> float:
        return float(np.log1p(tokens)) if rule.cost_transform == "log1p" else tokens

    forecasts = list(score.forecasts)
    if rule.terminal == "meter":
        if score.terminal is None:
            raise ScoringError("terminal: meter needs the meter's forecast at the end state, the score has none")
        forecasts.append(score.terminal)
    costs = [cost(forecast) for forecast in forecasts]
    if rule.parse_failure == "carry":
        costs = _carried(costs, [forecast.is_valid for forecast in forecasts])
    if rule.terminal == "outcome":
        if rule.target == "ttg":
            costs.append(0.0 if success else transform(rule.failure_cost))
        else:
            costs.append(-reward if rule.target == "outcome" else -float(success))
    elif rule.terminal == "carry":
        costs.append(costs[-1])
    return np.asarray(costs, dtype=np.float64)


def step_signal(costs: FloatArray, num_tokens: Sequence[int], *, net_of_spent: bool = False) -> FloatArray:
    """Returns Delta [K] = cost(s_k) - cost(s_{k+1}): positive where remaining work fell.

    `net_of_spent` subtracts the action's own tokens (not in the paper).
    """
    signal = costs[:-1] - costs[1:]
    return signal - np.asarray(num_tokens, dtype=np.float64) if net_of_spent else signal


def step_shares(
    signal: FloatArray, *, direction: float, rho: float, softmax_temperature: float | None = None
) -> FloatArray:
    """Returns q [K], the share of the credit that each action gets; sums to 1, each >= rho / K.

    g_k = max(direction * Delta_k, 0);  p = g / sum g, uniform if that is 0;  q = (1-rho) p + rho/K.
    `direction` is the sign of the trajectory's advantage: a positive one rewards progress, a
    negative one blames regression. With a temperature, p = softmax(direction * Delta / temperature).
    """
    num_turns = len(signal)
    directed = direction * np.asarray(signal, dtype=np.float64)
    if softmax_temperature is not None:
        gains = np.exp((directed - directed.max(initial=-np.inf)) / softmax_temperature)
    else:
        gains = np.maximum(directed, 0.0)
    largest = gains.max(initial=0.0)
    if largest > 0:
        gains = gains / largest  # shares do not depend on scale; this keeps the sum finite and non-zero
        shares = gains / gains.sum()
    else:
        shares = np.full(num_turns, 1.0 / num_turns)
    return (1.0 - rho) * shares + rho / num_turns


def token_multipliers(
    shares: FloatArray,
    num_tokens: Sequence[int],
    *,
    max_multiplier: float,
    spread: Literal["broadcast", "divide"] = "broadcast",
) -> FloatArray:
    """Returns m [K]: the multiplier of every token of each action, unit mean over the N tokens.

        m = min(lambda * u, M) with the unique lambda that gives mean_t m_t = 1

    u is the action's share, divided by its length for `spread: divide`. lambda is found by water
    filling: cap what exceeds M, rescale the rest to carry the remainder, repeat (at most K times).
    Where the actions with a share are too short to carry the mean (only possible at rho = 0), they
    get M and the other tokens an equal part of the rest.
    """
    n = np.asarray(num_tokens, dtype=np.float64)
    u = np.asarray(shares, dtype=np.float64)
    if spread == "divide":
        u = np.divide(u, n, out=np.zeros_like(u), where=n > 0)
    total = n.sum()
    if total <= 0:
        return np.ones_like(u)
    carries = (u > 0) & (n > 0)
    capped = np.zeros_like(carries)
    while (carries & ~capped).any():
        free = carries & ~capped
        remainder = total - (max_multiplier * n[capped].sum() if capped.any() else 0.0)
        level = remainder / (n[free] * u[free]).sum()
        exceeds = free & (level * u > max_multiplier)
        if not exceeds.any():
            return np.where(capped, max_multiplier, level * u)
        capped |= exceeds
    supported = n[carries].sum()
    rest = (total - max_multiplier * supported) / (total - supported) if total > supported else 0.0
    return np.where(carries, max_multiplier, max(rest, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMultipliers:
    """How one trajectory's advantage is spread over its turns."""

    costs: FloatArray  # [K+1]
    signal: FloatArray  # [K]
    multipliers: FloatArray  # [K]; a token's advantage is the trajectory's times this


def redistribute(
    score: MeterScore,
    num_tokens: Sequence[int],
    *,
    advantage: float,
    success: bool,
    reward: float,
    rule: SignalRule,
    rho: float,
    max_multiplier: float,
    sign_aware: bool,
    spread: Literal["broadcast", "divide"],
    softmax_temperature: float | None = None,
) -> TurnMultipliers:
    """Returns the multipliers of one trajectory whose turns have `num_tokens` trained tokens.

    The direction follows the sign of the advantage even where it contradicts the outcome; the end
    cost follows the outcome. Raises ScoringError where forecasts and turns do not match.
    """
    if len(score.forecasts) != len(num_tokens):
        raise ScoringError(
            f"the meter gave {len(score.forecasts)} forecasts for {len(num_tokens)} turns; it must give one for "
            "the state before each action"
        )
    costs = step_costs(score, success=success, reward=reward, rule=rule)
    signal = step_signal(costs, num_tokens, net_of_spent=rule.net_of_spent)
    direction = float(np.sign(advantage)) if sign_aware else 1.0
    shares = step_shares(signal, direction=direction, rho=rho, softmax_temperature=softmax_temperature)
    multipliers = token_multipliers(shares, num_tokens, max_multiplier=max_multiplier, spread=spread)
    return TurnMultipliers(costs=costs, signal=signal, multipliers=multipliers)


def select_action(costs: Sequence[float]) -> int:
    """Returns the index of the cheapest candidate action; the first of equals.

    `costs` are `forecast_cost` of the states after each candidate, before its observation.
    """
    values = np.asarray(costs, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ScoringError(f"candidate costs {list(costs)} must be a non-empty list of finite numbers")
    return int(np.argmin(values))


def signal_length_correlation(signals: Sequence[FloatArray], num_tokens: Sequence[Sequence[int]]) -> float:
    """Returns Pearson's correlation of Delta_k with the action's length n_k; 0 where undefined.

    Near 1, long actions earn their credit by length alone: on a perfectly forecast successful path
    Delta_k equals n_k.
    """
    if not signals:
        return 0.0
    x = np.concatenate([np.asarray(s, dtype=np.float64) for s in signals])
    y = np.concatenate([np.asarray(n, dtype=np.float64) for n in num_tokens])
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _carried(costs: Sequence[float], is_valid: Sequence[bool]) -> list[float]:
    """An unparseable state repeats the cost before it, or the first valid one where none is before:
    the action between gets signal 0 either way. Without any valid state the costs stay."""
    if not any(is_valid):
        return list(costs)
    previous = costs[list(is_valid).index(True)]
    carried = []
    for cost, valid in zip(costs, is_valid, strict=True):
        previous = cost if valid else previous
        carried.append(previous)
    return carried
