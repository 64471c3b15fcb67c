"""A small process beside the driver: what the driver started does not outlive it, however it ended.

Usage: python reaper.py DRIVER_PID

It remembers the driver's descendants and, when the driver is gone, gives them a moment to end by themselves and
then kills those that are left. Ray's own agents would stay for a minute after a SIGKILL of the driver, waiting for
a control store that died with it (seen with Ray 2.60.0). Only the standard library is imported.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.5
GRACE_S = 3.0


def process_table() -> dict[int, tuple[int, str]]:
    """Process id -> (parent's id, start time) of every process that is no zombie (Linux)."""
    table = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # ended while we looked
        # pid (command may hold spaces and brackets) state ppid ... starttime is field 22
        fields = stat.rpartition(")")[2].split()
        if fields[0] != "Z":
            table[int(entry.name)] = (int(fields[1]), fields[19])
    return table


def descendants(root: int, table: dict[int, tuple[int, str]]) -> dict[int, str]:
    """Process id -> start time of everything below `root`, this process aside."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid != os.getpid():
                found[pid] = table[pid][1]
                waiting.append(pid)
    return found


def main(arguments: list[str]) -> None:
    driver = int(arguments[0])
    known: dict[int, str] = {}
    while os.getppid() == driver:
        known |= descendants(driver, process_table())
        time.sleep(POLL_S)
    deadline = time.monotonic() + GRACE_S
    while left := alive(known):
        for pid in left:
            known |= descendants(pid, process_table())  # what they started meanwhile
        if time.monotonic() > deadline:
            for pid in alive(known):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def alive(known: dict[int, str]) -> list[int]:
    """Those that still run; a number that was given to another process since does not count."""
    table = process_table()
    return [pid for pid, started in known.items() if table.get(pid, (0, ""))[1] == started]


@contextlib.contextmanager
def no_process_outlives_this_one() -> Iterator[None]:
    """Runs a reaper for the present process until the block ends in order."""
    command = [sys.executable, "-S", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as reaper:  # Ctrl-C is not for it
        try:
            yield
        finally:
            reaper.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
