"""Tool arguments, deadlines of blocking tools, and cut observations."""

import asyncio
import time

import pytest

from megatrl.data.messages import POSITIONAL, ToolCall, ToolSpec
from megatrl.envs.tools import CUT_MARKER, bind_arguments, cut_to_tokens, run_blocking, string_argument
from megatrl.errors import DeadlineError

SEARCH = ToolSpec(
    name="search",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "order": {"type": "string", "enum": ["newest", "best"]},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
)


def bind(**arguments: object):
    return bind_arguments(SEARCH, ToolCall(name="search", arguments=arguments))


def test_fitting_arguments_pass_unchanged() -> None:
    bound = bind(query="a", limit=3, order="best")
    assert (bound.error, bound.arguments) == ("", {"query": "a", "limit": 3, "order": "best"})


def test_positional_argument_goes_to_the_only_required_parameter() -> None:
    assert bind_arguments(SEARCH, ToolCall(name="search", arguments={POSITIONAL: "a b"})).arguments == {"query": "a b"}
    two = ToolSpec(name="move", description="", parameters={"properties": {}, "required": ["x", "y"]})
    assert "named arguments" in bind_arguments(two, ToolCall(name="move", arguments={POSITIONAL: "1"})).error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "search needs the argument query"),
        ({"limit": 1}, "search needs the argument query"),
        ({"query": "a", "page": 2}, "search takes only: query, limit, order"),
        ({"query": 3}, "query of search must be string"),
        ({"query": None}, "query of search must be string"),
        ({"query": "a", "limit": True}, "limit of search must be integer"),
        ({"query": "a", "limit": "3"}, "limit of search must be integer"),
        ({"query": "a", "order": "worst"}, "order of search must be one of newest, best"),
    ],
)
def test_arguments_that_do_not_fit_are_named_without_repeating_them(arguments: dict, error: str) -> None:
    bound = bind(**arguments)
    assert (bound.error, bound.arguments) == (error, {})


def test_string_argument_is_none_where_the_call_does_not_fit() -> None:
    assert string_argument(SEARCH, ToolCall(name="search", arguments={"query": "a"})) == "a"
    assert string_argument(SEARCH, ToolCall(name="search", arguments={"query": 1})) is None


def words(text: str) -> int:
    return len(text.split())


def test_text_is_cut_one_token_above_the_limit_and_not_at_it() -> None:
    assert cut_to_tokens("a b c d", max_tokens=4, count_tokens=words) == ("a b c d", False)
    assert cut_to_tokens("a b c d e", max_tokens=4, count_tokens=words) == (f"a b c {CUT_MARKER}", True)


@pytest.mark.parametrize("text", ["漢" * 300_000, "x" * 1_000_000, "a " * 500_000])
def test_a_huge_result_of_any_script_ends_within_the_token_limit(text: str) -> None:
    def characters(piece: str) -> int:
        return len(piece.encode()) // 2

    cut, was_cut = cut_to_tokens(text, max_tokens=256, count_tokens=characters)
    assert was_cut
    assert cut.endswith(CUT_MARKER)
    assert 200 < characters(cut) <= 256


def test_a_hanging_tool_ends_at_its_deadline_and_holds_up_nobody() -> None:
    async def episodes() -> list[object]:
        started = time.monotonic()
        results = await asyncio.gather(
            run_blocking(lambda: time.sleep(30), timeout_s=0.3, what="the hanging tool"),
            *(run_blocking(lambda n=n: n, timeout_s=5, what="a quick tool") for n in range(7)),
            return_exceptions=True,
        )
        assert time.monotonic() - started < 5
        return list(results)

    hanging, *others = asyncio.run(episodes())
    assert isinstance(hanging, DeadlineError)
    assert "the hanging tool did not return within 0.3 s" in str(hanging)
    assert others == list(range(7))


def test_an_error_in_a_blocking_tool_reaches_the_caller() -> None:
    def broken() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        asyncio.run(run_blocking(broken, timeout_s=5, what="a broken tool"))
