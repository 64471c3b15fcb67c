"""Bytes around the vocabulary head: hidden states of the weighted positions and blocks of fp32 logits."""

from megatrl.config.engines import Precision
from megatrl.config.estimate.activations import PassTokens
from megatrl.config.estimate.degrees import Degrees
from megatrl.config.estimate.parameters import padded_vocab_size
from megatrl.config.estimate.states import ITEM_BYTES
from megatrl.config.model_shape import ModelShape

LOGIT_BLOCK_BYTES = 256 * 1024 * 1024
"""`mcore/logprobs.py` makes at most this many bytes of fp32 logits at once."""

_FORWARD_BLOCKS = 4  # logits, logits / temperature, their exponents, and one temporary
_BACKWARD_BLOCKS = 3  # probabilities, their gradient, and one temporary
_ENTROPY_BLOCKS = 2  # log-probabilities, and one temporary


def logit_bytes(
    shape: ModelShape, degrees: Degrees, precision: Precision, tokens: PassTokens, num_rows: int, *,
    with_gradient: bool, with_entropy: bool = False,
) -> int:  # fmt: skip
    """Returns the peak on the last stage for `num_rows` distinct weighted positions of a pack."""
    item, hidden = ITEM_BYTES[precision], shape.hidden_size
    rows_here = padded_vocab_size(shape, degrees.tensor) // degrees.tensor
    block_rows = min(num_rows, max(1, LOGIT_BLOCK_BYTES // (4 * rows_here)))
    blocks = _FORWARD_BLOCKS + (_ENTROPY_BLOCKS if with_entropy else 0)
    if with_gradient:
        blocks = max(blocks, _BACKWARD_BLOCKS + (_ENTROPY_BLOCKS if with_entropy else 0))
    total = block_rows * rows_here * (4 * blocks + item)
    total += num_rows * hidden * item  # the rows' hidden states
    if degrees.sequence_parallel:
        total += tokens.whole * hidden * item  # all rows, gathered from the tensor ranks
    if with_gradient:
        total += rows_here * hidden * item + num_rows * hidden * item  # gradients of the head and of the rows
    return total
