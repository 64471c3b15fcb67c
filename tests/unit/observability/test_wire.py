"""The wire format: exact, strict, and tolerant of one thing only, a cut last line."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.scores import AnswerScore, Forecast, MeterScore, Scores
from megatrl.data.trajectories import Prompt, PromptGroup, Segment, Trajectory, TrajectoryId, Turn
from megatrl.data.wire import (
    WIRE_VERSION,
    GroupRecord,
    TrajectoryNotes,
    decode_lines,
    decode_record,
    encode_record,
    record_group,
)
from megatrl.errors import TrajectoryError
from megatrl.observability.trajectories import read_records, write_records
from tests.fakes.recorded_groups import make_group, records


def _bits(value: Any) -> Any:
    """The value with every float as its exact bits, so that NaN equals NaN and 0.0 differs from -0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bits(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: _bits(getattr(value, each.name)) for each in fields(value)}
    return value


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(records())
def test_any_record_returns_bit_for_bit(record: GroupRecord) -> None:
    line = encode_record(record)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert _bits(decode_record(line, where="f:1")) == _bits(record)


def test_numpy_values_are_stored_as_plain_numbers_of_the_same_bits() -> None:
    group = make_group(rewards=(1.0,))
    tenth = np.float32(0.1)
    second: Any = np.array([tenth, tenth], dtype=np.float32)
    advantages = {group.trajectories[0].id: (np.array([0.1, 1 / 3]), second)}
    again = decode_record(encode_record(record_group(group, step=3, advantages=advantages)), where="f:1")
    assert again.notes[0].advantages == ((0.1, 1 / 3), (float(tenth), float(tenth)))


def test_scores_return_to_their_trajectories() -> None:
    group = make_group(rewards=(1.0, 0.0))
    first, second = (trajectory.id for trajectory in group.trajectories)
    scores = Scores(
        answers={first: AnswerScore(logprobs=(-1.5, -0.25))},
        meter={second: MeterScore(forecasts=(Forecast(is_valid=True, completion=True, tokens_to_go=12.0),))},
        failure_cost=900.0,
    )
    again = decode_record(encode_record(record_group(group, step=1, scores=scores)), where="f:1")
    assert again.group == group
    assert again.scores == scores


def _body() -> dict[str, Any]:
    return json.loads(encode_record(record_group(make_group(), step=1)))


def _with_turn_field(name: str, value: Any) -> dict[str, Any]:
    body = _body()
    body["group"]["trajectories"][1]["segments"][0]["turns"][0][name] = value
    return body


@pytest.mark.parametrize(
    "body, complaint",
    [
        ({**_body(), "version": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}"),
        ({**_body(), "version": True}, "wire version True"),
        ({key: value for key, value in _body().items() if key != "version"}, "wire version None"),
        ({**_body(), "surprise": 1}, r"unknown fields \['surprise'\]"),
        ({key: value for key, value in _body().items() if key != "dropped"}, r"missing fields \['dropped'\]"),
        (_with_turn_field("entropy", 0.5), r"trajectories\[1\].segments\[0\].turns\[0\].*unknown fields \['entropy'\]"),
        (_with_turn_field("policy_version", "7"), r"turns\[0\].policy_version should be a int, found '7'"),
        (_with_turn_field("policy_version", True), r"policy_version should be a int, found True"),
        (_with_turn_field("action_tokens", [1, 2.0, 3, 4]), r"action_tokens\[1\] should be a int, found 2.0"),
        (_with_turn_field("penalty", "0.1"), r"penalty should be a float, found '0.1'"),
        (_with_turn_field("finish_reason", "bored"), r"finish_reason is 'bored'; allowed: stop, length, abort"),
        (_with_turn_field("behavior_logprobs", [-1.0]), "4 action_tokens but 1 behavior_logprobs"),
        ([1], "expected a JSON object"),
    ],
)
def test_anything_else_is_refused_with_file_and_line(body: Any, complaint: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"^some/file.jsonl:17: .*{complaint}"):
        decode_record(json.dumps(body), where="some/file.jsonl:17")


def test_a_bare_nan_is_refused() -> None:
    line = encode_record(record_group(make_group(), step=1)).replace('"failure_cost":null', '"failure_cost":NaN')
    with pytest.raises(TrajectoryError, match="f:1: not a line of JSON"):
        decode_record(line, where="f:1")


def test_a_nan_inside_a_task_is_refused_when_written() -> None:
    group = make_group()
    prompt = Prompt(prompt_id=group.prompt.prompt_id, task={"size": math.nan}, seed=0)
    broken = PromptGroup(prompt=prompt, group_id=group.group_id, trajectories=group.trajectories)
    with pytest.raises(TrajectoryError, match="cannot be stored as JSON"):
        encode_record(record_group(broken, step=1))


def _record_ends(content: bytes) -> set[int]:
    after_newline = {index + 1 for index, byte in enumerate(content) if byte == ord("\n")}
    return {0} | after_newline | {index - 1 for index in after_newline}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_file_cut_at_any_byte_gives_its_whole_lines_and_reports_the_rest(tmp_path: Path, suffix: str) -> None:
    written = [record_group(make_group(number), step=4) for number in range(4)]
    path = tmp_path / f"whole{suffix}"
    assert write_records(path, written) == 4
    content = path.read_bytes()
    assert read_records(path) == (tuple(written), ())
    counts = set()
    for size in range(0, len(content), 23):
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(content[:size])
        found, torn = read_records(cut)
        assert found == tuple(written[: len(found)])
        # Plain text may be cut just after a record; a cut gzip stream always lacks its end.
        is_at_record_end = suffix == ".jsonl" and size in _record_ends(content)
        assert len(torn) == (0 if is_at_record_end else 1)
        if torn:
            assert torn[0].where == f"{cut}:{len(found) + 1}"
        counts.add(len(found))
    assert len(counts) > 1


def test_a_damaged_line_before_the_last_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_records(path, [record_group(make_group(number), step=1) for number in range(3)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(TrajectoryError, match=rf"{path}:2: not a line of JSON"):
        read_records(path)


def test_a_cut_line_is_an_error_for_a_reader_that_does_not_ask_for_it() -> None:
    with pytest.raises(TrajectoryError, match="f:1: the last line is cut after 4 bytes"):
        list(decode_lines(iter([b'{"a"']), path="f"))


def test_stored_fields_change_only_together_with_the_wire_version() -> None:
    stored = (GroupRecord, TrajectoryNotes, PromptGroup, Prompt, Trajectory, TrajectoryId, Segment, Turn, RoutedExperts)
    found = {cls.__name__: " ".join(each.name for each in fields(cls)) for cls in stored}
    assert (WIRE_VERSION, found) == (
        2,
        {
            "GroupRecord": "step group dropped notes failure_cost",
            "TrajectoryNotes": "advantages answer meter details",
            "PromptGroup": "prompt group_id trajectories",
            "Prompt": "prompt_id task seed",
            "Trajectory": "id segments reward success termination gold_answers messages metrics error",
            "TrajectoryId": "prompt_id group_id index attempt",
            "Segment": "turns trailing_observation_tokens",
            "Turn": "observation_tokens action_tokens behavior_logprobs policy_version finish_reason is_tool_call "
            "observation_key penalty routed_experts",
            "RoutedExperts": "num_tokens num_layers top_k item_bytes data",
        },
    ), "a stored field changed: raise WIRE_VERSION with it"
