"""TRACE: temporal differences of the reference's belief in the gold answer, added to the outcome.

Source: TRACE (arXiv 2607.13988), Algorithm 1 and Eq. 8-12. Shape letters: S = states, T = S - 1
transitions. Transition k leads from state k to state k+1 and credits the action between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrl.data.samples import FloatArray
from megatrl.errors import ScoringError

CreditForm = Literal["log_ratio", "raw", "remaining_gap", "initial_gap"]

# A scorer's log-softmax may round a certain answer to slightly above 0; more than this is a fault.
MAX_LOGPROB = 1e-6


def mean_answer_logprob(token_logprobs: Sequence[float]) -> float:
    """Returns l, the mean log-probability of the gold answer's tokens at one state, in nats."""
    if len(token_logprobs) == 0:
        raise ScoringError("the gold answer has no tokens; an empty answer is never scored")
    return float(np.mean(np.asarray(token_logprobs, dtype=np.float64)))


def best_alias_logprobs(alias_logprobs: Sequence[Sequence[float]]) -> FloatArray:
    """Returns l [S]: at each state the best of the accepted answers' mean logprobs [aliases][S].

    The maximum is still a function of the state alone, so credits telescope.
    """
    return np.max(np.asarray(alias_logprobs, dtype=np.float64), axis=0)


def distances(logprobs: Sequence[float] | FloatArray, eps: float) -> FloatArray:
    """Returns d [S] = -l + eps > 0. Raises ScoringError where l is not finite or above 0."""
    values = np.asarray(logprobs, dtype=np.float64)
    if not np.isfinite(values).all() or (values > MAX_LOGPROB).any():
        raise ScoringError(
            f"answer logprobs {values.tolist()} must be finite and <= 0; check the reference's numerics "
            "and that the scored positions are the answer's"
        )
    return eps - np.minimum(values, 0.0)


def state_values(logprobs: Sequence[float] | FloatArray, eps: float) -> FloatArray:
    """Returns V [S] = ln(d_0 / d_k): 0 at the first state, > 0 where the answer became likelier."""
    d = distances(logprobs, eps)
    return np.log(d[0]) - np.log(d)


def temporal_differences(
    logprobs: Sequence[float] | FloatArray, *, eps: float, form: CreditForm = "log_ratio"
) -> FloatArray:
    """Returns delta [T], the one-step credit of each transition.

    log_ratio: ln(d_k / d_{k+1}) = V_{k+1} - V_k;  raw: l_{k+1} - l_k;
    remaining_gap: (d_k - d_{k+1}) / d_k;  initial_gap: (d_k - d_{k+1}) / d_0.
    """
    d = distances(logprobs, eps)
    if form == "log_ratio":
        return np.log(d[:-1]) - np.log(d[1:])
    drop = d[:-1] - d[1:]
    if form == "raw":
        return drop
    return drop / (d[:-1] if form == "remaining_gap" else d[0])


def window_credit(deltas: FloatArray, *, window: int, gamma: float) -> FloatArray:
    """Returns c [T]: the gamma-weighted average of the next `window` differences; 0 at window 0.

    c_k = sum_{u=k}^{h} gamma^(u-k) delta_u / sum_{u=k}^{h} gamma^(u-k),   h = min(k+window-1, T-1)
    """
    credit = np.zeros(len(deltas))
    for k in range(len(deltas) if window > 0 else 0):
        ahead = deltas[k : k + window]
        weights = gamma ** np.arange(len(ahead))
        credit[k] = (weights * ahead).sum() / weights.sum()
    return credit


def terminal_fill(
    num_transitions: int, outcome_advantage: float, *, window: int, gamma: float, weight: float
) -> FloatArray:
    """Returns [T]: weight * gamma^(T-k) * outcome advantage where the window reaches the end, else 0.

    That is the last `window` transitions; window 0 still fills the last one.
    """
    k = np.arange(num_transitions)
    reaches_end = k + max(window, 1) >= num_transitions
    return np.where(reaches_end, weight * gamma ** (num_transitions - k) * outcome_advantage, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """TRACE's parts for the transitions of one trajectory."""

    deltas: FloatArray  # [T]
    credit: FloatArray  # [T] c
    fill: FloatArray  # [T]
    advantages: FloatArray  # [T] of each token of the action of that transition


def turn_credit(
    logprobs: Sequence[float] | FloatArray,
    outcome_advantage: float,
    *,
    window: int,
    gamma: float,
    eps: float,
    terminal_weight: float,
    alpha_outcome: float,
    alpha_turn: float,
    form: CreditForm = "log_ratio",
) -> TurnCredit:
    """Returns A_k = alpha_outcome A_out + alpha_turn (c_k + fill_k) and its parts.

    Turn values are never normalised over the group: a trajectory's credit depends on the others
    only through A_out, and a group of equal rewards (A_out = 0) still trains on it.
    """
    deltas = temporal_differences(logprobs, eps=eps, form=form)
    credit = window_credit(deltas, window=window, gamma=gamma)
    fill = terminal_fill(len(deltas), outcome_advantage, window=window, gamma=gamma, weight=terminal_weight)
    advantages = alpha_outcome * outcome_advantage + alpha_turn * (credit + fill)
    return TurnCredit(deltas=deltas, credit=credit, fill=fill, advantages=advantages)
