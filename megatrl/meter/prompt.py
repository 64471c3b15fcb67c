"""The meter's text: what is put around a history, and the answers it can give.

    <header> <history, token by token as the policy saw it> <question> {"completion": 1, "tokens_to_go": 330}

The history is never re-rendered, so the question follows the policy's own generation prompt. The
question comes last: all states of one trajectory share a prefix.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatrl.data.meter_answer import answer_text
from megatrl.data.meter_prompt import MeterAnswer, MeterPrompt
from megatrl.errors import ScoringError

HEADER = "You estimate how much work an agent still has to do.\n\n"
QUESTION = (
    "\n\nWill the agent complete the task from here, and how many tokens will it still generate? "
    'Reply with JSON only: {"completion": 0|1, "tokens_to_go": integer or null}\n'
)


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


COMPACT = MeterText(header="", question="forecast")
"""For word-level tokenizers, which know no sentences."""


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


def meter_text(codec: MeterCodec) -> MeterText:
    """The full text where the tokenizer can spell it, else the few words that every tiny tokenizer knows.

    Raises ScoringError where it can spell neither.
    """
    for text in (MeterText(), COMPACT):
        if all(_is_spellable(codec, part) for part in (text.header, text.question)):
            return text
    raise ScoringError(
        f"the tokenizer {codec.fingerprint} can spell neither the meter's question nor {COMPACT.question!r}; "
        "choose a model whose tokenizer knows English"
    )


def _is_spellable(codec: MeterCodec, text: str) -> bool:
    """True where decoding gives the text back, up to white space."""
    return "".join(codec.decode(codec.encode(text)).split()) == "".join(text.split())
