"""What every meter does whatever its readout: which states are asked about, in whose tokens, and the metrics."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.scores import Forecast, MeterScore
from megatrl.data.states import State, trajectory_states, transcript_end
from megatrl.data.trajectories import PromptGroup, Trajectory, TrajectoryId
from megatrl.errors import ScoringError
from megatrl.rendering.retokenize import SameTokens, TrajectoryView


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedStates:
    """States of one trajectory, whose tokens are the meter's own."""

    trajectory: Trajectory
    states: tuple[State, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForecasts:
    """A forecast for every state asked about, in the same nesting."""

    forecasts: tuple[tuple[Forecast, ...], ...]
    num_shortened: int  # histories that lost middle turns, or did not fit at all


class GroupMeter(ABC):
    """A MeterScorer: forecasts at the decision states of whole groups."""

    def __init__(
        self,
        *,
        prompt: MeterPrompt,
        failure_cost: float,
        policy_fingerprint: str,
        with_terminal: bool = False,
        view: TrajectoryView | None = None,
    ) -> None:
        """`view` gives trajectories in the meter's tokens; without one they must be the policy's.

        Raises ScoringError when the token ids that would be scored are of another tokenizer than the meter's.
        """
        self._view = view or SameTokens(policy_fingerprint)
        if prompt.tokenizer_fingerprint != self._view.fingerprint:
            raise ScoringError(
                f"the meter's tokenizer is {prompt.tokenizer_fingerprint} but the token ids it would read are of "
                f"{self._view.fingerprint}; they would mean other words. Give it a view of the trajectories in its "
                "own tokens (rendering.retokenize.Retokenizer)"
            )
        self._prompt = prompt
        self._with_terminal = with_terminal
        self.failure_cost: float | None = failure_cost
        """C in tokens."""

    @abstractmethod
    def forecast_states(self, asked: Sequence[AskedStates]) -> StateForecasts:
        """Forecasts at any states. Histories that do not fit lose their middle turns, as in the training set;
        where even the task and the last observation do not fit, the forecast is invalid."""

    def score(self, groups: Sequence[PromptGroup]) -> tuple[dict[TrajectoryId, MeterScore], dict[str, float]]:
        """Forecasts at s_1..s_K, and after the last action where asked for; and shares for the metrics.

        Pass only groups whose advantages are not all zero: the others need no forecast.
        """
        views = [self._view(group, t) for group in groups for t in group.trajectories if t.is_trainable]
        asked = [AskedStates(trajectory=view, states=self._states(view)) for view in views]
        answered = self.forecast_states(asked)
        scores: dict[TrajectoryId, MeterScore] = {}
        for item, answers in zip(asked, answered.forecasts, strict=True):
            forecasts = answers[:-1] if self._with_terminal else answers
            terminal = answers[-1] if self._with_terminal else None
            scores[item.trajectory.id] = MeterScore(forecasts=forecasts, terminal=terminal)
        total = sum(len(item.states) for item in asked)
        return scores, _metrics(scores, answered.num_shortened / max(total, 1))

    def _states(self, trajectory: Trajectory) -> tuple[State, ...]:
        states = [state for state in trajectory_states(trajectory) if state.turn_index < trajectory.num_turns]
        return (*states, transcript_end(trajectory)) if self._with_terminal else tuple(states)


def _metrics(scores: Mapping[TrajectoryId, MeterScore], shortened: float) -> dict[str, float]:
    forecasts = [forecast for score in scores.values() for forecast in score.forecasts]
    total = max(len(forecasts), 1)
    valid = [forecast for forecast in forecasts if forecast.is_valid]
    return {
        "meter/invalid": (len(forecasts) - len(valid)) / total,
        "meter/shortened": shortened,
        "meter/forecast_failure": sum(not forecast.completion for forecast in valid) / max(len(valid), 1),
    }
