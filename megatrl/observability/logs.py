"""Log set-up for one process: who speaks is on every line, repeats are counted, files are bounded."""

import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

MAX_MESSAGE_CHARS = 8_000
MAX_FILE_BYTES = 50 * 1024 * 1024
NUM_OLD_FILES = 3
MAX_KINDS = 1_000
"""Kinds of repeated messages told apart; further kinds are counted together."""

_FORMAT = "%(asctime)s %(levelname).1s {role} %(name)s: %(message)s"


class RepeatFilter(logging.Filter):
    """Lets a repeated warning through at its 1st, 10th, 100th, ... time, with the count.

    Messages are the same kind when level, logger and text agree apart from numbers. INFO and below
    pass unchanged, so that one line per step stays one line per step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int, str], tuple[int, str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        kind = (record.name, record.levelno, re.sub(r"\d+", "#", message[:300]))
        with self._lock:
            if kind not in self._counts and len(self._counts) >= MAX_KINDS:
                kind = ("", record.levelno, "messages of further kinds")
            count, first = self._counts.get(kind, (0, message[:300]))
            count += 1
            self._counts[kind] = (count, first)
        if str(count).rstrip("0") != "1":
            return False
        if count > 1:
            record.msg, record.args = f"{message} [{count} times so far; first: {first}]", ()
        return True

    def totals(self) -> dict[str, int]:
        """How often each repeated message came, by its first example."""
        with self._lock:
            return {first: count for count, first in self._counts.values() if count > 1}


class _CutFormatter(logging.Formatter):
    """Cuts one message to a bounded length."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) <= MAX_MESSAGE_CHARS:
            return text
        return f"{text[:MAX_MESSAGE_CHARS]} ... ({len(text) - MAX_MESSAGE_CHARS} more characters)"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now: a live progress bar replaces it to print above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


@contextmanager
def logging_to(
    path: Path | None, *, role: str = "driver", level: int = logging.INFO, to_stderr: bool = True
) -> Iterator[RepeatFilter]:
    """Send the log of this process to `path` (rotated at 50 MiB) and stderr; restore the earlier set-up after.

    `role` names this process on each line, e.g. "driver" or "actor-3". At the end the totals of
    repeated warnings are logged.
    """
    repeats = RepeatFilter()
    handlers: list[logging.Handler] = [_StderrHandler()] if to_stderr else []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"))
    root = logging.getLogger()
    earlier_handlers, earlier_level = root.handlers[:], root.level
    gate = _Gate(repeats, handlers)
    for handler in handlers:
        handler.setFormatter(_CutFormatter(_FORMAT.format(role=role.replace("%", "%%"))))
    root.handlers[:] = [gate]
    root.setLevel(level)
    try:
        yield repeats
    finally:
        for first, count in repeats.totals().items():
            logging.getLogger(__name__).info("%d times in all: %s", count, first)
        root.handlers[:] = earlier_handlers
        root.setLevel(earlier_level)
        for handler in handlers:
            handler.close()


class _Gate(logging.Handler):
    """Asks the repeat filter once for each record, then hands it to all handlers."""

    def __init__(self, repeats: RepeatFilter, targets: list[logging.Handler]) -> None:
        super().__init__()
        self.addFilter(repeats)
        self._targets = targets

    def emit(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            target.handle(record)
