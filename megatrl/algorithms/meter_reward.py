"""Reward of the meter's own answers, for its GRPO refinement. It never enters the actor's reward."""

import math
from typing import Literal

from megatrl.data.scores import Forecast


def ttg_accuracy(forecast: float, label: float, *, form: Literal["log", "relative"] = "log", tau: float = 1.0) -> float:
    """Returns 1 for an exact tokens-to-go and less the further off, in [0, 1].

    log: exp(-|ln((1 + forecast) / (1 + label))| / tau), at tau 1 the ratio of the smaller to the larger.
    relative: max(0, 1 - |forecast - label| / max(label, 1)), harder on over-estimates.
    """
    if form == "relative":
        return max(0.0, 1.0 - abs(forecast - label) / max(label, 1.0))
    return math.exp(-abs(math.log((1.0 + forecast) / (1.0 + label))) / tau)


def meter_reward(
    forecast: Forecast,
    *,
    completion: bool,
    tokens_to_go: float | None,
    completion_weight: float = 0.5,
    ttg_weight: float = 0.5,
    form: Literal["log", "relative"] = "log",
    tau: float = 1.0,
    failure_earns_ttg_weight: bool = True,
) -> float:
    """Returns the reward of one forecast for a state with this recorded outcome, in [0, w_c + w_t].

    Invalid or wrong completion: 0. Correct failure: w_c + w_t (only w_c if not
    `failure_earns_ttg_weight`). Correct completion: w_c + w_t * `ttg_accuracy`.
    """
    if not forecast.is_valid or forecast.completion != completion:
        return 0.0
    if not completion:
        return completion_weight + (ttg_weight if failure_earns_ttg_weight else 0.0)
    if tokens_to_go is None:
        raise ValueError("a successful state has a tokens_to_go label, got None")
    accuracy = ttg_accuracy(forecast.tokens_to_go, tokens_to_go, form=form, tau=tau)
    return completion_weight + ttg_weight * accuracy
