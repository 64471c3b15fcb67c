"""A meter's weights from its labels: SFT on the actor's ranks, and how well any meter forecasts a data set."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatrl.algorithms.deltattg import SignalRule, forecast_cost, step_costs, step_signal
from megatrl.config.recipe import SFTConfig
from megatrl.data.meter_labels import LabeledState, MeterLabels
from megatrl.data.scores import Forecast, MeterScore
from megatrl.data.states import State, trajectory_states
from megatrl.data.trajectories import Trajectory, TrajectoryId
from megatrl.meter.evaluation import MeterEvaluation, TrajectorySignal, evaluate_examples
from megatrl.meter.sft_set import build_sft_set
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.supervision import supervise
from megatrl.scoring.group_meter import AskedStates, GroupMeter
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import CandidateMeter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What SFT of a meter did."""

    loss: float  # nats a target token, over the last tenth of the steps
    epochs: float
    num_examples: int
    num_shortened: int
    num_dropped: int


def fit_meter(
    actor: ActorGroup, labels: MeterLabels, sft: SFTConfig, *, microbatch_tokens: int, seed: int
) -> FitReport:
    """SFT on the training side, loss on the answers alone. The caller has loaded the weights and an optimizer."""
    sft_set = build_sft_set(labels.training, labels.prompt, max_sequence_tokens=labels.max_sequence_tokens)
    loss = supervise(
        actor, sft_set.samples, sft, microbatch_tokens=microbatch_tokens, seed=seed, title="SFT of the meter"
    )
    report = FitReport(
        loss=loss,
        epochs=sft.num_steps * sft.sequences_per_step / len(sft_set.samples),
        num_examples=len(sft_set.samples),
        num_shortened=sft_set.num_shortened,
        num_dropped=sft_set.num_dropped,
    )
    logger.info("meter sft %s", report)
    return report


def frozen_copy_meter(actor: ActorGroup, labels: MeterLabels, *, microbatch_tokens: int) -> CandidateMeter:
    """The candidates readout of the weights that the actor holds now: a frozen copy of them is the meter."""
    actor.freeze_reference()
    return CandidateMeter(
        prompt=labels.prompt,
        backend=IndependentBackend(runner=actor.query_runner("reference"), microbatch_tokens=microbatch_tokens),
        failure_cost=labels.failure_cost,
        policy_fingerprint=labels.prompt.tokenizer_fingerprint,
        max_sequence_tokens=labels.max_sequence_tokens,
    )


def evaluate_meter(
    meter: GroupMeter, examples: Sequence[LabeledState], *, failure_cost: float | None = None
) -> MeterEvaluation:
    """Forecasts against labels, and the step signal that they make on the examples' whole trajectories."""
    cost = failure_cost or meter.failure_cost or 0.0
    trajectories = {example.trajectory.id: example.trajectory for example in examples}
    wanted: dict[TrajectoryId, set[State]] = {
        id: {s for s in trajectory_states(t) if s.turn_index < t.num_turns} for id, t in trajectories.items()
    }
    for example in examples:
        wanted[example.trajectory.id].add(example.state)
    asked = [
        AskedStates(trajectory=trajectory, states=tuple(sorted(wanted[id], key=lambda s: (s.segment_index, s.length))))
        for id, trajectory in trajectories.items()
    ]
    answered = meter.forecast_states(asked)
    found: dict[tuple[TrajectoryId, State], Forecast] = {
        (item.trajectory.id, state): forecast
        for item, forecasts in zip(asked, answered.forecasts, strict=True)
        for state, forecast in zip(item.states, forecasts, strict=True)
    }
    return evaluate_examples(
        [found[example.trajectory.id, example.state] for example in examples],
        [example.label for example in examples],
        [_signal(trajectory, found, cost) for trajectory in trajectories.values()],
    )


def _signal(
    trajectory: Trajectory, found: dict[tuple[TrajectoryId, State], Forecast], failure_cost: float
) -> TrajectorySignal:
    """The paper's signal: plain reduction of cost, the end by the recorded outcome."""
    states = [s for s in trajectory_states(trajectory) if s.turn_index < trajectory.num_turns]
    forecasts = tuple(found[trajectory.id, state] for state in states)
    rule = SignalRule(
        target="ttg",
        terminal="outcome",
        cost_transform="identity",
        parse_failure="failure_cost",
        net_of_spent=False,
        failure_cost=failure_cost,
    )
    costs = step_costs(
        MeterScore(forecasts=forecasts), success=bool(trajectory.success), reward=trajectory.reward or 0.0, rule=rule
    )
    lengths = tuple(len(turn.action_tokens) for turn in trajectory.turns)
    at_cost = sum(forecast_cost(forecast, failure_cost) >= failure_cost for forecast in forecasts)
    return TrajectorySignal(
        deltas=tuple(step_signal(costs, lengths).tolist()), lengths=lengths, num_states_at_failure_cost=at_cost
    )
