"""The oracle meter: the true remaining work of every state, from environments that know it. For studies.

It answers what a perfect meter would of an agent that plays on without a mistake, so whatever DeltaTTG
does under it is the rule's doing and not the meter's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatrl.data.scores import Forecast, MeterScore
from megatrl.data.trajectories import PromptGroup, Trajectory, TrajectoryId


class TextEncoder(Protocol):
    """The part of a Renderer that counts tokens."""

    def encode(self, text: str) -> tuple[int, ...]: ...


class OracleMeter:
    """A MeterScorer without a model."""

    def __init__(
        self, *, plan: Callable[[str], tuple[str, ...]], encoder: TextEncoder, max_turns: int, failure_cost: float
    ) -> None:
        """`plan` gives the texts of the best actions from a state's observation key to the end."""
        self._plan, self._encoder, self._max_turns = plan, encoder, max_turns
        self.failure_cost: float | None = failure_cost
        """C in tokens."""

    def score(self, groups: Sequence[PromptGroup]) -> tuple[dict[TrajectoryId, MeterScore], Mapping[str, float]]:
        """Forecasts at s_1..s_K; failure where fewer turns are left than the plan has actions.

        Tokens count the plan's texts and one end token for each action.
        """
        scores = {
            trajectory.id: MeterScore(forecasts=self._forecasts(trajectory))
            for group in groups
            for trajectory in group.trajectories
            if trajectory.is_trainable
        }
        forecasts = [forecast for score in scores.values() for forecast in score.forecasts]
        failures = sum(not forecast.completion for forecast in forecasts)
        return scores, {"meter/invalid": 0.0, "meter/forecast_failure": failures / max(len(forecasts), 1)}

    def _forecasts(self, trajectory: Trajectory) -> tuple[Forecast, ...]:
        forecasts = []
        for place, turn in enumerate(trajectory.turns):
            tokens = [len(self._encoder.encode(text)) + 1 for text in self._plan(turn.observation_key)]
            is_possible = len(tokens) <= self._max_turns - place
            forecasts.append(
                Forecast(
                    is_valid=True,
                    completion=is_possible,
                    completion_prob=float(is_possible),
                    tokens_to_go=float(sum(tokens)) if is_possible else 0.0,
                )
            )
        return tuple(forecasts)
