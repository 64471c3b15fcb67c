"""Timing spans: nested, summed for each step, and written as a trace file for Perfetto or chrome://tracing."""

import asyncio
import contextvars
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_EVENTS_PER_FILE = 500_000
"""Spans beyond this are still timed but no longer written; about 60 MB."""

_path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("megatrl_span_path", default=())


class SpanRecorder:
    """Times named spans. Safe to use from several threads and from asyncio tasks.

    The file is a JSON array that grows by `flush()`. Trace viewers accept it without its closing
    bracket, so a killed run leaves a readable trace.
    """

    def __init__(self, trace_path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._pending: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}
        self._written = 0
        self._dropped = 0
        self._trace_path = trace_path
        if trace_path is not None:
            trace_path.parent.mkdir(parents=True, exist_ok=True)
            trace_path.write_text("[", encoding="utf-8")

    @contextmanager
    def span(self, name: str, **arguments: float | int | str) -> Iterator[None]:
        """Time the body under `name`, below the span it is called in. Counted also when the body raises."""
        path = (*_path.get(), name)
        token = _path.set(path)
        try:
            with self._timed(path, arguments):
                yield
        finally:
            _path.reset(token)

    @contextmanager
    def frame(self, name: str, **arguments: float | int | str) -> Iterator[None]:
        """Time the body without naming what is in it: spans inside are "learn", not "step/learn"."""
        with self._timed((*_path.get(), name), arguments):
            yield

    @contextmanager
    def _timed(self, path: tuple[str, ...], arguments: Mapping[str, float | int | str]) -> Iterator[None]:
        started_s, clock_s = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._record(path, started_s, time.perf_counter() - clock_s, _current_track(), arguments)

    def external(self, name: str, *, started_s: float, seconds: float, track: str) -> None:
        """Add a span that another process measured. `started_s` is Unix time."""
        self._record((name,), started_s, seconds, track, {}, is_counted=False)

    @staticmethod
    def current_path() -> tuple[str, ...]:
        """Names of the open spans of this thread or task, outermost first."""
        return _path.get()

    def take_seconds(self) -> dict[str, float]:
        """Seconds by span path ("learn", "learn/forward") since the last call. Parallel spans add up."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def flush(self) -> None:
        """Append finished spans to the trace file."""
        # Taken before the events are: two flushes at once would write their parts in either order.
        with self._file_lock:
            with self._lock:
                pending, self._pending = self._pending, []
                start = self._written
                self._written += len(pending)
            if self._trace_path is None or not pending:
                return
            lines = [json.dumps(event, separators=(",", ":")) for event in pending]
            with self._trace_path.open("a", encoding="utf-8") as file:
                file.write(("\n" if start == 0 else ",\n") + ",\n".join(lines))

    def close(self) -> None:
        """Flush, and close the JSON array."""
        self.flush()
        if self._trace_path is not None:
            with self._trace_path.open("a", encoding="utf-8") as file:
                file.write("\n]\n")
            self._trace_path = None

    def _record(
        self,
        path: tuple[str, ...],
        started_s: float,
        seconds: float,
        track: str,
        arguments: Mapping[str, float | int | str],
        *,
        is_counted: bool = True,
    ) -> None:
        with self._lock:
            if is_counted:
                key = "/".join(path)
                self._seconds[key] = self._seconds.get(key, 0.0) + seconds
            if self._trace_path is None:
                return
            if self._written + len(self._pending) >= MAX_EVENTS_PER_FILE:
                self._dropped += 1
                return
            number = self._tracks.get(track)
            if number is None:
                number = self._tracks[track] = len(self._tracks)
                self._pending.append(_event("M", "thread_name", 0, number, args={"name": track}))
            # Chrome's trace format counts in microseconds.
            event = _event("X", path[-1], round(started_s * 1e6), number, dur=round(seconds * 1e6))
            if arguments:
                event["args"] = dict(arguments)
            self._pending.append(event)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, also of one whose process was killed before it closed the array."""
    events: list[dict[str, Any]] = []
    # Each event stands on a line of its own, between lines with the brackets.
    lines = [line.rstrip(",") for line in path.read_text(encoding="utf-8").splitlines() if line not in ("[", "]", "")]
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise
    return events


def _event(phase: str, name: str, timestamp_us: int, track: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": os.getpid(), "tid": track, "ts": timestamp_us, **fields}


def _current_track() -> str:
    # Overlapping tasks of one event loop need a track each, or the viewer nests them.
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread().name if task is None else task.get_name()
