"""A directory that takes another's place in one step, or not at all."""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrl.checkpoint.atomic import fsync_directory, fsync_tree
from megatrl.errors import CheckpointError

logger = logging.getLogger(__name__)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replacing_directory(out: Path) -> Iterator[Path]:
    """Gives an empty directory beside `out` that becomes `out` when the block ends well.

    An earlier `out` stays as it is until then, through errors, full disks and kills; what a killed writer left
    beside it is removed by the next one. Raises CheckpointError where another process is writing `out`.
    """
    staging, replaced = out.with_name(f".writing-{out.name}"), out.with_name(f".replaced-{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if replaced.exists() and not out.exists():  # killed between the two renames of `_swap`
        replaced.rename(out)
    if staging.exists():
        with _locked(staging, out):
            logger.warning("removing what an interrupted writer left path=%s", staging)
            shutil.rmtree(staging)
    shutil.rmtree(replaced, ignore_errors=True)
    staging.mkdir()
    try:
        with _locked(staging, out):
            yield staging
            fsync_tree(staging)
            if out.exists():
                _swap(staging, out, replaced)
            else:
                staging.rename(out)
            fsync_directory(out.parent)
    finally:  # after a swap, `staging` or `replaced` is the earlier content
        shutil.rmtree(staging, ignore_errors=True)
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(staging: Path, out: Path) -> Iterator[None]:
    """Two writers of one directory would delete each other's files; the lock goes with its process."""
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{out} is being written by another process; wait for it, or choose another"
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("no lock on %s: %s", staging, error)
        yield
    finally:
        os.close(descriptor)


def _swap(staging: Path, out: Path, replaced: Path) -> None:
    """Exchanges the two in one step where kernel and file system can, else by two renames."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is not None:
        if exchange(_AT_FDCWD, os.fsencode(staging), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE) == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(out))
    out.rename(replaced)
    staging.rename(out)
