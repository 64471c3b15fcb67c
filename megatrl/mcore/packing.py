"""Packed sequences as device tensors, padded at the tail to what sequence parallelism needs."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatrl.data.samples import IntArray
from megatrl.mcore.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Input of one forward pass: [1, T'] tokens, T' >= T a multiple of `layout.length_multiple`."""

    tokens: Tensor  # [1, T'] int64; the tail beyond `length` is padding
    sequences: PackedSeqParams
    length: int  # T, real tokens


def pack_tokens(tokens: IntArray, cu_seqlens: IntArray, layout: Layout) -> PackedTokens:
    """Returns the pack on the device; padding forms a sequence of its own that nothing attends to."""
    length = len(tokens)
    padding = -length % layout.length_multiple
    if length + padding == 0:
        padding = layout.length_multiple  # an empty pack still takes part in every collective
    padded = np.concatenate([tokens, np.zeros(padding, dtype=np.int64)])
    lengths = np.diff(cu_seqlens)
    lengths = lengths[lengths > 0]
    if padding:
        lengths = np.append(lengths, padding)
    device = layout.torch_device
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
    longest = int(lengths.max())
    sequences = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return PackedTokens(
        tokens=torch.from_numpy(padded).to(device).unsqueeze(0),
        sequences=sequences,
        length=length,
    )
