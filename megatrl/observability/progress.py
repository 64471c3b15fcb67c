"""What a person watching a run sees: a live bar on a terminal, and one key=value line for each step."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

logger = logging.getLogger(__name__)

WAIT_LINE_EVERY_S = 30.0
_RECENT_STEPS = 20  # the time left follows the recent pace, not a slow start


class ProgressDisplay:
    """Shows steps done, chosen numbers and the time left. One line per step is logged in any case.

    Used by the loop and by supervised fine-tuning; `waiting` is for what has no steps.
    """

    def __init__(self, num_steps: int, *, done: int = 0, title: str = "", console: Console | None = None) -> None:
        """`done`: steps finished before this start. A console that is no terminal shows no bar."""
        self._num_steps, self._done, self._title = num_steps, done, title
        self._step_ends: deque[tuple[int, float]] = deque([(done, time.monotonic())], maxlen=_RECENT_STEPS + 1)
        console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            fixed = Column(no_wrap=True)
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=12, table_column=fixed),
                MofNCompleteColumn(table_column=fixed),
                TimeElapsedColumn(table_column=fixed),
                TextColumn("{task.fields[numbers]}", table_column=Column()),  # goes over several lines where narrow
                console=console,
                transient=False,
            )
            self._task = self._bar.add_task(title or "step", total=num_steps, completed=done, numbers="")
            self._bar.start()

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Step `step` is done. `numbers` are shown in their order."""
        self._done = step
        if step <= self._step_ends[-1][0]:  # an evaluation before the first step says nothing about the pace of steps
            self._step_ends.clear()
        self._step_ends.append((step, time.monotonic()))
        shown = [f"{name}={format_number(value)}" for name, value in numbers.items()]
        left = self.seconds_left()
        if left is not None:
            shown.append(f"left={format_seconds(left)}")
        head = f"{self._title}: " if self._title else ""
        logger.info("%sstep=%d/%d %s", head, step, self._num_steps, " ".join(shown))
        if self._bar is not None:
            # Square brackets would be read as rich markup.
            text = "  ".join(shown).replace("[", "(").replace("]", ")")
            self._bar.update(self._task, completed=step, numbers=text)

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the recent steps; None before the first step of this start."""
        (first, began), (last, ended) = self._step_ends[0], self._step_ends[-1]
        if last <= first:
            return None
        return max(0.0, (self._num_steps - last) * (ended - began) / (last - first))

    def close(self) -> None:
        """Leave the last state on the terminal. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def waiting(
    what: str, *, deadline_s: float | None = None, every_s: float = WAIT_LINE_EVERY_S, console: Console | None = None
) -> Iterator[None]:
    """Shows that the body waits for `what`; the deadline is the body's to keep.

    A terminal shows a spinner with the time, and a line with the time it took. The log has a line at the start, one
    every `every_s` seconds, and one at the end.
    """
    limit = "" if deadline_s is None else f" (at most {format_seconds(deadline_s)})"
    began = time.monotonic()
    console = console or Console(stderr=True)
    over = threading.Event()

    def remind() -> None:
        while not over.wait(every_s):
            logger.info("still waiting for %s after %s%s", what, format_seconds(time.monotonic() - began), limit)

    logger.info("waiting for %s%s", what, limit)
    thread = threading.Thread(target=remind, name="waiting", daemon=True)
    thread.start()
    try:
        with _spinner(f"{what}{limit}", console):
            yield
    except BaseException:
        logger.info("gave up on %s after %s", what, format_seconds(time.monotonic() - began))
        raise
    else:
        took = f"{what}, {format_seconds(time.monotonic() - began)}"
        logger.info("done: %s", took)
        if console.is_terminal:
            console.print(f"✓ {took}", markup=False, highlight=False)
    finally:
        over.set()
        thread.join(5.0)


def _spinner(text: str, console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    spinner = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    spinner.add_task(text, total=None)
    return spinner


def format_number(value: float) -> str:
    """Four significant digits; whole numbers up to a million in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """`4.2s`, `3m05s` or `2h07m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
