"""Queries dealt to data-parallel ranks come back in their order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatrl.data.queries import PackedQueries
from megatrl.orchestration.sharing import share_over_ranks


def query(length: int) -> PackedQueries:
    return PackedQueries(
        tokens=np.full(length, length),
        cu_seqlens=np.array([0, length]),
        rows=np.array([length - 1]),
        targets=np.array([0]),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 4))
def test_every_query_is_answered_once_and_all_ranks_run_the_same_number(lengths, num_ranks):
    split = share_over_ranks([query(length) for length in lengths], num_ranks)
    assert len({len(share) for share in split.shares}) == 1
    answers = [[np.array([len(q.tokens)]) for q in share] for share in split.shares]
    assert [int(a[0]) for a in split.merge(answers)] == lengths
