"""Text of one scalar to the type of the field that receives it, by the rules of YAML 1.2.

`1e-6` is a number; `no`, `off`, `010` and `12:30:00` are words where a word is wanted and refused where a
number or a truth value is; quoted text is never anything but text.
"""

import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatrl.config.yaml_nodes import Scalar

ScalarValue = str | int | float | bool | None

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_NO_VALUE = object()
_YAML_1_1_BOOLS = {"yes", "no", "on", "off", "y", "n", "0", "1"}


class ScalarError(ValueError):
    """The text does not fit the field."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy


def members(annotation: Any) -> tuple[Any, ...]:
    """Alternatives of a union, or the annotation itself; without the constraints of an `Annotated`."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members(part))
    return (annotation,)


def read_scalar(scalar: Scalar, annotation: Any) -> ScalarValue:
    """Return the value of the scalar for a field of this annotation; raise ScalarError where it has none."""
    alternatives = members(annotation)
    words = [word for member in alternatives if get_origin(member) is Literal for word in get_args(member)]
    value = _convert(scalar.text, scalar.is_quoted, alternatives, words)
    if value is _NO_VALUE:
        raise ScalarError(f"expected {describe(alternatives, words)}", _remedy(scalar, alternatives, words))
    return value


def _convert(text: str, is_quoted: bool, alternatives: tuple[Any, ...], words: list[Any]) -> Any:
    if text in words:
        return text
    if not is_quoted:
        if text in _NULLS and types.NoneType in alternatives:
            return None
        if bool in alternatives and text in _BOOLS:
            return _BOOLS[text]
        if int in alternatives and _INT.fullmatch(text):
            return int(text)
        if float in alternatives and _FLOAT.fullmatch(text):
            return float(text)
    if str in alternatives and (is_quoted or text not in _NULLS):
        return text
    return _NO_VALUE


def describe(alternatives: Iterable[Any], words: Iterable[Any]) -> str:
    """The allowed values in words."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    allowed = [names[member] for member in alternatives if member in names]
    choices = " | ".join(str(word) for word in words)
    return " or ".join(filter(None, [choices, *allowed])) or "a value"


def _remedy(scalar: Scalar, alternatives: tuple[Any, ...], words: list[Any]) -> str:
    text = scalar.text
    if scalar.is_quoted and _convert(text, False, alternatives, words) is not _NO_VALUE:
        return "remove the quotes: quoted text is always text"
    if text in _NULLS and not scalar.is_quoted:
        return "write a value, or delete the key to get the default"
    if words:
        return "choose one of the allowed values"
    if bool in alternatives:
        return f"write true or false; {text!r} is a word" if text.lower() in _YAML_1_1_BOOLS else "write true or false"
    if ":" in text:
        return "write one number, for times the number of seconds"
    plain = text.replace("_", "").replace(",", "")
    if re.fullmatch(r"[-+]?0+[0-9]+", plain):
        return f"write {int(plain)}; a leading zero could mean octal"
    if _INT.fullmatch(plain) or (float in alternatives and _FLOAT.fullmatch(plain)):
        return f"write {plain}"
    if _FLOAT.fullmatch(plain) and abs(float(plain)) < 1e300 and float(plain).is_integer():
        return f"write {int(float(plain))}"
    return "write digits"
