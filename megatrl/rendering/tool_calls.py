"""The grammar of actions: text to tool calls or a final answer. Nothing here raises.

* `qwen`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several;
* `react`: the first `Action: tool arguments`, where the arguments are free text to the end of the
  line, `[free text]`, `({JSON object})` or nothing; free text is the argument named POSITIONAL;
* both: `<answer>final answer</answer>`.

A call that cannot be read becomes `parse_error`, which the environment answers like a tool result.
Text up to the last `</think>` is thought and is not searched. A line may as well be a line of words:
a tokenizer that loses newlines changes nothing.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from megatrl.data.messages import POSITIONAL, Action, ToolCall

_QWEN_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_REACT_CALL = re.compile(
    r"(?:^|(?<=\s))Action\s*:[ \t]*(?P<call>[^\n]*?)(?=\s*(?:\b(?:Observation|Action|Thought)\s*:|<answer>|\n|\Z))"
)
_REACT_PARTS = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)\s*(?P<rest>.*)\Z", re.DOTALL)
_SHOWN = 80  # characters of the model's own text quoted in an error


class _Unreadable(Exception):
    """Carries the text for `parse_error`."""


def parse_action(text: str, tool_format: Literal["qwen", "react"]) -> Action:
    """The action that `text` spells. What comes first counts where it holds both calls and an answer."""
    spoken = text[_end_of_thought(text) :]
    call_start, read_calls = _PARSERS[tool_format](spoken)
    answers = list(_ANSWER.finditer(spoken))
    answer_start = spoken.find("<answer>")
    try:
        if call_start >= 0 and (answer_start < 0 or call_start < answer_start):
            return Action(text=text, tool_calls=read_calls())
        if answers:
            return Action(text=text, answer=answers[-1].group(1).strip())
        if answer_start >= 0:
            raise _Unreadable("<answer> is not closed by </answer>")
    except _Unreadable as problem:
        return Action(text=text, parse_error=str(problem))
    return Action(text=text)


def _end_of_thought(text: str) -> int:
    """Where speech begins; an unclosed thought is thought to its end."""
    closed = text.rfind("</think>")
    if closed >= 0:
        return closed + len("</think>")
    return len(text) if text.lstrip().startswith("<think>") else 0


_Parsed = tuple[int, Callable[[], tuple[ToolCall, ...]]]


def _qwen_calls(text: str) -> _Parsed:
    def read() -> tuple[ToolCall, ...]:
        return tuple(_qwen_call(match.group(1), match.group(2)) for match in _QWEN_CALL.finditer(text))

    return text.find("<tool_call>"), read


def _qwen_call(body: str, close: str) -> ToolCall:
    if not close:
        raise _Unreadable("<tool_call> is not closed by </tool_call>")
    call = _json(body, "tool call")
    if not isinstance(call, dict):
        raise _Unreadable(f"tool call must be a JSON object, got {_kind(call)}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable('tool call must have a "name" that is a string')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models encode the arguments once more
        arguments = _json(arguments, "arguments") if arguments.strip() else {}
    return ToolCall(name=name, arguments=_object(arguments))


def _react_calls(text: str) -> _Parsed:
    match = _REACT_CALL.search(text)
    if match is None:
        return -1, tuple
    return match.start(), lambda: (_react_call(match.group("call")),)


def _react_call(text: str) -> ToolCall:
    parts = _REACT_PARTS.match(text.strip())
    if parts is None:
        raise _Unreadable(f"Action: needs a tool name, got {text.strip()[:_SHOWN]!r}")
    name, rest = parts.group("name"), parts.group("rest").strip()
    if rest.startswith("[") and rest.endswith("]"):
        return ToolCall(name=name, arguments=_free_text(rest[1:-1]))
    if rest.startswith("(") and rest.endswith(")"):
        return ToolCall(name=name, arguments=_bracketed(rest[1:-1].strip()))
    if rest.startswith("{"):
        return ToolCall(name=name, arguments=_object(_json(rest, "arguments")))
    return ToolCall(name=name, arguments=_free_text(rest))


def _bracketed(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        value = _json(text, "arguments")
    except _Unreadable:
        if text.startswith(("{", "[")):
            raise
        return _free_text(text)
    return _free_text(value) if isinstance(value, str) else _object(value)


def _free_text(text: str) -> Mapping[str, Any]:
    text = text.strip()
    return {POSITIONAL: text} if text else {}


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Unreadable(f"arguments must be a JSON object, got {_kind(value)}")
    return value


def _json(text: str, what: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"{what} is not valid JSON: {str(error)[:_SHOWN]}") from error


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "null")


_PARSERS: dict[str, Callable[[str], _Parsed]] = {"qwen": _qwen_calls, "react": _react_calls}
