"""Log-probabilities of given tokens from a server: nothing is sampled, a prompt is read.

Everything is asked at temperature 1. SGLang (0.5.23) ignores the sampling temperature for the tokens of a prompt,
other versions may apply it; at 1 both mean the same, so a caller that needs another temperature cannot use this.
"""

import math
from dataclasses import dataclass
from typing import Any

import orjson

from megatrl.errors import RolloutError, ServerRejectedError
from megatrl.rollout.replies import MAX_LOGPROB, AbortedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Asks for log p(input_ids[i] | input_ids[:i]) at i >= first, and for `others` at each of these positions."""

    input_ids: tuple[int, ...]
    first: int
    """1 <= first <= len(input_ids); the last means that nothing is wanted but the prompt in the server's cache."""
    others: tuple[int, ...] = ()
    deadline_s: float = 600.0  # over all attempts at this request
    routing_key: str = ""
    """Requests with the same key go to the same server while it lives, where their prefix is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Nats; W = len(input_ids) - first positions."""

    tokens: tuple[float, ...]  # [W], of the prompt's own tokens
    others: tuple[tuple[float, ...], ...]  # [W][len(request.others)]
    cached_tokens: int  # of the prompt, found in the prefix cache
    policy_version: int


def check_prompt(request: PromptRequest, vocab_size: int) -> None:
    """Raises ServerRejectedError for a request that must not be sent: an id outside the vocabulary kills a server."""
    if not 1 <= request.first <= len(request.input_ids):
        raise ServerRejectedError(
            f"a request was not sent: the first wanted position is {request.first} of {len(request.input_ids)} tokens; "
            "the token at position 0 has no prefix, and there must be one token"
        )
    for name in ("input_ids", "others"):
        ids = getattr(request, name)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ServerRejectedError(
                f"a request was not sent: {name} hold ids {min(ids)}..{max(ids)}, the model has 0 to {vocab_size - 1}"
            )


def prompt_body(request: PromptRequest, rid: str) -> bytes:
    """JSON of one request.

    `logprob_start_len` is one before the first wanted token: SGLang answers None for the token at that place, and
    takes no more than that many tokens from its cache.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": request.first - 1,
    }
    if request.others:
        body["token_ids_logprob"] = request.others
    return orjson.dumps(body)


def read_prompt_reply(body: bytes, request: PromptRequest, rid: str, vocab_size: int) -> PromptLogprobs:
    """The answer in a 200 reply. Raises RolloutError, naming what is wrong, for anything unusable."""
    try:
        meta = orjson.loads(body)["meta_info"]
        finish, entries = meta["finish_reason"]["type"], meta["input_token_logprobs"]
        others = meta["input_token_ids_logprobs"] if request.others else [None] * len(entries)
        version, cached = int(meta["weight_version"]), int(meta["cached_tokens"] or 0)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"unusable reply ({type(error).__name__}: {error}): {body[:300]!r}") from error
    if finish == "abort":
        raise AbortedError(f"the server aborted the request: {meta['finish_reason']}")
    if meta.get("id", rid) != rid:
        raise RolloutError(f"reply belongs to request {meta['id']}, expected {rid}")
    wanted = request.input_ids[request.first :]
    if len(entries) != len(wanted) + 1 or len(others) != len(entries) or entries[0][0] is not None:
        raise RolloutError(
            f"{len(wanted)} logprobs of the prompt and a leading None were expected, the reply holds {len(entries)} "
            f"entries ({len(others)} of other tokens), first {entries[:1]}; does this server count "
            "logprob_start_len differently?"
        )
    return PromptLogprobs(
        tokens=tuple(
            _logprob(entry, token, vocab_size, place)
            for place, (entry, token) in enumerate(zip(entries[1:], wanted, strict=True))
        ),
        others=tuple(_others(row, request.others, vocab_size, place) for place, row in enumerate(others[1:])),
        cached_tokens=cached,
        policy_version=version,
    )


def _others(row: Any, tokens: tuple[int, ...], vocab_size: int, place: int) -> tuple[float, ...]:
    if len(row or ()) != len(tokens):
        raise RolloutError(f"{len(tokens)} other tokens were asked at place {place}, the reply holds {len(row or ())}")
    return tuple(_logprob(entry, token, vocab_size, place) for entry, token in zip(row or (), tokens, strict=True))


def _logprob(entry: Any, token: int, vocab_size: int, place: int) -> float:
    logprob, seen = entry[0], entry[1]
    if seen != token and not (seen == 0 and token == vocab_size - 1):  # SGLang (0.5.23) names the very last id 0
        raise RolloutError(f"logprob {place} is of token {seen}, expected {token}")
    if not isinstance(logprob, float | int) or not math.isfinite(logprob) or logprob > MAX_LOGPROB:
        raise RolloutError(f"logprob {place} of token {token} is {logprob!r}; a logprob is finite and <= 0")
    return min(float(logprob), 0.0)
