"""A trajectory in the token ids of another model: rendered again from its messages.

Ids of one vocabulary mean other words in another one. A frozen model whose tokenizer or chat format is not
the policy's therefore never sees the policy's ids; it gets this view, whose states are the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from megatrl.data.messages import Message, ToolSpec
from megatrl.data.trajectories import FinishReason, PromptGroup, Segment, Trajectory, Turn
from megatrl.errors import ScoringError
from megatrl.rendering.renderer import Renderer

ToolsOf = Callable[[PromptGroup], Sequence[ToolSpec]]
"""The tools of a group's task: messages do not hold them."""


class TrajectoryView(Protocol):
    """A trajectory in a scorer's own token ids; `fingerprint` says whose they are."""

    @property
    def fingerprint(self) -> str: ...

    def __call__(self, group: PromptGroup, trajectory: Trajectory) -> Trajectory: ...


@dataclass(frozen=True, slots=True)
class SameTokens:
    """For a scorer that shares the policy's tokenizer: the trajectory itself."""

    fingerprint: str

    def __call__(self, group: PromptGroup, trajectory: Trajectory) -> Trajectory:
        return trajectory


class Retokenizer:
    """For a scorer with a tokenizer or template of its own: every trajectory is rendered again."""

    def __init__(self, renderer: Renderer, tools_of: ToolsOf) -> None:
        self._renderer, self._tools_of = renderer, tools_of
        self.fingerprint: str = renderer.fingerprint

    def __call__(self, group: PromptGroup, trajectory: Trajectory) -> Trajectory:
        """Raises ScoringError where messages are missing; see `rerender`."""
        return rerender(trajectory, self._renderer, self._tools_of(group))


def rerender(trajectory: Trajectory, renderer: Renderer, tools: Sequence[ToolSpec] = ()) -> Trajectory:
    """The trajectory with every token id replaced by the renderer's own, one segment, the same turns.

    An action ends with the renderer's end of turn where the policy had sampled its own, so lengths count
    it alike. Text before an action is encoded without what follows it: states stay prefixes of each other.
    Raises ScoringError where the messages do not hold one assistant message for each turn.
    """
    opening, exchanges = _split(trajectory)
    turns: list[Turn] = []
    observation = renderer.initial(opening, tools)
    trailing: tuple[int, ...] = ()
    for turn, (text, answers) in zip(trajectory.turns, exchanges, strict=True):
        has_ended = turn.finish_reason is FinishReason.STOP
        action = renderer.encode(text) + (renderer.stop_token_ids[:1] if has_ended else ())
        turns.append(
            Turn(
                observation_tokens=observation,
                action_tokens=action,
                behavior_logprobs=(0.0,) * len(action),
                policy_version=turn.policy_version,
                finish_reason=turn.finish_reason,
                is_tool_call=turn.is_tool_call,
                observation_key=turn.observation_key,
                penalty=turn.penalty,
            )
        )
        # stop_token_ids[0] is the end of turn, so the template must not close the turn again.
        observation = renderer.continuation(answers, previous_ended=has_ended)
    if trajectory.segments and trajectory.segments[-1].trailing_observation_tokens:
        trailing = observation
    segments = (Segment(turns=tuple(turns), trailing_observation_tokens=trailing),) if turns else ()
    return Trajectory(
        id=trajectory.id,
        segments=segments,
        reward=trajectory.reward,
        success=trajectory.success,
        termination=trajectory.termination,
        gold_answers=trajectory.gold_answers,
        messages=trajectory.messages,
        metrics=trajectory.metrics,
        error=trajectory.error,
    )


def _split(trajectory: Trajectory) -> tuple[list[Message], list[tuple[str, list[Message]]]]:
    """The opening messages, and each action's text with the messages that answered it."""
    opening: list[Message] = []
    exchanges: list[tuple[str, list[Message]]] = []
    for raw in trajectory.messages:
        message = cast("Message", _checked(trajectory, raw))
        if message["role"] == "assistant":
            exchanges.append((message["content"], []))
        elif exchanges:
            exchanges[-1][1].append(message)
        else:
            opening.append(message)
    if len(exchanges) != trajectory.num_turns or not opening:
        raise ScoringError(
            f"trajectory {trajectory.id} has {trajectory.num_turns} turns but {len(exchanges)} assistant messages and "
            f"{len(opening)} before them; a scorer with its own tokenizer needs the messages of every turn"
        )
    return opening, exchanges


def _checked(trajectory: Trajectory, message: Any) -> Any:
    if not isinstance(message.get("content"), str) or "role" not in message:
        raise ScoringError(f"trajectory {trajectory.id} has a message without role and text: {str(message)[:120]}")
    return message
