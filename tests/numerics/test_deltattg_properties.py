"""DeltaTTG's promises on random input: sign and token average kept, cap held, GRPO in the limits."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrl.algorithms import deltattg
from megatrl.algorithms.meter_reward import meter_reward, ttg_accuracy
from megatrl.data.scores import Forecast, MeterScore
from megatrl.errors import ScoringError
from tests.numerics.credit_examples import completes, fails, redistribute, rule

forecasts = st.builds(
    Forecast,
    is_valid=st.booleans(),
    completion=st.booleans(),
    completion_prob=st.floats(0, 1),
    tokens_to_go=st.floats(-10, 5000),
)
trajectories = st.lists(st.tuples(forecasts, st.integers(0, 60)), min_size=1, max_size=12)
signals = st.lists(st.floats(-2000, 2000), min_size=1, max_size=12).map(np.asarray)
advantages = st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3)


def split(trajectory):
    return MeterScore(forecasts=tuple(f for f, _ in trajectory)), [n for _, n in trajectory]


@given(trajectories, advantages, st.booleans(), st.sampled_from(["broadcast", "divide"]), st.floats(1, 8))
def test_multipliers_keep_mean_bounds_and_sign(trajectory, advantage, success, spread, cap):
    score, n = split(trajectory)
    assume(sum(n) > 0)
    result = redistribute(deltattg, score, n, advantage, success=success, spread=spread, max_multiplier=cap)
    m = result.multipliers
    assert (m >= 0).all()
    assert (m <= cap * (1 + 1e-12)).all()
    assert m @ np.asarray(n) / sum(n) == pytest.approx(1, abs=1e-9)
    assert (advantage * m * np.sign(advantage) >= 0).all()


@given(trajectories, st.booleans())
def test_signals_telescope_to_first_minus_last_cost(trajectory, success):
    score, n = split(trajectory)
    result = redistribute(deltattg, score, n, 1.0, success=success)
    first = deltattg.forecast_cost(score.forecasts[0], 2000.0)
    assert result.signal.sum() == pytest.approx(first - (0.0 if success else 2000.0), abs=1e-6)


@given(signals, st.sampled_from([-1.0, 1.0]), st.floats(0, 1), st.floats(0.01, 100))
def test_shares_sum_to_one_have_a_floor_and_ignore_scale(signal, direction, rho, scale):
    shares = deltattg.step_shares(signal, direction=direction, rho=rho)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= rho / len(signal) - 1e-12).all()
    scaled = deltattg.step_shares(signal * scale, direction=direction, rho=rho)
    np.testing.assert_allclose(scaled, shares, atol=1e-9)


@given(signals, st.sampled_from([-1.0, 1.0]), st.floats(0, 1), st.floats(1, 1e4))
def test_softmax_shares_sum_to_one_and_follow_the_directed_signal(signal, direction, rho, temperature):
    shares = deltattg.step_shares(signal, direction=direction, rho=rho, softmax_temperature=temperature)
    assert shares.sum() == pytest.approx(1)
    order = np.argsort(direction * signal, kind="stable")
    assert (np.diff(shares[order]) >= -1e-12).all()


@given(
    st.lists(st.tuples(st.floats(1e-6, 1), st.integers(1, 50)), min_size=1, max_size=10),
    st.floats(1.0, 10.0),
)
def test_water_filling_equals_bisection_and_keeps_the_order(steps, cap):
    u, n = np.array([s for s, _ in steps]), np.array([c for _, c in steps], dtype=float)
    m = deltattg.token_multipliers(u, [int(c) for c in n], max_multiplier=cap)
    low, high = 0.0, cap / u.min() + 1
    for _ in range(200):
        middle = (low + high) / 2
        if (np.minimum(middle * u, cap) @ n) / n.sum() < 1:
            low = middle
        else:
            high = middle
    np.testing.assert_allclose(m, np.minimum(high * u, cap), rtol=1e-6, atol=1e-9)
    assert (np.diff(m[np.argsort(u, kind="stable")]) >= -1e-9).all()


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 30)), min_size=1, max_size=8),
    st.floats(1.0, 6.0),
)
def test_without_uniform_mixing_the_mean_still_is_one(steps, cap):
    u, n = np.array([s for s, _ in steps]), [c for _, c in steps]
    assume(sum(n) > 0)
    m = deltattg.token_multipliers(u, n, max_multiplier=cap)
    assert m @ np.asarray(n) / sum(n) == pytest.approx(1, abs=1e-9)
    assert (m >= 0).all()
    assert (m <= cap * (1 + 1e-12)).all()


@pytest.mark.parametrize("switches", [{"rho": 1.0}, {"max_multiplier": 1.0}])
@given(trajectories, advantages, st.booleans())
def test_grpo_is_the_limit_of_full_mixing_and_of_a_cap_of_one(switches, trajectory, advantage, success):
    score, n = split(trajectory)
    assume(sum(n) > 0)
    result = redistribute(deltattg, score, n, advantage, success=success, **switches)
    np.testing.assert_allclose(result.multipliers[np.asarray(n) > 0], 1, atol=1e-9)


@given(forecasts, st.integers(1, 100), advantages, st.booleans())
def test_a_single_turn_gets_multiplier_one(forecast, n, advantage, success):
    result = redistribute(deltattg, MeterScore(forecasts=(forecast,)), [n], advantage, success=success)
    np.testing.assert_allclose(result.multipliers, [1])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_flat_meter_and_equal_signals_are_grpo(advantage):
    carry = {"terminal": "carry", "success": True}
    flat = redistribute(deltattg, completes(500, 500, 500), [1, 20, 3], advantage, **carry)
    np.testing.assert_allclose(flat.multipliers, 1)
    falling = completes(300, 200, 100) if advantage > 0 else completes(100, 200, 300)
    equal = redistribute(deltattg, falling, [1, 20, 3], advantage, success=advantage > 0, failure_cost=400.0)
    np.testing.assert_allclose(equal.multipliers, 1)


def test_no_progress_to_praise_and_no_regression_to_blame_are_grpo():
    rising = redistribute(deltattg, completes(100, 300), [1, 100], 1.0, success=False, failure_cost=500.0)
    assert (rising.signal < 0).all()
    np.testing.assert_allclose(rising.multipliers, 1)
    falling = redistribute(deltattg, completes(300, 100), [1, 100], -1.0, success=True)
    assert (falling.signal > 0).all()
    np.testing.assert_allclose(falling.multipliers, 1)


def test_the_direction_follows_the_advantage_and_the_end_cost_the_outcome():
    # A praised failure (length-shaped rewards): progress is rewarded, yet the end still costs C.
    praised = redistribute(deltattg, completes(300, 100), [10, 10], 1.0, success=False, failure_cost=500.0)
    np.testing.assert_allclose(praised.signal, [200, -400])
    assert praised.multipliers[0] > praised.multipliers[1]


def test_invalid_forecasts_of_a_success_put_the_share_on_the_last_step_where_the_cap_binds():
    result = redistribute(deltattg, fails(10), [10] * 10, 1.0, success=True)
    share = 0.8 + 0.2 / 10  # ten equal steps: uncapped multiplier 8.2 > 5
    assert share * 10 > 5
    np.testing.assert_allclose(result.multipliers, [5 / 9] * 9 + [5])


def test_all_zero_progress_and_very_unequal_lengths():
    np.testing.assert_allclose(deltattg.step_shares(np.zeros(3), direction=1.0, rho=0.2), [1 / 3] * 3)
    m = deltattg.token_multipliers(np.array([0.9, 0.1]), [1, 100], max_multiplier=5.0)
    np.testing.assert_allclose(m, [5, 96 / 100])


def test_a_step_without_tokens_keeps_its_share_and_leaves_the_token_mean():
    m = deltattg.token_multipliers(np.array([0.5, 0.25, 0.25]), [0, 10, 10], max_multiplier=5.0)
    np.testing.assert_allclose(m[1:], 1)
    np.testing.assert_allclose(deltattg.token_multipliers(np.array([1.0]), [0], max_multiplier=5.0), [1])


def test_huge_and_tiny_signals_share_alike():
    for scale in (1e-310, 1e300):
        shares = deltattg.step_shares(np.array([1.0, 3.0]) * scale, direction=1.0, rho=0.0)
        np.testing.assert_allclose(shares, [0.25, 0.75], rtol=1e-6)


def test_failure_cost_only_enters_beside_failure_forecasts_of_successes():
    cheap, dear = (
        redistribute(deltattg, completes(400, 300, 50), [5, 6, 7], 1.0, success=True, failure_cost=c)
        for c in (500, 5e6)
    )
    np.testing.assert_array_equal(cheap.multipliers, dear.multipliers)


def test_unusable_forecasts_are_errors():
    with pytest.raises(ScoringError, match="2 forecasts for 3 turns"):
        redistribute(deltattg, completes(1, 2), [1, 1, 1], 1.0, success=True)
    with pytest.raises(ScoringError, match="tokens_to_go=nan"):
        redistribute(deltattg, completes(float("nan")), [1], 1.0, success=True)
    with pytest.raises(ScoringError, match="terminal: meter"):
        redistribute(deltattg, completes(1.0), [1], 1.0, success=True, terminal="meter")
    broken = Forecast(is_valid=True, completion=True, completion_prob=float("inf"))
    with pytest.raises(ScoringError, match="completion_prob=inf"):
        deltattg.forecast_value(broken, "completion_prob")
    for costs in ([], [1.0, float("nan")]):
        with pytest.raises(ScoringError, match="candidate costs"):
            deltattg.select_action(costs)


def test_carried_failures_at_the_start_take_the_first_forecast_and_without_any_cost_c():
    broken = Forecast(is_valid=False)
    score = MeterScore(forecasts=(broken, broken, *completes(70).forecasts))
    costs = deltattg.step_costs(score, success=True, reward=1.0, rule=rule(deltattg, parse_failure="carry"))
    assert costs.tolist() == [70, 70, 70, 0]
    lost = MeterScore(forecasts=(broken, broken))
    costs = deltattg.step_costs(lost, success=True, reward=1.0, rule=rule(deltattg, parse_failure="carry"))
    assert costs.tolist() == [2000, 2000, 0]


def test_the_outcome_target_ends_at_the_reward_and_the_others_at_the_bit():
    score = MeterScore(forecasts=(Forecast(is_valid=True, completion=True, completion_prob=0.5),))
    ends = {
        target: deltattg.step_costs(score, success=False, reward=0.7, rule=rule(deltattg, target=target))[-1]
        for target in ("outcome", "completion_prob", "binary")
    }
    assert ends == {"outcome": -0.7, "completion_prob": 0.0, "binary": 0.0}


def test_length_correlation_is_one_for_a_perfect_meter_and_zero_where_undefined():
    n = [120, 80, 200, 50]
    spread = redistribute(deltattg, completes(450, 330, 250, 50), n, 1.0, success=True)
    assert deltattg.signal_length_correlation([spread.signal], [n]) == pytest.approx(1)
    assert deltattg.signal_length_correlation([], []) == 0
    assert deltattg.signal_length_correlation([np.array([1.0, 2.0])], [[5, 5]]) == 0


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.sampled_from(["log", "relative"]))
def test_a_meter_reward_is_bounded_and_best_when_exact(label, forecast, further, form):
    exact = Forecast(is_valid=True, completion=True, tokens_to_go=label)
    wrong = Forecast(is_valid=True, completion=False)
    invalid = Forecast(is_valid=False, completion=True, tokens_to_go=label)
    off = Forecast(is_valid=True, completion=True, tokens_to_go=forecast)
    reward = meter_reward(off, completion=True, tokens_to_go=label, form=form)
    assert 0.5 <= reward <= 1.0
    assert meter_reward(exact, completion=True, tokens_to_go=label, form=form) == 1.0
    assert meter_reward(wrong, completion=True, tokens_to_go=label, form=form) == 0.0
    assert meter_reward(invalid, completion=True, tokens_to_go=label, form=form) == 0.0
    if abs(np.log1p(further) - np.log1p(label)) >= abs(np.log1p(forecast) - np.log1p(label)):
        assert ttg_accuracy(further, label) <= ttg_accuracy(forecast, label) + 1e-9


def test_a_success_label_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="tokens_to_go label"):
        meter_reward(Forecast(is_valid=True, completion=True), completion=True, tokens_to_go=None)
