"""What the meter learns from: states of recorded trajectories, and what came of each."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.states import State, segment_tokens, shortened_history
from megatrl.data.trajectories import Trajectory
from megatrl.errors import ScoringError

Cut = Literal["before_action", "after_action"]
Split = Literal["training", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterLabel:
    """The recorded outcome from one state on. `tokens_to_go` is None exactly where it failed."""

    completion: bool
    tokens_to_go: int | None

    def __post_init__(self) -> None:
        if self.completion != (self.tokens_to_go is not None):
            raise ScoringError(f"label has completion={self.completion} but tokens_to_go={self.tokens_to_go}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledState:
    """One example of the meter: a state of a trajectory and what came of it."""

    trajectory: Trajectory  # in the meter's token ids
    state: State
    label: MeterLabel
    cut: Cut = "before_action"
    """An after_action state ends with an action: nothing has answered it, and no generation prompt follows."""
    domain: str = ""  # kind of the environment it was recorded in

    def history(self, max_tokens: int) -> tuple[int, ...] | None:
        """The tokens of the state with middle turns dropped until they fit, or None; see `shortened_history`."""
        return shortened_history(self.trajectory.segments[self.state.segment_index], self.state.length, max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterLabels:
    """A labelled data set: training and validation share no task. One tokenizer for every source policy."""

    training: tuple[LabeledState, ...]
    validation: tuple[LabeledState, ...]
    prompt: MeterPrompt
    chat_format: str  # with tool_format and tokenizer: how the histories were rendered
    tool_format: str
    failure_costs: Mapping[str, float]  # domain -> C in tokens
    failure_cost: float  # C over all domains together
    max_sequence_tokens: int  # of history, question and answer; longer histories lose middle turns
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were made, JSON values
    sources: tuple[str, ...] = ()  # the runs they come from
    content_hash: str = ""  # of the files, once they are on disk

    def examples(self, split: Split) -> tuple[LabeledState, ...]:
        return self.training if split == "training" else self.validation

    @property
    def max_history_tokens(self) -> int:
        return self.max_sequence_tokens - self.prompt.num_extra_tokens


def content_hash(examples: tuple[LabeledState, ...]) -> str:
    """Hash of everything the examples say: tokens, cut points and labels."""
    digest = hashlib.sha256()
    for example in examples:
        tokens = np.asarray(segment_tokens(example.trajectory.segments[example.state.segment_index]), dtype=np.int64)
        digest.update(repr((example.state, example.label)).encode())
        digest.update(tokens[: example.state.length].tobytes())
    return digest.hexdigest()[:16]
