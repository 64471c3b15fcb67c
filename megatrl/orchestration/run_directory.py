"""Whose a run directory is: a fresh one for a beginning, an existing one for a resume, one driver at a time."""

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrl.checkpoint.store import CheckpointStore
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_LOCK = "driver.lock"
_RESULTS = ("metrics.jsonl", "*/metrics.jsonl", "checkpoints/step-*")
_MAX_DIFFERENCES = 8
_NOT_PART_OF_A_RUN: dict[str, Any] = {
    **dict.fromkeys(("observe", "checkpoint", "evaluation", "placement", "publish", "train", "scoring"), True),
    "actor": {"timeout_s": True, "layout": True, "recompute": True},
    "rollout": {
        **dict.fromkeys(("episode_timeout_s", "tool_timeout_s", "max_attempts", "max_failure_fraction"), True),
        "max_concurrent_episodes": True,
        "servers": dict.fromkeys(
            (
                "num_servers",
                "tensor",
                "max_restarts",
                "python",
                "start_timeout_s",
                "request_timeout_s",
                "max_total_tokens",
                "mem_fraction_static",
            ),
            True,
        ),
    },
}
"""Where a run writes, how long it goes on, how processes share its work (which changes the order of sums and nothing
else), and the limits that one raises to continue after a failure."""


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides what a run computes, as JSON values."""
    return recipe.model_dump(mode="json", exclude=_NOT_PART_OF_A_RUN)


@contextlib.contextmanager
def claimed(home: Path, run_id: str | None) -> Iterator[Path]:
    """A directory below `home` for a run that begins, held by this process until the block ends.

    Without a run id its name is the time, and a number where two runs begin in one second. Raises
    ConfigError where the run id was used before.
    """
    run_dir = home / run_id if run_id else _new_directory(home)
    used = next((path for pattern in _RESULTS for path in run_dir.glob(pattern)), None)
    if used is not None:
        raise ConfigError(f"run directory {run_dir} exists ({used}); give --resume to continue it, or another --run-id")
    with held(run_dir):
        yield run_dir


@contextlib.contextmanager
def continued(home: Path, run_id: str | None, recipe: Recipe) -> Iterator[Path]:
    """The directory of a run to resume, the last one by default, held by this process until the block ends.

    Reads a few small files only, so that a resume that cannot work fails before anything is started:
    CheckpointError where there is no such run, no checkpoint, or the recipe is another one now.
    """
    run_dir = home / (run_id or _newest(home))
    if not (run_dir / "config.json").is_file():
        raise CheckpointError(f"nothing to resume in {run_dir}: no run was started there; start it without --resume")
    if not CheckpointStore(run_dir / "checkpoints", run_id=recipe.name, keep=recipe.checkpoint.keep).steps():
        raise CheckpointError(
            f"nothing to resume in {run_dir}: it has no checkpoint yet; start it again under another --run-id"
        )
    changes = changed_settings(json.loads((run_dir / "config.json").read_text()), recipe)
    if changes:
        more = f"; and {len(changes) - _MAX_DIFFERENCES} more" if len(changes) > _MAX_DIFFERENCES else ""
        raise CheckpointError(
            f"the recipe is not the one of {run_dir}: {'; '.join(changes[:_MAX_DIFFERENCES])}{more}. "
            "Set them back, or start a new run without --resume"
        )
    with held(run_dir):
        yield run_dir


def changed_settings(recorded: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """What decides a run's numbers and is not as it was recorded, one `path was A, is B` for each."""
    was = _leaves(identity_of(Recipe.model_validate(recorded)))
    now = _leaves(identity_of(recipe))
    absent = "absent"
    return [
        f"{path} was {was.get(path, absent)}, is {now.get(path, absent)}"
        for path in {**was, **now}
        if was.get(path, absent) != now.get(path, absent)
    ]


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Two drivers in one directory would replace each other's checkpoints; the lock goes with its process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run directory {run_dir} is in use by another process; wait for it, or give another --run-id"
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("no lock on %s: %s", run_dir, error)
        yield


def _new_directory(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while True:
        run_dir = home / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
            continue
        return run_dir


def _newest(home: Path) -> str:
    """The run id that was used last. Raises CheckpointError where there is none."""
    ids = sorted(path.name for path in home.iterdir() if (path / "config.json").exists()) if home.is_dir() else []
    if not ids:
        raise CheckpointError(f"nothing to resume in {home}: no run was started there")
    return ids[-1]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = json.dumps(value)
    return leaves
