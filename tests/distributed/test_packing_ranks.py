"""Which token each rank's rows hold, for every degree of context and tensor parallelism."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatrl.mcore.layout import Layout
from megatrl.mcore.packing import PADDING, local_rows, pack_tokens

ALONE = Layout(
    world_size=1, tensor=1, pipeline=1, expert=1, expert_tensor=1, data=1, sequence_parallel=False, device="cpu",
    rank=0, tensor_rank=0, pipeline_rank=0, expert_rank=0, data_rank=0,
)  # fmt: skip
LENGTHS = [(n,) for n in range(1, 41)] + [(1, 1, 1), (3, 40, 1, 17), (2, 16, 0, 5), ()]


def ranks(context: int, tensor: int) -> list[Layout]:
    cut = replace(ALONE, context=context, tensor=tensor, sequence_parallel=tensor > 1)
    return [
        replace(cut, context_rank=context_rank, tensor_rank=tensor_rank)
        for context_rank in range(context)
        for tensor_rank in range(tensor)
    ]


@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_every_token_is_in_one_row_of_one_rank_and_ranks_have_equally_many(context: int, tensor: int) -> None:
    for lengths in LENGTHS:
        bounds = np.cumsum([0, *lengths]).astype(np.int64)
        rows = [local_rows(bounds, layout) for layout in ranks(context, tensor)]
        assert len({len(each) for each in rows}) == 1
        assert len(rows[0]) > 0, "an empty pack still takes part"
        held = np.concatenate(rows)
        assert sorted(held[held != PADDING]) == list(range(sum(lengths)))


@pytest.mark.parametrize("context", [1, 2, 4, 8])
def test_tokens_bounds_and_the_map_back_agree_with_the_rows(context: int) -> None:
    rng = np.random.default_rng(0)
    for lengths in LENGTHS:
        bounds = np.cumsum([0, *lengths]).astype(np.int64)
        tokens = rng.integers(1, 99, sum(lengths))
        padded_lengths = [n for n in lengths if n > 0]
        for layout in ranks(context, 1):
            pack = pack_tokens(tokens, bounds, layout)
            rows = local_rows(bounds, layout)
            expected = np.where(rows == PADDING, 0, np.append(tokens, 0)[rows])
            assert pack.tokens[0].tolist() == expected.tolist()
            places, found = pack.owned(torch.arange(len(tokens)))
            assert rows[found.numpy()].tolist() == places.tolist()
            assert sorted(places.tolist()) == sorted(rows[rows != PADDING].tolist())
            padded = np.diff(pack.sequences.cu_seqlens_q.numpy())
            assert all(after >= before for before, after in zip(padded_lengths, padded, strict=False))
            assert pack.sequences.max_seqlen_q == padded.max()
            assert padded.sum() == context * len(rows)


def test_short_sequences_leave_some_context_ranks_with_padding_only() -> None:
    (only_token,) = [
        layout.context_rank for layout in ranks(8, 1) if (local_rows(np.array([0, 1]), layout) != PADDING).any()
    ]
    assert only_token == 0


def test_a_rank_holds_a_chunk_from_the_front_and_its_mirror_image_of_each_sequence() -> None:
    rows = [local_rows(np.array([0, 8, 11]), layout).tolist() for layout in ranks(2, 1)]
    assert rows == [[0, 1, 6, 7, 8, PADDING], [2, 3, 4, 5, 9, 10]]


def test_tensor_ranks_have_consecutive_shares_under_sequence_parallelism_only() -> None:
    parallel = [local_rows(np.array([0, 5]), layout).tolist() for layout in ranks(1, 2)]
    assert parallel == [[0, 1, 2], [3, 4, PADDING]]
    plain = replace(ALONE, tensor=2, tensor_rank=1)
    assert local_rows(np.array([0, 5]), plain).tolist() == [0, 1, 2, 3, 4]
