"""Sequences into microbatches of equal size on every rank: largest differencing, and LPT beside it.

Ranks wait for each other in every microbatch, so what a batch costs is the fullest rank of each:

    computed tokens = sum over microbatches m of num_ranks * max over ranks r of tokens(r, m)

Karmarkar, Karp: The differencing method of set partitioning (1982); the k-way form as in Korf (2009), Multi-way
number partitioning. LPT: Graham (1969).
"""

import heapq
from collections.abc import Sequence

import numpy as np

Bins = list[list[int]]
"""Indices of sequences, one list for each bin."""


def balanced_bins(
    lengths: Sequence[int], num_ranks: int, capacity: int, *, count_multiple: int = 1
) -> list[list[list[int]]]:
    """Returns bins[rank][microbatch] of indices into `lengths`, with few microbatches that fit `capacity` tokens.

    Every rank gets the same number of bins, a multiple of `count_multiple`; some may be empty. A sequence
    longer than `capacity` raises the limit of all bins to its own size. Of the two methods the one that
    computes fewer tokens is taken; equal input gives equal output.
    """
    limit = max([capacity, *lengths]) if lengths else capacity
    fewest = max(1, -(-sum(lengths) // (capacity * num_ranks)))
    count = -(-fewest // count_multiple) * count_multiple
    bins = longest_first(lengths, count * num_ranks)
    while _fullest(bins, lengths) > limit:
        count += count_multiple
        bins = longest_first(lengths, count * num_ranks)
    # Differencing sometimes fits where LPT does not; else it competes with LPT at the same count.
    fewer = (count - count_multiple) * num_ranks
    tries = [largest_differencing(lengths, num) for num in (fewer, count * num_ranks) if num >= fewest * num_ranks]
    for candidate in tries:
        if _fullest(candidate, lengths) <= limit and (
            len(candidate) < len(bins)
            or (len(candidate) == len(bins) and _cost(candidate, lengths, num_ranks) < _cost(bins, lengths, num_ranks))
        ):
            bins = candidate
    return _dealt(bins, lengths, num_ranks)


def longest_first(lengths: Sequence[int], num_bins: int) -> Bins:
    """LPT: each sequence, longest first, into the emptiest bin."""
    heap = [(0, b) for b in range(num_bins)]
    bins: Bins = [[] for _ in heap]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        filled, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (filled + lengths[i], b))
    return bins


def largest_differencing(lengths: Sequence[int], num_bins: int) -> Bins:
    """Karmarkar-Karp: the two partitions with the largest spread are merged, large sums onto small ones.

    Takes O(n k log k) for n sequences and k bins.
    """
    if not lengths:
        return [[] for _ in range(num_bins)]
    heap = []
    for order, (i, length) in enumerate(sorted(enumerate(lengths), key=lambda pair: (-pair[1], pair[0]))):
        sums = np.zeros(num_bins, dtype=np.int64)
        sums[0] = length  # sums fall from left to right in every partition
        heap.append((-int(sums[0] - sums[-1]), order, sums, [[i], *([] for _ in range(num_bins - 1))]))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        merged = sums + other_sums[::-1]
        falling = np.argsort(-merged, kind="stable")
        joined = [members[b] + other_members[num_bins - 1 - b] for b in falling.tolist()]
        merged = merged[falling]
        heapq.heappush(heap, (-int(merged[0] - merged[-1]), order, merged, joined))
        order += 1
    return heap[0][3]


def computed_tokens(
    bins: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], *, length_multiple: int = 1
) -> int:
    """Tokens that all ranks together spend time on, from bins[rank][microbatch].

    Each microbatch takes as long as its fullest rank, whose length is padded to `length_multiple`.
    """
    total = 0
    for microbatch in zip(*bins, strict=True):
        fullest = max(sum(lengths[i] for i in members) for members in microbatch)
        total += len(bins) * (-(-max(fullest, 1) // length_multiple) * length_multiple)
    return total


def _fullest(bins: Bins, lengths: Sequence[int]) -> int:
    return max(_sums(bins, lengths))


def _sums(bins: Bins, lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[i] for i in members) for members in bins]


def _cost(bins: Bins, lengths: Sequence[int], num_ranks: int) -> int:
    """Computed tokens of one rank when bins of like size meet: every `num_ranks`-th of the falling sums."""
    return sum(sorted(_sums(bins, lengths), reverse=True)[::num_ranks])


def _dealt(bins: Bins, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Bins of like size meet in one microbatch, the largest first.

    Within a microbatch, the bin with the most attention (sum of squared lengths) goes to the rank that has the
    least of it so far: that changes no token count.
    """
    sums = _sums(bins, lengths)
    squares = [sum(lengths[i] ** 2 for i in members) for members in bins]
    falling = sorted(range(len(bins)), key=lambda b: (-sums[b], -squares[b], bins[b]))
    attention = [0] * num_ranks
    dealt: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for first in range(0, len(falling), num_ranks):
        by_attention = sorted(falling[first : first + num_ranks], key=lambda b: (-squares[b], bins[b]))
        for rank, b in zip(sorted(range(num_ranks), key=lambda r: (attention[r], r)), by_attention, strict=True):
            dealt[rank].append(sorted(bins[b]))
            attention[rank] += squares[b]
    return dealt
