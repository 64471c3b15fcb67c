"""Chat templates as explicit pieces: special tokens by name, everything between them as text.

Only the pieces are listed here, so that a conversation can be rendered in parts: what a message adds
never depends on what came before it. The history is append-only. Templates that drop the thinking
of earlier turns when they render them again (Qwen3's own) are not followed in that: every token the
policy saw or sampled stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatrl.data.messages import Message

ChatFormatName = Literal["chatml", "llama3"]


@dataclass(frozen=True, slots=True)
class Special:
    """One special token, by its text. Everything else in a list of pieces is plain text."""

    token: str


Piece = Special | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A turn is `open role close header_end content end between`."""

    begin: tuple[Special, ...]  # before the first message, and nowhere else
    open: Special
    close: Special | None
    header_end: str
    end: Special
    between: str  # template text after a turn's end token
    stop_tokens: tuple[str, ...]  # end a sampled action; those a tokenizer lacks are skipped
    strips_content: bool

    def turn(self, role: str, content: str) -> list[Piece]:
        """A whole message."""
        if self.strips_content:
            content = content.strip()
        return [*self._header(role, content), self.end, *self._between()]

    def generation_prompt(self) -> list[Piece]:
        """The header that an action follows."""
        return self._header("assistant", "")

    def closing(self, *, previous_ended: bool) -> list[Piece]:
        """What follows an action: its end token where it was not sampled, then the template's text."""
        return [*(() if previous_ended else (self.end,)), *self._between()]

    def _header(self, role: str, content: str) -> list[Piece]:
        if self.close is None:
            return [self.open, role + self.header_end + content]
        return [self.open, role, self.close, self.header_end + content]

    def _between(self) -> list[Piece]:
        return [self.between] if self.between else []


CHAT_FORMATS: dict[ChatFormatName, ChatFormat] = {
    "chatml": ChatFormat(
        begin=(),
        open=Special("<|im_start|>"),
        close=None,
        header_end="\n",
        end=Special("<|im_end|>"),
        between="\n",
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        strips_content=False,
    ),
    "llama3": ChatFormat(
        begin=(Special("<|begin_of_text|>"),),
        open=Special("<|start_header_id|>"),
        close=Special("<|end_header_id|>"),
        header_end="\n\n",
        end=Special("<|eot_id|>"),
        between="",
        stop_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        strips_content=True,
    ),
}


def message_pieces(chat: ChatFormat, messages: Sequence[Message], *, wrap_tool_results: bool) -> list[Piece]:
    """Pieces of consecutive messages. Tool results are user turns; neighbors share one turn.

    `wrap_tool_results` puts each into <tool_response> (Qwen3); otherwise they are plain text.
    """
    pieces: list[Piece] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        pieces += _tool_turn(chat, results, wrap_tool_results)
        results = []
        pieces += chat.turn(message["role"], message["content"])
    return pieces + _tool_turn(chat, results, wrap_tool_results)


def _tool_turn(chat: ChatFormat, results: Sequence[str], wrap: bool) -> list[Piece]:
    if not results:
        return []
    if wrap:
        results = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
    return chat.turn("user", "\n".join(results))
