"""A model directory whose weights are a distributed checkpoint: `megatrl convert hf-to-megatron` writes it.

It holds what a Hugging Face directory holds (config.json, tokenizer, chat template), `shards/` in place of
safetensors, and the description below. No torch and no megatron here: drivers ask what kind a directory is.
"""

import json
from pathlib import Path
from typing import Any

from megatrl.errors import ModelError

DESCRIPTION = "megatron.json"
SHARDS = "shards"

_FORMAT = 1


def is_weights_directory(path: str | Path) -> bool:
    return (Path(path) / DESCRIPTION).is_file()


def description(*, files: dict[str, int], num_tensors: int, dtypes: list[str]) -> dict[str, Any]:
    """The content of the description; `files` are the names below `shards/` with their bytes."""
    return {"format": _FORMAT, "kind": "weights", "num_tensors": num_tensors, "dtypes": dtypes, "files": files}


def checked_shards(path: str | Path) -> Path:
    """Returns the folder of shards. Raises ModelError where its files are not those that were written."""
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
    problems = [
        f"{name} is missing"
        if not (shards / name).is_file()
        else f"{name} has {(shards / name).stat().st_size} bytes, {size} were written"
        for name, size in files.items()
        if not (shards / name).is_file() or (shards / name).stat().st_size != size
    ]
    if problems:
        raise ModelError(f"{directory} is torn: {'; '.join(problems[:3])}; convert the model again")
    return shards
