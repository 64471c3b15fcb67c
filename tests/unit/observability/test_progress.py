"""What a person sees while a run works or waits."""

import io
import logging
import time

import pytest
from rich.console import Console

from megatrl.observability.progress import ProgressDisplay, format_number, format_seconds, waiting


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megatrl.observability.progress")


def test_without_a_terminal_nothing_but_log_lines_is_written(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    display = ProgressDisplay(20, done=10, title="sft", console=Console(file=screen, force_terminal=False))
    display.update(11, {"loss": 0.5, "rare": float("nan")})
    display.close()
    assert screen.getvalue() == ""
    assert caplog.messages[0].startswith("sft: step=11/20 loss=0.5 rare=nan left=")


def test_on_a_terminal_the_bar_shows_step_and_numbers() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140)
    display = ProgressDisplay(20, title="demo", console=console)
    display.update(4, {"success": 0.25})
    display.close()
    display.close()
    assert "4/20" in screen.getvalue()
    assert "success=0.25" in screen.getvalue()


def test_a_narrow_terminal_cuts_no_number_off() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    display = ProgressDisplay(400, title="20260101-120000", console=console)
    numbers = {"reward": 0.09375, "success": 0.09375, "eval_success": 0.125, "tokens_per_s": 400.1, "step_s": 8.152}
    display.update(123, numbers)
    display.close()
    assert "123/400" in screen.getvalue()
    for name, value in numbers.items():
        assert f"{name}={value}" in screen.getvalue()
    assert "left=" in screen.getvalue()
    assert "…" not in screen.getvalue()


def test_time_left_follows_the_pace_of_the_recent_steps() -> None:
    display = ProgressDisplay(1000, console=Console(file=io.StringIO()))
    assert display.seconds_left() is None
    time.sleep(0.3)  # a slow first step
    for step in range(1, 61):
        time.sleep(0.002)
        display.update(step, {})
    left = display.seconds_left()
    assert left is not None
    assert 940 * 0.002 <= left < 940 * 0.3 / 5


def test_an_evaluation_before_the_first_step_is_not_taken_for_the_pace_of_steps() -> None:
    display = ProgressDisplay(100, console=Console(file=io.StringIO()))
    time.sleep(0.3)
    display.update(0, {"eval_success": 0.1})
    time.sleep(0.002)
    display.update(1, {})
    left = display.seconds_left()
    assert left is not None
    assert left < 99 * 0.15


def test_a_wait_is_logged_at_its_start_while_it_lasts_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with waiting("rollout servers", deadline_s=300, every_s=0.02):
        time.sleep(0.15)
    assert caplog.messages[0] == "waiting for rollout servers (at most 5m00s)"
    assert caplog.messages[1].startswith("still waiting for rollout servers after 0.")
    assert caplog.messages[-1].startswith("done: rollout servers, 0.")
    count = len(caplog.messages)
    time.sleep(0.06)
    assert len(caplog.messages) == count


def test_a_wait_that_fails_says_so_and_raises(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with pytest.raises(TimeoutError), waiting("the port", deadline_s=1.0, console=console):
        raise TimeoutError
    assert caplog.messages[-1].startswith("gave up on the port after")
    assert "✓" not in screen.getvalue()


def test_a_wait_is_seen_on_a_terminal_while_it_lasts_and_how_long_it_took() -> None:
    screen = io.StringIO()
    with waiting("rollout servers", console=Console(file=screen, force_terminal=True, width=100)):
        time.sleep(0.15)
        assert "rollout servers" in screen.getvalue()
    assert "✓ rollout servers, 0." in screen.getvalue()


def test_numbers_and_times_are_short() -> None:
    values = (3.0, 0.123456, 123456.0, 1234567.0, 1e-7, float("inf"), float("nan"))
    assert [format_number(value) for value in values] == [
        "3", "0.1235", "123456", "1.235e+06", "1e-07", "inf", "nan",
    ]  # fmt: skip
    assert [format_seconds(value) for value in (4.24, 59.9, 185, 7621)] == ["4.2s", "59.9s", "3m05s", "2h07m"]
