"""CheckpointStore: directories that appear by rename, with hashed files, and a pointer that moves last."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrl.checkpoint.atomic import fsync_directory, fsync_tree, write_text_atomically
from megatrl.errors import CheckpointError

logger = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "manifest.json"
_LATEST = "latest"
_STEP = "step-"
_WRITING = ".writing-"
_DELETING = ".deleting-"
_PINNED = "pinned"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint whose files were compared with its manifest."""

    step: int
    path: Path
    run_id: str


class CheckpointStore:
    """The checkpoints of one run below `directory`. One process writes; any number may read.

    Layout: `step-000040/` holds what the caller wrote plus `manifest.json` (run, step, size and SHA-256 of each
    file) and, where the step is pinned, a file `pinned`; `latest` is a text file with the name of the newest
    committed directory. Directories that start with a dot are unfinished work of a writer that was killed; the
    next writer removes them.
    """

    def __init__(self, directory: Path, *, run_id: str, keep: int, pin_every: int | None = None) -> None:
        """`keep` newest checkpoints stay, pinned ones not counted; multiples of `pin_every` are pinned when written."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the newest checkpoint has to stay")
        self.directory = directory
        self._run_id = run_id
        self._keep = keep
        self._pin_every = pin_every

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """An empty directory to write checkpoint `step` into; it becomes visible when the block ends well.

        Anything raised inside, or while hashing and renaming, leaves the earlier checkpoints and the pointer as
        they were. A full disk is raised as CheckpointError that states the free space. An existing checkpoint of
        this step is replaced.
        """
        staging = self.begin(step)
        try:
            yield staging
            self.commit(step)
        except BaseException as error:
            if (full := self.abandon(step, error)) is not None:
                raise full from error
            raise

    def begin(self, step: int) -> Path:
        """An empty directory that `commit` makes visible as the checkpoint of `step`, or `abandon` removes."""
        staging = self._staging(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            staging.mkdir()
        except OSError as error:
            if (full := self.abandon(step, error)) is not None:
                raise full from error
            raise
        return staging

    def commit(self, step: int) -> None:
        """Hashes, renames, moves the pointer, then deletes what is neither pinned nor among the newest.

        Where it raises, the earlier checkpoints and the pointer are as they were; call `abandon` then.
        """
        self._commit(step, self._staging(step))
        self._apply_retention(step)

    def abandon(self, step: int, error: BaseException) -> CheckpointError | None:
        """Removes what was written of `step`; returns the error to raise instead where the disk was full."""
        staging = self._staging(step)
        is_full = self._was_space_short(error, staging)
        shutil.rmtree(staging, ignore_errors=True)
        if not is_full:
            return None
        reason = f" ({error.message})" if isinstance(error, CheckpointError) else ""
        return CheckpointError(self._no_space(step) + reason)

    def pin(self, step: int) -> None:
        """Exempts a checkpoint from deletion, until `unpin`. A file `pinned` made by hand does the same."""
        path = self.directory / _directory_name(step)
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint of step {step} to pin; there are {list(self.steps())}")
        write_text_atomically(path / _PINNED, "by hand\n")

    def unpin(self, step: int) -> None:
        """Lets the next save delete the checkpoint again where it is old enough."""
        (self.directory / _directory_name(step) / _PINNED).unlink(missing_ok=True)

    def pinned_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoint is never deleted, ascending."""
        return tuple(step for step in self.steps() if (self.directory / _directory_name(step) / _PINNED).exists())

    def steps(self) -> tuple[int, ...]:
        """Steps with a directory of a final name, complete or not, ascending."""
        if not self.directory.is_dir():
            return ()
        found = (_step_of(entry.name) for entry in self.directory.iterdir() if entry.is_dir())
        return tuple(sorted(step for step in found if step is not None))

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of exactly this step. Raises CheckpointError saying what is wrong with it."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}; there are: {there}")
        checkpoint = self._check(step)
        logger.info("checkpoint opened step=%d path=%s", step, checkpoint.path)
        return checkpoint

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from: the pointer's, or where that is unusable the newest intact one.

        None only where there is no checkpoint at all. Unusable ones are named in the log and skipped; where
        all are unusable CheckpointError lists the reasons, because starting from step 0 would be a surprise.
        """
        reasons: list[str] = []
        checkpoint = next(self.usable(reasons), None)
        if checkpoint is None and reasons:
            raise self.unusable(reasons)
        return checkpoint

    def usable(self, reasons: list[str]) -> Iterator[Checkpoint]:
        """Intact checkpoints: the pointer's first, then the others from the newest on.

        The unusable ones between them are named in the log and added to `reasons`.
        """
        steps = self.steps()
        pointed = self._pointed_step() if steps else None
        candidates = sorted(steps, key=lambda step: (step == pointed, step), reverse=True)
        for step in candidates:
            try:
                checkpoint = self._check(step)
            except CheckpointError as error:
                logger.warning("checkpoint skipped reason=%s", error.message)
                reasons.append(error.message)
                continue
            newer = [other for other in steps if other > step]
            if newer:
                logger.warning("resuming from step=%d although there are directories of steps %s", step, newer)
            logger.info("checkpoint opened step=%d path=%s", step, checkpoint.path)
            yield checkpoint

    def unusable(self, reasons: list[str]) -> CheckpointError:
        """The error where no checkpoint can be used: starting from step 0 would be a surprise."""
        return CheckpointError(
            f"none of the {len(self.steps())} checkpoints in {self.directory} can be used: {'; '.join(reasons)}. "
            "Move the directory away to begin again, or restore one from a copy"
        )

    def _commit(self, step: int, staging: Path) -> None:
        files = {str(file.relative_to(staging)): file for file in sorted(staging.rglob("*")) if file.is_file()}
        if not files:
            raise CheckpointError(f"checkpoint of step {step} has no files; nothing was written into {staging}")
        fsync_tree(staging)
        manifest = {"format": _FORMAT, "run_id": self._run_id, "step": step, "files": _measure(files)}
        write_text_atomically(staging / _MANIFEST, json.dumps(manifest, indent=1))
        target = self.directory / _directory_name(step)
        if self._pin_every and step % self._pin_every == 0:
            write_text_atomically(staging / _PINNED, f"checkpoint.pin_every={self._pin_every}\n")
        elif (target / _PINNED).exists():  # a run that went back writes the step again
            write_text_atomically(staging / _PINNED, (target / _PINNED).read_text())
        if target.exists():
            self._delete(target)
        staging.rename(target)
        fsync_directory(self.directory)
        write_text_atomically(self.directory / _LATEST, target.name + "\n")
        logger.info("checkpoint committed step=%d path=%s files=%d", step, target, len(files))

    def _check(self, step: int) -> Checkpoint:
        path = self.directory / _directory_name(step)
        manifest_path = path / _MANIFEST
        try:
            manifest = json.loads(manifest_path.read_text())
            run_id, files = manifest["run_id"], dict(manifest["files"])
            is_same = (manifest["format"], manifest["step"]) == (_FORMAT, step)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is torn: it has no {_MANIFEST}{_weights_hint(path)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is torn: {_MANIFEST} is not readable ({error!r})") from error
        if not is_same:
            raise CheckpointError(
                f"{path} is foreign: its manifest is of format {manifest['format']}, step {manifest['step']}; "
                f"expected format {_FORMAT}, step {step}"
            )
        if run_id != self._run_id:
            raise CheckpointError(
                f"{path} is foreign: it belongs to run {run_id!r}, this is {self._run_id!r}; "
                "give the runs different directories"
            )
        problems = _compare(path, files)
        if problems:
            raise CheckpointError(f"{path} is torn: {'; '.join(problems[:3])}{' ...' if len(problems) > 3 else ''}")
        return Checkpoint(step=step, path=path, run_id=run_id)

    def _pointed_step(self) -> int | None:
        try:
            name = (self.directory / _LATEST).read_text().strip()
        except FileNotFoundError:
            logger.warning("no pointer %s; taking the newest intact checkpoint", self.directory / _LATEST)
            return None
        step = _step_of(name)
        if step is None or step not in self.steps():
            logger.warning("pointer %s names %r, which is not there", self.directory / _LATEST, name)
        return step

    def _apply_retention(self, step: int) -> None:
        pinned = self.pinned_steps()
        older = [other for other in self.steps() if other < step and other not in pinned]
        num_kept = self._keep if step in pinned else self._keep - 1
        for other in older[: max(0, len(older) - num_kept)]:
            self._delete(self.directory / _directory_name(other))

    def _delete(self, path: Path) -> None:
        """Rename first, so that being killed half-way leaves no torn directory under a final name."""
        doomed = path.with_name(f"{_DELETING}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for entry in self.directory.iterdir():
            if entry.name.startswith((_WRITING, _DELETING)):
                logger.warning("removing what an interrupted writer left path=%s", entry)
                shutil.rmtree(entry, ignore_errors=True)

    def _staging(self, step: int) -> Path:
        return self.directory / f"{_WRITING}{_directory_name(step)}"

    def _was_space_short(self, error: BaseException, staging: Path) -> bool:
        """Whether a full disk explains the error. Writers of shards report theirs without an errno, so there the
        space that is left is compared with what the previous checkpoint would still need."""
        if isinstance(error, OSError):
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not isinstance(error, CheckpointError) or not staging.exists() or not self.steps():
            return False
        previous = _tree_bytes(self.directory / _directory_name(self.steps()[-1]))
        return shutil.disk_usage(self.directory).free < previous - _tree_bytes(staging)

    def _no_space(self, step: int) -> str:
        free = shutil.disk_usage(self.directory if self.directory.exists() else self.directory.parent).free
        sizes = [_tree_bytes(self.directory / _directory_name(other)) for other in self.steps()]
        size = (
            f"the previous one takes {sizes[-1] / 1e9:.2f} GB" if sizes else "there is no earlier one to compare with"
        )
        return (
            f"no space for the checkpoint of step {step} in {self.directory}: {free / 1e9:.2f} GB free now, {size}. "
            f"Intact: steps {list(self.steps())}. Free space, or lower checkpoint.keep"
        )


def _directory_name(step: int) -> str:
    if step < 0:
        raise ValueError(f"step is {step}; it counts from 0")
    return f"{_STEP}{step:06d}"


def _step_of(name: str) -> int | None:
    digits = name.removeprefix(_STEP)
    return int(digits) if name.startswith(_STEP) and digits.isdecimal() else None


def _weights_hint(path: Path) -> str:
    """For a directory that holds a model and no checkpoint."""
    if not any(path.glob("*.safetensors")):
        return ""
    return " but *.safetensors; weights alone cannot be resumed, start a new run from them with model.path"


def _measure(files: Mapping[str, Path]) -> dict[str, dict[str, int | str]]:
    """Relative path -> size in bytes and SHA-256; files are hashed in parallel."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = dict(zip(files, pool.map(file_sha256, files.values()), strict=True))
    return {name: {"bytes": path.stat().st_size, "sha256": digests[name]} for name, path in files.items()}


def _compare(path: Path, files: Mapping[str, Mapping[str, object]]) -> list[str]:
    """What differs between the directory and its manifest. Sizes first, since a cut file is the common case."""
    problems = []
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != entry["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}")
    if problems:
        return problems
    found = _measure({name: path / name for name in files})
    return [f"{name} has other content than was written" for name in files if found[name] != files[name]]


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _tree_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
