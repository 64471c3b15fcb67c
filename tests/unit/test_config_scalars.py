"""YAML scalars meet the type of the field that receives them (known faults of YAML 1.1 readers)."""

from typing import Literal

import pytest

from megatrl.config.credit import DeltaTTGCredit
from megatrl.config.scalars import ScalarError, read_scalar
from megatrl.config.yaml_nodes import DEFAULT, Scalar


def plain(text: str) -> Scalar:
    return Scalar(text=text, is_quoted=False, origin=DEFAULT)


def quoted(text: str) -> Scalar:
    return Scalar(text=text, is_quoted=True, origin=DEFAULT)


PassThrough = str | int | float | bool


@pytest.mark.parametrize(
    "text, annotation, value",
    [
        ("1e-6", float, 1e-6),
        ("1e5", float, 1e5),
        ("5E-7", float, 5e-7),
        (".5", float, 0.5),
        ("3", float, 3.0),
        ("-2", int, -2),
        ("0", int, 0),
        ("true", bool, True),
        ("False", bool, False),
        ("no", str, "no"),
        ("off", Literal["off", "online"], "off"),
        ("010", str, "010"),
        ("12:30:00", str, "12:30:00"),
        ("1_000", str, "1_000"),
        ("1e-6", str, "1e-6"),
        ("2024-01-01", str, "2024-01-01"),
        ("null", int | None, None),
        ("~", str | None, None),
        ("", float | None, None),
        ("auto", float | Literal["auto"], "auto"),
        ("12.5", float | Literal["auto"], 12.5),
        ("true", PassThrough, True),
        ("8", PassThrough, 8),
        ("0.8", PassThrough, 0.8),
        ("off", PassThrough, "off"),
    ],
)
def test_plain_text_takes_the_type_of_the_field(text, annotation, value):
    read = read_scalar(plain(text), annotation)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text, annotation, remedy",
    [
        ("no", bool, "write true or false"),
        ("off", bool, "write true or false"),
        ("0", bool, "write true or false"),
        ("1", bool, "write true or false"),
        ("yes", bool, "write true or false"),
        ("010", int, "write 10; a leading zero could mean octal"),
        ("1_000", int, "write 1000"),
        ("1e3", int, "write 1000"),
        ("8.0", int, "write 8"),
        ("0x10", int, "write digits"),
        ("12:30:00", int, "number of seconds"),
        ("12:30:00", float, "number of seconds"),
        ("1,5", int, "write 15"),
        ("abc", float, "write digits"),
        ("nan", float, "write digits"),
        ("inf", float, "write digits"),
        (".inf", float, "write digits"),
        ("null", int, "delete the key"),
        ("", str, "delete the key"),
        ("offf", Literal["off", "online"], "choose one"),
    ],
)
def test_plain_text_that_does_not_fit_is_refused_with_a_remedy(text, annotation, remedy):
    with pytest.raises(ScalarError) as refusal:
        read_scalar(plain(text), annotation)
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize("annotation", [bool, int, float, int | None, float | Literal["auto"]])
@pytest.mark.parametrize("text", ["false", "3", "null"])
def test_quoted_text_is_never_a_number_a_truth_value_or_null(text, annotation):
    with pytest.raises(ScalarError):
        read_scalar(quoted(text), annotation)


def test_quoted_text_stays_text_where_text_is_allowed():
    assert read_scalar(quoted("null"), str | None) == "null"
    assert read_scalar(quoted("true"), PassThrough) == "true"
    assert read_scalar(quoted("auto"), float | Literal["auto"]) == "auto"


def test_the_remedy_for_a_quoted_number_is_to_remove_the_quotes():
    with pytest.raises(ScalarError) as refusal:
        read_scalar(quoted("false"), bool)
    assert "remove the quotes" in refusal.value.remedy


@pytest.mark.parametrize("text, value", [("auto", "auto"), ("250", 250.0), ("2.5e2", 250.0)])
def test_a_number_or_a_word_can_be_either(text, value):
    annotation = DeltaTTGCredit.model_fields["failure_cost"].annotation
    assert read_scalar(plain(text), annotation) == value
