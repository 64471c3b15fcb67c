"""A small process between the driver and a server: the server never outlives the driver.

Usage: python guardian.py PARENT_PID COMMAND...

It starts COMMAND in a session of its own and ends every process of that session when the command
exits, when it gets SIGTERM, or when PARENT_PID is no longer its parent (the driver was killed).
Only the standard library is imported, so it costs about 10 MB. PR_SET_PDEATHSIG alone would not do:
it fires when the *thread* that started the child ends, and it reaches one process, not the tree.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def _die_with_guardian() -> None:
    """Runs in the child before exec: SIGKILL it should the guardian itself be killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Process ids, zombies aside, whose session id is `session` (Linux)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # ended while we looked
        # pid (command may hold spaces and brackets) state ppid pgrp session ...
        state, _, _, owner = stat.rpartition(")")[2].split()[:4]
        if state != "Z" and int(owner) == session:
            members.append(int(entry.name))
    return members


def end_session(server: subprocess.Popen[bytes]) -> None:
    """SIGKILL to everything in the server's session. A rollout server keeps nothing worth an orderly end,
    and SGLang's own takes more than six seconds."""
    for _ in range(20):  # a process that is being killed may just have forked
        members = session_members(server.pid)
        if not members:
            break
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        server.poll()
        time.sleep(0.05)
    server.wait()


def main(arguments: list[str]) -> int:
    """The command's exit code; 0 where we ended it on purpose."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    stop_requested = False

    def request_stop(signum: int, frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    with tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, "TMPDIR": scratch}  # SGLang leaves its socket files behind
        server = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_die_with_guardian)
        while server.poll() is None and not stop_requested and os.getppid() == parent_pid:
            time.sleep(POLL_S)
        exit_code = server.poll()
        end_session(server)
    if exit_code is None:
        return 0
    return exit_code if exit_code >= 0 else 128 - exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
