"""What a killed driver leaves behind is ended, and nothing else."""

import os
import subprocess
import sys
import time

from megatrl.orchestration.reaper import alive, process_table

DRIVER = """
import subprocess, sys, time
from megatrl.orchestration.reaper import no_process_outlives_this_one
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
with no_process_outlives_this_one():
    child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
    time.sleep(3)
    print("up", flush=True)
    time.sleep(float(sys.argv[1]))
child.kill()
"""


def start(seconds: float, mark: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(seconds)], stdout=subprocess.PIPE, env={**os.environ, "MARK": mark}
    )


def marked(mark: str) -> dict[int, str]:
    """Running processes of one driver, by a variable that its children inherit."""
    found = {}
    for pid, (_, started) in process_table().items():
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment:
                if f"MARK={mark}\0".encode() in environment.read():
                    found[pid] = started
        except OSError:
            continue
    return found


def test_sessions_of_their_own_end_with_a_driver_that_is_killed_and_a_neighbour_stays() -> None:
    with start(300, "killed") as driver, start(300, "neighbour") as neighbour:
        try:
            for each in (driver, neighbour):
                assert each.stdout is not None
                assert each.stdout.readline() == b"up\n"
            assert len(marked("killed")) >= 4  # the driver, its reaper, a child and that one's child
            driver.kill()
            driver.wait(timeout=20)
            deadline = time.monotonic() + 10
            while marked("killed") and time.monotonic() < deadline:
                time.sleep(0.1)
            assert marked("killed") == {}
            assert len(marked("neighbour")) >= 4
        finally:
            driver.kill()
            neighbour.kill()


def test_a_driver_that_ends_in_order_takes_its_reaper_along() -> None:
    with start(0.1, "orderly") as driver:
        assert driver.wait(timeout=30) == 0
        reapers = [pid for pid in marked("orderly") if b"reaper.py" in _command(pid)]
        assert reapers == []
        for pid in marked("orderly"):  # the nested child, which this driver did not end
            os.kill(pid, 9)


def test_a_process_id_given_to_another_process_is_not_ours() -> None:
    own = process_table()[os.getpid()][1]
    assert alive({os.getpid(): own}) == [os.getpid()]
    assert alive({os.getpid(): "0"}) == []


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read()
    except OSError:
        return b""
