"""A tracker may raise or hang; training neither stops nor slows, and the local file has every step."""

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from megatrl.config.recipe import ObserveConfig
from megatrl.observability.memory import MemoryMeter
from megatrl.observability.progress import ProgressDisplay
from megatrl.observability.record import Observation
from megatrl.observability.sinks import BackgroundTracker, MetricsFile, read_metrics
from megatrl.observability.spans import SpanRecorder
from megatrl.observability.trackers import TensorBoardTracker, WandbTracker
from megatrl.observability.trajectories import TrajectoryStore


class MonotonicTracker:
    """Drops a point whose step is not above the last, as wandb does with its own step."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.points or step > self.points[-1][0]:
            self.points.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


class RaisingTracker(MonotonicTracker):
    """Answers like a service under a rate limit: fails four times of five."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls % 5:
            raise ConnectionError("429 too many requests")
        super().log(step, metrics)

    def close(self) -> None:
        raise OSError("upload failed")


class BlockedTracker(MonotonicTracker):
    """Never answers until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.released.wait(60)
        super().log(step, metrics)


def _observation(run_dir: Path, tracker: BackgroundTracker) -> Observation:
    return Observation(
        metrics_file=MetricsFile(run_dir / "metrics.jsonl"),
        store=TrajectoryStore(run_dir),
        spans=SpanRecorder(),
        trackers=[tracker],
        display=ProgressDisplay(1000),
        memory=MemoryMeter(),
    )


def _run_steps(run_dir: Path, tracker: BackgroundTracker, count: int) -> float:
    """Seconds that `count` steps and the end took."""
    observation = _observation(run_dir, tracker)
    began = time.perf_counter()
    for step in range(1, count + 1):
        with observation.step(step) as record:
            record.add({"loss": step / 2})
    observation.close()
    return time.perf_counter() - began


def test_a_working_tracker_gets_every_step_and_is_closed(tmp_path: Path) -> None:
    fake = MonotonicTracker()
    tracker = BackgroundTracker("fake", lambda: fake)
    _run_steps(tmp_path, tracker, 50)
    assert [step for step, _ in fake.points] == list(range(1, 51))
    assert fake.points[9][1]["loss"] == 5.0
    assert fake.is_closed
    assert (tracker.num_logged, tracker.num_failed, tracker.num_left_out) == (50, 0, 0)


def test_a_raising_tracker_costs_nothing_but_its_own_points(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = RaisingTracker()
    tracker = BackgroundTracker("fake", lambda: fake)
    _run_steps(tmp_path, tracker, 200)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 200
    assert [step for step, _ in fake.points] == list(range(5, 201, 5))
    assert (tracker.num_logged, tracker.num_failed) == (40, 161)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 2 <= len(warnings) < 10
    assert "429 too many requests" in warnings[0].getMessage()


def test_a_tracker_that_cannot_connect_stays_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def connect() -> MonotonicTracker:
        raise ImportError("no module named tracker")

    tracker = BackgroundTracker("fake", connect)
    _run_steps(tmp_path, tracker, 20)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 20
    assert tracker.num_logged == 0
    assert "no module named tracker" in caplog.text


def test_a_blocked_tracker_neither_slows_the_steps_nor_holds_up_the_end(tmp_path: Path) -> None:
    fake = BlockedTracker()
    tracker = BackgroundTracker("fake", lambda: fake, queue_size=8, close_timeout_s=0.5)
    seconds = _run_steps(tmp_path, tracker, 100)
    assert seconds < 30  # one blocked call alone lasts 60
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 100
    assert tracker.num_left_out >= 100 - 9
    fake.released.set()


def test_a_process_with_a_tracker_blocked_for_ever_exits_with_zero(tmp_path: Path) -> None:
    script = """
import threading
from megatrl.observability.sinks import BackgroundTracker
class Blocked:
    def log(self, step, metrics): threading.Event().wait()
    def close(self): pass
tracker = BackgroundTracker("blocked", Blocked, close_timeout_s=0.2)
tracker.log(1, {"x": 1.0})
assert tracker.close() is False
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_resumed_at_an_earlier_step_loses_no_point_locally_and_links_a_second_tracker_run(tmp_path: Path) -> None:
    first, second = MonotonicTracker(), MonotonicTracker()
    _run_steps(tmp_path, BackgroundTracker("fake", lambda: first), 49)
    observation = Observation(
        metrics_file=MetricsFile(tmp_path / "metrics.jsonl", last_kept=23),
        store=TrajectoryStore(tmp_path),
        spans=SpanRecorder(),
        trackers=[BackgroundTracker("fake", lambda: second)],
        display=ProgressDisplay(60, done=23),
        memory=MemoryMeter(),
    )
    for step in range(24, 61):
        with observation.step(step) as record:
            record.add({"loss": 1.0})
    observation.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 61))
    assert [step for step, _ in second.points] == list(range(24, 61))


def _tfevents(path: Path) -> Iterator[bytes]:
    """Raw events of a TensorBoard file: length, crc, payload, crc."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def test_tensorboard_files_hold_the_scalars_by_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    tracker = TensorBoardTracker(tmp_path, resume_step=4)
    tracker.log(5, {"rollout/success": 0.25, "loss": -1.5})
    tracker.log(6, {"rollout/success": 0.5})
    tracker.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(raw) for raw in _tfevents(path)]
    scalars = [(each.step, value.tag, value.simple_value) for each in events for value in each.summary.value]
    assert scalars == [(5, "rollout/success", 0.25), (5, "loss", -1.5), (6, "rollout/success", 0.5)]
    assert [each.step for each in events if each.HasField("session_log")] == [5]


def _isolated_wandb(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def test_wandb_offline_writes_the_run_with_step_as_its_own_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    _isolated_wandb(monkeypatch, tmp_path)
    tracker = BackgroundTracker(
        "wandb",
        lambda: WandbTracker(tmp_path, mode="offline", name="demo", resume_step=7, run_config={"seed": 3}),
    )
    for step in (8, 9):
        tracker.log(step, {"rollout/success": step / 10})
    assert tracker.close()
    assert (tracker.num_logged, tracker.num_failed) == (2, 0)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # wandb's own service process writes the file, a moment after `finish` returned.
    wanted = (b"demo@7", b"resumed_from_step", b"rollout/success", b"0.9")
    deadline = time.monotonic() + 20
    while missing := [text for text in wanted if text not in path.read_bytes()]:
        assert time.monotonic() < deadline, f"{missing} not in {path} after 20 s"
        time.sleep(0.1)


def test_wandb_online_without_a_key_or_a_network_keeps_the_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    _isolated_wandb(monkeypatch, tmp_path)
    monkeypatch.setattr("megatrl.observability.trackers.ONLINE_TIMEOUT_S", 2.0)

    def run_once(run_dir: Path) -> list[Path]:
        run_dir.mkdir()
        tracker = BackgroundTracker("wandb", lambda: WandbTracker(run_dir, mode="online", name="demo"))
        tracker.log(1, {"loss": 1.0})
        assert tracker.close()
        assert (tracker.num_logged, tracker.num_failed) == (1, 0)
        return list((run_dir / "wandb").glob("offline-run-*"))

    assert len(run_once(tmp_path / "no-key")) == 1
    assert "no API key" in caplog.text
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nothing listens
    assert len(run_once(tmp_path / "no-network")) == 1
    assert "not reachable" in caplog.text


def test_the_default_config_uses_both_trackers_and_off_uses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _isolated_wandb(monkeypatch, tmp_path)

    def open_and_close(name: str, config: ObserveConfig) -> set[str]:
        run_dir = tmp_path / name
        with Observation.open(run_dir, config, num_steps=1) as observation, observation.step(1):
            pass
        return {each.name for each in run_dir.iterdir()} & {"wandb", "tensorboard"}

    assert open_and_close("bare", ObserveConfig(wandb="off", tensorboard=False)) == set()
    pytest.importorskip("wandb")
    assert open_and_close("full", ObserveConfig()) == {"wandb", "tensorboard"}


@pytest.mark.parametrize("heavy", ["wandb", "tensorboard", "matplotlib", "torch", "ray"])
def test_importing_the_package_imports_no_heavy_library(heavy: str, imported_modules: Callable[[], set[str]]) -> None:
    assert heavy not in imported_modules()


@pytest.fixture(scope="module")
def imported_modules() -> Callable[[], set[str]]:
    script = """
import sys, pkgutil, importlib, megatrl.observability as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"megatrl.observability.{module.name}")
import megatrl.data.wire
print("\\n".join(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert "megatrl.observability.record" in names
    return lambda: names
