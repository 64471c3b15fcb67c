"""Where each Hugging Face tensor ends up in SGLang's fused parameters.

Names and layouts: sglang 0.5.23, models/{qwen3,qwen3_moe,llama}.py and layers/moe/fused_moe_triton/layer.py.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrl.config.model_shape import ModelShape
from megatrl.weight_sync.expected import ExpectedTensors

Slice = Literal["rows", "columns", "key_value", "vocabulary", "whole"]

_VOCABULARY_PADDING = 64
_EXPERT = re.compile(r"^(?P<prefix>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")
_FUSED: dict[str, tuple[str, int, int]] = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPiece:
    fused_name: str
    index: int
    """Position of this piece among the `num_pieces` that follow one another in the fused tensor's memory."""
    num_pieces: int
    slice: Slice
    """What one tensor-parallel rank of the server keeps of the piece."""


def fused_pieces(model: ModelShape, expected: ExpectedTensors) -> dict[str, FusedPiece]:
    """Hugging Face name -> its place in the server's fused tensors, for every expected name. One pass, no searching."""
    return {name: _place(name, model.num_experts) for name in expected}


def _place(name: str, num_experts: int) -> FusedPiece:
    expert = _EXPERT.match(name)
    if expert is not None:
        number, part = int(expert["expert"]), expert["part"]
        if part == "down_proj":
            return FusedPiece(
                fused_name=expert["prefix"] + "w2_weight", index=number, num_pieces=num_experts, slice="columns"
            )
        index = 2 * number + (part == "up_proj")
        return FusedPiece(
            fused_name=expert["prefix"] + "w13_weight", index=index, num_pieces=2 * num_experts, slice="rows"
        )
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return FusedPiece(fused_name=name, index=0, num_pieces=1, slice="vocabulary")
    module = name.split(".")[-2]
    if module in _FUSED:
        fused, index, num_pieces = _FUSED[module]
        kept: Slice = "key_value" if module in ("k_proj", "v_proj") else "rows"
        return FusedPiece(fused_name=name.replace(module, fused), index=index, num_pieces=num_pieces, slice=kept)
    kept = "columns" if module in ("o_proj", "down_proj") else "whole"
    return FusedPiece(fused_name=name, index=0, num_pieces=1, slice=kept)


def rank_slice(piece: FusedPiece, tensor: Tensor, *, rank: int, size: int, num_kv_heads: int) -> Tensor:
    """What rank `rank` of `size` tensor-parallel server ranks holds of a full tensor.

    Rows and columns are cut evenly. With fewer key/value heads than ranks a head is repeated. The vocabulary
    is padded with zero rows to a multiple of 64 (of 64 x size where 64-padding does not divide) and then cut.
    """
    if piece.slice == "whole":
        return tensor
    if piece.slice == "columns":
        return tensor.chunk(size, dim=1)[rank]
    if piece.slice == "rows":
        return tensor.chunk(size, dim=0)[rank]
    if piece.slice == "key_value":
        if num_kv_heads >= size:
            return tensor.chunk(size, dim=0)[rank]
        return tensor.chunk(num_kv_heads, dim=0)[rank // (size // num_kv_heads)]
    padding = _padded_vocabulary(tensor.shape[0], size) - tensor.shape[0]
    if padding:
        tensor = torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
    return tensor.chunk(size, dim=0)[rank]


def _padded_vocabulary(rows: int, size: int) -> int:
    step = _VOCABULARY_PADDING
    if -(-rows // step) * step % size:
        step *= size
    return -(-rows // step) * step


def rank_bytes(piece: FusedPiece, shape: tuple[int, ...], itemsize: int, *, size: int, num_kv_heads: int) -> int:
    """Bytes of `rank_slice` without making it; the same on every rank."""
    num_elements = math.prod(shape)
    if piece.slice == "whole":
        return num_elements * itemsize
    if piece.slice == "vocabulary":
        num_elements = _padded_vocabulary(shape[0], size) * math.prod(shape[1:])
    parts = min(size, num_kv_heads) if piece.slice == "key_value" else size
    return num_elements // parts * itemsize
