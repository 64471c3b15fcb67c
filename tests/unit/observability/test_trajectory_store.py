"""Every step's groups on disk, whole or not at all, and how a person reads them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatrl.data.scores import AnswerScore, Forecast, MeterScore, Scores
from megatrl.data.wire import record_group
from megatrl.errors import TrajectoryError
from megatrl.observability.show import render_step
from megatrl.observability.trajectories import TrajectoryStore, read_records, write_records
from tests.fakes.recorded_groups import make_group


def test_a_step_returns_as_written_with_the_reason_of_dropped_groups(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    written = [
        record_group(make_group(0), step=12),
        record_group(make_group(1, (1.0, 1.0)), step=12, dropped="equal_rewards"),
    ]
    path = store.write(12, written)
    assert path == tmp_path / "trajectories" / "step_000012.jsonl.gz"
    found = store.read(12)
    assert found == tuple(written)
    assert [record.dropped for record in found] == ["", "equal_rewards"]


def test_equal_groups_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_records(tmp_path / f"{name}.jsonl.gz", [record_group(make_group(3), step=1)])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_missing_step_is_named_with_what_is_stored(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    with pytest.raises(TrajectoryError, match=r"no trajectories of step 3 .* none is stored"):
        store.read(3)
    for step in (1, 2):
        store.write(step, [record_group(make_group(), step=step)])
    with pytest.raises(TrajectoryError, match="stored are 2 steps from 1 to 2"):
        store.read(3)


def test_a_writer_that_raises_leaves_the_earlier_file(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.write(1, [record_group(make_group(0), step=1)])

    def broken():
        yield record_group(make_group(1), step=1)
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        store.write(1, broken())
    assert [record.group for record in store.read(1)] == [make_group(0)]
    assert [path.name for path in store.directory.iterdir()] == ["step_000001.jsonl.gz"]


_WRITER = """
import sys, time
from pathlib import Path
from megatrl.data.wire import record_group
from megatrl.observability.trajectories import TrajectoryStore
from tests.fakes.recorded_groups import make_group
def endless():
    for number in range(10**9):
        yield record_group(make_group(number, (1.0,) * 8, num_turns=8), step=2)
store = TrajectoryStore(Path(sys.argv[1]))
store.write(1, [record_group(make_group(), step=1)])
store.write(2, endless())
"""


def test_a_writer_killed_in_the_middle_leaves_no_half_step(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], cwd=root)
    store = TrajectoryStore(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 100_000 for path in store.directory.glob(".step_000002*")):
            assert time.monotonic() < deadline, "the writer did not write 100 kB in 60 s"
            assert writer.poll() is None
            time.sleep(0.005)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
    assert store.steps() == (1,)
    (unfinished,) = store.directory.glob(".step_000002*")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(unfinished.read_bytes())
    records, torn = read_records(cut)
    assert len(records) > 10
    assert records[5].group == make_group(5, (1.0,) * 8, num_turns=8)
    assert len(torn) == 1
    assert store.set_aside_after(1) is None
    assert not unfinished.exists()


def test_resume_sets_later_steps_aside_without_overwriting_an_earlier_set(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for _ in range(2):
        for step in range(1, 5):
            store.write(step, [record_group(make_group(), step=step)])
        store.write(4, [record_group(make_group(), step=4)], "eval_step")
        aside = store.set_aside_after(2)
        assert aside is not None
        assert sorted(path.name for path in aside.iterdir()) == [
            "eval_step_000004.jsonl.gz", "step_000003.jsonl.gz", "step_000004.jsonl.gz",
        ]  # fmt: skip
    assert store.steps() == (1, 2)
    assert store.steps("eval_step") == ()
    assert sorted(path.name for path in store.directory.iterdir() if path.is_dir()) == ["set-aside", "set-aside-1"]


def _shown(run_dir: Path, **options) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render_step(run_dir, 5, console=console, **options)
    return console.export_text()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    group, other = make_group(0, (1.0, 0.0)), make_group(1, (1.0, None))
    first = group.trajectories[0].id
    scores = Scores(
        answers={first: AnswerScore(logprobs=(-4.0, -2.5, -0.125))},
        meter={
            first: MeterScore(
                forecasts=(
                    Forecast(is_valid=True, completion=True, completion_prob=0.75, tokens_to_go=120.0),
                    Forecast(is_valid=False),
                )
            )
        },
    )
    advantages = {first: (np.full(4, 0.5), np.array([-1.0, -1.0, -2.0, -2.0]))}
    details = {first: {"multiplier": (1.25, 0.75)}}
    records = [
        record_group(group, step=5, advantages=advantages, scores=scores, details=details),
        record_group(other, step=5, dropped="too_few_trainable"),
    ]
    TrajectoryStore(tmp_path).write(5, records)
    return tmp_path


def test_a_step_is_shown_as_a_table_with_rewards_credit_and_drop_reasons(run_dir: Path) -> None:
    text = _shown(run_dir, limit=0)
    (kept,) = [line for line in text.splitlines() if "task-0/e0-0" in line]
    assert kept.split() == ["task-0/e0-0", "1", "0", "2.0", "8", "-2.00", "+0.50", "completed"]
    (dropped,) = [line for line in text.splitlines() if "task-1/e0-1" in line]
    assert dropped.split()[1:3] == ["1", "?"]
    assert "1 completed, 1 env_error" in dropped
    assert "too_few_trainable" in dropped


def test_a_trajectory_is_shown_with_its_text_and_the_numbers_of_every_turn(run_dir: Path) -> None:
    text = _shown(run_dir, trajectory="task-0/e0-0/0.0")
    assert "Where is the [bold]key[/bold]?" in text
    first, second = [line for line in text.splitlines() if "  wrote 4" in line]
    assert (
        "credit +0.500  gold logprob -4.000  forecast completes (p=0.75, 120 tokens to go)  multiplier 1.250" in first
    )
    assert "credit -1.500  gold logprob -2.500  forecast unreadable  multiplier 0.750" in second
    assert text.index("<look>0</look>") < text.index(first) < text.index("room 0") < text.index("<look>1</look>")
    assert "end state: gold logprob -0.125" in text
    assert "gold: under the mat" in text


def test_a_failed_trajectory_shows_its_error_and_why_it_was_not_trained(run_dir: Path) -> None:
    text = _shown(run_dir, trajectory="task-1/e0-1/1")
    assert "not trained: too_few_trainable" in text
    assert "error: door jammed" in text


def test_a_name_of_several_trajectories_is_refused_with_the_choices(run_dir: Path) -> None:
    with pytest.raises(TrajectoryError, match=r"'task-0' names 2 trajectories; name one of: task-0/e0-0/0.0, task-0"):
        _shown(run_dir, trajectory="task-0")
    with pytest.raises(TrajectoryError, match="'nobody' names 0 trajectories"):
        _shown(run_dir, trajectory="nobody")
