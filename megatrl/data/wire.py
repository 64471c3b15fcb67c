"""The exact JSON form of recorded groups: one line for each prompt group, every float bit for bit.

The dataclasses are the schema. A line holds every field of each of them, by name; a field more, a
field less or a value of another type is refused with the file and line. JSON has no NaN or infinity,
so where a float field holds one it is written as the text "NaN", "Infinity" or "-Infinity". Bytes
are written as base64 of their zlib form.
"""

import base64
import binascii
import json
import math
import types
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import numpy as np

from megatrl.data.samples import FloatArray
from megatrl.data.scores import AnswerScore, MeterScore, Scores
from megatrl.data.trajectories import PromptGroup, TrajectoryId
from megatrl.errors import TrajectoryError

WIRE_VERSION = 2
"""Raised whenever a field of a stored dataclass is added, removed or changes its meaning.

Version 1 lacks `routed_experts` of a turn and is still read.
"""

Decoded = TypeVar("Decoded")

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryNotes:
    """What one step computed about one trajectory."""

    advantages: tuple[tuple[float, ...], ...] | None = None  # [turn][action token]; None where not estimated
    answer: AnswerScore | None = None
    meter: MeterScore | None = None
    details: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # the credit rule's parts, by turn


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One prompt group as stored: what happened, whether it was trained on, and the credit it got."""

    step: int
    group: PromptGroup
    dropped: str = ""  # why the step did not train on it; "" where it did
    notes: tuple[TrajectoryNotes, ...] = ()  # one for each trajectory
    failure_cost: float | None = None

    def __post_init__(self) -> None:
        if len(self.notes) != len(self.group.trajectories):
            raise TrajectoryError(
                f"record of group {self.group.group_id} has {len(self.notes)} notes for "
                f"{len(self.group.trajectories)} trajectories; give one each"
            )

    @property
    def scores(self) -> Scores:
        """The notes as the frozen models' scores of this group."""
        pairs = list(zip(self.group.trajectories, self.notes, strict=True))
        return Scores(
            answers={trajectory.id: note.answer for trajectory, note in pairs if note.answer is not None},
            meter={trajectory.id: note.meter for trajectory, note in pairs if note.meter is not None},
            failure_cost=self.failure_cost,
        )


@dataclass(frozen=True, slots=True)
class TornLine:
    """The cut last line of a file whose writer was killed."""

    where: str  # path:line
    num_bytes: int


@dataclass(slots=True)
class TornLines:
    """Collects what a reader had to leave out, for the caller to report."""

    found: list[TornLine] = field(default_factory=list)


def record_group(
    group: PromptGroup,
    *,
    step: int,
    dropped: str = "",
    advantages: Mapping[TrajectoryId, Sequence[FloatArray]] | None = None,
    scores: Scores | None = None,
    details: Mapping[TrajectoryId, Mapping[str, tuple[float, ...]]] | None = None,
) -> GroupRecord:
    """A group with what `advantages`, `scores` and `details` say about its trajectories."""
    advantages, scores, details = advantages or {}, scores or Scores(), details or {}
    notes = []
    for trajectory in group.trajectories:
        per_turn = advantages.get(trajectory.id)
        notes.append(
            TrajectoryNotes(
                advantages=None
                if per_turn is None
                else tuple(tuple(np.asarray(turn, dtype=np.float64).tolist()) for turn in per_turn),
                answer=scores.answers.get(trajectory.id),
                meter=scores.meter.get(trajectory.id),
                details=details.get(trajectory.id, {}),
            )
        )
    return GroupRecord(step=step, group=group, dropped=dropped, notes=tuple(notes), failure_cost=scores.failure_cost)


def encode_record(record: GroupRecord) -> str:
    """One line of JSON without its newline."""
    body = {"version": WIRE_VERSION, **_encode(record)}
    # ASCII only: text decoded from half a character may hold lone surrogates, which UTF-8 refuses.
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def decode_record(line: str, *, where: str) -> GroupRecord:
    """The record of one line. `where` (path:line) begins every error message.

    Raises:
        TrajectoryError: not JSON, another version, unknown or missing fields, or wrong types.
    """
    try:
        body = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise TrajectoryError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(body, dict):
        raise TrajectoryError(f"{where}: expected a JSON object, found {type(body).__name__}")
    version = body.pop("version", None)
    if version not in (1, WIRE_VERSION) or isinstance(version, bool):
        raise TrajectoryError(
            f"{where}: wire version {version!r}; this megatrl reads versions 1 and {WIRE_VERSION}. "
            "Read the file with the megatrl that wrote it"
        )
    try:
        if version == 1:
            _upgrade_from_1(body)
        return _decode(GroupRecord, body, "record")
    except TrajectoryError as error:
        raise TrajectoryError(f"{where}: {error.message}") from error


def _upgrade_from_1(body: dict[str, Any]) -> None:
    """Gives each turn of a version 1 body its missing `routed_experts`; the shape is checked afterwards."""
    try:
        for trajectory in body["group"]["trajectories"]:
            for segment in trajectory["segments"]:
                for turn in segment["turns"]:
                    turn.setdefault("routed_experts", None)
    except (KeyError, TypeError, AttributeError) as error:
        raise TrajectoryError(f"record is not a group of trajectories ({type(error).__name__}: {error})") from error


def decode_lines(lines: Iterator[bytes], *, path: str, torn: TornLines | None = None) -> Iterator[GroupRecord]:
    """The records of a file's lines, newlines included.

    A last line without its newline that is not whole JSON is left out and added to `torn`; without
    `torn`, and anywhere else in the file, it is an error.
    """
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.endswith(b"\n") and not _is_whole(line):
            if torn is None:
                raise TrajectoryError(f"{where}: the last line is cut after {len(line)} bytes; its writer was killed")
            torn.found.append(TornLine(where, len(line)))
            return
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TrajectoryError(f"{where}: not UTF-8 text ({error})") from error
        yield decode_record(text, where=where)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON; write it as the text {text!r}")


@cache
def _schema(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _encode(value: Any, *, is_plain: bool = False) -> Any:
    """JSON values. `is_plain`: below a field of free JSON, where the text "NaN" could not be told from a NaN."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return _encode_float(float(value), is_plain)
    if isinstance(value, list | tuple):
        if all(type(item) is int for item in value) or _are_finite_floats(value):
            return value  # tokens and logprobs: nearly all of a file
        return [_encode(item, is_plain=is_plain) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(zlib.compress(value)).decode("ascii")
    if isinstance(value, Mapping):
        return {_encode_key(key): _encode(item, is_plain=is_plain) for key, item in value.items()}
    if is_dataclass(value):
        return {
            name: _encode(getattr(value, name), is_plain=_is_free(kind)) for name, kind in _schema(type(value)).items()
        }
    raise TrajectoryError(f"a {type(value).__name__} cannot be stored as JSON: {value!r:.200}")


def _are_finite_floats(values: Sequence[Any]) -> bool:
    return all(type(item) is float for item in values) and all(map(math.isfinite, values))


def _encode_float(number: float, is_plain: bool) -> float | str:
    if math.isfinite(number):
        return number
    if is_plain:
        raise TrajectoryError(f"{number!r} in a task or a message cannot be stored as JSON; use text or null")
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _is_free(kind: Any) -> bool:
    return kind is Any or any(_is_free(argument) for argument in typing.get_args(kind))


def _encode_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TrajectoryError(f"a JSON object has text keys, not {key!r} ({type(key).__name__})")
    return key


def _decode(kind: Any, value: Any, path: str) -> Any:
    """`value` as the type `kind`; `path` names it in errors."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (each for each in arguments if each is not type(None))
        return _decode(kind, value, path)
    if origin is tuple:
        return _decode_tuple(arguments[0], value, path)
    if origin is not None and issubclass(origin, Mapping):
        _expect(dict, value, path)
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _decode_dataclass(typing.cast("type[Any]", kind), value, path)
    if kind is float:
        return _decode_float(value, path)
    if kind is bytes:
        return _decode_bytes(value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(str(each.value) for each in kind)
            raise TrajectoryError(f"{path} is {value!r}; allowed: {allowed}") from None
    return _expect(kind, value, path)


def _decode_tuple(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    _expect(list, value, path)
    # The two long arrays of a file, tokens and logprobs, need no path for each number.
    if kind is int and all(type(item) is int for item in value):
        return tuple(value)
    if kind is float and all(type(item) is float for item in value):
        return tuple(value)
    return tuple(_decode(kind, item, f"{path}[{index}]") for index, item in enumerate(value))


def _decode_dataclass(cls: type[Decoded], value: Any, path: str) -> Decoded:
    _expect(dict, value, path)
    schema = _schema(cls)
    unknown, missing = value.keys() - schema.keys(), schema.keys() - value.keys()
    if unknown or missing:
        parts = [f"unknown fields {sorted(unknown)}"] if unknown else []
        parts += [f"missing fields {sorted(missing)}"] if missing else []
        raise TrajectoryError(f"{path} is not a {cls.__name__} of wire version {WIRE_VERSION}: {'; '.join(parts)}")
    decoded = {name: _decode(kind, value[name], f"{path}.{name}") for name, kind in schema.items()}
    return cls(**decoded)


def _decode_float(value: Any, path: str) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TrajectoryError(f"{path} should be a float, found {value!r:.80}")
    return float(value)


def _decode_bytes(value: Any, path: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(_expect(str, value, path), validate=True))
    except (binascii.Error, zlib.error) as error:
        raise TrajectoryError(f"{path} is not base64 of zlib data ({error})") from error


def _expect(kind: type[Decoded], value: Any, path: str) -> Decoded:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TrajectoryError(f"{path} should be a {kind.__name__}, found {value!r:.80}")
    return value
