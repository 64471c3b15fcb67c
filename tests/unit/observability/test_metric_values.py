"""Metrics that carry their reduction."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.observability.metrics import Last, Max, Mean, Min, Sum, flatten, merge

weighted = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 100)), min_size=1, max_size=8)


@given(weighted)
def test_merged_means_equal_one_mean_over_all(parts: list[tuple[float, int]]) -> None:
    merged = merge(*({"x": Mean(value, weight)} for value, weight in parts))["x"].result
    weight = sum(count for _, count in parts)
    if weight == 0:
        assert merged is None
    else:
        expected = math.fsum(value * count for value, count in parts) / weight
        assert merged == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_each_reduction_merges_in_its_own_way() -> None:
    first = {"mean": Mean(1.0, 3), "sum": Sum(2), "max": Max(5), "min": Min(5), "last": Last(1), "plain": 4}
    second = {"mean": Mean(5.0, 1), "sum": Sum(3), "max": Max(4), "min": Min(4), "last": Last(9), "plain": 6.5}
    assert flatten(merge(first, second)) == {
        "last": 9.0, "max": 5.0, "mean": 2.0, "min": 4.0, "plain": 6.5, "sum": 5.0,
    }  # fmt: skip


def test_a_mean_over_nothing_is_absent_and_not_zero() -> None:
    assert flatten({"a": Mean.of([]), "b": Mean.of([0.0])}) == {"b": 0.0}


def test_nan_is_not_hidden_by_max_and_min() -> None:
    for kind in (Max, Min):
        for pair in ((math.nan, 1.0), (1.0, math.nan)):
            assert math.isnan(merge(*({"x": kind(value)} for value in pair))["x"].result or 0.0)


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(ValueError, match="'loss' was given as Mean and as Sum"):
        merge({"loss": Mean(1.0)}, {"loss": Sum(1.0)})


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="a weight is finite and >= 0"):
        Mean(1.0, weight)


def test_flatten_prefixes_and_sorts() -> None:
    assert list(flatten({"b": 1, "a": 2}, prefix="eval/")) == ["eval/a", "eval/b"]
