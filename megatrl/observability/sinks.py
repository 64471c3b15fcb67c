"""Where a step's numbers go: one local file that is the full truth, and trackers that may fail.

A tracker (wandb, TensorBoard) runs in a thread of its own behind a bounded queue. What it raises is
counted and logged, what it blocks on is waited for only a few seconds at the end, and what does not
fit the queue is left out there; the local file has every line.
"""

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatrl.errors import TrajectoryError
from megatrl.observability.atomic_file import replace_file, unused_path

logger = logging.getLogger(__name__)

STEP = "step"
WALL_TIME = "wall_time_s"  # Unix time at which the line was written

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """`metrics.jsonl`: one JSON object for each step, steps strictly increasing, flushed as written."""

    def __init__(self, path: Path, *, last_kept: int = -1) -> None:
        """Open for steps after `last_kept`. Lines of later steps and a cut last line move to a file beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step = set_aside_lines_after(path, last_kept)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            ValueError: the step is not above the last one, or a metric is named like a column of ours.
            OSError: naming this file, where the disk does not take the line.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self._path}: step {step} after step {self.last_step}; steps only grow")
        if reserved := {STEP, WALL_TIME} & metrics.keys():
            raise ValueError(f"metrics may not be named {sorted(reserved)}; these columns are written for each line")
        line = {STEP: step, WALL_TIME: round(time.time(), 3)}
        line |= {name: _json_number(float(value)) for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.last_step = step

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # a line that the disk refused before is refused again; `write` has said so
            logger.warning("closing %s: %s", self._path, error)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file in order; a cut last line is left out.

    Raises:
        TrajectoryError: a line before the last is damaged.
    """
    rows, _ = _read_lines(path)
    return [row for row, _ in rows]


def set_aside_lines_after(path: Path, step: int) -> int | None:
    """Keep only the lines up to `step`; returns the last step kept, None for none.

    The rest, also a line cut by a kill, moves to `metrics-set-aside.jsonl` (or `-1`, `-2`, ...). That
    file is complete before the metrics file itself is replaced.
    """
    if not path.exists():
        return None
    rows, torn = _read_lines(path)
    kept = [raw for row, raw in rows if row[STEP] <= step]
    aside = [raw for row, raw in rows if row[STEP] > step]
    if aside or torn:
        beside = unused_path(path.with_name(f"{path.stem}-set-aside{path.suffix}"))
        with replace_file(beside) as file:
            file.writelines(aside)
            file.write(torn)
        with replace_file(path) as file:
            file.writelines(kept)
        logger.warning("moved %d lines after step %d to %s", len(aside) + bool(torn), step, beside)
    steps = [int(row[STEP]) for row, _ in rows if row[STEP] <= step]
    return steps[-1] if steps else None


def _read_lines(path: Path) -> tuple[list[tuple[dict[str, float], bytes]], bytes]:
    """(row, raw line) of each whole line, and the cut last line (b"" for none)."""
    rows: list[tuple[dict[str, float], bytes]] = []
    torn = b""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                torn = raw
                break
            try:
                row = json.loads(raw)
                rows.append(({name: _number(value) for name, value in row.items()}, raw))
                rows[-1][0][STEP] = int(row[STEP])
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise TrajectoryError(f"{path}:{number}: not a line of metrics ({error!r})") from error
    return rows, torn


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> float:
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


class Tracker(Protocol):
    """A place for metrics outside the run directory. Its methods may raise and may block."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class BackgroundTracker:
    """Feeds a tracker from a thread of its own; none of its methods raises or blocks the loop."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Tracker],
        *,
        queue_size: int = 256,
        close_timeout_s: float = 30.0,
    ) -> None:
        """`connect` is called once, in the thread. When it raises, the tracker stays off."""
        self.name = name
        self.num_failed = 0
        self.num_left_out = 0
        self.num_logged = 0
        self._connect = connect
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_size)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step over; left out and counted when the tracker is this far behind."""
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.num_left_out += 1
            if _is_worth_a_line(self.num_left_out):
                logger.warning("%s is behind: %d steps left out there", self.name, self.num_left_out)

    def close(self) -> bool:
        """Let the tracker finish; False where it did not within its time and was left behind."""
        deadline = time.monotonic() + self._close_timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.05)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s did not finish within %.0f s; left behind", self.name, self._close_timeout_s)
            return False
        if self.num_failed or self.num_left_out:
            logger.warning(
                "%s: %d steps logged, %d failed, %d left out; metrics.jsonl has them all",
                self.name, self.num_logged, self.num_failed, self.num_left_out,
            )  # fmt: skip
        return True

    def _run(self) -> None:
        tracker = self._guarded("connect", self._connect)
        while (item := self._queue.get()) is not None:
            if tracker is None:
                self.num_failed += 1
                continue
            step, metrics = item
            if self._guarded("log", lambda step=step, metrics=metrics: (tracker.log(step, metrics), True)) is not None:
                self.num_logged += 1
        if tracker is not None:
            self._guarded("close", tracker.close)

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """The call's result, or None when it raised. The plan for any error of a tracker is to go on without it."""
        try:
            return call()
        except Exception as error:
            self.num_failed += 1
            if _is_worth_a_line(self.num_failed):
                logger.warning("%s %s failed (%d so far): %s", self.name, what, self.num_failed, f"{error!r}"[:500])
            return None


def _is_worth_a_line(count: int) -> bool:
    """True for 1, 10, 100, ...: a fault repeated at every step gives a handful of lines."""
    return str(count).rstrip("0") == "1"
