"""What an agent and an environment say to each other, before and after the tokenizer.

Plain values without behavior: the renderer turns messages into token ids, the parser turns an
action's text into an Action, and the environment answers an Action with messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Role = Literal["system", "user", "assistant", "tool"]

POSITIONAL = ""
"""Argument name under which a parser puts everything after the tool's name, where the format has no
argument names (`Action: open doc7` gives {"": "doc7"}). `envs/tools.py` binds it to the parameter."""


class Message(TypedDict):
    """One message of a conversation. `content` is plain text; tool calls are part of it as written."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that an environment offers. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One parsed call. `arguments` holds JSON values; they are not yet checked against a schema."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy did at one turn, as text and as the parser understood it.

    At most one of `tool_calls`, `answer` and `parse_error` is set; none is set for plain text.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    parse_error: str = ""
    """Why a tool call in `text` could not be read; "" where nothing was wrong."""
