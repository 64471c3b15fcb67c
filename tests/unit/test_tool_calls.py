"""Every way an action can be written, and every way it can be malformed. Parsing never raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.data.messages import POSITIONAL, ToolCall
from megatrl.rendering.tool_calls import parse_action


def qwen(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ('{"q": "a"}', {"q": "a"}),
        ("{}", {}),
        ('""', {}),
        ('"  "', {}),
        ('"{\\"q\\": 1}"', {"q": 1}),
        ('{"q": [1, null, {"z": true}]}', {"q": [1, None, {"z": True}]}),
        ('{"q": "tor 🚪 </b>"}', {"q": "tor 🚪 </b>"}),
    ],
)
def test_qwen_arguments_that_are_objects_run(arguments: str, expected: dict[str, object]) -> None:
    action = parse_action(qwen(f'{{"name": "find", "arguments": {arguments}}}'), "qwen")
    assert action.tool_calls == (ToolCall(name="find", arguments=expected),)
    assert action.parse_error == ""


@pytest.mark.parametrize(
    "body, error",
    [
        ('{"name": "f", "arguments": {"q": "a', "not valid JSON"),
        ('{"name": "f", "arguments": {"q": "a",}}', "not valid JSON"),
        ("{'name': 'f'}", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"q": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": [1, 2]}', "must be a JSON object, got a list"),
        ('{"name": "f", "arguments": 3}', "must be a JSON object, got a number"),
        ('{"name": "f", "arguments": true}', "must be a JSON object, got a boolean"),
        ('{"name": "f", "arguments": null}', "must be a JSON object, got null"),
        ('{"name": "f", "arguments": "[1]"}', "must be a JSON object, got a list"),
        ('{"name": "f", "arguments": "x"}', "arguments is not valid JSON"),
        ('["f"]', "tool call must be a JSON object, got a list"),
        ('{"arguments": {}}', 'must have a "name"'),
        ('{"name": 7}', 'must have a "name"'),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_qwen_calls_become_an_error_text(body: str, error: str) -> None:
    action = parse_action(qwen(body), "qwen")
    assert error in action.parse_error
    assert len(action.parse_error) < 200
    assert (action.tool_calls, action.answer) == ((), None)


def test_missing_arguments_are_none_at_all() -> None:
    assert parse_action(qwen('{"name": "look"}'), "qwen").tool_calls == (ToolCall(name="look"),)


def test_several_qwen_calls_run_in_order_or_not_at_all() -> None:
    good = qwen('{"name": "a"}') + "\n" + qwen('{"name": "b", "arguments": {"x": 1}}')
    assert [call.name for call in parse_action("Both. " + good, "qwen").tool_calls] == ["a", "b"]
    bad = parse_action(good + qwen("{"), "qwen")
    assert bad.tool_calls == ()
    assert "not valid JSON" in bad.parse_error


def test_unclosed_qwen_call_is_an_error() -> None:
    assert "not closed" in parse_action('<tool_call>\n{"name": "a"}', "qwen").parse_error
    assert "not closed" in parse_action('<tool_call>{"name": "a"}' + qwen('{"name": "b"}'), "qwen").parse_error


@pytest.mark.parametrize(
    "text, name, arguments",
    [
        ("Action: open d3", "open", {POSITIONAL: "d3"}),
        ("Action: open doc7 now", "open", {POSITIONAL: "doc7 now"}),
        ("Thought: try it\nAction: search[who was Ada]\n", "search", {POSITIONAL: "who was Ada"}),
        ("Action: search [ who ]", "search", {POSITIONAL: "who"}),
        ('Action: search({"q": "x", "k": 3})', "search", {"q": "x", "k": 3}),
        ('Action: search {"q": "x"}', "search", {"q": "x"}),
        ('Action: search("x")', "search", {POSITIONAL: "x"}),
        ("Action: search(free text)", "search", {POSITIONAL: "free text"}),
        ("Action: look", "look", {}),
        ("Action: look()", "look", {}),
        ("Action: look[]", "look", {}),
        ("Action : open d3", "open", {POSITIONAL: "d3"}),
        ("Action: open d3\nObservation: a door", "open", {POSITIONAL: "d3"}),
        ("Thought: t Action: open d3 Observation: x Action: open d4", "open", {POSITIONAL: "d3"}),
        ("Action: open d3 <answer> v1 </answer>", "open", {POSITIONAL: "d3"}),
    ],
)
def test_react_actions_are_read(text: str, name: str, arguments: dict[str, object]) -> None:
    assert parse_action(text, "react").tool_calls == (ToolCall(name=name, arguments=arguments),)


@pytest.mark.parametrize(
    "text, error",
    [
        ('Action: search({"q": "a)', "not valid JSON"),
        ("Action: search({'q': 1})", "not valid JSON"),
        ("Action: search([1, 2])", "got a list"),
        ("Action: search(3)", "got a number"),
        ("Action: search(null)", "got null"),
        ("Action:", "needs a tool name"),
        ("Action: 3 d", "needs a tool name"),
        ("Action: \nopen", "needs a tool name"),
    ],
)
def test_malformed_react_actions_become_an_error_text(text: str, error: str) -> None:
    action = parse_action(text, "react")
    assert error in action.parse_error
    assert action.tool_calls == ()


@pytest.mark.parametrize("tool_format", ["qwen", "react"])
def test_answers_are_read_in_both_formats(tool_format: str) -> None:
    def answer(text: str) -> str | None:
        return parse_action(text, tool_format).answer  # type: ignore[arg-type]

    assert answer("<answer> v1 v2 v3 </answer>") == "v1 v2 v3"
    assert answer("So: <answer>\nNew York\n</answer> done") == "New York"
    assert answer("<answer>a</answer> no, <answer>b</answer>") == "b"
    assert answer("<answer></answer>") == ""
    assert answer("v1 v2 v3") is None
    unclosed = parse_action("<answer> v1", tool_format)  # type: ignore[arg-type]
    assert unclosed.answer is None
    assert "not closed" in unclosed.parse_error


def test_what_comes_first_counts() -> None:
    call = qwen('{"name": "a"}')
    assert parse_action(f"{call}<answer>x</answer>", "qwen").answer is None
    assert parse_action(f"<answer>x</answer>{call}", "qwen").answer == "x"
    assert parse_action("<answer> x </answer> Action: open d3", "react").answer == "x"


def test_thoughts_are_not_searched() -> None:
    assert parse_action("<think>maybe <answer>1</answer></think>hm", "qwen").answer is None
    assert parse_action("<think><answer>1</answer></think><answer>2</answer>", "qwen").answer == "2"
    assert parse_action("maybe Action: open d1 </think> Action: open d2", "react").tool_calls[0].arguments == {
        POSITIONAL: "d2"
    }
    endless = parse_action("<think> Action: open d1", "react")
    assert (endless.tool_calls, endless.parse_error) == ((), "")


def test_plain_text_is_neither_call_nor_answer_nor_error() -> None:
    action = parse_action("I will open the door. Interaction: none", "react")
    assert (action.tool_calls, action.answer, action.parse_error) == ((), None, "")
    assert action.text == "I will open the door. Interaction: none"


@given(
    st.text(alphabet=st.sampled_from('<>/{}[]()":, \nAction:tool_callansweropen1')), st.sampled_from(["qwen", "react"])
)
def test_no_text_raises_and_at_most_one_reading_is_set(text: str, tool_format: str) -> None:
    action = parse_action(text, tool_format)  # type: ignore[arg-type]
    assert sum((bool(action.tool_calls), action.answer is not None, bool(action.parse_error))) <= 1
    assert action.text == text
