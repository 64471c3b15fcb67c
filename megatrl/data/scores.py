"""What frozen scorers say about the states of a trajectory.

The states of a trajectory with K turns are s_1..s_K (before each action) and, where an observation
follows the last action, s_{K+1}. A state's tokens are everything up to and including the generation
prompt of the next action.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrl.data.trajectories import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScore:
    """Reference probe: mean log-probability of the gold answer at every state (TRACE's l_k)."""

    logprobs: tuple[float, ...]
    """One per state, nats per gold token; () where the trajectory could not be scored."""
    skipped: str = ""
    """Why not: missing_gold, empty_gold, overlong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The meter's answer at one state. `is_valid` False: unparseable, the numbers mean nothing."""

    is_valid: bool
    completion: bool = False  # will the agent complete the task from here
    completion_prob: float = 0.0
    tokens_to_go: float = 0.0  # action tokens still to be generated, meaningful where completion


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterScore:
    """The meter's forecasts at s_1..s_K, and at the end state where it was asked for."""

    forecasts: tuple[Forecast, ...]
    terminal: Forecast | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Everything the frozen models said about one batch of groups."""

    answers: Mapping[TrajectoryId, AnswerScore] = field(default_factory=dict)
    meter: Mapping[TrajectoryId, MeterScore] = field(default_factory=dict)
    failure_cost: float | None = None
    """The frozen meter's own C in tokens (spec 2.5), where a meter is present."""
