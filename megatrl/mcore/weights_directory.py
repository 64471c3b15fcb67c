"""A model directory whose weights are a distributed checkpoint: `megatrl convert hf-to-megatron` writes it.

It holds what a Hugging Face directory holds (config.json, tokenizer, chat template), `shards/` in place of
safetensors, and the description below. No torch and no megatron here: drivers ask what kind a directory is.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrl.errors import ModelError

DESCRIPTION = "megatron.json"
SHARDS = "shards"

_FORMAT = 2


def is_weights_directory(path: str | Path) -> bool:
    return (Path(path) / DESCRIPTION).is_file()


def description(shards: Path, *, num_tensors: int, dtypes: list[str]) -> dict[str, Any]:
    """The content of the description: every file below `shards` with its bytes and SHA-256."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(shards.iterdir())
        if file.is_file()
    }
    return {"format": _FORMAT, "kind": "weights", "num_tensors": num_tensors, "dtypes": dtypes, "files": files}


def checked_shards(path: str | Path, *, contents: bool = False) -> Path:
    """Returns the folder of shards. Raises ModelError where its files are not those that were written.

    Sizes are compared, with `contents` hashes as well: that reads everything once, so a conversion asks for it and the
    ranks of a run do not.
    """
    directory = Path(path)
    file = directory / DESCRIPTION
    try:
        content = json.loads(file.read_text())
        is_known, files = (content["format"], content["kind"]) == (_FORMAT, "weights"), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not readable ({error!r}); convert the model again") from error
    if not is_known:
        raise ModelError(f"{file} is of format {content['format']}, {content['kind']}; this version reads {_FORMAT}")
    shards = directory / SHARDS
    problems = [problem for name, entry in files.items() if (problem := _difference(shards / name, entry, contents))]
    if problems:
        raise ModelError(f"{directory} is torn: {'; '.join(problems[:3])}; convert the model again")
    return shards


def _difference(file: Path, entry: Mapping[str, Any], contents: bool) -> str:
    """What a file has other than was written; an empty text for nothing."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes, {entry['bytes']} were written"
    if contents and _sha256(file) != entry["sha256"]:
        return f"{file.name} has other content than was written"
    return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
