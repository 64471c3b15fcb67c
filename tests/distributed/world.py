"""Starts one process for each rank of a small gloo world, with a deadline."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatrl.rollout.ports import free_port

__all__ = ["agreed_port", "free_port", "rank_arguments", "report", "run_world"]

HERE = Path(__file__).parent


def run_world(
    script: str, world_size: int, arguments: dict[str, Any], out: Path, *, timeout_s: float, cuda: bool = False
) -> list[Any]:
    """Returns what each rank of `script` handed to `report`, in rank order.

    All ranks are ended when one fails or the deadline passes; the message then holds their last output.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "arguments.json").write_text(json.dumps(arguments))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        **({} if cuda else {"CUDA_VISIBLE_DEVICES": ""}),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    logs = [(out / f"rank{rank}.log").open("w+") for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(world_size), str(out)],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in processes):
            time.sleep(0.5)  # let the others print why they failed
            raise AssertionError(f"{script} failed or passed its {timeout_s} s deadline\n{_last_lines(logs)}")
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in logs:
            log.close()
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def rank_arguments() -> tuple[int, int, dict[str, Any]]:
    """Returns rank, world size and arguments; called inside a rank script."""
    directory = Path(sys.argv[3])
    return int(sys.argv[1]), int(sys.argv[2]), json.loads((directory / "arguments.json").read_text())


def agreed_port(name: str, *, timeout_s: float = 120.0) -> int:
    """Returns a port for all ranks of this world, found free by rank 0 just before it is used.

    Ports chosen long before by the test get taken by others on a busy machine. `name` is used once.
    """
    file = Path(sys.argv[3]) / f"port-{name}"
    if sys.argv[1] == "0":
        draft = file.with_suffix(".draft")
        draft.write_text(str(free_port()))
        draft.rename(file)
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write {file} within {timeout_s} s")
        time.sleep(0.01)
    return int(file.read_text())


def report(result: Any) -> None:
    """Hands this rank's result (JSON values) to the test."""
    (Path(sys.argv[3]) / f"rank{sys.argv[1]}.json").write_text(json.dumps(result))


def _last_lines(logs: list[Any]) -> str:
    tails = []
    for rank, log in enumerate(logs):
        log.flush()
        log.seek(0)
        tails.append(f"--- rank {rank}\n" + "".join(log.readlines()[-25:]))
    return "\n".join(tails)
