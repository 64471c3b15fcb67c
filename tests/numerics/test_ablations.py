"""Every ablation of DeltaTTG is a few words in a recipe, and changes what it says it changes."""

from pathlib import Path

import numpy as np
import pytest

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.config.load import load_recipe
from megatrl.config.recipe import TrainedMeter
from megatrl.data.scores import Forecast, MeterScore, Scores
from tests.fakes.frozen_models import make_group, make_trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "evidence_hunt.yaml"
BASE = ("credit.kind=deltattg", "meter.kind=trained", "credit.failure_cost=100")
LENGTHS = (1, 2, 1)
FORECASTS = ((0.75, 40.0), (0.25, 60.0), (0.5, 10.0))  # (completion probability, tokens to go)

WON = make_trajectory([((1,), (2,) * n) for n in LENGTHS], index=0, reward=1.0)
LOST = make_trajectory([((1,), (2,) * n) for n in LENGTHS], index=1, reward=0.0)


def estimate(*overrides: str):
    """(signal, multiplier) by trajectory under the recipe; the second forecast says failure."""
    recipe = load_recipe(RECIPE, (*BASE, *overrides)).recipe
    score = MeterScore(
        forecasts=tuple(
            Forecast(is_valid=True, completion=p >= 0.5, completion_prob=p, tokens_to_go=t) for p, t in FORECASTS
        ),
        terminal=Forecast(is_valid=True, completion=True, completion_prob=0.9, tokens_to_go=4.0),
    )
    result = estimate_advantages(
        [make_group(WON, LOST)],
        Scores(meter={WON.id: score, LOST.id: score}),
        credit=recipe.credit,
        group_statistics=recipe.group_statistics,
        reward=recipe.reward,
    )
    return [
        (np.asarray(result.details[t.id]["signal"]), np.asarray(result.details[t.id]["multiplier"]))
        for t in (WON, LOST)
    ]


SIGNALS = {
    (): ([-60, 90, 10], [-60, 90, -90]),
    ("credit.target=outcome",): ([-0.5, 0.25, 0.5], [-0.5, 0.25, -0.5]),
    ("credit.target=completion_prob",): ([-0.5, 0.25, 0.5], [-0.5, 0.25, -0.5]),
    ("credit.target=binary",): ([-1, 1, 0], [-1, 1, -1]),
    ("credit.terminal=meter",): ([-60, 90, 6], [-60, 90, 6]),
    ("credit.terminal=carry",): ([-60, 90, 0], [-60, 90, 0]),
    ("credit.failure_cost_scale=0.5",): ([-10, 40, 10], [-10, 40, -40]),
    ("credit.net_of_spent=true",): ([-61, 88, 9], [-61, 88, -91]),
    ("credit.cost_transform=log1p",): (
        np.log([41 / 101, 101 / 11, 11 / 1]),
        np.log([41 / 101, 101 / 11, 11 / 101]),
    ),
}


@pytest.mark.parametrize("overrides, expected", SIGNALS.items(), ids=lambda value: " ".join(map(str, value)))
def test_the_signal_of_an_ablation_is_the_one_written_down(overrides, expected):
    for (signal, _), wanted in zip(estimate(*overrides), expected, strict=True):
        np.testing.assert_allclose(signal, wanted, atol=1e-12)


def shares(multiplier):
    """Turn shares, up to the common factor that gives a unit mean over tokens."""
    return multiplier / multiplier.sum()


def test_mixing_sign_cap_and_spread_change_who_gets_the_credit():
    won, lost = (multiplier for _, multiplier in estimate())
    np.testing.assert_allclose(shares(won), np.array([0, 0.9, 0.1]) * 0.8 + 0.2 / 3)
    np.testing.assert_allclose(shares(lost), np.array([0.4, 0, 0.6]) * 0.8 + 0.2 / 3)

    won, lost = (multiplier for _, multiplier in estimate("credit.rho=0"))
    np.testing.assert_allclose(shares(won), [0, 0.9, 0.1], atol=1e-12)
    np.testing.assert_allclose(shares(lost), [0.4, 0, 0.6], atol=1e-12)

    won, lost = (multiplier for _, multiplier in estimate("credit.sign_aware=false"))
    np.testing.assert_allclose(shares(lost), np.array([0, 1, 0]) * 0.8 + 0.2 / 3)

    won, lost = (multiplier for _, multiplier in estimate("credit.max_multiplier=1.5"))
    assert won.max() == lost.max() == 1.5
    assert won @ LENGTHS == pytest.approx(sum(LENGTHS))

    won, _ = (multiplier for _, multiplier in estimate("credit.spread=divide"))
    np.testing.assert_allclose(shares(won * LENGTHS), np.array([0, 0.9, 0.1]) * 0.8 + 0.2 / 3)


def test_the_meter_can_be_a_prompted_model_that_nobody_trained():
    meter = load_recipe(RECIPE, (*BASE, "meter.sft=null")).recipe.meter
    assert isinstance(meter, TrainedMeter)
    assert meter.sft is None
