"""Forests of token sequences in one forward pass: nodes see their own path and nothing else, and share what is common.

A node continues a prefix of its parent's path. Its rows have the positions that they have on the path, so
every row computes what it would compute in a sequence of its own, and the shared prefix is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import IntArray
from megatrl.errors import LayoutError
from megatrl.mcore.layout import Layout
from megatrl.mcore.packing import PackedTokens

QUERY_BLOCK = 512
"""Rows attended at once where a mask is needed: bounds the mask at 512 x path, never path x path."""
SPARE_PAIRS = 16384
"""(row, key) pairs that a call may compute for nothing to save another call: about what a call costs on a CPU."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ForestNode:
    """Rows [begin, end) of the pack; `prefix` are the rows of earlier nodes that they continue, in order."""

    begin: int
    end: int
    prefix: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows [begin, end) of the pack that are attended in one call, to the rows of `keys` in order, their own last."""

    begin: int
    end: int
    keys: tuple[Span, ...]
    before: int
    """Keys before the block's first row; without a mask, row i sees `before + i + 1` keys."""
    is_seen: Tensor | None = None  # [rows, keys] bool


@dataclass
class ForestSequences(PackedSeqParams):
    """What every layer gets: for the rotary embedding one sequence of all rows, for attention the blocks."""

    blocks: tuple[AttentionBlock, ...] = ()
    positions: Tensor | None = None  # [T'] int64, of each row on its path


def pack_forest(queries: PackedQueries, layout: Layout) -> PackedTokens:
    """Returns the forest on the device, padded at its tail to what sequence parallelism needs.

    Raises LayoutError under context parallelism, which cuts sequences where a forest cannot be cut.
    """
    if layout.context > 1:
        raise LayoutError(
            f"scoring.backend is tree but actor.layout.context={layout.context}; the tree backend needs context 1. "
            "Set scoring.backend: independent, or context to 1"
        )
    nodes, positions = forest_nodes(queries)
    padding = -len(queries.tokens) % layout.length_multiple
    if padding:
        nodes = (*nodes, ForestNode(len(queries.tokens), len(queries.tokens) + padding, ()))
        positions = np.concatenate([positions, np.arange(padding)])
    device = layout.torch_device
    tokens = torch.from_numpy(np.concatenate([queries.tokens, np.zeros(padding, dtype=np.int64)])).to(device)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
    reach = int(positions.max()) + 1
    return PackedTokens(
        tokens=tokens.unsqueeze(0),
        sequences=ForestSequences(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=reach,
            max_seqlen_kv=reach,
            blocks=attention_blocks(nodes, device),
            positions=torch.from_numpy(positions).to(device),
        ),
        length=len(queries.tokens),
        row_of=torch.arange(len(queries.tokens), device=device),
    )


def forest_nodes(queries: PackedQueries) -> tuple[tuple[ForestNode, ...], IntArray]:
    """Returns the nodes with the rows that each of them sees, and [T] the position of every row on its path."""
    assert queries.parents is not None, "plain packs have no nodes"
    assert queries.prefix_lengths is not None, "PackedQueries checks it"
    nodes: list[ForestNode] = []
    positions = np.empty(len(queries.tokens), dtype=np.int64)
    bounds = pairwise(queries.cu_seqlens.tolist())
    for (begin, end), parent, prefix in zip(
        bounds, queries.parents.tolist(), queries.prefix_lengths.tolist(), strict=True
    ):
        seen = _first(nodes[parent], prefix) if parent >= 0 else ()
        nodes.append(ForestNode(begin, end, seen))
        positions[begin:end] = np.arange(prefix, prefix + end - begin)
    return tuple(nodes), positions


def _first(node: ForestNode, length: int) -> tuple[Span, ...]:
    """Returns the first `length` rows of a node's path as spans."""
    spans: list[Span] = []
    for begin, end in (*node.prefix, (node.begin, node.end)):
        if length <= 0:
            break
        taken = min(length, end - begin)
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], begin + taken)
        else:
            spans.append((begin, begin + taken))
        length -= taken
    return tuple(spans)


def attention_blocks(nodes: Sequence[ForestNode], device: torch.device | str) -> tuple[AttentionBlock, ...]:
    """Returns the calls that attention over a forest takes, made once for all layers.

    Neighbours share a call (a trajectory's end and its branches, the branches after a long trunk) while that computes
    less than about twice what they need; a long node is cut into blocks of QUERY_BLOCK rows.
    """
    blocks: list[AttentionBlock] = []
    cluster: list[ForestNode] = []
    outside: tuple[Span, ...] = ()  # what the cluster sees of the rows before it
    area = 0  # pairs that the cluster's call computes
    for node in nodes:
        rows = node.end - node.begin
        path = rows + _num_keys(node.prefix)
        if cluster and node.end - cluster[0].begin <= QUERY_BLOCK:
            begin = cluster[0].begin
            seen = _merged([*outside, *((a, min(b, begin)) for a, b in node.prefix if a < begin)])
            together = (node.end - begin) * (_num_keys(seen) + node.end - begin)
            if together - area <= 2 * rows * path + SPARE_PAIRS:
                cluster.append(node)
                outside, area = seen, together
                continue
        blocks += _blocks_of(cluster, outside, device)
        cluster, outside, area = [node], _merged(node.prefix), rows * path
    return tuple(blocks + _blocks_of(cluster, outside, device))


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the rows of all spans in order, each once."""
    merged: list[Span] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return tuple(merged)


def _num_keys(keys: Sequence[Span]) -> int:
    return sum(b - a for a, b in keys)


def _blocks_of(
    cluster: Sequence[ForestNode], outside: tuple[Span, ...], device: torch.device | str
) -> list[AttentionBlock]:
    """Returns the calls for neighbours that see the rows `outside` before them."""
    if not cluster:
        return []
    begin, end = cluster[0].begin, cluster[-1].end
    if len(cluster) > 1:
        keys = (*outside, (begin, end))
        starts = np.asarray([a for a, _ in keys])
        columns = np.cumsum([0, *(b - a for a, b in keys)])
        is_seen = np.zeros((end - begin, columns[-1]), dtype=np.bool_)
        for node in cluster:
            rows = slice(node.begin - begin, node.end - begin)
            for a, b in node.prefix:
                for low, high in ((a, min(b, begin)), (max(a, begin), b)):  # a span may run into the cluster
                    if low < high:
                        which = int(np.searchsorted(starts, low, side="right")) - 1
                        first = columns[which] + low - starts[which]
                        is_seen[rows, first : first + high - low] = True
            own = columns[-2] + node.begin - begin
            is_seen[rows, own : own + node.end - node.begin] = np.tri(node.end - node.begin, dtype=np.bool_)
        return [AttentionBlock(begin, end, keys, int(columns[-2]), torch.from_numpy(is_seen).to(device))]
    (node,) = cluster
    if not node.prefix:
        return [AttentionBlock(begin, end, ((begin, end),), 0)]
    before = _num_keys(node.prefix)
    return [
        AttentionBlock(
            first,
            min(first + QUERY_BLOCK, end),
            (*node.prefix, (begin, min(first + QUERY_BLOCK, end))),
            before + first - begin,
        )
        for first in range(begin, end, QUERY_BLOCK)
    ]


@cache
def forest_capable(core_attention: type) -> type:
    """Returns a core attention for Megatron's module spec that takes forests, too; plain packs go on as before."""

    class ForestCapable(core_attention):  # type: ignore[misc]
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
            sequences = options.get("packed_seq_params")
            if not isinstance(sequences, ForestSequences):
                return super().forward(query, key, value, *arguments, **options)
            return forest_attention(query, key, value, sequences.blocks, scale=query.shape[-1] ** -0.5).flatten(1)

    return ForestCapable


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[AttentionBlock], *, scale: float
) -> Tensor:
    """Causal attention along every node's path: query [T, heads, d], key and value [T, groups, d] -> [T, heads, d].

    Nothing of size [T, T] is made: rows meet the keys of their own path, and those of their neighbours in the block.
    """
    output = torch.empty_like(query)
    for block in blocks:
        rows = slice(block.begin, block.end)
        keys, values = _rows(key, block.keys), _rows(value, block.keys)
        is_seen = block.is_seen
        if is_seen is None and block.before:
            places = torch.arange(block.before, block.before + block.end - block.begin, device=query.device)
            is_seen = torch.arange(len(keys), device=query.device)[None, :] <= places[:, None]
        output[rows] = _attend(query[rows], keys, values, is_seen, scale)
    return output


def _rows(x: Tensor, spans: Sequence[Span]) -> Tensor:
    parts = [x[begin:end] for begin, end in spans]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[ForestNode], *, scale: float) -> Tensor:
    """The same with one mask over the whole pack, [T, T]: simple, for small packs and as a check."""
    return _attend(query, key, value, visibility(nodes, len(query)).to(query.device), scale)


def visibility(nodes: Sequence[ForestNode], num_rows: int) -> Tensor:
    """Returns the dense mask of a forest, [T, T] bool: whether row i sees row j."""
    is_seen = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for node in nodes:
        own = slice(node.begin, node.end)
        for begin, end in node.prefix:
            is_seen[own, begin:end] = True
        is_seen[own, own] = torch.ones(node.end - node.begin, node.end - node.begin, dtype=torch.bool).tril()
    return is_seen


def _attend(query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor | None, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, length, d]
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=is_seen, is_causal=is_seen is None, scale=scale, enable_gqa=True
    )
    return output.squeeze(0).transpose(0, 1)
