"""Activation bytes: what one forward pass keeps for its backward pass, tensor by tensor.

`local` kernels are Megatron's own modules with megatrl's attention and norms, as on CPU: there the counts are tested
against what autograd really saves. `fused` kernels are Transformer Engine's, as on CUDA: counted from their sources.
Letters: T = tokens of a pack on this rank, S = T over the tensor ranks under sequence parallelism (else T),
N = token copies that this rank's experts receive when routing is even, b = bytes of one element of the model.
"""

from dataclasses import dataclass
from typing import Literal

from megatrl.config.engines import Precision
from megatrl.config.estimate.degrees import Degrees
from megatrl.config.estimate.states import ITEM_BYTES
from megatrl.config.model_shape import ModelShape

Kernels = Literal["local", "fused"]
Recompute = Literal["none", "full", "selective"]

_FP32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTokens:
    """Tokens of one microbatch as one rank sees them."""

    whole: int  # T
    cut: int  # S
    routed: int  # N; 0 in a dense model
    longest: int  # the longest sequence of the pack


def pass_tokens(shape: ModelShape, degrees: Degrees, num_tokens: int, longest: int | None = None) -> PassTokens:
    """Returns the shares of a pack of `num_tokens`; routing is assumed to be even."""
    whole = -(-num_tokens // degrees.context)
    cut = -(-whole // degrees.tensor) if degrees.sequence_parallel else whole
    routed = cut * shape.num_experts_per_token * degrees.expert_tensor if shape.is_mixture else 0
    return PassTokens(whole=whole, cut=cut, routed=routed, longest=longest or num_tokens)


def layer_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, *, kernels: Kernels,
    recompute: Recompute,
) -> int:  # fmt: skip
    """Returns what one transformer layer keeps. With full recomputation that is its input alone."""
    if recompute == "full":
        return tokens.cut * shape.hidden_size * ITEM_BYTES[precision]
    is_core_kept = recompute == "none"
    if kernels == "local":
        return _local_attention(shape, degrees, precision, tokens, is_core_kept) + _local_feed_forward(
            shape, degrees, precision, tokens
        )
    return _fused_attention(shape, degrees, precision, tokens, is_core_kept) + _fused_feed_forward(
        shape, degrees, precision, tokens
    )


def ends_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, *, is_first: bool, is_last: bool,
    kernels: Kernels, recompute: Recompute,
) -> int:  # fmt: skip
    """Returns what the first stage keeps for the embedding and the last one for the final norm."""
    # Ids; under tensor parallelism also a mask of those that lie in other ranks' vocabulary.
    total = tokens.whole * (_INT64 + (degrees.tensor > 1)) if is_first else 0
    if is_last:
        total += _norm(tokens.cut, shape.hidden_size, ITEM_BYTES[precision], kernels)
    if recompute == "full":
        total += tokens.longest * shape.head_dim * _FP32  # one table of rotary angles for all layers
    return total


def _norm(num_rows: int, width: int, item: int, kernels: Kernels) -> int:
    """A norm over `width`, without its output: torch keeps an fp32 input, 1 / rms and the normalised input."""
    return num_rows * (2 * _FP32 * width + _FP32) if kernels == "local" else num_rows * (item * width + _FP32)


def _heads(shape: ModelShape, degrees: Degrees) -> tuple[int, int]:
    """Query heads and key groups of one tensor rank."""
    return shape.num_heads // degrees.tensor, max(1, shape.num_kv_heads // degrees.tensor)


def _fused_rows(shape: ModelShape, degrees: Degrees) -> int:
    """Rows of the fused projection on a rank; with fewer KV groups than tensor ranks all of it is gathered on each."""
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return rows if shape.num_kv_heads < degrees.tensor else rows // degrees.tensor


def _local_attention(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, is_core_kept: bool
) -> int:
    item, width = ITEM_BYTES[precision], shape.head_dim
    queries, keys = _heads(shape, degrees)
    total = _norm(tokens.cut, shape.hidden_size, item, "local") + tokens.cut * shape.hidden_size * item
    token = _fused_rows(shape, degrees) * item  # the fused projection; values stay a view of it
    if shape.has_qk_norm:
        token += _norm(queries, width, item, "local")
        if precision == "fp32" and keys == 1:
            token -= queries * width * _FP32  # one group's queries are a view of the fused projection as well
        # In fp32 the keys' norm reads the fused projection itself; in bf16 a copy of it.
        token += keys * (_FP32 * width + _FP32) + (keys * width * _FP32 if precision == "bf16" else 0)
    token += 4 * width * item  # sines and cosines, for queries and for keys
    token += (queries + keys) * width * item  # rotated
    if is_core_kept:
        token += queries * (width * item + _FP32)  # output and log normalizer of each sequence
    else:
        total += 4  # the kind of mask, which the checkpoint keeps as a tensor
    token += queries * width * item  # the outputs joined: input of the projection
    return total + tokens.whole * token


def _local_feed_forward(shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens) -> int:
    item = ITEM_BYTES[precision]
    total = _norm(tokens.cut, shape.hidden_size, item, "local") + tokens.cut * shape.hidden_size * item
    if not shape.is_mixture:  # gate and up, up + offset, silu(gate), their product
        return total + tokens.whole * 5 * shape.ffn_size // degrees.tensor * item
    chosen, experts = shape.num_experts_per_token, shape.num_experts
    total += tokens.cut * (chosen * (_INT64 + _FP32) + experts * (1 + _FP32))  # top-k, its softmax; map and weights
    total += tokens.cut * chosen * _INT64  # where each copy came from
    inner = shape.expert_ffn_size // degrees.expert_tensor
    # Input; gate and up, up + offset, silu(gate), product, weighted product; the weight.
    return total + tokens.routed * (shape.hidden_size * item + 6 * inner * item + _FP32)


def _fused_attention(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, is_core_kept: bool
) -> int:
    item, width = ITEM_BYTES[precision], shape.head_dim
    queries, keys = _heads(shape, degrees)
    total = _norm(tokens.cut, shape.hidden_size, item, "fused") + tokens.cut * shape.hidden_size * item
    token = _fused_rows(shape, degrees) * item  # the fused projection; values and the keys' norm read it
    if shape.has_qk_norm:
        token += _norm(queries, width, item, "fused") + keys * _FP32
    token += (queries + keys) * width * item  # rotated
    token += queries * width * item  # output, which is the input of the projection as well
    if is_core_kept:
        token += queries * _FP32  # log normalizer
    return total + tokens.whole * token


def _fused_feed_forward(shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens) -> int:
    item = ITEM_BYTES[precision]
    total = _norm(tokens.cut, shape.hidden_size, item, "fused") + tokens.cut * shape.hidden_size * item
    if not shape.is_mixture:
        return total + tokens.whole * 3 * shape.ffn_size // degrees.tensor * item
    chosen, experts = shape.num_experts_per_token, shape.num_experts
    total += tokens.cut * (chosen * (_INT64 + _FP32) + experts * (1 + _FP32))
    total += tokens.cut * (2 * experts + 1) * _FP32  # row map of the fused permutation
    inner = shape.expert_ffn_size // degrees.expert_tensor
    return total + tokens.routed * (shape.hidden_size * item + 3 * inner * item + 2 * _FP32)


def chunks_in_flight(degrees: Degrees, stage: int, num_microbatches: int) -> int:
    """Returns how many forward passes of a model chunk wait for their backward pass on a stage at most.

    1F1B: the stages after this one, and the pass at hand. Interleaved: Megatron's warm-up of
    2 (stages after) + (chunks - 1) x stages passes, and the one at hand.
    """
    after = degrees.pipeline - stage - 1
    if degrees.virtual == 1:
        return min(num_microbatches, after + 1)
    warm_up = 2 * after + (degrees.virtual - 1) * degrees.pipeline
    return min(num_microbatches * degrees.virtual, warm_up + 1)


def saved_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, *, kernels: Kernels,
    recompute: Recompute, stage: int, num_microbatches: int = 1,
) -> int:  # fmt: skip
    """Returns the activations that a rank of a stage keeps at the worst moment of the schedule."""
    layer = layer_bytes(shape, degrees, precision, tokens, kernels=kernels, recompute=recompute)
    ends = ends_bytes(
        shape, degrees, precision, tokens, is_first=stage == 0, is_last=stage == degrees.pipeline - 1, kernels=kernels,
        recompute=recompute,
    )  # fmt: skip
    in_flight = chunks_in_flight(degrees, stage, num_microbatches)
    largest_chunk = max(len(chunk) for chunk in degrees.chunks[stage])
    return in_flight * largest_chunk * layer + -(-in_flight // degrees.virtual) * ends


def handed_on_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, *, stage: int, num_microbatches: int
) -> int:
    """Returns what the schedule itself keeps of the passes in flight: inputs of the stage, and its outputs.

    In fp32 an input is what the first norm keeps anyway; in bf16 the norm keeps a copy.
    """
    if degrees.pipeline == 1:
        return 0
    hidden = tokens.cut * shape.hidden_size * ITEM_BYTES[precision]
    return chunks_in_flight(degrees, stage, num_microbatches) * hidden * (2 if precision == "bf16" else 1)


def working_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, *, kernels: Kernels,
    recompute: Recompute,
) -> int:  # fmt: skip
    """Returns the bytes that live only inside a layer: what is recomputed, and gradients of its largest tensors."""
    item = ITEM_BYTES[precision]
    queries, keys = _heads(shape, degrees)
    widest = max(
        tokens.whole * (queries + 2 * keys) * shape.head_dim,
        tokens.cut * shape.hidden_size,
        0 if shape.is_mixture else tokens.whole * 2 * shape.ffn_size // degrees.tensor,
        tokens.routed * max(shape.hidden_size, 2 * shape.expert_ffn_size // degrees.expert_tensor),
    )
    again = 0
    if recompute == "full":
        again = layer_bytes(shape, degrees, precision, tokens, kernels=kernels, recompute="none")
    return again + 3 * widest * item
