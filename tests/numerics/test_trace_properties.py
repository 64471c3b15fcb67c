"""TRACE's invariants on random answer logprobs, and its edge cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.algorithms import trace
from megatrl.errors import ScoringError
from tests.numerics.credit_examples import TRACE_DEFAULTS

logprob_lists = st.lists(st.floats(-50, 0), min_size=1, max_size=12)


@given(logprob_lists, st.floats(1e-4, 1.0))
def test_values_start_at_zero_and_differences_telescope(logprobs, eps):
    values = trace.state_values(logprobs, eps)
    deltas = trace.temporal_differences(logprobs, eps=eps)
    assert values[0] == 0
    assert np.isfinite(values).all()
    np.testing.assert_allclose(np.concatenate([[0.0], np.cumsum(deltas)]), values, atol=1e-9)


@given(logprob_lists, st.sampled_from(["log_ratio", "raw", "remaining_gap", "initial_gap"]))
def test_every_form_has_the_sign_of_the_change(logprobs, form):
    deltas = trace.temporal_differences(logprobs, eps=0.1, form=form)
    changes = np.diff(logprobs)
    clear = np.abs(changes) > 1e-9
    assert (np.sign(deltas[clear]) == np.sign(changes[clear])).all()


@given(logprob_lists, st.integers(0, 11))
def test_a_repeated_state_adds_zero_and_leaves_the_sum(logprobs, place):
    place = min(place, len(logprobs) - 1)
    longer = [*logprobs[: place + 1], *logprobs[place:]]
    deltas, more = (trace.temporal_differences(values, eps=0.1) for values in (logprobs, longer))
    assert more[place] == 0
    assert more.sum() == pytest.approx(deltas.sum(), abs=1e-9)


@given(logprob_lists)
def test_a_larger_eps_shrinks_every_value(logprobs):
    small, large = (np.abs(trace.state_values(logprobs, eps)) for eps in (0.01, 0.5))
    assert (large <= small + 1e-12).all()


@given(logprob_lists, st.integers(1, 6), st.floats(0.1, 1.0))
def test_window_credit_lies_within_its_window(logprobs, window, gamma):
    deltas = trace.temporal_differences(logprobs, eps=0.1)
    credit = trace.window_credit(deltas, window=window, gamma=gamma)
    for k, value in enumerate(credit):
        ahead = deltas[k : k + window]
        assert ahead.min() - 1e-9 <= value <= ahead.max() + 1e-9
    np.testing.assert_array_equal(trace.window_credit(deltas, window=1, gamma=gamma), deltas)


@given(logprob_lists, st.floats(-3, 3))
def test_no_turn_weight_is_grpo(logprobs, outcome):
    turns = trace.turn_credit(logprobs, outcome, **{**TRACE_DEFAULTS, "alpha_turn": 0.0})
    np.testing.assert_array_equal(turns.advantages, np.full(len(logprobs) - 1, outcome))


@given(logprob_lists)
def test_without_outcome_advantage_only_local_credit_remains(logprobs):
    turns = trace.turn_credit(logprobs, 0.0, **TRACE_DEFAULTS)
    np.testing.assert_allclose(turns.advantages, 0.2 * turns.credit)


@pytest.mark.parametrize(
    "num_transitions, window, filled", [(4, 3, 3), (2, 3, 2), (3, 3, 3), (5, 1, 1), (4, 0, 1), (0, 3, 0)]
)
def test_the_fill_reaches_the_last_turns_of_the_window(num_transitions, window, filled):
    fill = trace.terminal_fill(num_transitions, 1.0, window=window, gamma=0.8, weight=2.0)
    assert np.count_nonzero(fill) == filled
    np.testing.assert_allclose(fill[::-1][:filled], [2 * 0.8 ** (i + 1) for i in range(filled)])


def test_extreme_beliefs_stay_finite_and_one_step_credits_sum():
    logprobs = [0.0, -1e4, 0.0]
    values = trace.state_values(logprobs, 1e-6)
    assert np.isfinite(values).all()
    assert values[0] == 0
    assert values[2] == 0
    assert trace.temporal_differences(logprobs, eps=1e-6).sum() == pytest.approx(0, abs=1e-9)


def test_bf16_noise_of_a_score_is_amplified_at_most_tenfold():
    certain, noisy = (trace.state_values([-2.0, logprob], 0.1)[1] for logprob in (0.0, -0.01))
    assert abs(certain - noisy) <= 0.01 / 0.1


@pytest.mark.parametrize("logprobs", [[-1, float("nan")], [-1, float("-inf")], [-1, 1e-5]])
def test_unusable_logprobs_are_errors(logprobs):
    with pytest.raises(ScoringError, match="must be finite and <= 0"):
        trace.temporal_differences(logprobs, eps=0.1)


def test_rounding_above_zero_is_read_as_certainty():
    assert trace.distances([5e-7], 0.1).tolist() == [0.1]


def test_an_empty_answer_is_never_scored():
    with pytest.raises(ScoringError, match="no tokens"):
        trace.mean_answer_logprob([])


def test_aliases_take_the_best_at_each_state_and_still_telescope():
    best = trace.best_alias_logprobs([[-4, -3, -0.5], [-2, -5, -1]])
    assert best.tolist() == [-2, -3, -0.5]
    deltas = trace.temporal_differences(best, eps=0.1)
    assert deltas.sum() == pytest.approx(np.log(2.1 / 0.6))
