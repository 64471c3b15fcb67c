"""What every environment needs around its tools: checked arguments, deadlines, cut observations."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatrl.data.messages import POSITIONAL, Action, ToolCall, ToolSpec
from megatrl.errors import DeadlineError

Returned = TypeVar("Returned")

CUT_MARKER = "[cut]"

UNREADABLE = "error: unreadable call"
NO_CALL = "error: no call"
SEVERAL_CALLS = "error: one call only"
UNKNOWN_TOOL = "error: unknown tool"
WRONG_ARGUMENTS = "error: wrong arguments"
CALL_ERRORS = (UNREADABLE, NO_CALL, SEVERAL_CALLS, UNKNOWN_TOOL, WRONG_ARGUMENTS)
"""What `only_argument` answers a bad action with."""

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCall:
    """Arguments of a call by parameter name, or the reason why they do not fit the tool."""

    arguments: Mapping[str, Any]
    error: str = ""


def bind_arguments(spec: ToolSpec, call: ToolCall) -> BoundCall:
    """Arguments checked against the tool's schema; a positional argument goes to the only required parameter.

    Checks what JSON schemas of tools use: type, required, additionalProperties: false and enum. The
    error names parameters of the tool and never repeats what the policy wrote.
    """
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    required = tuple(spec.parameters.get("required", ()))
    arguments = dict(call.arguments)
    if set(arguments) == {POSITIONAL}:
        if len(required) != 1:
            return BoundCall(arguments={}, error=f"{spec.name} takes {len(required)} named arguments")
        arguments = {required[0]: arguments[POSITIONAL]}
    for name in required:
        if name not in arguments:
            return BoundCall(arguments={}, error=f"{spec.name} needs the argument {name}")
    if spec.parameters.get("additionalProperties", True) is False and not set(arguments) <= set(properties):
        return BoundCall(arguments={}, error=f"{spec.name} takes only: {', '.join(properties)}")
    for name, schema in properties.items():
        if name in arguments and not _fits(arguments[name], schema):
            return BoundCall(arguments={}, error=f"{name} of {spec.name} must be {_expected(schema)}")
    return BoundCall(arguments=arguments)


def string_argument(spec: ToolSpec, call: ToolCall) -> str | None:
    """The argument of a tool with one required string parameter; None where the call does not fit."""
    bound = bind_arguments(spec, call)
    value = bound.arguments.get(spec.parameters["required"][0]) if not bound.error else None
    return value if isinstance(value, str) else None


def only_argument(spec: ToolSpec, action: Action) -> tuple[str | None, str]:
    """(argument, "") of an action that is one good call of the environment's only tool, else (None, what is wrong).

    The tool has one required string parameter. The text is one of CALL_ERRORS and repeats nothing of the action.
    """
    if action.parse_error:
        return None, UNREADABLE
    if not action.tool_calls:
        return None, NO_CALL
    call, *more = action.tool_calls
    if more:
        return None, SEVERAL_CALLS
    if call.name != spec.name:
        return None, UNKNOWN_TOOL
    value = string_argument(spec, call)
    return (None, WRONG_ARGUMENTS) if value is None else (value.strip(), "")


def cut_to_tokens(text: str, *, max_tokens: int, count_tokens: Callable[[str], int]) -> tuple[str, bool]:
    """The text, or its longest beginning that fits with a marker; and whether it was cut.

    The unit is tokens, as `count_tokens` counts them, whatever the script of the text is.
    """
    # A token stands for at most a few dozen characters, so most huge results need not be tokenised whole.
    if len(text) <= max_tokens * 64 and count_tokens(text) <= max_tokens:
        return text, False
    low, high = 0, min(len(text), max_tokens * 64)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(_marked(text[:middle])) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return _marked(text[:low]), True


async def run_blocking(function: Callable[[], Returned], *, timeout_s: float, what: str) -> Returned:
    """Result of a blocking function, called in a thread of its own so that the event loop goes on.

    Raises what the function raises, and DeadlineError after `timeout_s`. A thread cannot be stopped:
    one that hangs is left behind as a daemon, so it holds up neither other episodes nor the exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Returned] = loop.create_future()

    def deliver(result: Returned | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        try:
            outcome: tuple[Returned | None, BaseException | None] = (function(), None)
        except Exception as error:  # handed over to whoever waits
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=body, name=what, daemon=True).start()
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not return within {timeout_s:g} s") from error


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    wanted = schema.get("type")
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
    if not names:
        return True
    if isinstance(value, bool):  # bool is an int to isinstance, not to JSON
        return "boolean" in names
    return any(isinstance(value, _PYTHON_TYPES[name]) for name in names if name in _PYTHON_TYPES)


def _expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    return str(schema.get("type", "a JSON value"))


def _marked(text: str) -> str:
    return f"{text.rstrip()} {CUT_MARKER}".lstrip()
