import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.data.queries import PackedQueries
from megatrl.errors import ScoringError
from megatrl.scoring.branches import Branch, TrunkQuery, answer_branch, answer_logprobs, plan_candidates


def test_an_answer_branch_never_feeds_its_last_token_and_asks_for_every_answer_token():
    branch = answer_branch((7, 8), (1, 2, 3))
    assert branch.tokens == (7, 8, 1, 2)
    assert branch.targets == ((), (), (1,), (2,), (3,))


def test_a_one_token_answer_is_read_from_the_last_wrapper_token():
    branch = answer_branch((7,), (1,))
    assert branch.tokens == (7,)
    assert branch.targets == ((), (1,))


def test_answer_logprobs_skip_the_wrapper():
    assert answer_logprobs((7, 8), ((), (), (-1.0,), (-2.0,))) == (-1.0, -2.0)


def test_an_empty_answer_is_refused():
    with pytest.raises(ScoringError, match="empty answer"):
        answer_branch((7,), ())


def test_a_branch_without_targets_or_with_too_many_positions_is_refused():
    with pytest.raises(ScoringError, match="no target"):
        Branch(tokens=(1, 2), targets=((), ()))
    with pytest.raises(ScoringError, match="at most 2"):
        Branch(tokens=(1,), targets=((1,), (2,), (3,)))


def test_a_trunk_query_refuses_boundaries_outside_the_trunk_and_targets_without_a_row():
    branch = Branch(tokens=(), targets=((1,),))
    with pytest.raises(ScoringError, match="outside the trunk"):
        TrunkQuery(trunk=(1, 2), boundaries=(3,), branches=((branch,),))
    with pytest.raises(ScoringError, match="no row"):
        TrunkQuery(trunk=(1, 2), boundaries=(0,), branches=((branch,),))


def test_candidates_that_differ_in_one_token_cost_one_branch_with_several_targets():
    plan = plan_candidates((9,), [(1, 2, 10), (1, 2, 11), (1, 2, 12)])
    assert plan.branches == (Branch(tokens=(9, 1, 2), targets=((), (1,), (2,), (10, 11, 12))),)
    results = [((), (-0.1,), (-0.2,), (-1.0, -2.0, -3.0))]
    assert plan.read(results) == ((-0.1, -0.2, -1.0), (-0.1, -0.2, -2.0), (-0.1, -0.2, -3.0))


def test_candidates_of_several_tokens_share_their_common_prefix_rows():
    # Numbers 1}, 12}, 13} and 2} spelled in digits; 0 is the closing brace.
    plan = plan_candidates((9,), [(1, 0), (1, 2, 0), (1, 3, 0), (2, 0)])
    assert {branch.tokens for branch in plan.branches} == {(9, 1, 2), (9, 1, 3), (9, 2)}
    wanted = [
        (branch.tokens[:position], target)
        for branch in plan.branches
        for position, targets in enumerate(branch.targets)
        for target in targets
    ]
    assert len(wanted) == len(set(wanted))  # no question is asked twice
    assert set(wanted) == {
        ((9,), 1), ((9,), 2), ((9, 1), 0), ((9, 1), 2), ((9, 1), 3), ((9, 1, 2), 0), ((9, 1, 3), 0), ((9, 2), 0)
    }  # fmt: skip


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12))
def test_reading_a_plan_gives_each_candidate_its_own_tokens(candidates):
    plan = plan_candidates((9, 9), candidates)
    contexts = {candidate[:length] for candidate in candidates for length in range(len(candidate))}
    leaves = [c for c in contexts if not any(other[: len(c)] == c != other for other in contexts)]
    assert len(plan.branches) == len(leaves)  # fewer cannot hold every context
    code = {}  # an invented, distinct value for each (context, token)

    def value(context, token):
        return code.setdefault((context, token), -float(len(code) + 1))

    results = [
        tuple(tuple(value(branch.tokens[:j], t) for t in targets) for j, targets in enumerate(branch.targets))
        for branch in plan.branches
    ]
    read = plan.read(results)
    for candidate, logprobs in zip(candidates, read, strict=True):
        lead = (9, 9)
        assert logprobs == tuple(code[lead + candidate[:i], t] for i, t in enumerate(candidate))


def test_unwanted_tails_cost_nothing():
    full = plan_candidates((9,), [(0, 5, 6), (1, 7)])
    short = plan_candidates((9,), [(0, 5, 6), (1, 7)], is_wanted=lambda candidate, token: candidate == 1 or token == 0)
    assert len(full.branches) == 2
    assert short.branches == (Branch(tokens=(9, 1), targets=((), (0, 1), (7,))),)
    assert [len(place) for place in short.places] == [1, 2]


def test_packed_queries_refuse_rows_outside_and_empty_sequences():
    import numpy as np

    def packed(cu_seqlens, rows):
        return PackedQueries(
            tokens=np.arange(4), cu_seqlens=np.asarray(cu_seqlens), rows=np.asarray(rows), targets=np.asarray(rows)
        )

    assert packed([0, 4], [3]).num_questions == 1
    with pytest.raises(ScoringError, match="rows must lie"):
        packed([0, 4], [4])
    with pytest.raises(ScoringError, match="empty sequence"):
        packed([0, 2, 2, 4], [0])
