"""A way out of blocking code in an environment: an asyncio timeout cannot interrupt what never awaits."""

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from types import CodeType, FrameType

from megatrl.errors import DeadlineError

logger = logging.getLogger(__name__)

_SIGNAL = signal.SIGRTMIN + 7  # one that neither test runners, profilers nor schedulers use
_TICKS = 8  # looks at the loop within one limit; a process that was merely suspended misses most of them

_environment_code: set[CodeType] = set()


def calls_environments(code: CodeType) -> None:
    """Declares a function below which only an environment's own code runs: there it may be interrupted."""
    _environment_code.add(code)


@contextlib.asynccontextmanager
async def blocking_calls_end_after(limit_s: float) -> AsyncIterator[None]:
    """Raises DeadlineError inside an environment that keeps the running event loop from turning for `limit_s`.

    It costs that episode and no other. Works in the main thread, where Python runs signal handlers;
    elsewhere, and for blocking outside environments, the stack is logged. A C function that neither
    returns nor lets signals through cannot be interrupted: the log names it.
    """
    beats = 0
    is_over = threading.Event()
    loop_thread = threading.get_ident()
    can_interrupt = threading.current_thread() is threading.main_thread()

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(limit_s / _TICKS / 2)

    def watch() -> None:
        seen, num_stale = beats, 0
        while not is_over.wait(limit_s / _TICKS):
            num_stale = num_stale + 1 if beats == seen else 0
            seen = beats
            if num_stale >= _TICKS:
                num_stale = 0
                frame = sys._current_frames().get(loop_thread)
                stack = "".join(traceback.format_stack(frame)[-6:]) if frame else "(no stack)\n"
                logger.error("the rollout's event loop is blocked limit_s=%g by:\n%s", limit_s, stack)
                if can_interrupt:
                    signal.pthread_kill(loop_thread, _SIGNAL)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if _in_environment(frame):
            raise DeadlineError(
                f"blocking code did not return within rollout.tool_timeout_s={limit_s:g} and held up all episodes; "
                "use await, or megatrl.envs.tools.run_blocking"
            )

    earlier = signal.signal(_SIGNAL, interrupt) if can_interrupt else None
    heart = asyncio.create_task(beat())
    watcher = threading.Thread(target=watch, name="stall watcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        heart.cancel()
        if can_interrupt:
            signal.signal(_SIGNAL, earlier)


def _in_environment(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _environment_code:
            return True
        frame = frame.f_back
    return False
