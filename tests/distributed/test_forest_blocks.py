"""Attention over a forest in shared calls: every row sees its own path and nothing else, whatever the forest."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.data.queries import PackedQueries
from megatrl.mcore.forest import (
    QUERY_BLOCK,
    attention_blocks,
    dense_attention,
    forest_attention,
    forest_nodes,
    visibility,
)


def random_forest(rng: np.random.Generator, sizes: list[int]) -> PackedQueries:
    parents, prefixes, paths = [-1], [0], [sizes[0]]
    for node, size in enumerate(sizes[1:], start=1):
        parent = int(rng.integers(-1, node))
        prefix = 0 if parent < 0 else int(rng.integers(1, paths[parent] + 1))
        parents.append(parent)
        prefixes.append(prefix)
        paths.append(prefix + size)
    bounds = np.cumsum([0, *sizes])
    none = np.zeros(0, dtype=np.int64)
    return PackedQueries(
        tokens=rng.integers(0, 9, bounds[-1]),
        cu_seqlens=bounds,
        rows=none,
        targets=none,
        parents=np.array(parents),
        prefix_lengths=np.array(prefixes),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_shared_calls_equal_one_dense_mask(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 2, 3, 9, 40, 150, QUERY_BLOCK + 60], size=rng.integers(1, 14)).tolist()
    nodes, positions = forest_nodes(random_forest(rng, sizes))
    generator = torch.Generator().manual_seed(seed % 2**31)
    q, k, v = (torch.randn(len(positions), heads, 4, generator=generator) for heads in (2, 1, 1))
    blocks = attention_blocks(nodes, "cpu")
    torch.testing.assert_close(
        forest_attention(q, k, v, blocks, scale=0.5), dense_attention(q, k, v, nodes, scale=0.5), rtol=1e-5, atol=1e-5
    )
    # Blocks follow each other, cover every row once, and no mask exceeds 512 rows.
    assert [block.begin for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == len(positions)
    assert all(block.end - block.begin <= QUERY_BLOCK for block in blocks if block.is_seen is not None or block.before)


def test_branches_share_the_call_of_their_trunk_or_of_each_other_and_trunks_do_not_pay_for_it() -> None:
    def forest(trunk: int, turns: int, branch: int) -> PackedQueries:
        sizes = [trunk] + [branch] * turns
        none = np.zeros(0, dtype=np.int64)
        return PackedQueries(
            tokens=np.zeros(sum(sizes), dtype=np.int64),
            cu_seqlens=np.cumsum([0, *sizes]),
            rows=none,
            targets=none,
            parents=np.array([-1] + [0] * turns),
            prefix_lengths=np.array([0] + [trunk * (turn + 1) // turns for turn in range(turns)]),
        )

    short, _ = forest_nodes(forest(180, 8, 9))
    assert len(attention_blocks(short, "cpu")) == 1
    nodes, positions = forest_nodes(forest(20_000, 60, 8))
    first, *others = attention_blocks(nodes, "cpu")
    assert (first.begin, first.end, first.is_seen) == (0, 20_000, None)
    assert len(others) <= 4  # for 60 branches
    computed = sum((block.end - block.begin) * sum(b - a for a, b in block.keys) for block in others)
    needed = int(positions[20_000:].sum())
    assert computed < 3 * needed
    assert visibility(short, 252).sum() < 252 * 252
