"""From rewards and frozen models' scores to one advantage for each action token.

The dispatcher of the credit rules: it unpacks trajectories and sections, the formulas live in the
modules named after their papers. Pure driver code over whole prompt groups, before any sharding.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from megatrl.algorithms import deltattg, gigpo, hgpo, trace
from megatrl.algorithms.group_statistics import GroupAdvantages, group_advantages
from megatrl.algorithms.returns import outcome_returns
from megatrl.algorithms.rewards import task_reward
from megatrl.config.credit import (
    CreditConfig,
    DeltaTTGCredit,
    GiGPOCredit,
    GroupStatisticsConfig,
    HGPOCredit,
    NoCredit,
    RewardConfig,
    TraceCredit,
)
from megatrl.data.samples import FloatArray
from megatrl.data.scores import AnswerScore, MeterScore, Scores
from megatrl.data.trajectories import PromptGroup, Termination, Trajectory, TrajectoryId
from megatrl.errors import ConfigError, ScoringError

TurnValues = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimate:
    """Advantages of one step's action tokens."""

    per_turn: Mapping[TrajectoryId, tuple[FloatArray, ...]]
    """One [n_k] array for each turn of every trajectory; 0 where the outcome is unknown."""
    metrics: Mapping[str, float]
    details: Mapping[TrajectoryId, TurnValues] = field(default_factory=dict)
    """The credit rule's parts, for people: `signal`, `multiplier`, `delta`, ... by turn."""


@dataclass(slots=True, kw_only=True)
class _Draft:
    """What a credit rule fills in, group by group."""

    turn_advantages: dict[TrajectoryId, FloatArray] = field(default_factory=dict)  # [K] each
    details: dict[TrajectoryId, TurnValues] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    signals: list[FloatArray] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    last_action_weights: list[float] = field(default_factory=list)  # share of a trajectory's credit


def estimate_advantages(
    groups: Sequence[PromptGroup],
    scores: Scores,
    *,
    credit: CreditConfig,
    group_statistics: GroupStatisticsConfig,
    reward: RewardConfig,
) -> AdvantageEstimate:
    """Returns the advantage of every action token of groups that went through `combine_rewards`.

    Every token of a turn has the turn's advantage: the trajectory's part spread by the credit rule
    plus the turn's own penalty part. Raises ScoringError where a needed score is missing or
    unusable, or more meter answers than allowed are unparseable.
    """
    draft = _Draft()
    for group in groups:
        advantages = statistics_of(group, group_statistics)
        draft.counts["trajectories"] += len(group.trajectories)
        draft.counts["unscorable"] += int((~advantages.is_scorable).sum())
        draft.counts["zero_signal_groups"] += not advantages.trajectory.any()
        if isinstance(credit, DeltaTTGCredit):
            _deltattg(group, advantages, scores, credit, reward, draft)
        elif isinstance(credit, TraceCredit):
            _trace(group, advantages, scores, credit, draft)
        elif isinstance(credit, GiGPOCredit):
            _gigpo(group, advantages, credit, draft)
        elif isinstance(credit, HGPOCredit):
            _hgpo(group, advantages, credit, draft)
        elif isinstance(credit, NoCredit):
            _broadcast(group, advantages, draft)
        else:
            assert_never(credit)
    if isinstance(credit, DeltaTTGCredit):
        _refuse_unparseable(draft.counts, credit)
    per_turn = {
        trajectory.id: tuple(
            np.full(len(turn.action_tokens), value)
            for turn, value in zip(trajectory.turns, draft.turn_advantages[trajectory.id], strict=True)
        )
        for group in groups
        for trajectory in group.trajectories
    }
    return AdvantageEstimate(
        per_turn=per_turn, metrics=_metrics(draft, len(groups), per_turn), details=dict(draft.details)
    )


def groups_needing_meter(
    groups: Sequence[PromptGroup], *, credit: CreditConfig, group_statistics: GroupStatisticsConfig
) -> tuple[PromptGroup, ...]:
    """Returns the groups whose advantages a meter's forecasts can change: those not all zero."""
    if not isinstance(credit, DeltaTTGCredit) or _is_uniform(credit):
        return ()
    return tuple(group for group in groups if statistics_of(group, group_statistics).trajectory.any())


def statistics_of(group: PromptGroup, config: GroupStatisticsConfig) -> GroupAdvantages:
    """Returns the group-relative advantages of one group under the recipe's statistics.

    A turn without sampled tokens is no action: it counts in no statistic.
    """
    acting = [[turn for turn in t.turns if turn.action_tokens] for t in group.trajectories]
    statistics = group_advantages(
        [t.reward for t in group.trajectories],
        num_actions=[len(turns) for turns in acting],
        penalties=[[turn.penalty for turn in turns] for turns in acting],
        std=config.std,
        norm_std=config.norm_std,
        step_expanded=config.step_expanded,
        eps=config.eps,
    )
    # Back onto all turns, so that every array is indexed by turn.
    penalty = []
    for trajectory, terms in zip(group.trajectories, statistics.penalty, strict=True):
        row = np.zeros(trajectory.num_turns)
        row[[bool(turn.action_tokens) for turn in trajectory.turns]] = terms
        penalty.append(row)
    return GroupAdvantages(
        trajectory=statistics.trajectory,
        penalty=tuple(penalty),
        is_scorable=statistics.is_scorable,
        mean=statistics.mean,
        std=statistics.std,
    )


def _broadcast(group: PromptGroup, advantages: GroupAdvantages, draft: _Draft) -> None:
    for i, trajectory in enumerate(group.trajectories):
        draft.turn_advantages[trajectory.id] = advantages.trajectory[i] + advantages.penalty[i]


def _is_uniform(credit: DeltaTTGCredit) -> bool:
    """True where the switches make every multiplier 1 whatever the meter says."""
    return credit.max_multiplier == 1 or (credit.rho == 1 and credit.spread == "broadcast")


def _deltattg(
    group: PromptGroup,
    advantages: GroupAdvantages,
    scores: Scores,
    credit: DeltaTTGCredit,
    reward: RewardConfig,
    draft: _Draft,
) -> None:
    _broadcast(group, advantages, draft)
    if _is_uniform(credit):
        return
    for i, trajectory in enumerate(group.trajectories):
        advantage = float(advantages.trajectory[i])
        outcome = task_reward(trajectory, reward)
        if advantage == 0 or outcome is None:
            continue
        score = _meter_score(trajectory, scores)
        if score.skipped:
            draft.counts["meter_skipped"] += 1
            continue
        lengths = [len(turn.action_tokens) for turn in trajectory.turns]
        try:
            spread = deltattg.redistribute(
                score,
                lengths,
                advantage=advantage,
                success=bool(trajectory.success),
                reward=outcome,
                rule=_signal_rule(credit, scores),
                rho=credit.rho,
                max_multiplier=credit.max_multiplier,
                sign_aware=credit.sign_aware,
                spread=credit.spread,
                softmax_temperature=credit.softmax_temperature,
            )
        except ScoringError as error:
            raise ScoringError(f"trajectory {trajectory.id}: {error.message}") from error
        draft.turn_advantages[trajectory.id] = advantage * spread.multipliers + advantages.penalty[i]
        draft.details[trajectory.id] = {
            "cost": tuple(spread.costs[:-1]),
            "signal": tuple(spread.signal),
            "multiplier": tuple(spread.multipliers),
        }
        _count_spread(draft, score, spread, lengths, _signal_rule(credit, scores), credit.max_multiplier)


def _count_spread(
    draft: _Draft,
    score: MeterScore,
    spread: deltattg.TurnMultipliers,
    lengths: list[int],
    rule: deltattg.SignalRule,
    max_multiplier: float,
) -> None:
    """What spec 2.16 says to watch: length, the last action, the cap, states at cost C, unreadable answers."""
    draft.signals.append(spread.signal)
    draft.lengths.append(lengths)
    weights = spread.multipliers * np.asarray(lengths, dtype=np.float64)
    draft.last_action_weights.append(float(weights[-1] / weights.sum()) if weights.any() else 0.0)
    draft.counts["forecasts"] += len(score.forecasts)
    draft.counts["unparseable"] += sum(not forecast.is_valid for forecast in score.forecasts)
    if rule.target == "ttg":
        cost = rule.failure_cost
        draft.counts["at_failure_cost"] += sum(deltattg.forecast_cost(f, cost) >= cost for f in score.forecasts)
    draft.counts["tokens"] += sum(lengths)
    draft.counts["last_action_tokens"] += lengths[-1]
    at_cap = spread.multipliers >= max_multiplier * (1 - 1e-9)
    draft.counts["capped_tokens"] += int(np.asarray(lengths)[at_cap].sum())


def _meter_score(trajectory: Trajectory, scores: Scores) -> MeterScore:
    score = scores.meter.get(trajectory.id)
    if score is None:
        raise ScoringError(
            f"trajectory {trajectory.id} has a non-zero advantage but no meter score; score every group that "
            "groups_needing_meter returns"
        )
    return score


def _signal_rule(credit: DeltaTTGCredit, scores: Scores) -> deltattg.SignalRule:
    cost = scores.failure_cost if credit.failure_cost == "auto" else credit.failure_cost
    if cost is None and credit.target == "ttg":
        raise ConfigError(
            "credit.failure_cost=auto needs the meter's own failure cost, the scores carry none; "
            "set credit.failure_cost to a number of tokens or use a meter that records it"
        )
    return deltattg.SignalRule(
        target=credit.target,
        terminal=credit.terminal,
        cost_transform=credit.cost_transform,
        parse_failure=credit.parse_failure,
        net_of_spent=credit.net_of_spent,
        failure_cost=(cost or 0.0) * credit.failure_cost_scale,
    )


def _refuse_unparseable(counts: Counter[str], credit: DeltaTTGCredit) -> None:
    if counts["unparseable"] > credit.max_parse_failure_rate * counts["forecasts"]:
        raise ScoringError(
            f"{counts['unparseable']} of {counts['forecasts']} meter answers are unparseable, above "
            f"credit.max_parse_failure_rate={credit.max_parse_failure_rate}; check the meter's prompt and readout, "
            "train it longer, or raise the limit"
        )


def _trace(group: PromptGroup, advantages: GroupAdvantages, scores: Scores, credit: TraceCredit, draft: _Draft) -> None:
    for i, trajectory in enumerate(group.trajectories):
        outcome = float(advantages.trajectory[i])
        values = np.full(trajectory.num_turns, credit.alpha_outcome * outcome)
        if credit.tail_scale is not None and advantages.is_scorable[i] and ends_with_answer(trajectory):
            assert trajectory.reward is not None, "a scorable trajectory has a reward"
            values[-1] = credit.tail_scale * (trajectory.reward - advantages.mean)
        if advantages.is_scorable[i]:
            logprobs = _answer_logprobs(trajectory, scores, draft)
            try:
                turns = trace.turn_credit(
                    logprobs,
                    outcome,
                    window=credit.window,
                    gamma=credit.gamma,
                    eps=credit.eps,
                    terminal_weight=credit.terminal_weight,
                    alpha_outcome=credit.alpha_outcome,
                    alpha_turn=credit.alpha_turn,
                    form=credit.form,
                )
            except ScoringError as error:
                raise ScoringError(f"trajectory {trajectory.id}: {error.message}") from error
            num_transitions = len(turns.deltas)
            values[:num_transitions] = turns.advantages
            draft.counts["transitions"] += num_transitions
            draft.details[trajectory.id] = {
                "delta": tuple(turns.deltas),
                "credit": tuple(turns.credit),
                "fill": tuple(turns.fill),
            }
        draft.turn_advantages[trajectory.id] = values + advantages.penalty[i]


def ends_with_answer(trajectory: Trajectory) -> bool:
    """True where the last turn is the final answer: the episode completed without a tool call."""
    turns = trajectory.turns
    return bool(turns) and trajectory.termination == Termination.COMPLETED and not turns[-1].is_tool_call


def _answer_logprobs(trajectory: Trajectory, scores: Scores, draft: _Draft) -> tuple[float, ...]:
    """Returns l at the states that bound transitions; one state, so no transition, if not scored.

    An observation after the final answer (an environment's verdict) is no state: the final answer
    is no transition.
    """
    score = scores.answers.get(trajectory.id, AnswerScore(logprobs=(), skipped="missing"))
    if score.skipped == "missing":
        raise ScoringError(f"trajectory {trajectory.id} has no answer score; the reference probe must report each one")
    if score.skipped:
        draft.counts["answers_skipped"] += 1
        return (0.0,)
    num_turns = trajectory.num_turns
    if len(score.logprobs) not in (num_turns, num_turns + 1):
        raise ScoringError(
            f"trajectory {trajectory.id} has {len(score.logprobs)} answer logprobs for {num_turns} turns; expected one "
            "for the state before each action, and one more where an observation follows the last action"
        )
    return score.logprobs[:num_turns] if ends_with_answer(trajectory) else score.logprobs


def _gigpo(group: PromptGroup, advantages: GroupAdvantages, credit: GiGPOCredit, draft: _Draft) -> None:
    _broadcast(group, advantages, draft)
    members, returns, keys = _anchored(group, advantages, credit.gamma, draft)
    steps = gigpo.step_advantages(returns, keys, mean_std_norm=credit.mean_std_norm, similarity=credit.similarity)
    for trajectory, values in zip(members, steps, strict=True):
        draft.turn_advantages[trajectory.id] = draft.turn_advantages[trajectory.id] + credit.step_weight * values
        draft.details[trajectory.id] = {"step_advantage": tuple(values)}


def _hgpo(group: PromptGroup, advantages: GroupAdvantages, credit: HGPOCredit, draft: _Draft) -> None:
    members, returns, keys = _anchored(group, advantages, credit.gamma, draft)
    base = [float(a) for a, scorable in zip(advantages.trajectory, advantages.is_scorable, strict=True) if scorable]
    steps = hgpo.history_advantages(
        returns,
        keys,
        history=credit.history,
        alpha=credit.alpha,
        trajectory_advantages=base if credit.base_group else None,
    )
    for trajectory in group.trajectories:
        draft.turn_advantages[trajectory.id] = np.zeros(trajectory.num_turns)
    for trajectory, values in zip(members, steps, strict=True):
        draft.turn_advantages[trajectory.id] = values


def _anchored(
    group: PromptGroup, advantages: GroupAdvantages, gamma: float, draft: _Draft
) -> tuple[list[Trajectory], list[FloatArray], list[list[str]]]:
    """Returns the scorable trajectories with each turn's return and observation key."""
    members = [t for t, scorable in zip(group.trajectories, advantages.is_scorable, strict=True) if scorable]
    returns = [outcome_returns(float(t.reward or 0.0), [turn.penalty for turn in t.turns], gamma) for t in members]
    keys = [[turn.observation_key for turn in t.turns] for t in members]
    draft.counts["turns"] += sum(len(k) for k in keys)
    draft.counts["unanchored"] += sum(not key for k in keys for key in k)
    return members, returns, keys


def _metrics(
    draft: _Draft, num_groups: int, per_turn: Mapping[TrajectoryId, tuple[FloatArray, ...]]
) -> dict[str, float]:
    def fraction(part: str, whole: str) -> float:
        return draft.counts[part] / draft.counts[whole] if draft.counts[whole] else 0.0

    tokens = [values for turns in per_turn.values() for values in turns]
    flat = np.concatenate(tokens) if tokens else np.zeros(0)
    metrics = {
        "credit/zero_signal_groups": draft.counts["zero_signal_groups"] / num_groups if num_groups else 0.0,
        "credit/unscorable_fraction": fraction("unscorable", "trajectories"),
        "credit/advantage_abs_mean": float(np.abs(flat).mean()) if flat.size else 0.0,
        "credit/advantage_abs_max": float(np.abs(flat).max()) if flat.size else 0.0,
    }
    if draft.counts["forecasts"] or draft.counts["meter_skipped"]:
        metrics["credit/parse_failure_rate"] = fraction("unparseable", "forecasts")
        metrics["credit/capped_token_fraction"] = fraction("capped_tokens", "tokens")
        metrics["credit/signal_length_correlation"] = deltattg.signal_length_correlation(draft.signals, draft.lengths)
        metrics["credit/last_action_weight"] = float(np.mean(draft.last_action_weights or [0.0]))
        # What the last action would get by its length alone, to compare the weight with.
        metrics["credit/last_action_token_share"] = fraction("last_action_tokens", "tokens")
        metrics["credit/failure_cost_rate"] = fraction("at_failure_cost", "forecasts")
        metrics["credit/meter_skipped"] = float(draft.counts["meter_skipped"])
    if draft.counts["transitions"] or draft.counts["answers_skipped"]:
        deltas = np.concatenate([np.asarray(d["delta"]) for d in draft.details.values()])
        metrics["credit/delta_abs_mean"] = float(np.abs(deltas).mean()) if deltas.size else 0.0
        metrics["credit/answers_skipped"] = float(draft.counts["answers_skipped"])
    if draft.counts["turns"]:
        metrics["credit/unanchored_fraction"] = fraction("unanchored", "turns")
    return metrics
