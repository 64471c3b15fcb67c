"""Lives of a run, one forked process group each: some die by SIGKILL at a named boundary, others go on from there.

The parent imports everything once and never initialises a process group, so a fork costs nothing.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from local_run import LocalWorkers, open_local_run
from world import rank_arguments, report

from megatrl.checkpoint.store import CheckpointStore
from megatrl.config.recipe import Recipe
from megatrl.observability.logs import logging_to
from megatrl.orchestration.loop import train
from megatrl.orchestration.run import Run
from megatrl.rollout.ports import free_port

LIFE_S = 120.0


def main() -> None:
    _, _, arguments = rank_arguments()
    report([outlive(life) for life in arguments["lives"]])


def outlive(life: dict[str, Any]) -> dict[str, Any]:
    """Runs one life in a process group of its own; says how it ended and what it said last."""
    run_dir = Path(life["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    for damage in life.get("before", ()):
        BEFORE[damage](run_dir / "checkpoints")
    log = run_dir / f"life-{life['name']}.log"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _live_and_exit(life, log)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > LIFE_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"life {life} took longer than {LIFE_S} s\n{log.read_text()[-3000:]}")
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # ranks that still wait for a life that has ended
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    return {"name": life["name"], "code": code, "log": log.read_text(), "seconds": time.monotonic() - began}


def _forget_last(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / "step-000005")


def _mix_shards(checkpoints: Path) -> None:
    with _rewritten(checkpoints, 4) as shards:
        shutil.copy(checkpoints / "step-000002" / "actor" / "shards" / "__0_0.distcp", shards)


def _lose_index(checkpoints: Path) -> None:
    with _rewritten(checkpoints, 5) as shards:
        (shards / ".metadata").unlink()


@contextlib.contextmanager
def _rewritten(checkpoints: Path, step: int) -> Iterator[Path]:
    """The shards of a checkpoint to damage; afterwards its manifest agrees with what is there."""
    store = CheckpointStore(checkpoints, run_id="lives", keep=9)
    with store.writing(step) as staging:
        shutil.copytree(checkpoints / f"step-{step:06d}", staging, dirs_exist_ok=True)
        (staging / "manifest.json").unlink()
        yield staging / "actor" / "shards"


BEFORE = {"forget step 5": _forget_last, "mix shards": _mix_shards, "lose index": _lose_index}


def _live_and_exit(life: dict[str, Any], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        live(life)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without the parent's exit handlers


def live(life: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(life["recipe"])
    run_dir, start = Path(life["run_dir"]), Path(life["start"])
    meter = Path(life["meter"]) if life.get("meter") else None
    (run_dir / "logs").mkdir(exist_ok=True)
    workers: Any = LocalWorkers(recipe, start, free_port(), run_dir / "logs")
    role, kill = life.get("role"), life.get("kill", {})
    if role == "workers":
        workers = DiesAt(workers, **kill)
    with (
        logging_to(run_dir / "logs" / "driver.log", to_stderr=True),
        open_local_run(recipe, run_dir, start, workers, meter=meter, resume=life["resume"]) as run,
    ):
        train(doomed(run, role, kill) if role else run)


class DiesAt:
    """A role that works as ever, until the n-th call of one method is done (or about to begin): then SIGKILL."""

    def __init__(
        self, wrapped: Any, *, method: str, nth: int, before: bool = False, first_argument: str | None = None
    ) -> None:
        self._role, self._method, self._left = wrapped, method, nth
        self._before, self._first_argument = before, first_argument

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._role, name)
        return self._counted(value) if name == self._method else value

    def _counted(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._first_argument in (None, *args[:1]):
                self._left -= 1
            if self._left == 0 and self._before:
                die()
            result = function(*args, **kwargs)
            if self._left == 0:
                die()
            return result

        return call


def die() -> None:
    print("killed here", flush=True)
    os.killpg(0, signal.SIGKILL)


def doomed(run: Run, role: str, kill: dict[str, Any]) -> Run:
    """The run with one role, or the rollout's collector or journal, wrapped."""
    if role in ("collector", "journal"):
        rollout: Any = run.rollout
        setattr(rollout.inner, f"_{role}", DiesAt(getattr(rollout.inner, f"_{role}"), **kill))
        return run
    return run if role == "workers" else replace(run, **{role: DiesAt(getattr(run, role), **kill)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
