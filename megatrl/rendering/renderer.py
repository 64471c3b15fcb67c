"""Renderer: messages to token ids, in parts that only ever append.

    prompt = initial(messages, tools)
    tokens = prompt + action + continuation(messages, previous_ended=...) + action + ...

Sampled tokens are never decoded and encoded again. Special tokens enter by id; message content is
encoded with special tokens disabled, so no tool result can forge or close a turn, and the encoder
adds no token of its own (no second BOS).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from megatrl.data.messages import Message, ToolSpec
from megatrl.errors import ModelError
from megatrl.rendering.chat_formats import CHAT_FORMATS, ChatFormatName, Piece, Special, message_pieces
from megatrl.rendering.tool_prompt import qwen_tool_prompt

ToolFormatName = Literal["qwen", "react"]

TEMPLATE_VERSION = 1
"""Part of every fingerprint; raise it when the same messages give other tokens."""


class Renderer:
    """Renders one model's chats. Immutable and safe to share between threads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, chat_format: ChatFormatName, tool_format: ToolFormatName
    ) -> None:
        """`vocab_size` counts the model's rows, which may exceed the tokenizer's entries."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._chat = CHAT_FORMATS[chat_format]
        self._tool_format: ToolFormatName = tool_format
        self.vocab_size = vocab_size
        chat = self._chat
        needed = (*chat.begin, chat.open, *((chat.close,) if chat.close else ()), chat.end)
        self._special_ids = {special.token: self._required_id(special.token, chat_format) for special in needed}
        known = (tokenizer.token_to_id(token) for token in chat.stop_tokens)
        self.stop_token_ids: tuple[int, ...] = tuple(token_id for token_id in known if token_id is not None)
        """Ids that end an action; the end of a turn first."""
        self.fingerprint: str = _fingerprint(tokenizer, vocab_size, chat_format, tool_format)
        """Changes with the vocabulary, the merges, the chat format or the template version."""

    def initial(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The whole first prompt, generation prompt included.

        With tool format `qwen` the tools are described in the system message. With `react` the
        environment's own messages describe them.
        """
        messages = list(messages)
        if tools and self._tool_format == "qwen":
            text = qwen_tool_prompt(tools)
            if messages and messages[0]["role"] == "system":
                text = messages.pop(0)["content"] + "\n\n" + text
            messages.insert(0, Message(role="system", content=text))
        return self._ids([*self._chat.begin, *self._message_pieces(messages), *self._chat.generation_prompt()])

    def continuation(self, messages: Sequence[Message], *, previous_ended: bool) -> tuple[int, ...]:
        """What the template adds after an action: the turn's close, new messages, generation prompt.

        `previous_ended` says whether the action's last token is the end of turn (see `ends_turn`).
        """
        pieces = self._chat.closing(previous_ended=previous_ended)
        return self._ids([*pieces, *self._message_pieces(messages), *self._chat.generation_prompt()])

    def ends_turn(self, action_tokens: Sequence[int]) -> bool:
        """True where the policy sampled the end-of-turn token itself."""
        return bool(action_tokens) and action_tokens[-1] == self._special_ids[self._chat.end.token]

    def action_text(self, action_tokens: Sequence[int]) -> str:
        """Text of a sampled action without its end token, decoded at once."""
        stopped = bool(action_tokens) and action_tokens[-1] in self.stop_token_ids
        return self.decode(action_tokens[:-1] if stopped else action_tokens)

    def answer_wrapper(self) -> tuple[int, ...]:
        """Ids between a state and a gold answer (TRACE): a closed empty thought where the model thinks, <answer>."""
        thinks = self._tokenizer.token_to_id("<think>") is not None
        return self.encode("<think>\n\n</think>\n\n<answer>" if thinks else "<answer>")

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. No special token is added, and none is recognised in the text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included. Ids the tokenizer does not know are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _message_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        return message_pieces(self._chat, messages, wrap_tool_results=self._tool_format == "qwen")

    def _ids(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, Special):
                ids.append(self._special_ids[piece.token])
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return tuple(ids)

    def _required_id(self, token: str, chat_format: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ModelError(
                f"rollout.chat_format={chat_format} needs the token {token!r}, which the tokenizer lacks; "
                f"choose another of {', '.join(CHAT_FORMATS)} or another model"
            )
        return token_id


def load_renderer(model_path: str, chat_format: ChatFormatName, tool_format: ToolFormatName) -> Renderer:
    """The renderer of a model directory in Hugging Face form (tokenizer.json and config.json).

    Raises ModelError where a file is missing, unreadable, or the chat format does not fit.
    """
    root = Path(model_path)
    try:
        config: Mapping[str, object] = json.loads((root / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"no tokenizer.json and config.json that can be read in {model_path}: {error}") from error
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= 0:
        raise ModelError(f"{root / 'config.json'} has vocab_size={vocab_size!r}; it must be a positive number")
    return Renderer(tokenizer, vocab_size, chat_format, tool_format)


def _fingerprint(tokenizer: Tokenizer, vocab_size: int, chat_format: str, tool_format: str) -> str:
    digest = hashlib.sha256(tokenizer.to_str().encode())
    digest.update(f"|{vocab_size}|{chat_format}|{tool_format}|{TEMPLATE_VERSION}".encode())
    return digest.hexdigest()[:16]
