"""Packed sequences as device tensors: padded, and cut over context ranks."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatrl.config.plan import sequence_multiple
from megatrl.data.samples import IntArray
from megatrl.mcore.layout import Layout

PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Input of one forward pass on this context rank.

    T = real tokens of the pack, T' >= T the padded length, a multiple of `layout.length_multiple`. Each
    sequence is padded at its end, where causal attention lets no real token see it; the tail of the pack
    is a sequence of its own. This rank has T' / CP rows.
    """

    tokens: Tensor  # [1, T' / CP] int64
    sequences: PackedSeqParams  # bounds of the padded sequences, over all context ranks
    length: int  # T
    row_of: Tensor  # [T] int64: which of this rank's rows holds a token, PADDING where another rank has it

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which of `positions` (token indices in the pack, [N]) are this rank's, and their rows.

        Both [M]: places in `positions`, and rows of this rank's hidden states after a gather over SP.
        """
        rows = self.row_of[positions]
        places = (rows != PADDING).nonzero()[:, 0]
        return places, rows[places]


def pack_tokens(tokens: IntArray, cu_seqlens: IntArray, layout: Layout) -> PackedTokens:
    """Returns this context rank's part of the pack, on the device."""
    padded_bounds, index = _padded(cu_seqlens, layout)
    mine = index[_rows_of_context_rank(padded_bounds, layout)]
    is_real = mine != PADDING
    local = np.zeros(len(mine), dtype=np.int64)
    local[is_real] = tokens[mine[is_real]]
    row_of = np.full(len(tokens), PADDING, dtype=np.int64)
    row_of[mine[is_real]] = np.flatnonzero(is_real)
    device = layout.torch_device
    bounds = torch.tensor(padded_bounds, dtype=torch.int32, device=device)
    longest = int(np.diff(padded_bounds).max())
    return PackedTokens(
        tokens=torch.from_numpy(local).to(device).unsqueeze(0),
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        length=len(tokens),
        row_of=torch.from_numpy(row_of).to(device),
    )


def local_rows(cu_seqlens: IntArray, layout: Layout) -> IntArray:
    """Returns for each row that this rank's layers see its token index in the pack, PADDING (-1) for padding.

    [T' / CP], and under sequence parallelism this tensor rank's consecutive share of it, [T' / CP / TP].
    """
    padded_bounds, index = _padded(cu_seqlens, layout)
    rows = index[_rows_of_context_rank(padded_bounds, layout)]
    if not layout.sequence_parallel:
        return rows
    share = len(rows) // layout.tensor
    return rows[layout.tensor_rank * share : (layout.tensor_rank + 1) * share]


def zigzag(length: int, *, context: int, rank: int) -> IntArray:
    """Returns the positions of a padded sequence that a context rank holds: chunk `rank` of 2 CP, and its mirror."""
    if context == 1:
        return np.arange(length)
    half = length // (2 * context)
    front, back = rank * half, (2 * context - 1 - rank) * half
    return np.concatenate([np.arange(front, front + half), np.arange(back, back + half)])


def _padded(cu_seqlens: IntArray, layout: Layout) -> tuple[IntArray, IntArray]:
    """Returns the bounds of the padded sequences, and [T'] the token index at each place or PADDING."""
    multiple = sequence_multiple(layout.context)
    lengths = [int(n) for n in np.diff(cu_seqlens) if n > 0]
    padded = [-(-n // multiple) * multiple for n in lengths]
    tail = -sum(padded) % layout.length_multiple
    if sum(padded) + tail == 0:
        tail = layout.length_multiple  # an empty pack still takes part in every collective
    bounds = np.cumsum([0, *padded, *([tail] if tail else [])])
    index = np.full(int(bounds[-1]), PADDING, dtype=np.int64)
    begin = 0
    for place, length in zip(bounds, lengths, strict=False):
        index[place : place + length] = np.arange(begin, begin + length)
        begin += length
    return bounds, index


def _rows_of_context_rank(padded_bounds: IntArray, layout: Layout) -> IntArray:
    """Returns the places in the padded pack that this context rank holds, sequence by sequence."""
    if layout.context == 1:
        return np.arange(int(padded_bounds[-1]))
    return np.concatenate(
        [
            begin + zigzag(int(end - begin), context=layout.context, rank=layout.context_rank)
            for begin, end in pairwise(padded_bounds)
        ]
    )
