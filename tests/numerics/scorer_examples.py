"""Frozen scorers and the meter's labels, on worked examples.

A check takes the module under test, so that test_mutations can hand it a broken copy. Names in
parentheses are the examples' names in docs/algorithms.md.
"""

import torch

from megatrl.algorithms.trace import mean_answer_logprob, state_values
from megatrl.scoring.branches import Branch, TrunkQuery
from megatrl.scoring.independent import IndependentBackend
from tests.fakes.frozen_models import PrefixRunner, make_trajectory
from tests.numerics.tolerance import close


def labels_of_a_success_and_a_failure(module):
    """(D1)"""
    turns = [((9,) * 30, (1,) * n) for n in (120, 80, 200, 50)]

    def labels(reward):
        examples = module.trajectory_labels(make_trajectory(turns, reward=reward))
        return [(example.label.completion, example.label.tokens_to_go) for example in examples]

    assert labels(1.0) == [(True, 450), (True, 330), (True, 250), (True, 50)]
    assert labels(0.0) == [(False, None)] * 4


# (T9) log-probability of each answer token after the state of that length
ANSWER, WRAPPER = (71, 72, 73), (60, 61)
TABLE = {1: (-6, -2, -1), 3: (-3, -0.5, -0.1), 5: (-0.9, -0.2, 0)}


def table_logprob(prefix, target):
    state_length, answer_start = prefix.index(WRAPPER[0]), prefix.index(WRAPPER[1]) + 1
    assert prefix[answer_start:] == ANSWER[: len(prefix) - answer_start]
    return float(TABLE[state_length][ANSWER.index(target)])


def every_answer_token_is_scored_at_every_state(module):
    """(T9) through the scoring engine: a wrapper, three answer tokens, three states."""
    branch = module.answer_branch(WRAPPER, ANSWER)
    query = TrunkQuery(trunk=(1, 2, 3, 4, 5), boundaries=tuple(TABLE), branches=((branch,),) * 3)
    (result,) = IndependentBackend(runner=PrefixRunner(table_logprob), microbatch_tokens=64).score([query])
    logprobs = [mean_answer_logprob(module.answer_logprobs(WRAPPER, branches[0])) for branches in result]
    close(logprobs, [-3, -1.2, -0.366667])
    close(state_values(logprobs, 0.1), [0, 0.869038, 1.893542])


def tokens_of_independent_scoring(module):
    """(T11) n_0 = 1000, 700 tokens a turn, 16 of a branch: 1,342,976 at T = 60 and 12,080 at T = 4."""
    branch = Branch(tokens=(0,) * 16, targets=((),) * 16 + ((1,),))
    for num_turns, expected in ((60, 1_342_976), (4, 12_080)):
        boundaries = tuple(1000 + 700 * k for k in range(num_turns + 1))
        query = TrunkQuery(trunk=(5,) * boundaries[-1], boundaries=boundaries, branches=((branch,),) * len(boundaries))
        plan = module.plan_queries([query], microbatch_tokens=49_152)
        assert (plan.num_tokens, plan.num_sequences) == (expected, num_turns + 1)


def the_reference_scores_with_its_own_weights(module):
    """Values come from the weights of the start, not of the policy that has moved since."""
    policy = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        policy.weight.copy_(torch.tensor([[1.0, 2.0]]))
        reference = module.FrozenWeights.capture([policy])
        policy.weight.copy_(torch.tensor([[5.0, 7.0]]))
        x = torch.tensor([1.0, 10.0], dtype=torch.float64)
        with reference.swapped_into([policy]):
            close(policy(x), [21])
        close(policy(x), [75])
