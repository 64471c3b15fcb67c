"""Group statistics on random groups: ragged, with unknown members, nearly equal, with penalties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.algorithms.dapo import has_equal_rewards
from megatrl.algorithms.group_statistics import StdEstimator, group_advantages, mean_and_std, normalize
from megatrl.algorithms.returns import discounted_returns, outcome_returns
from megatrl.errors import ScoringError

GRPO = {"std": "bessel", "norm_std": True, "step_expanded": False, "eps": 1e-6}
rewards_lists = st.lists(st.one_of(st.none(), st.integers(-20, 20).map(lambda n: n / 4)), min_size=1, max_size=9)


def with_counts(rewards):
    return st.tuples(st.just(rewards), st.lists(st.integers(0, 6), min_size=len(rewards), max_size=len(rewards)))


groups = rewards_lists.flatmap(with_counts)


@given(groups, st.booleans(), st.sampled_from(["bessel", "population"]), st.booleans())
def test_advantages_equal_a_loop_over_rows(group, step_expanded, std, norm_std):
    rewards, counts = group
    result = group_advantages(
        rewards, num_actions=counts, std=std, norm_std=norm_std, step_expanded=step_expanded, eps=1e-6
    )
    rows = []
    for reward, count in zip(rewards, counts, strict=True):
        if reward is not None and count > 0:
            rows += [reward] * (count if step_expanded else 1)
    scorable = [r is not None and n > 0 for r, n in zip(rewards, counts, strict=True)]
    assert result.is_scorable.tolist() == scorable
    for reward, known, advantage in zip(rewards, scorable, result.trajectory, strict=True):
        if not known or len(set(rows)) < 2:
            assert advantage == 0
        else:
            deviation = np.std(rows, ddof=1 if std == "bessel" else 0) + 1e-6 if norm_std else 1.0
            assert advantage == pytest.approx((reward - np.mean(rows)) / deviation, abs=1e-9)


@given(groups)
def test_step_expanded_advantages_cancel_when_weighted_by_actions(group):
    rewards, counts = group
    result = group_advantages(rewards, num_actions=counts, std="bessel", norm_std=True, step_expanded=True, eps=1e-6)
    assert result.trajectory @ np.asarray(counts) == pytest.approx(0, abs=1e-6)


@given(groups, st.randoms())
def test_permuting_a_group_permutes_its_advantages(group, random):
    rewards, counts = group
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(rewards, num_actions=counts, **GRPO).trajectory
    permuted = group_advantages([rewards[i] for i in order], num_actions=[counts[i] for i in order], **GRPO)
    np.testing.assert_allclose(permuted.trajectory, straight[order], atol=1e-12)


@pytest.mark.parametrize("rewards", [[1, None, 0, float("nan")], [None, 1, float("inf"), 0], [1, 0]])
def test_unknown_members_leave_the_statistics_of_the_others_alone(rewards):
    known = [r for r in rewards if r is not None and np.isfinite(r)]
    result = group_advantages(rewards, num_actions=[3] * len(rewards), **GRPO)
    expected = group_advantages(known, num_actions=[3] * len(known), **GRPO)
    np.testing.assert_allclose(result.trajectory[result.is_scorable], expected.trajectory)
    assert not result.trajectory[~result.is_scorable].any()
    assert int(result.is_scorable.sum()) == len(known)


@pytest.mark.parametrize("rewards", [[None, None], [float("nan")], [], [5.0], [None, 5.0]])
def test_groups_without_a_comparison_have_advantage_zero(rewards):
    result = group_advantages(rewards, num_actions=[2] * len(rewards), **GRPO)
    assert result.trajectory.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [0.1] * 4, [1, 1, 1, 1 + 1e-7], [0.7] * 3, [-3e8] * 5])
def test_equal_and_nearly_equal_rewards_give_exactly_zero(rewards, dtype):
    values = [float(v) for v in np.asarray(rewards, dtype=dtype)]
    for norm_std in (True, False):
        result = group_advantages(
            values, num_actions=[1] * len(values), std="bessel", norm_std=norm_std, step_expanded=False, eps=1e-6
        )
        assert result.trajectory.tolist() == [0.0] * len(values)
        assert result.std == 0
    assert has_equal_rewards(values)


def test_different_rewards_are_not_equal_and_one_reward_is():
    assert not has_equal_rewards([0, 0, 0, 1])
    assert not has_equal_rewards([1, 1 + 1e-4])
    assert has_equal_rewards([1])
    assert has_equal_rewards([])


def test_a_reward_that_is_no_number_is_an_error_that_names_its_member():
    with pytest.raises(ScoringError, match="member 1 is 'seven'"):
        group_advantages([1.0, "seven"], num_actions=[1, 1], **GRPO)  # type: ignore[list-item]


def test_counts_and_penalties_must_fit_the_rewards():
    with pytest.raises(ScoringError, match="one count for each reward"):
        group_advantages([1.0, 0.0], num_actions=[1], **GRPO)
    with pytest.raises(ScoringError, match="one penalty for each action"):
        group_advantages([1.0, 0.0], num_actions=[1, 2], penalties=[[0.0], [0.1]], **GRPO)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 10.0]), st.lists(st.sampled_from([0.0, 0.1]), min_size=1, max_size=5)),
        min_size=2,
        max_size=6,
    )
)
def test_outcome_and_penalty_parts_sum_to_the_row_advantages_of_verl_agent(members):
    rewards = [reward for reward, _ in members]
    penalties = [row for _, row in members]
    result = group_advantages(
        rewards,
        num_actions=[len(row) for row in penalties],
        penalties=penalties,
        std="bessel",
        norm_std=True,
        step_expanded=True,
        eps=1e-6,
    )
    rows = np.concatenate([reward - np.asarray(row) for reward, row in members])
    if np.std(rows) < 1e-9:
        assert not result.trajectory.any()
        return
    start = 0
    for i, (reward, row) in enumerate(members):
        mine = result.trajectory[i] + result.penalty[i]
        expected = (rows[start : start + len(row)] - rows.mean()) / (np.std(rows, ddof=1) + 1e-6)
        np.testing.assert_allclose(mine, expected, atol=1e-9)
        # The trajectory part alone keeps the outcome's sign, whatever the penalties are.
        weighted = sum(r * len(p) for r, p in members) / len(rows)
        assert np.sign(round(result.trajectory[i], 9)) == np.sign(round(reward - weighted, 9))
        start += len(row)


def test_penalties_alone_leave_the_trajectory_part_zero():
    result = group_advantages(
        [1, 1],
        num_actions=[2, 2],
        penalties=[[0, 0.1], [0, 0]],
        std="bessel",
        norm_std=False,
        step_expanded=True,
        eps=0,
    )
    assert result.trajectory.tolist() == [0, 0]
    np.testing.assert_allclose(np.concatenate(result.penalty), [0.025, -0.075, 0.025, 0.025])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.lists(st.integers(1, 5), min_size=8, max_size=8))
def test_weights_count_occurrences(values, weights):
    weights = weights[: len(values)]
    repeated = np.repeat(values, weights)
    estimators: tuple[tuple[StdEstimator, int], ...] = (("bessel", 1), ("population", 0))
    for std, ddof in estimators:
        mean, deviation = mean_and_std(values, std, weights)
        assert mean == pytest.approx(repeated.mean(), abs=1e-9)
        assert deviation == pytest.approx(repeated.std(ddof=ddof), abs=1e-6)


def test_normalize_of_one_value_is_zero():
    assert normalize([3.0], std="population", norm_std=False, eps=0.0).tolist() == [0.0]


def test_returns_discount_the_outcome_and_keep_penalties_local():
    np.testing.assert_allclose(discounted_returns([1, 0, 2], 0.5), [1.5, 1, 2])
    np.testing.assert_allclose(outcome_returns(8.0, [0, 0.1, 0], 0.5), [2, 3.9, 8])
    assert outcome_returns(8.0, [], 0.5).shape == (0,)
