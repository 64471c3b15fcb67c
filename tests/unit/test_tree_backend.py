"""The tree backend against the independent one: the same answers, each prefix seen exactly, tokens shared."""

import random
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.data.queries import PackedQueries
from megatrl.errors import ScoringError
from megatrl.scoring.branches import Branch, TrunkQuery, answer_branch, plan_candidates
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.tree import TreeBackend, plan_forest
from tests.fakes.frozen_models import PrefixRunner


def mixed(prefix: tuple[int, ...], target: int) -> float:
    """A logprob that depends on every token of the prefix and its place."""
    return -float(zlib.crc32(repr((prefix, target)).encode()) % 100_003) / 1000


def random_query(rng: random.Random, *, prompt: tuple[int, ...] = ()) -> TrunkQuery:
    """Ragged trunk and branches, boundaries anywhere, the beginning and the end among them."""
    trunk = prompt + tuple(rng.randrange(4) for _ in range(rng.randrange(0 if prompt else 1, 14)))
    boundaries = sorted({rng.randrange(len(trunk) + 1) for _ in range(rng.randrange(1, 6))} | {len(trunk)})
    branches = []
    for boundary in boundaries:
        here = []
        for _ in range(rng.randrange(1, 4)):
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(0 if boundary else 1, 6)))
            targets = [tuple(rng.sample(range(9), rng.randrange(3))) for _ in range(len(tokens) + 1)]
            targets[0] = targets[0] if boundary else ()
            if not any(targets):
                targets[-1] = (1,)
            here.append(Branch(tokens=tokens, targets=tuple(targets)))
        branches.append(tuple(here))
    return TrunkQuery(trunk=trunk, boundaries=tuple(boundaries), branches=tuple(branches))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 200))
def test_it_answers_as_the_independent_backend_whatever_is_shared_and_however_it_is_packed(
    seed: int, microbatch_tokens: int
) -> None:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(6)))
    queries = [random_query(rng, prompt=prompt if rng.random() < 0.7 else ()) for _ in range(rng.randrange(1, 6))]
    tree = TreeBackend(runner=PrefixRunner(mixed), microbatch_tokens=microbatch_tokens)
    independent = IndependentBackend(runner=PrefixRunner(mixed), microbatch_tokens=microbatch_tokens)
    assert tree.score(queries) == independent.score(queries)


def test_one_trajectory_costs_its_own_tokens_and_its_branches() -> None:
    """Spec, section 4: n_0 = 1000, 700 tokens a turn, 16 of a branch: 43,976 tokens at 60 turns, 3,880 at 4."""
    branch = Branch(tokens=(0,) * 16, targets=((),) * 16 + ((1,),))
    for num_turns, expected in ((60, 43_976), (4, 3_880)):
        boundaries = tuple(1000 + 700 * k for k in range(num_turns + 1))
        query = TrunkQuery(trunk=(5,) * boundaries[-1], boundaries=boundaries, branches=((branch,),) * len(boundaries))
        plan = plan_forest([query], microbatch_tokens=49_152)
        assert (plan.num_tokens, plan.num_sequences, len(plan.packed)) == (expected, num_turns + 2, 1)


def test_the_prompt_of_a_group_is_laid_out_once() -> None:
    prompt = tuple(range(100, 140))
    answer = answer_branch((1, 2), (3, 4))
    queries = [
        TrunkQuery(trunk=(*prompt, *(member,) * 10), boundaries=(40, 50), branches=((answer,), (answer,)))
        for member in range(5)
    ]
    plan = plan_forest(queries, microbatch_tokens=1000)
    assert len(plan.packed) == 1
    # prompt + 5 x 10 own tokens + one answer after the prompt for all + 5 at the ends, 3 tokens fed of each
    assert plan.num_tokens == 40 + 50 + 3 + 15


def test_candidates_after_one_question_share_it() -> None:
    question, candidates = tuple(range(10, 30)), [(1, 2), (1, 3, 4), (5, 6)]
    plan = plan_candidates(question, candidates)
    query = TrunkQuery(trunk=(7, 8, 9), boundaries=(3,), branches=(plan.branches,))
    forest = plan_forest([query], microbatch_tokens=1000)
    assert forest.num_tokens == 3 + 20 + 3  # trunk, question, and the contexts (1), (1, 3) and (5)
    (results,) = TreeBackend(runner=PrefixRunner(mixed), microbatch_tokens=1000).score([query])
    prefix = (7, 8, 9, *question)
    expected = [tuple(mixed((*prefix, *c[:i]), c[i]) for i in range(len(c))) for c in candidates]
    assert list(plan.read(results[0])) == expected


def test_a_query_larger_than_a_microbatch_gets_its_own_and_no_query_is_cut() -> None:
    answer = answer_branch((), (1,))
    queries = [TrunkQuery(trunk=(i,) * n, boundaries=(n,), branches=((answer,),)) for i, n in enumerate((5, 50, 5, 5))]
    plan = plan_forest(queries, microbatch_tokens=12)
    assert [len(packed.tokens) for packed in plan.packed] == [5, 50, 10]


def test_nothing_to_ask_asks_nothing() -> None:
    runner = PrefixRunner(mixed)
    assert TreeBackend(runner=runner, microbatch_tokens=8).score([]) == ()
    empty = TrunkQuery(trunk=(1, 2), boundaries=(1,), branches=((),))
    assert TreeBackend(runner=runner, microbatch_tokens=8).score([empty]) == (((),),)
    assert runner.calls == []


@pytest.mark.parametrize(
    ("parents", "prefixes"), [([-1, 1], [0, 1]), ([-1, 0], [0, 4]), ([-1, 0], [0, 0]), ([-1, -1], [0, 2]), ([-1], [0])]
)
def test_a_node_without_the_prefix_it_names_is_refused(parents: list[int], prefixes: list[int]) -> None:
    with pytest.raises(ScoringError, match=r"node 1 continues|a forest of 2 nodes"):
        PackedQueries(
            tokens=np.arange(5),
            cu_seqlens=np.array([0, 3, 5]),
            rows=np.array([0]),
            targets=np.array([0]),
            parents=np.array(parents),
            prefix_lengths=np.array(prefixes),
        )
