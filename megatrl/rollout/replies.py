"""Bodies of SGLang's /generate: written from a SampleRequest, read into a Sample with every doubt raised."""

import base64
import binascii
import math
from typing import Any

import numpy as np
import orjson

from megatrl.config.model_shape import ModelShape
from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.trajectories import FinishReason
from megatrl.errors import RolloutError, ServerRejectedError
from megatrl.rollout.sampler import Sample, SampleRequest

MAX_LOGPROB = 1e-4
"""Rounding may lift the logprob of a certain token a little above 0."""


class AbortedError(RolloutError):
    """The server ended a request before its time (a pause, a shutdown)."""


def check_request(request: SampleRequest, vocab_size: int) -> None:
    """Raise ServerRejectedError for a request that must not be sent.

    An id outside the vocabulary kills a CPU server and reads foreign memory on a GPU.
    """
    ids = request.input_ids
    if not ids:
        raise ServerRejectedError("a request without input ids was not sent")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position, bad = next((p, i) for p, i in enumerate(ids) if not 0 <= i < vocab_size)
        raise ServerRejectedError(
            f"a request was not sent: input_ids[{position}] is {bad}, the model has ids 0 to {vocab_size - 1}"
        )
    if request.max_new_tokens < 1:
        raise ServerRejectedError(f"a request was not sent: max_new_tokens is {request.max_new_tokens}, at least 1")


def request_body(request: SampleRequest, rid: str, *, record_routing: bool = False) -> bytes:
    """JSON of one request. Only the sampled tokens' logprobs are asked for, no alternatives."""
    sampling = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": request.stop_token_ids,
        "sampling_seed": request.sampling_seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if request.pattern:
        sampling["regex"] = request.pattern
    body = {"rid": rid, "input_ids": request.input_ids, "sampling_params": sampling, "return_logprob": True}
    if record_routing:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.first_routed}
    return orjson.dumps(body)


def read_reply(
    body: bytes, request: SampleRequest, rid: str, vocab_size: int, *, routed_shape: ModelShape | None = None
) -> Sample:
    """The sample in a 200 reply. Raises RolloutError, naming what is wrong, for anything unusable.

    With `routed_shape` the reply has to hold the expert choices of that mixture model; a server that does
    not send them raises ServerRejectedError, since no further attempt would.
    """
    try:
        reply = orjson.loads(body)  # refuses NaN and Infinity, which are not JSON
        meta = reply["meta_info"]
        finish = meta["finish_reason"]["type"]
        output_ids = tuple(reply["output_ids"])
        entries = meta["output_token_logprobs"]
        version = str(meta["weight_version"])
        versions = {str(span["version"]) for span in meta.get("weight_versions") or ()}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RolloutError(f"unusable reply ({type(error).__name__}: {error}): {body[:300]!r}") from error
    if finish == "abort":
        raise AbortedError(f"the server aborted the request after {len(output_ids)} tokens: {meta['finish_reason']}")
    if meta.get("id", rid) != rid:
        raise RolloutError(f"reply belongs to request {meta['id']}, expected {rid}")
    if versions - {version}:
        raise RolloutError(f"one action was sampled under several weight versions: {sorted(versions | {version})}")
    _check_ids(output_ids, request, vocab_size)
    return Sample(
        output_ids=output_ids,
        logprobs=_logprobs(entries, output_ids),
        finish_reason=_finish_reason(finish),
        policy_version=_policy_version(version),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=None if routed_shape is None else _routed_experts(meta, request, len(output_ids), routed_shape),
    )


def _routed_experts(meta: Any, request: SampleRequest, num_outputs: int, shape: ModelShape) -> RoutedExperts:
    """SGLang's base64 of int32 [tokens, layers, top-k]: every position from `first_routed` but the very last."""
    text = meta.get("routed_experts")
    if text is None:
        raise ServerRejectedError(
            "the server did not send routed_experts; actor.router.replay needs a mixture model on an SGLang that was "
            "started with enable_return_routed_experts"
        )
    num_rows = len(request.input_ids) + num_outputs - 1 - request.first_routed
    layers, top_k = shape.num_layers, shape.num_experts_per_token
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, TypeError, ValueError) as error:
        raise RolloutError(f"routed_experts are not base64 of 32-bit numbers ({error})") from error
    if flat.size != num_rows * layers * top_k:
        raise RolloutError(
            f"routed_experts hold {flat.size} numbers; {num_rows} tokens x {layers} layers x {top_k} experts need "
            f"{num_rows * layers * top_k}"
        )
    experts = flat.reshape(num_rows, layers, top_k)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= shape.num_experts):
        raise RolloutError(
            f"routed_experts hold ids {int(flat.min())}..{int(flat.max())}; the model has experts 0 to "
            f"{shape.num_experts - 1}"
        )
    in_order = np.sort(experts, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise RolloutError(f"routed_experts name one expert twice for a token; each token has {top_k} different ones")
    return RoutedExperts.of(experts, num_experts=shape.num_experts)


def _check_ids(output_ids: tuple[Any, ...], request: SampleRequest, vocab_size: int) -> None:
    if not output_ids:
        raise RolloutError("reply holds no sampled token")
    if len(output_ids) > request.max_new_tokens:
        raise RolloutError(f"reply holds {len(output_ids)} tokens, max_new_tokens is {request.max_new_tokens}")
    for token in output_ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RolloutError(f"reply holds the token {token!r}; the model has ids 0 to {vocab_size - 1}")


def _logprobs(entries: Any, output_ids: tuple[int, ...]) -> tuple[float, ...]:
    if not isinstance(entries, list) or len(entries) != len(output_ids):
        seen = len(entries) if isinstance(entries, list) else entries
        raise RolloutError(f"reply holds {len(output_ids)} tokens but {seen} logprobs; one each is needed")
    logprobs: list[float] = []
    for position, (entry, token) in enumerate(zip(entries, output_ids, strict=True)):
        logprob, logprob_token = entry[0], entry[1]
        if logprob_token != token:
            raise RolloutError(f"logprob {position} is of token {logprob_token}, the token sampled there is {token}")
        if not isinstance(logprob, float | int) or not math.isfinite(logprob) or logprob > MAX_LOGPROB:
            raise RolloutError(f"logprob {position} of token {token} is {logprob!r}; a logprob is finite and <= 0")
        logprobs.append(float(logprob))
    return tuple(logprobs)


def _finish_reason(text: str) -> FinishReason:
    if text not in ("stop", "length"):
        raise RolloutError(f"finish_reason is {text!r}; expected stop or length")
    return FinishReason(text)


def _policy_version(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RolloutError(f"weight_version is {text!r}; megatrl names weights by number. Publish first") from None
