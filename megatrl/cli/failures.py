"""The boundary between errors and people: a clean message and an exit code instead of a traceback.

Exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

import errno
import functools
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import typer

from megatrl.errors import ConfigError, MegatrlError, Terminated

P = ParamSpec("P")
R = TypeVar("R")

_DISK_FAULTS = {
    errno.ENOSPC: "free space there; checkpoints that were complete before are intact",
    errno.EDQUOT: "free space within your quota; checkpoints that were complete before are intact",
    errno.EROFS: "choose another directory with observe.runs_dir",
    errno.EACCES: "allow writing there, or choose another directory with observe.runs_dir",
}
"""Faults of the disk that a person can mend, and how."""

debugging: ContextVar[bool] = ContextVar("debugging", default=False)
"""Set by `megatrl --debug`: errors keep their traceback."""


def reports_failures(command: Callable[P, R]) -> Callable[P, R]:
    """Return the command with every MegatrlError told on stderr; `megatrl --debug` keeps the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except MegatrlError as error:
            if debugging.get():
                raise
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            print(f"error: {kind}{error.message}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
        except BrokenPipeError:
            # The reader (head, less) has gone; without this the interpreter complains once more while it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            if debugging.get() or error.errno not in _DISK_FAULTS:
                raise
            place = f" ({error.filename})" if error.filename else ""
            print(f"error: {error.strerror}{place}: {_DISK_FAULTS[error.errno]}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except Terminated:
            print("terminated", file=sys.stderr)
            raise typer.Exit(143) from None

    return run


def show_warnings(warnings: tuple[str, ...]) -> None:
    """Print what does not stop a run, one line each, on stderr."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
