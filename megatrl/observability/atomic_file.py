"""Files that are either the old one or the whole of the new one, whatever kills the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Write a new version of `path`: it appears by rename when the body ends, or not at all when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    # Some file systems cannot sync a directory; the rename itself is done.
    with suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with replace_file(path) as file:
        file.write(text.encode("utf-8"))


def unused_path(path: Path) -> Path:
    """`path`, or the first of `stem-1.suffix`, `stem-2.suffix`, ... that does not exist."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
