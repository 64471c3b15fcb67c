"""Writes that are either complete on disk or not there."""

import os
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: temporary name in the same directory, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every file and directory below `path`, and `path` itself, durable."""
    for entry in sorted(path.rglob("*"), reverse=True):
        if entry.is_dir():
            fsync_directory(entry)
        elif entry.is_file():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
    fsync_directory(path)
