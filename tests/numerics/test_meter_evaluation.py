import math
from itertools import pairwise

import pytest

from megatrl.data.meter_labels import MeterLabel
from megatrl.data.scores import Forecast
from megatrl.meter.evaluation import (
    area_under_curve,
    average_ranks,
    evaluate_forecasts,
    pearson,
    spearman,
)
from megatrl.meter.labels import trajectory_labels
from tests.fakes.frozen_models import make_trajectory


def forecast(prob, tokens=0.0, *, valid=True):
    return Forecast(is_valid=valid, completion=prob >= 0.5, completion_prob=prob, tokens_to_go=tokens)


def success(tokens):
    return MeterLabel(completion=True, tokens_to_go=tokens)


FAILURE = MeterLabel(completion=False, tokens_to_go=None)


def test_worked_example_of_labels():
    lengths = (120, 80, 200, 50)  # D1
    turns = [((1,), (2,) * n) for n in lengths]
    labels = [e.label for e in trajectory_labels(make_trajectory(turns))]
    assert [label.tokens_to_go for label in labels] == [450, 330, 250, 50]
    steps = [(a.tokens_to_go or 0) - (b.tokens_to_go or 0) for a, b in pairwise(labels)]
    assert steps == list(lengths[:-1])
    failed = [e.label for e in trajectory_labels(make_trajectory(turns, reward=0.0))]
    assert failed == [FAILURE] * 4


def test_metrics_by_hand():
    forecasts = [
        forecast(0.9, 9),
        forecast(0.6, 99),
        forecast(0.4),
        forecast(0.2),
        forecast(0.7),
        forecast(0, valid=False),
    ]
    labels = [success(9), success(49), success(5), FAILURE, FAILURE, FAILURE]
    metrics = evaluate_forecasts(forecasts, labels)
    assert metrics == pytest.approx(
        {
            "valid_rate": 5 / 6,
            "bit_accuracy": 3 / 6,
            "bit_accuracy_success": 2 / 3,
            "bit_accuracy_failure": 1 / 3,  # the invalid forecast counts as wrong
            "bit_auc": 4 / 6,  # pairs won: 0.9 twice, 0.6 and 0.4 once each against 0.2 and 0.7
            "failure_forecast_rate": 2 / 5,
            "median_abs_log_error": math.log(2) / 2,  # errors 0 and ln(100/50)
            "spearman": 1.0,
        }
    )


def test_metrics_without_their_cases_are_left_out():
    metrics = evaluate_forecasts([forecast(0.1)], [FAILURE])
    assert metrics == {
        "valid_rate": 1.0, "bit_accuracy": 1.0, "bit_accuracy_failure": 1.0, "failure_forecast_rate": 1.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="0 labels"):
        evaluate_forecasts([], [])


def test_ties_share_ranks_and_count_half_in_the_area():
    assert average_ranks([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]
    assert area_under_curve([0.5, 0.5, 0.5], [True, False, False]) == 0.5
    assert area_under_curve([0.9, 0.1], [True, True]) is None


def test_spearman_sees_order_and_not_scale():
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1.0], [2.0]) is None
