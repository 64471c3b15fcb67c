"""Forests of token sequences in one forward pass: nodes see their own path and nothing else, and share what is common.

A node continues a prefix of its parent's path. Its rows have the positions that they have on the path, so
every row computes what it would compute in a sequence of its own, and the shared prefix is computed once.
"""

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
"""Rows of a node attended at once where it continues a prefix: bounds the mask at 512 x path, never path x path."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ForestNode:
    """Rows [begin, end) of the pack; `prefix` are the rows of earlier nodes that they continue, in order."""

    begin: int
    end: int
    prefix: tuple[Span, ...]


@dataclass
class ForestSequences(PackedSeqParams):
    """What every layer gets: for the rotary embedding one sequence of all rows, for attention the nodes."""

    nodes: tuple[ForestNode, ...] = ()
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
            nodes=nodes,
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


@cache
def forest_capable(core_attention: type) -> type:
    """Returns a core attention for Megatron's module spec that takes forests, too; plain packs go on as before."""

    class ForestCapable(core_attention):  # type: ignore[misc]
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
            sequences = options.get("packed_seq_params")
            if not isinstance(sequences, ForestSequences):
                return super().forward(query, key, value, *arguments, **options)
            return forest_attention(query, key, value, sequences.nodes, scale=query.shape[-1] ** -0.5).flatten(1)

    return ForestCapable


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, nodes: tuple[ForestNode, ...], *, scale: float, is_dense: bool = False
) -> Tensor:
    """Causal attention along every node's path: query [T, heads, d], key and value [T, groups, d] -> [T, heads, d].

    Nothing of size [T, T] is made: a node's rows meet the keys of its own path, in blocks of QUERY_BLOCK rows.
    `is_dense` makes one mask over the whole pack instead, [T, T]: simple, for small packs and as a check.
    """
    if is_dense:
        return _attend(query, key, value, visibility(nodes, len(query)).to(query.device), scale)
    output = torch.empty_like(query)
    for node in nodes:
        if not node.prefix:
            rows = slice(node.begin, node.end)
            output[rows] = _attend(query[rows], key[rows], value[rows], None, scale)
            continue
        spans = (*node.prefix, (node.begin, node.end))
        keys, values = (torch.cat([x[a:b] for a, b in spans]) for x in (key, value))
        before = len(keys) - (node.end - node.begin)
        for first in range(node.begin, node.end, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, node.end)
            reach = before + last - node.begin
            places = torch.arange(before + first - node.begin, reach, device=query.device)
            is_seen = torch.arange(reach, device=query.device)[None, :] <= places[:, None]
            output[first:last] = _attend(query[first:last], keys[:reach], values[:reach], is_seen, scale)
    return output


def visibility(nodes: tuple[ForestNode, ...], num_rows: int) -> Tensor:
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
