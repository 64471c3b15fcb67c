"""Packed queries over data-parallel ranks: alike shares, and answers back in their order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """The same number of queries for each rank: they run the same collectives, also where experts cross ranks."""

    shares: tuple[tuple[PackedQueries, ...], ...]  # [rank][microbatch]
    indices: tuple[tuple[int, ...], ...]  # [rank][microbatch] into the original order; -1 is filling

    def merge(self, results: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
        """Results [rank][microbatch] in the original order, those of the filling dropped."""
        placed = {
            index: result
            for indices, answers in zip(self.indices, results, strict=True)
            for index, result in zip(indices, answers, strict=True)
            if index >= 0
        }
        return [placed[index] for index in range(len(placed))]


_FILLING = PackedQueries(
    tokens=np.zeros(1, dtype=np.int64),
    cu_seqlens=np.asarray([0, 1], dtype=np.int64),
    rows=np.zeros(1, dtype=np.int64),
    targets=np.zeros(1, dtype=np.int64),
)


def share_over_ranks(queries: Sequence[PackedQueries], num_ranks: int) -> RankShares:
    """Deals queries by falling size, there and back, and fills short shares with one-token queries."""
    order = sorted(range(len(queries)), key=lambda index: -len(queries[index].tokens))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, index in enumerate(order):
        lap, seat = divmod(place, num_ranks)
        dealt[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(index)
    most = max(len(share) for share in dealt)
    indices = tuple(tuple(share + [-1] * (most - len(share))) for share in dealt)
    return RankShares(
        shares=tuple(tuple(queries[i] if i >= 0 else _FILLING for i in share) for share in indices), indices=indices
    )
