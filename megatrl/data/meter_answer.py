"""The meter's answer as text: written for training, read strictly from whatever was generated."""

import json
from typing import Any

from megatrl.data.scores import Forecast

MAX_TOKENS_TO_GO = 1e12
"""A larger number in a free answer is nonsense (and may not fit a float): the answer is invalid."""


ANSWER_PATTERN = r'\{"completion": ?(0, ?"tokens_to_go": ?null|1, ?"tokens_to_go": ?[0-9]{1,9})\}'
"""Every answer that can be parsed, with or without the spaces that some tokenizers cannot spell."""


def answer_text(*, completion: bool, tokens_to_go: int | None) -> str:
    """The JSON that the meter is trained to answer."""
    return json.dumps({"completion": int(completion), "tokens_to_go": tokens_to_go if completion else None})


def parse_answer(text: str) -> Forecast:
    """The forecast in a freely decoded answer: its last syntactically valid flat JSON object.

    `completion` must be 0, 1 or a bool; with 1, `tokens_to_go` must be a finite number >= 0 and not a
    bool; with 0 the number is ignored. Anything else is an invalid forecast, never an exception.
    """
    answer = _last_flat_object(text)
    invalid = Forecast(is_valid=False)
    if answer is None:
        return invalid
    completion = answer.get("completion")
    if not isinstance(completion, int) or completion not in (0, 1):  # a bool is an int
        return invalid
    if not completion:
        return Forecast(is_valid=True)
    tokens = answer.get("tokens_to_go")
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not 0 <= tokens <= MAX_TOKENS_TO_GO:
        return invalid
    return Forecast(is_valid=True, completion=True, completion_prob=1.0, tokens_to_go=float(tokens))


def _last_flat_object(text: str) -> dict[str, Any] | None:
    """The last {...} without braces inside that is a JSON object of plain values."""
    end = text.rfind("}")
    while end >= 0:
        start = text.rfind("{", 0, end)
        if start < 0:
            return None
        try:
            value = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and not any(isinstance(item, (dict, list)) for item in value.values()):
            return value
        end = text.rfind("}", 0, end)
    return None
