"""Things a recipe makes once and reuses: kept under a name that says what they were made from."""

import functools
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import megatrl

logger = logging.getLogger(__name__)


@functools.cache
def source_digest() -> str:
    """Hash of the package's Python sources, 16 hex digits."""
    root = Path(megatrl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Artifacts:
    """Directories `<root>/<kind>-<hash of the key>`, each complete from the moment it appears."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get_or_make(self, kind: str, key: Mapping[str, object], make: Callable[[Path], None]) -> Path:
        """Returns the directory for `key`; calls `make(empty directory)` when it does not exist yet.

        The key must hold every setting the content depends on; megatrl's own sources are part of it, so
        that no change of code reuses what older code made. A failed or killed `make` leaves nothing under
        the final name.
        """
        text = json.dumps({"sources": source_digest(), **key}, sort_keys=True, default=str)
        final = self._root / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if final.is_dir():
            logger.info("reusing %s", final)
            return final
        partial = self._root / f".{final.name}.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        partial.mkdir(parents=True)
        try:
            make(partial)
            (partial / "made_from.json").write_text(text + "\n")
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final
