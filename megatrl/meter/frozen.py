"""A frozen meter on disk: weights in Hugging Face form and `meter.json`, which says what they are.

The directory appears by rename once it is complete, and every file is checked when it is loaded.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatrl.data.meter_prompt import MeterPrompt
from megatrl.errors import CheckpointError
from megatrl.observability.label_store import file_hash, read_prompt

MANIFEST_NAME = "meter.json"
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMeter:
    """A meter ready to score: where its weights lie, its fixed token ids, and its failure cost C."""

    path: Path
    prompt: MeterPrompt
    failure_cost: float  # C in tokens, over all domains it was trained in
    training_hash: str  # content of the training labels
    failure_costs: Mapping[str, float] = field(default_factory=dict)  # C of each domain
    chat_format: str = "chatml"  # with tool_format and the tokenizer: how it reads a conversation
    tool_format: str = "qwen"
    evaluation: Mapping[str, float] = field(default_factory=dict)  # on held-out tasks, when it was frozen
    identity: str = ""  # hash of the manifest, which holds the hash of every file

    def cost_in(self, domain: str) -> float:
        """C in a domain. In one it was not trained in, its own: costs live on the scale of its forecasts."""
        return self.failure_costs.get(domain, self.failure_cost)


def freeze_meter(
    weights: Path,
    destination: Path,
    *,
    prompt: MeterPrompt,
    failure_cost: float,
    training_hash: str,
    failure_costs: Mapping[str, float] | None = None,
    chat_format: str = "chatml",
    tool_format: str = "qwen",
    evaluation: Mapping[str, float] | None = None,
) -> FrozenMeter:
    """Copies a saved Hugging Face model and its manifest to `destination`, and loads it back verified.

    Raises CheckpointError when the source holds no weights or the destination exists.
    """
    files = sorted(path for path in weights.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    if not any(path.suffix == ".safetensors" for path in files) or not (weights / "config.json").is_file():
        raise CheckpointError(f"{weights} is no Hugging Face model directory: config.json and *.safetensors are needed")
    if destination.exists():
        raise CheckpointError(f"{destination} exists; a frozen meter is never overwritten. Choose another path")
    unfinished = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        hashes: dict[str, str] = {}
        for path in files:
            name = path.relative_to(weights).as_posix()
            target = unfinished / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            hashes[name] = file_hash(target)
        manifest = {
            "format_version": FORMAT_VERSION,
            "prompt": asdict(prompt),
            "failure_cost": failure_cost,
            "failure_costs": dict(failure_costs or {}),
            "chat_format": chat_format,
            "tool_format": tool_format,
            "training_hash": training_hash,
            "evaluation": dict(evaluation or {}),
            "files": hashes,
        }
        (unfinished / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
        for path in unfinished.rglob("*"):
            _sync(path)
        _sync(unfinished)
        os.rename(unfinished, destination)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync(destination.parent)
    return load_frozen_meter(destination)


def load_frozen_meter(path: Path) -> FrozenMeter:
    """The meter at `path`, every file verified.

    Raises CheckpointError for a missing, torn or altered directory.
    """
    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file():
        raise CheckpointError(f"{path} holds no frozen meter: {MANIFEST_NAME} is missing")
    text = manifest_path.read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{manifest_path} has format_version {version}; this version reads {FORMAT_VERSION}")
        files: dict[str, str] = manifest["files"]
        meter = FrozenMeter(
            path=path,
            prompt=read_prompt(manifest["prompt"]),
            failure_cost=float(manifest["failure_cost"]),
            training_hash=manifest["training_hash"],
            failure_costs=manifest["failure_costs"],
            chat_format=manifest["chat_format"],
            tool_format=manifest["tool_format"],
            evaluation=manifest["evaluation"],
            identity=hashlib.sha256(text).hexdigest()[:16],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_path} cannot be read as a meter manifest: {error!r}") from error
    wrong = [name for name, digest in files.items() if file_hash(path / name) != digest]
    if wrong:
        raise CheckpointError(f"files of the frozen meter at {path} are missing or altered: {', '.join(wrong[:5])}")
    return meter


def _sync(path: Path) -> None:
    """Flush a file or directory to disk; some file systems cannot sync directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
