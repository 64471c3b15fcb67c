"""The local metrics file is the full truth: nothing lost, steps strictly increasing, whatever killed the run."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.errors import TrajectoryError
from megatrl.observability.sinks import MetricsFile, read_metrics


def _steps(path: Path) -> list[float]:
    return [row["step"] for row in read_metrics(path)]


def _write(path: Path, steps: range) -> None:
    file = MetricsFile(path)
    for step in steps:
        file.write(step, {"loss": step / 3})
    file.close()


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda n: n not in ("step", "wall_time_s")), st.floats()))
def test_values_return_bit_for_bit_in_strict_json(tmp_path_factory: pytest.TempPathFactory, metrics: dict) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(5, metrics)
    file.close()
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (row,) = read_metrics(path)
    found = {name: row[name] for name in metrics}
    assert {name: value.hex() for name, value in found.items() if not math.isnan(value)} == {
        name: value.hex() for name, value in metrics.items() if not math.isnan(value)
    }
    assert row["step"] == 5


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"x": 1.0})
    metrics._file.close()
    metrics._file = open("/dev/full", "w")  # noqa: SIM115 - closed by the metrics file
    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl") as caught:
        metrics.write(2, {"x": 2.0})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    metrics.close()
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"loss": 0.5})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] == 0.5
    assert abs(row["wall_time_s"] - time.time()) < 60


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_that_does_not_grow_is_refused(tmp_path: Path, step: int) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(3, {})
    with pytest.raises(ValueError, match=f"step {step} after step 3"):
        file.write(step, {})


def test_a_metric_named_like_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['step'\]"):
        MetricsFile(tmp_path / "metrics.jsonl").write(1, {"step": 4.0})


def test_resume_moves_later_lines_aside_and_continues_increasing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 250))
    file = MetricsFile(path, last_kept=203)
    assert file.last_step == 203
    for step in range(204, 260):
        file.write(step, {"loss": -1.0})
    file.close()
    assert _steps(path) == list(range(1, 260))
    assert read_metrics(path)[202]["loss"] == 203 / 3
    assert _steps(tmp_path / "metrics-set-aside.jsonl") == list(range(204, 250))


def test_two_resumes_keep_both_copies(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 5))
    MetricsFile(path, last_kept=3).close()
    MetricsFile(path, last_kept=1).close()
    assert _steps(path) == [1]
    assert _steps(tmp_path / "metrics-set-aside.jsonl") == [4]
    assert _steps(tmp_path / "metrics-set-aside-1.jsonl") == [2, 3]


def test_resume_where_nothing_is_later_moves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 5))
    before = path.read_bytes()
    MetricsFile(path, last_kept=10).close()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_cut_at_any_byte_resumes_with_its_whole_lines(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    _write(whole, range(1, 4))
    content = whole.read_bytes()
    for size in range(len(content)):
        directory = tmp_path / str(size)
        directory.mkdir()
        path = directory / "metrics.jsonl"
        path.write_bytes(content[:size])
        num_whole = content[:size].count(b"\n")
        assert _steps(path) == list(range(1, num_whole + 1))
        file = MetricsFile(path, last_kept=num_whole)
        file.write(num_whole + 1, {"loss": 0.0})
        file.close()
        assert _steps(path) == list(range(1, num_whole + 2))
        aside = directory / "metrics-set-aside.jsonl"
        torn = content[:size].rpartition(b"\n")[2]
        assert (aside.read_bytes() if aside.exists() else b"") == torn


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(TrajectoryError, match=f"{path}:2: not a line of metrics"):
        read_metrics(path)


_WRITER = """
import sys
from pathlib import Path
from megatrl.observability.sinks import MetricsFile
file = MetricsFile(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    file.write(step, {f"name/{index}": index / 7 for index in range(4000)})
"""


def test_a_writer_killed_in_the_middle_loses_no_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 3_000_000:
            assert time.monotonic() < deadline, "the writer did not write 3 MB in 60 s"
            assert writer.poll() is None
            time.sleep(0.005)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
    steps = _steps(path)
    assert steps == list(range(1, len(steps) + 1))
    last = len(steps)
    assert last >= 10
    file = MetricsFile(path, last_kept=last - 2)
    file.write(last - 1, {"resumed": 1.0})
    file.close()
    assert _steps(path) == list(range(1, last))
    assert read_metrics(path)[-1]["resumed"] == 1.0
