"""A judged record as a meter reads it: rendered by the meter's own renderer, one turn for each assistant message.

Tool calls are text, one after the other behind the message's own, as Qwen's template writes them:

    <tool_call>
    {"name": "search", "arguments": {"q": "a b"}}
    </tool_call>

Words that a tokenizer does not know become its unknown token; `unknown_share` says how many.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatrl.data.messages import Message, ToolSpec
from megatrl.data.scores import Forecast
from megatrl.data.states import State, trajectory_states, transcript_end
from megatrl.data.trajectories import Segment, Termination, Trajectory, TrajectoryId, Turn
from megatrl.errors import ScoringError
from megatrl.meter.process_bench import ASSISTANT, ProcessRecord
from megatrl.meter.process_judgment import Target
from megatrl.rendering.renderer import Renderer
from megatrl.rendering.retokenize import rerender

_ROLES = ("system", "user", "assistant", "tool")
_NO_WORD = "\u2603qzx\u2603"  # in no vocabulary of whole words


def plain_messages(record: ProcessRecord) -> tuple[Message, ...]:
    """The messages with text alone. Raises ScoringError for a role that no chat format has."""
    plain: list[Message] = []
    for message in record.messages:
        role = message["role"]
        if role not in _ROLES:
            raise ScoringError(f"{record.name} has a message with role {role!r}; known are {', '.join(_ROLES)}")
        parts = [_text(message.get("content")), *(_call_text(call) for call in message.get("tool_calls") or ())]
        plain.append(Message(role=role, content="\n".join(part for part in parts if part)))
    return tuple(plain)


def record_trajectory(record: ProcessRecord, renderer: Renderer) -> Trajectory:
    """The record in the renderer's tokens. Its outcome stays unknown: nobody who judges may see it.

    Raises ScoringError where the first message is an assistant's.
    """
    messages = plain_messages(record)
    # Tokens of the turns are made by `rerender`; these only say how many there are and whether one was answered.
    turns = tuple(
        Turn(observation_tokens=(0,), action_tokens=(0,), behavior_logprobs=(0.0,), policy_version=0)
        for _ in record.step_labels
    )
    trailing = () if messages[-1]["role"] == ASSISTANT else (0,)
    outline = Trajectory(
        id=TrajectoryId(prompt_id=record.name, group_id="process", index=record.sample_index),
        segments=(Segment(turns=turns, trailing_observation_tokens=trailing),),
        reward=None,
        success=None,
        termination=Termination.COMPLETED,
        messages=messages,
    )
    return rerender(outline, renderer, [_tool(record, tool) for tool in record.tools])


def judged_states(trajectory: Trajectory) -> tuple[State, ...]:
    """s_1..s_K before each step, and the end of the transcript: what K signals need."""
    before = [state for state in trajectory_states(trajectory) if state.turn_index < trajectory.num_turns]
    return (*before, transcript_end(trajectory))


def forecast_values(forecasts: Sequence[Forecast], target: Target) -> tuple[float | None, ...]:
    """A meter's answers as `process_signal` wants them.

    future_score: the probability of completion, 0 where nothing can be read. The others: the number that the
    meter gives, in the unit it was trained in, None where it forecasts failure or cannot be read.
    """
    if target == "future_score":
        return tuple(f.completion_prob if f.is_valid else 0.0 for f in forecasts)
    return tuple(f.tokens_to_go if f.is_valid and f.completion else None for f in forecasts)


def unknown_share(trajectories: Sequence[Trajectory], renderer: Renderer) -> float:
    """Share of tokens that stand for words the tokenizer does not know; 0 for one that knows all."""
    nonsense = renderer.encode(_NO_WORD)
    if len(nonsense) != 1:  # a tokenizer of bytes or pieces spells everything
        return 0.0
    (unknown,) = nonsense
    tokens = [token for t in trajectories for s in t.segments for token in (*s.tokens, *s.trailing_observation_tokens)]
    return sum(token == unknown for token in tokens) / max(len(tokens), 1)


def _text(content: Any) -> str:
    """Plain text of a content: a text, nothing, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return str(content)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # then it stays as the model wrote it; a judge reads that, too
            arguments = json.loads(arguments)
    body = json.dumps({"name": function.get("name", ""), "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _tool(record: ProcessRecord, tool: Mapping[str, Any]) -> ToolSpec:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or "name" not in function:
        raise ScoringError(f"{record.name} has a tool without a name: {str(tool)[:120]}")
    return ToolSpec(
        name=str(function["name"]),
        description=str(function.get("description") or ""),
        parameters=function.get("parameters") or {},
    )
