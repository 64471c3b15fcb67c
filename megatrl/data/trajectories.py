"""Turn -> Segment -> Trajectory -> PromptGroup: what happened, token by token.

Token-in, token-out: `action_tokens` and `behavior_logprobs` are stored exactly as the rollout
server returned them and are never re-tokenised. Identity is explicit; nothing is inferred from
position or text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatrl.data.routed_experts import ExpertArray, RoutedExperts, concatenated
from megatrl.errors import TrajectoryError


class FinishReason(StrEnum):
    """Why the server stopped sampling one action."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Termination(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"
    ACTION_LENGTH = "action_length"  # an action was cut at its token limit; it was not executed
    PARSE_ERROR = "parse_error"
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    SERVER_ERROR = "server_error"

    @property
    def is_truncation(self) -> bool:
        """True where a limit, not the policy or the task, ended the episode."""
        return self in (Termination.MAX_TURNS, Termination.CONTEXT_OVERFLOW, Termination.ACTION_LENGTH)

    @property
    def is_infrastructure_failure(self) -> bool:
        """True where the outcome says nothing about the policy: no reward, no statistic, no weight."""
        return self in (Termination.TIMEOUT, Termination.ENV_ERROR, Termination.SERVER_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryId:
    """Who a trajectory is. `str()` gives `prompt/group/index.attempt`."""

    prompt_id: str
    group_id: str  # one prompt taken once; the same prompt in a later epoch is another group
    index: int  # place inside the group, from 0
    attempt: int = 0  # counts replacements after infrastructure failures

    def __str__(self) -> str:
        return f"{self.prompt_id}/{self.group_id}/{self.index}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy saw since its last action, what it did, and under which weights."""

    observation_tokens: tuple[int, ...]  # includes the generation prompt (assistant header)
    action_tokens: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]  # one per action token, at the sampling temperature
    policy_version: int
    finish_reason: FinishReason = FinishReason.STOP
    is_tool_call: bool = False  # False for a final answer, a malformed call or plain text
    observation_key: str = ""  # anchor text of the state acted in (GiGPO, HGPO); never trained
    penalty: float = 0.0  # >= 0, subtracted from this turn's row (invalid action), 0 when valid
    routed_experts: RoutedExperts | None = None
    """The server's expert choices for the observation and the action tokens, in order; None where it did not
    record. The last action token was not processed yet: its row is unrecorded unless a later turn filled it in."""

    def __post_init__(self) -> None:
        if len(self.behavior_logprobs) != len(self.action_tokens):
            raise TrajectoryError(
                f"turn has {len(self.action_tokens)} action_tokens but {len(self.behavior_logprobs)} "
                "behavior_logprobs; the rollout server must return exactly one logprob for each token"
            )
        for position, logprob in enumerate(self.behavior_logprobs):
            if not math.isfinite(logprob) or logprob > 1e-4:
                raise TrajectoryError(
                    f"behavior_logprobs[{position}] is {logprob!r}; a logprob is finite and <= 0. "
                    "Check the server's numerics (dtype, temperature) before training on its samples"
                )
        num_tokens = len(self.observation_tokens) + len(self.action_tokens)
        if self.routed_experts is not None and self.routed_experts.num_tokens != num_tokens:
            raise TrajectoryError(
                f"turn has {num_tokens} tokens but routed_experts for {self.routed_experts.num_tokens}; "
                "the rollout server must return one row for each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An append-only run of turns. It trains as one sequence.

    Where an environment or a template rewrites history, the next turn starts a new segment and its
    `observation_tokens` hold the whole rewritten history.
    """

    turns: tuple[Turn, ...]
    trailing_observation_tokens: tuple[int, ...] = ()
    """Observation after the last action that the policy never acted on (turn limit, end of the
    environment). Frozen scorers read it as the last state; it is never trained."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All trained-on tokens in order: observation, action, observation, action, ..."""
        return tuple(t for turn in self.turns for t in (*turn.observation_tokens, *turn.action_tokens))

    @property
    def num_action_tokens(self) -> int:
        return sum(len(turn.action_tokens) for turn in self.turns)

    @property
    def routed_experts(self) -> ExpertArray | None:
        """Expert choices [T, layers, top-k] aligned with `tokens`; None where no turn has them.

        Raises TrajectoryError where only some turns have them.
        """
        parts = [turn.routed_experts for turn in self.turns if turn.routed_experts is not None]
        if not parts:
            return None
        if len(parts) != len(self.turns):
            raise TrajectoryError(
                f"{len(parts)} of the {len(self.turns)} turns of a segment have routed_experts; all or none must"
            )
        return concatenated(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One whole episode and its outcome.

    `reward` is None where no outcome is known (infrastructure failure, unscorable task). Such a
    trajectory enters no group statistic and no loss; it is never silently a zero.
    """

    id: TrajectoryId
    segments: tuple[Segment, ...]
    reward: float | None
    success: bool | None  # None exactly where reward is None
    termination: Termination
    gold_answers: tuple[str, ...] = ()  # canonical first; () where the task has none
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation as text, for people and for meters
    metrics: Mapping[str, float] = field(default_factory=dict)  # from the environment
    error: str = ""  # first error text where one ended or marked the episode

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise TrajectoryError(f"trajectory {self.id}: reward is {self.reward!r}; use None for an unknown outcome")
        if (self.reward is None) != (self.success is None):
            raise TrajectoryError(f"trajectory {self.id}: reward={self.reward!r} but success={self.success!r}")

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(turn for segment in self.segments for turn in segment.turns)

    @property
    def num_turns(self) -> int:
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def num_action_tokens(self) -> int:
        return sum(segment.num_action_tokens for segment in self.segments)

    @property
    def is_trainable(self) -> bool:
        """True where the outcome is known and at least one token was sampled."""
        return self.reward is not None and self.num_action_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task to be attempted: everything an environment needs to start an episode."""

    prompt_id: str
    task: Mapping[str, Any]  # JSON values only; handed to the environment
    seed: int  # of the environment and, combined with the index, of sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """The trajectories of one prompt: the unit of every group statistic."""

    prompt: Prompt
    group_id: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if (trajectory.id.prompt_id, trajectory.id.group_id) != (self.prompt.prompt_id, self.group_id):
                raise TrajectoryError(
                    f"trajectory {trajectory.id} does not belong to group {self.prompt.prompt_id}/{self.group_id}"
                )
