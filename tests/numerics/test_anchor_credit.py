"""GiGPO and HGPO: clusters of equal observations, against hand values and loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.algorithms.gigpo import anchor_clusters, step_advantages
from megatrl.algorithms.hgpo import history_advantages

key_lists = st.lists(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5), min_size=1, max_size=5)


def random_returns(keys):
    random = np.random.default_rng(sum(len(k) for k in keys))
    return [random.normal(size=len(k)) for k in keys]


def test_equal_observations_are_compared_across_and_within_trajectories():
    keys = [["start", "hall", "hall"], ["start", "attic"]]
    returns = [np.array([1.0, 2.0, 4.0]), np.array([0.0, 9.0])]
    plain = step_advantages(returns, keys, mean_std_norm=False)
    np.testing.assert_allclose(plain[0], [0.5, -1, 1])
    np.testing.assert_allclose(plain[1], [-0.5, 0])
    normed = step_advantages(returns, keys, mean_std_norm=True)
    np.testing.assert_allclose(normed[0], [np.sqrt(0.5), -np.sqrt(0.5), np.sqrt(0.5)], atol=1e-5)
    assert normed[1][1] == 0


@given(key_lists, st.booleans())
def test_step_advantages_cancel_within_every_cluster(keys, mean_std_norm):
    returns = random_returns(keys)
    advantages = step_advantages(returns, keys, mean_std_norm=mean_std_norm)
    sums: dict[str, list[float]] = {}
    for row, values in zip(keys, advantages, strict=True):
        for key, value in zip(row, values, strict=True):
            sums.setdefault(key, []).append(value)
    for values in sums.values():
        assert sum(values) == pytest.approx(0, abs=1e-9)
        if len(values) == 1:
            assert values == [0]
        elif mean_std_norm:
            assert np.std(values, ddof=1) == pytest.approx(1, abs=1e-3)


def test_similar_observations_join_the_first_cluster_that_fits():
    keys = [["the red room", "the red roof"], ["a garden", "the red room"]]
    assert anchor_clusters(keys) == [[(0, 0), (1, 1)], [(0, 1)], [(1, 0)]]
    assert anchor_clusters(keys, similarity=0.9) == [[(0, 0), (0, 1), (1, 1)], [(1, 0)]]


def test_turns_without_an_observation_key_have_no_peers():
    assert anchor_clusters([["", ""], [""]]) == [[(0, 0)], [(0, 1)], [(1, 0)]]
    assert anchor_clusters([["", ""]], similarity=0.5) == [[(0, 0)], [(0, 1)]]
    empty = history_advantages([np.array([1.0]), np.array([0.0])], [[""], [""]], history=0, alpha=1.0)
    assert [a.tolist() for a in empty] == [[0], [0]]


def test_history_levels_combine_by_their_weights():
    # Level 1 compares four turns in "b"; level 2 only those that came from the same room.
    keys = [["a", "b"], ["a", "b"], ["c", "b"], ["c", "b"]]
    returns = [np.array([0, 4.0]), np.array([0, 0.0]), np.array([0, 2.0]), np.array([0, 2.0])]
    advantages = history_advantages(returns, keys, history=1, alpha=1.0)
    level_1 = np.array([2, -2, 0, 0]) / np.std([4, 0, 2, 2])
    np.testing.assert_allclose(advantages[0], [0, (2 * level_1[0] + 3 * 1.0) / 5], atol=1e-5)
    np.testing.assert_allclose(advantages[1], [0, (2 * level_1[1] - 3 * 1.0) / 5], atol=1e-5)
    np.testing.assert_allclose(advantages[2], [0, 0])
    base = history_advantages(returns, keys, history=0, alpha=1.0, trajectory_advantages=[0.5, 0, 0, 0])
    np.testing.assert_allclose(base[0], [0.5, (0.5 + 2 * level_1[0]) / 3], atol=1e-5)


@given(key_lists, st.integers(0, 3), st.floats(0, 2))
def test_history_advantages_equal_a_direct_loop(keys, history, alpha):
    returns = random_returns(keys)
    advantages = history_advantages(returns, keys, history=history, alpha=alpha)
    for i, row in enumerate(keys):
        for k in range(len(row)):
            total = weight = 0.0
            for level in range(1, history + 2):
                if k + 1 < level:
                    continue
                recent = row[k + 1 - level : k + 1]
                peers = [
                    returns[j][m]
                    for j, other in enumerate(keys)
                    for m in range(level - 1, len(other))
                    if other[m + 1 - level : m + 1] == recent
                ]
                if len(peers) > 1:
                    total += (level + 1) ** alpha * (returns[i][k] - np.mean(peers)) / (np.std(peers) + 1e-6)
                    weight += (level + 1) ** alpha
            assert advantages[i][k] == pytest.approx(total / (weight + 1e-6), abs=1e-6)
