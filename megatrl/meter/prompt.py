"""The meter's text: what is put around a history, how it answers, and how a free answer is parsed.

    <header> <history, token by token as the policy saw it> <question> {"completion": 1, "tokens_to_go": 330}

The history is never re-rendered, so the question follows the policy's own generation prompt. The
question comes last: all states of one trajectory share a prefix.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatrl.data.meter_prompt import MeterAnswer, MeterPrompt
from megatrl.data.scores import Forecast
from megatrl.errors import ScoringError

HEADER = "You estimate how much work an agent still has to do.\n\n"
QUESTION = (
    "\n\nWill the agent complete the task from here, and how many tokens will it still generate? "
    'Reply with JSON only: {"completion": 0|1, "tokens_to_go": integer or null}\n'
)
MAX_TOKENS_TO_GO = 1e12
"""A larger number in a free answer is nonsense (and may not fit a float): the answer is invalid."""


class MeterCodec(Protocol):
    """The part of a Renderer that a meter prompt is built with."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterText:
    """The words of a meter. A meter is only itself with the text it was trained with."""

    header: str = HEADER
    question: str = QUESTION


def answer_text(*, completion: bool, tokens_to_go: int | None) -> str:
    """The JSON that the meter is trained to answer."""
    return json.dumps({"completion": int(completion), "tokens_to_go": tokens_to_go if completion else None})


def can_answer(codec: MeterCodec, tokens_to_go: int) -> bool:
    """True where the tokenizer can spell the answer with this number; a small one knows few numbers."""
    return _is_spellable(codec, answer_text(completion=True, tokens_to_go=tokens_to_go))


def build_meter_prompt(codec: MeterCodec, grid: Sequence[int], text: MeterText | None = None) -> MeterPrompt:
    """Token ids of the meter's text for one tokenizer. `grid` holds the tokens to go it can answer with.

    Header, question and each answer are encoded on their own, in training and in scoring alike, so
    no token spans two of them. Raises ScoringError when the tokenizer cannot spell an answer.
    """
    text = text or MeterText()
    failure = answer_text(completion=False, tokens_to_go=None)
    completions = [answer_text(completion=True, tokens_to_go=value) for value in grid]
    if unspellable := [text for text in (failure, *completions) if not _is_spellable(codec, text)]:
        raise ScoringError(
            f"the tokenizer cannot spell {len(unspellable)} of the meter's {len(grid) + 1} answers, first "
            f"{unspellable[0]}; choose a grid of numbers it knows (log_spaced_grid with is_spellable)"
        )
    answers = [MeterAnswer(tokens=codec.encode(failure), completion=False)]
    answers += [
        MeterAnswer(tokens=codec.encode(answer), completion=True, tokens_to_go=float(value))
        for answer, value in zip(completions, grid, strict=True)
    ]
    template = json.dumps([text.header, text.question, failure, *completions])
    return MeterPrompt(
        header=codec.encode(text.header) if text.header else (),
        question=codec.encode(text.question),
        answers=tuple(answers),
        end_token=codec.stop_token_ids[0] if codec.stop_token_ids else None,
        tokenizer_fingerprint=codec.fingerprint,
        template_hash=hashlib.sha256(template.encode()).hexdigest()[:16],
    )


def _is_spellable(codec: MeterCodec, text: str) -> bool:
    """True where decoding gives the text back, up to white space."""
    return "".join(codec.decode(codec.encode(text)).split()) == "".join(text.split())


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
