"""MeterPrompt: the fixed token ids around a history that make a language model a meter."""

import math
from dataclasses import dataclass

from megatrl.errors import ScoringError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterAnswer:
    """One answer the meter can give. `tokens_to_go` is None exactly for the answer of failure."""

    tokens: tuple[int, ...]
    completion: bool
    tokens_to_go: float | None = None

    def __post_init__(self) -> None:
        if self.completion != (self.tokens_to_go is not None):
            raise ScoringError(
                f"meter answer has completion={self.completion} and tokens_to_go={self.tokens_to_go}; "
                "a number belongs to a forecast of completion only"
            )
        if self.tokens_to_go is not None and not (math.isfinite(self.tokens_to_go) and self.tokens_to_go >= 0):
            raise ScoringError(f"meter answer has tokens_to_go={self.tokens_to_go}; it must be finite and >= 0")
        if not self.tokens:
            raise ScoringError("meter answer has no tokens; the tokenizer encodes the answer text to nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterPrompt:
    """header + history + question, answered by one of `answers`.

    The question comes last, so all states of one trajectory share the header and the history.
    """

    header: tuple[int, ...]
    question: tuple[int, ...]
    answers: tuple[MeterAnswer, ...]  # failure first, then completion by rising tokens_to_go
    end_token: int | None = None
    """Trained after the answer so that free decoding stops; never scored."""
    tokenizer_fingerprint: str
    template_hash: str
    """Hash of the header, question and answer texts."""

    def __post_init__(self) -> None:
        if not self.question:
            raise ScoringError("meter prompt has an empty question; the answer needs a token before it")
        if not self.answers or self.answers[0].completion or not all(a.completion for a in self.answers[1:]):
            raise ScoringError("meter answers must be the failure answer followed by the completion answers")
        grid = self.grid
        if not grid or list(grid) != sorted(set(grid)):
            raise ScoringError(f"meter grid must be a rising list of tokens to go, got {list(grid)}")
        if len({answer.tokens for answer in self.answers}) != len(self.answers):
            raise ScoringError(
                "two meter answers have the same token ids; the vocabulary lacks their numbers "
                f"(grid {list(grid)}). Use a grid whose numbers the tokenizer knows"
            )

    @property
    def grid(self) -> tuple[float, ...]:
        """Tokens to go of the completion answers, rising."""
        return tuple(a.tokens_to_go for a in self.answers if a.tokens_to_go is not None)

    @property
    def num_extra_tokens(self) -> int:
        """Most tokens the prompt adds to a history: header, question, longest answer and end token."""
        return len(self.header) + len(self.question) + max(len(a.tokens) for a in self.answers) + 1

    def answer_for(self, *, completion: bool, tokens_to_go: float | None) -> MeterAnswer:
        """The answer of a label; tokens to go snapped to the nearest grid value (the smaller on a tie)."""
        if not completion:
            return self.answers[0]
        if tokens_to_go is None:
            raise ScoringError("a label of completion needs tokens_to_go")
        value = tokens_to_go
        return min(self.answers[1:], key=lambda answer: abs((answer.tokens_to_go or 0.0) - value))
