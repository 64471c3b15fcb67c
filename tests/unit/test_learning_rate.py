import pytest

from megatrl.actor.learning_rate import LearningRateSchedule
from megatrl.config.engines import OptimizerConfig


def rates(num_steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    schedule = LearningRateSchedule(config=config, num_steps=num_steps)
    return [schedule.lr(step) for step in range(1, num_steps + 1)]


def test_constant_is_constant_from_the_first_step() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_climbs_and_never_starts_at_zero() -> None:
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_falls_to_min_lr_after_the_last_step() -> None:
    assert rates(4, decay="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_passes_the_middle_halfway() -> None:
    assert rates(4, decay="cosine")[2] == pytest.approx(0.5)


def test_decay_steps_overrules_the_run_length_and_min_lr_stays() -> None:
    assert rates(5, decay="linear", decay_steps=2, min_lr=0.1) == pytest.approx([1.0, 0.55, 0.1, 0.1, 0.1])


def test_decay_begins_after_warmup() -> None:
    assert rates(6, decay="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
