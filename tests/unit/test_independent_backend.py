import math

import numpy as np
import pytest

from megatrl.errors import ScoringError
from megatrl.scoring.branches import Branch, TrunkQuery, answer_branch
from megatrl.scoring.independent import IndependentBackend, plan_queries, unpack
from tests.fakes.frozen_models import PrefixRunner

# p(next | previous) by hand: rows are the previous token.
BIGRAM = np.log(np.asarray([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.6, 0.3, 0.1]]))


def bigram(prefix, target):
    return float(BIGRAM[prefix[-1], target])


def backend(logprob=bigram, microbatch_tokens=16):
    return IndependentBackend(runner=PrefixRunner(logprob), microbatch_tokens=microbatch_tokens)


@pytest.mark.parametrize(
    "gold, expected",
    [
        # After the prefix (0, 1): p(2|1)
        ((2,), [0.25]),
        # p(2|1) p(0|2) p(1|0)
        ((2, 0, 1), [0.25, 0.6, 0.2]),
    ],
)
def test_a_gold_token_is_scored_by_the_row_of_the_token_before_it(gold, expected):
    query = TrunkQuery(trunk=(0, 1, 1, 2), boundaries=(2,), branches=((answer_branch((), gold),),))
    ((result,),) = backend().score([query])[0]
    assert [position[0] for position in result] == pytest.approx([math.log(p) for p in expected])


def test_the_first_gold_token_after_a_wrapper_follows_the_last_wrapper_token():
    query = TrunkQuery(trunk=(0, 1), boundaries=(2,), branches=((answer_branch((0, 2), (0,)),),))
    ((result,),) = backend().score([query])[0]
    assert result[:2] == ((), ())
    assert result[2][0] == pytest.approx(math.log(0.6))  # p(0|2); p(0|0) and p(0|1) would be 0.1 and 0.5


def test_each_boundary_sees_exactly_its_own_prefix():
    seen = []

    def spy(prefix, target):
        seen.append((prefix, target))
        return -float(len(prefix))

    query = TrunkQuery(
        trunk=(5, 6, 7, 8), boundaries=(1, 3, 4), branches=tuple((answer_branch((9,), (1, 2)),) for _ in range(3))
    )
    result = backend(spy).score([query])[0]
    assert set(seen) == {
        (prefix, target)
        for trunk in ((5,), (5, 6, 7), (5, 6, 7, 8))
        for prefix, target in (((*trunk, 9), 1), ((*trunk, 9, 1), 2))
    }
    assert [branches[0][1:] for branches in result] == [((-2.0,), (-3.0,)), ((-4.0,), (-5.0,)), ((-5.0,), (-6.0,))]


def test_several_targets_share_one_row():
    branch = Branch(tokens=(1,), targets=((), (0, 1, 2)))
    query = TrunkQuery(trunk=(0,), boundaries=(1,), branches=((branch,),))
    plan = plan_queries([query], microbatch_tokens=8)
    assert plan.packed[0].rows.tolist() == [1, 1, 1]
    assert backend().score([query])[0][0][0][1] == pytest.approx(np.log([0.5, 0.25, 0.25]).tolist())


def test_identical_sequences_are_run_once_across_branches_and_queries():
    first = Branch(tokens=(1,), targets=((2,), (0,)))
    second = Branch(tokens=(1,), targets=((), (0, 2)))
    queries = [TrunkQuery(trunk=(0, 2), boundaries=(2,), branches=((first, second),)) for _ in range(3)]
    plan = plan_queries(queries, microbatch_tokens=100)
    assert plan.num_sequences == 1
    assert plan.num_tokens == 3
    assert sorted(zip(plan.packed[0].rows.tolist(), plan.packed[0].targets.tolist(), strict=True)) == [
        (1, 2), (2, 0), (2, 2)
    ]  # fmt: skip
    results = backend().score(queries)
    assert results[0] == results[1] == results[2]
    assert results[0][0][1][1] == pytest.approx(np.log([0.5, 0.25]).tolist())


def test_packs_stay_within_the_budget_and_a_longer_sequence_gets_its_own():
    branch = answer_branch((), (1,))
    queries = [TrunkQuery(trunk=tuple([n] * n), boundaries=(n,), branches=((branch,),)) for n in (20, 3, 3, 4, 5)]
    plan = plan_queries(queries, microbatch_tokens=8)
    assert [np.diff(p.cu_seqlens).tolist() for p in plan.packed] == [[20], [5], [4, 3]]


def test_no_queries_means_no_call():
    runner = PrefixRunner(bigram)
    assert IndependentBackend(runner=runner, microbatch_tokens=8).score([]) == ()
    assert runner.calls == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e-3])
def test_a_value_that_is_no_logprob_is_refused(value):
    query = TrunkQuery(trunk=(0, 1), boundaries=(2,), branches=((answer_branch((), (1,)),),))
    with pytest.raises(ScoringError, match="unusable logprobs"):
        backend(lambda prefix, target: value).score([query])


def test_short_results_are_refused():
    query = TrunkQuery(trunk=(0, 1), boundaries=(2,), branches=((answer_branch((), (1,)),),))
    plan = plan_queries([query], microbatch_tokens=8)
    with pytest.raises(ScoringError, match="0 of 1"):
        unpack([query], plan, [])
    with pytest.raises(ScoringError, match="1 questions"):
        unpack([query], plan, [np.zeros(2)])
