import math

import numpy as np
import pytest

from megatrl.config.scoring import ScoringBackend
from megatrl.errors import ScoringError
from megatrl.scoring.backends import branch_backend
from megatrl.scoring.reference_probe import ReferenceProbe
from tests.fakes.frozen_models import PrefixRunner, WordCodec, make_group, make_trajectory
from tests.unit.test_tree_backend import mixed

CODEC = WordCodec(["task", "look", "see", "red", "blue", "green", "1", "2", "3", "<end>"], wrapper="<answer>")
TASK, LOOK, RED, BLUE, END = (CODEC.encode(w)[0] for w in ("task", "look", "red", "blue", "<end>"))


def probe(logprob, *, kind: ScoringBackend = "independent", **options):
    runner = PrefixRunner(logprob)
    backend = branch_backend(kind, runner=runner, microbatch_tokens=64)
    return ReferenceProbe(codec=CODEC, backend=backend, **{"max_sequence_tokens": 64, **options}), runner


def constant(prefix, target):
    return -1.0


def episode(gold=("red",), **options):
    turns = [((TASK,), (LOOK, END)), ((BLUE,), (LOOK, END)), ((RED,), (RED, END))]
    return make_trajectory(turns, gold_answers=gold, **options)


def test_hand_table_of_token_logprobs_gives_the_mean_at_each_state():
    # Worked example T9: three states, a gold answer of three tokens.
    table = {1: (-6, -2, -1), 4: (-3, -0.5, -0.1), 7: (-0.9, -0.2, 0)}
    gold = CODEC.encode("1 2 3")

    def logprob(prefix, target):
        wrapper = prefix.index(CODEC.answer_wrapper()[0])
        position = len(prefix) - wrapper - 1
        assert target == gold[position]
        assert prefix[wrapper + 1 :] == gold[:position]
        return float(table[wrapper][position])

    scorer, _ = probe(logprob)
    answers, _ = scorer.score([make_group(episode(gold=("1 2 3",)))])
    (score,) = answers.values()
    assert score.logprobs == pytest.approx((-3, -1.2, -0.366667), abs=1e-6)
    assert score.skipped == ""


def test_there_is_one_value_for_each_turn_and_one_for_a_trailing_observation():
    scorer, _ = probe(lambda prefix, target: -float(prefix.index(CODEC.answer_wrapper()[0])))
    with_trailing = episode(trailing=(BLUE, BLUE))
    (score,) = scorer.score([make_group(with_trailing)])[0].values()
    assert score.logprobs == (-1.0, -4.0, -7.0, -11.0)


def test_a_new_segment_restarts_the_prefix():
    scorer, _ = probe(lambda prefix, target: -float(prefix.index(CODEC.answer_wrapper()[0])))
    (score,) = scorer.score([make_group(episode(segment_starts=[2]))])[0].values()
    assert score.logprobs == (-1.0, -4.0, -1.0)


def test_the_wrapper_is_conditioned_on_but_not_scored():
    scorer, runner = probe(constant)
    scorer.score([make_group(episode())])
    wrapper = CODEC.answer_wrapper()[0]
    targets = {int(t) for call in runner.calls for q in call for t in q.targets}
    rows = {int(q.tokens[r]) for call in runner.calls for q in call for r in q.rows}
    assert targets == {RED}
    assert rows == {wrapper}


@pytest.mark.parametrize(
    "gold, reason",
    [((), "missing_gold"), (("",), "empty_gold"), (("  ",), "empty_gold"), (("<end>",), "empty_gold")],
)
def test_a_missing_or_empty_gold_answer_is_skipped_and_counted(gold, reason):
    scorer, _ = probe(constant)
    answers, metrics = scorer.score([make_group(episode(gold=gold), episode(index=1))])
    first, second = answers.values()
    assert (first.logprobs, first.skipped) == ((), reason)
    assert second.logprobs == (-1.0,) * 3
    assert metrics[f"probe/skipped_{reason}"] == 0.5


def test_one_empty_alias_does_not_spoil_the_others():
    scorer, _ = probe(constant, use_aliases=True)
    (score,) = scorer.score([make_group(episode(gold=("", "red")))])[0].values()
    assert score.logprobs == (-1.0,) * 3


@pytest.mark.parametrize("limit, is_scored", [(9, True), (8, False)])
def test_a_prefix_that_would_not_fit_with_its_answer_is_never_cut(limit, is_scored):
    # The longest state has 7 tokens, the wrapper 1, the gold 1.
    scorer, runner = probe(constant, max_sequence_tokens=limit)
    answers, metrics = scorer.score([make_group(episode())])
    (score,) = answers.values()
    assert score.skipped == ("" if is_scored else "overlong")
    assert len(score.logprobs) == (3 if is_scored else 0)
    assert (runner.num_sequences > 0) == is_scored
    assert metrics["probe/skipped_overlong"] == (0.0 if is_scored else 1.0)


def test_trajectories_without_an_outcome_are_left_out():
    scorer, runner = probe(constant)
    assert scorer.score([make_group(episode(reward=None))])[0] == {}
    assert runner.num_sequences == 0


def test_a_certain_gold_answer_is_exactly_zero_and_a_hopeless_one_stays_finite():
    certain, _ = probe(lambda prefix, target: 0.0)
    assert next(iter(certain.score([make_group(episode())])[0].values())).logprobs == (0.0,) * 3
    hopeless, _ = probe(lambda prefix, target: -1e4)
    assert next(iter(hopeless.score([make_group(episode())])[0].values())).logprobs == (-1e4,) * 3


@pytest.mark.parametrize("value", [1e-5, math.nan, math.inf, -math.inf])
def test_a_positive_or_non_finite_value_stops_the_run(value):
    scorer, _ = probe(lambda prefix, target: value)
    with pytest.raises(ScoringError):
        scorer.score([make_group(episode())])


def test_the_first_state_is_scored_once_for_all_rollouts_and_later_steps():
    scorer, runner = probe(constant)
    scorer.score([make_group(episode(), episode(index=1))])
    assert runner.num_sequences == 3  # the two rollouts are the same: all states merge
    again, _ = scorer.score([make_group(episode())])
    assert runner.num_sequences == 3 + 2
    assert next(iter(again.values())).logprobs == (-1.0,) * 3
    scorer.score([make_group(episode(gold=("blue",)))])
    assert runner.num_sequences == 3 + 2 + 3  # another answer is another question


def test_a_cached_first_state_keeps_its_own_value():
    values = iter([-1.0, -2.0, -3.0, -4.0, -5.0])
    scorer, _ = probe(lambda prefix, target: next(values))
    first = next(iter(scorer.score([make_group(episode())])[0].values())).logprobs
    second = next(iter(scorer.score([make_group(episode())])[0].values())).logprobs
    assert second[0] == first[0]
    assert not set(second[1:]) & set(first)


def test_the_best_alias_counts_at_each_state_on_its_own():
    def logprob(prefix, target):
        is_first = prefix.index(CODEC.answer_wrapper()[0]) == 1
        return -1.0 if (target == RED) == is_first else -2.0

    gold = ("red", "blue")
    canonical, _ = probe(logprob)
    best, _ = probe(logprob, use_aliases=True)
    assert next(iter(canonical.score([make_group(episode(gold=gold))])[0].values())).logprobs == (-1, -2, -2)
    assert next(iter(best.score([make_group(episode(gold=gold))])[0].values())).logprobs == (-1, -1, -1)


def test_the_share_of_trajectories_that_read_the_gold_answer_is_reported():
    scorer, _ = probe(constant)
    _, metrics = scorer.score(
        [make_group(episode(), episode(index=1, gold=("green",)), episode(index=2, gold=("task",)))]
    )
    assert metrics["probe/gold_in_observation"] == pytest.approx(1 / 3)
    assert metrics["probe/gold_in_prompt"] == pytest.approx(1 / 3)


def test_reference_logprobs_are_aligned_to_the_tokens_and_zero_outside_actions():
    scorer, runner = probe(lambda prefix, target: -float(len(prefix)), policy_temperature=0.7)
    trajectory = episode(segment_starts=[2])
    (arrays,) = scorer.reference_logprobs([make_group(trajectory)]).values()
    # Segment 0 is task look <end> blue look <end>; the logprob of token t is read after t tokens.
    assert arrays[0].tolist() == [0, -1, -2, 0, -4, -5]
    assert arrays[1].tolist() == [0, -1, -2]
    assert runner.temperatures == {0.7}


def test_reference_logprobs_ask_for_the_tokens_that_were_sampled():
    def logprob(prefix, target):
        # A model that is certain that `look` follows task or blue, and <end> follows look or red.
        wanted = {TASK: LOOK, BLUE: LOOK, LOOK: END, RED: RED}.get(prefix[-1])
        return -0.25 if target == wanted else -9.0

    scorer, _ = probe(logprob)
    (arrays,) = scorer.reference_logprobs([make_group(episode())]).values()
    # task | look <end> | blue | look <end> | red | red <end>: only the last <end> after red is a surprise.
    assert np.asarray(arrays[0]).tolist() == [0, -0.25, -0.25, 0, -0.25, -0.25, 0, -0.25, -9.0]


def group_of_four(gold=("red",)):
    """A common prompt of two tokens, then tokens of each member's own; the last one reads nothing at its end."""
    prompt = CODEC.encode("task look")
    own = [CODEC.encode(word)[0] for word in ("red", "blue", "green", "1")]
    return make_group(
        *(
            make_trajectory(
                [(prompt, (token, END)), ((LOOK, token), (token, LOOK, END))],
                index=index,
                gold_answers=gold,
                trailing=(BLUE,) if index < 3 else (),
            )
            for index, token in enumerate(own)
        )
    )


def test_a_group_feeds_its_prompt_once_and_each_trajectory_once_for_answers_and_policy_tokens():
    scorer, runner = probe(mixed, kind="tree", reads_policy=True)
    group = group_of_four()
    answers, _ = scorer.score([group])
    ((packed,),) = runner.calls
    prompt = [TASK, LOOK]
    assert packed.parents is not None
    roots = [node for node, parent in enumerate(packed.parents) if parent == -1]
    assert [packed.tokens[packed.cu_seqlens[n] : packed.cu_seqlens[n] + 2].tolist() for n in roots] == [prompt]
    # 2 of the prompt; of each member 2 + 2 + 3 tokens of its own and 1 behind them, the last member without its very
    # last token, which nobody reads on from; the wrapper after the prompt once, at 2 + 1 further states of each.
    assert len(packed.tokens) == 2 + 3 * 8 + 6 + 1 + 3 * 2 + 1
    assert all(len(score.logprobs) == 2 + (index < 3) for index, score in enumerate(answers.values()))


def test_the_policys_tokens_come_with_the_answers_and_the_second_call_is_free():
    together, runner = probe(mixed, kind="tree", reads_policy=True, policy_temperature=0.7)
    apart, other = probe(mixed, kind="independent", policy_temperature=0.7)
    group = make_group(*group_of_four().trajectories, episode(index=4, gold=()), episode(index=5, segment_starts=[2]))
    assert together.score([group])[0] == apart.score([group])[0]
    assert runner.temperatures == {1.0, 0.7}
    first, second = together.reference_logprobs([group]), apart.reference_logprobs([group])
    assert len(runner.calls) == 1
    assert len(other.calls) == 2
    assert first.keys() == second.keys() == {trajectory.id for trajectory in group.trajectories}
    for arrays, expected in zip(first.values(), second.values(), strict=True):
        assert [a.tolist() for a in arrays] == [a.tolist() for a in expected]


def test_what_was_read_for_one_batch_is_never_given_for_another():
    scorer, runner = probe(mixed, kind="tree", reads_policy=True)
    scorer.score([group_of_four()])
    scorer.reference_logprobs([group_of_four(gold=("blue",))])  # equal ids, other objects
    assert len(runner.calls) == 2
    scorer.reference_logprobs([group_of_four()])
    assert len(runner.calls) == 3


def test_first_states_are_remembered_for_one_model_only():
    first, runner = probe(constant)
    first.score([make_group(episode())])
    second, other = probe(lambda prefix, target: -2.0)
    answers, _ = second.score([make_group(episode())])
    assert next(iter(answers.values())).logprobs == (-2.0,) * 3
    assert runner.num_sequences == other.num_sequences == 3


def test_wrapper_and_gold_ids_are_the_same_at_every_state():
    asked = set()

    def logprob(prefix, target):
        wrapper = prefix.index(CODEC.answer_wrapper()[0])
        asked.add((prefix[wrapper:], target))
        return -1.0

    scorer, _ = probe(logprob)
    scorer.score([make_group(episode(gold=("1 2",)))])
    wrapper, one, two = *CODEC.answer_wrapper(), *CODEC.encode("1 2")
    assert asked == {((wrapper,), one), ((wrapper, one), two)}
