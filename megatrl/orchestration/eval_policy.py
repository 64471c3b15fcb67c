"""What a path given to `megatrl eval` means: a model directory, a run's policy, or a checkpoint converted to one."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from megatrl.checkpoint.conversion import ConversionOptions, megatron_to_hf
from megatrl.checkpoint.conversion_source import find_megatron_source
from megatrl.errors import CheckpointError
from megatrl.mcore.weights_directory import is_weights_directory
from megatrl.observability.label_store import file_hash
from megatrl.observability.progress import waiting

logger = logging.getLogger(__name__)

_READ_BY_SERVERS = ("*.safetensors", "config.json", "tokenizer.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPolicy:
    """A policy in Hugging Face form, and what its files are."""

    path: Path
    what: str  # for people
    content_hash: str  # of weights, config and tokenizer


def resolve_policy(source: Path, *, step: int | None, converted: Path) -> EvaluatedPolicy:
    """The policy of a Hugging Face directory, a run directory, a checkpoint, or a converted model directory.

    Of a run its `policy/` is taken, else its newest checkpoint, or with `step` the one of that step. A
    checkpoint is converted below `converted`, once. Raises CheckpointError where `source` is none of these.
    """
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is no directory; name a model in Hugging Face form, a run directory, or a checkpoint"
        )
    if step is None:
        for path, what in ((source / "policy", f"the policy of {source}"), (source, f"the model {source}")):
            if _is_hugging_face(path):
                return _described(path, what)
    elif _is_hugging_face(source):
        raise CheckpointError(f"{source} is one set of weights, so --step {step} means nothing there; leave it out")
    arms = [path.parent.name for path in sorted(source.glob("*/config.json")) if path.parent.name != "policy"]
    if arms and not (source / "checkpoints").is_dir() and not is_weights_directory(source):
        raise CheckpointError(f"{source} holds several runs; name one of them: {', '.join(arms)}")
    found = find_megatron_source(source, step=step)
    path = converted / f"policy-{_shards_hash(found.shards)}"
    if not _is_hugging_face(path):
        with waiting(f"conversion of {found.what}"):
            megatron_to_hf(found.shards, source=found.hf, out=path, options=ConversionOptions())
    return _described(path, found.what)


def _is_hugging_face(path: Path) -> bool:
    return all(any(path.glob(name)) for name in ("config.json", "tokenizer.json", "*.safetensors"))


def _described(path: Path, what: str) -> EvaluatedPolicy:
    with waiting(f"the hash of {path}"):
        files = sorted({file for pattern in _READ_BY_SERVERS for file in path.glob(pattern)})
        content = {file.name: file_hash(file) for file in files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    logger.info("policy %s path=%s hash=%s", what, path, digest)
    return EvaluatedPolicy(path=path, what=what, content_hash=digest)


def _shards_hash(shards: Path) -> str:
    """Of the files of a distributed checkpoint: where they lie says nothing about what they are."""
    content = {file.name: file_hash(file) for file in sorted(shards.iterdir()) if file.is_file()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
