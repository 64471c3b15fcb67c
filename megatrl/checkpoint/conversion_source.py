"""What a path given to `megatrl convert megatron-to-hf` means: which shards, and whose config and tokenizer."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrl.checkpoint.store import CheckpointStore
from megatrl.errors import CheckpointError
from megatrl.mcore.weights_directory import SHARDS, checked_shards, is_weights_directory

logger = logging.getLogger(__name__)

_ACTOR = "actor"
_CHECKPOINTS = "checkpoints"
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSource:
    """A distributed checkpoint and the Hugging Face directory that its config and tokenizer come from."""

    shards: Path
    hf: Path
    what: str  # for people: which run, which step


def find_megatron_source(path: Path, *, step: int | None = None, hf: Path | None = None) -> MegatronSource:
    """Returns what `path` holds: a run, its `checkpoints`, one checkpoint, or a converted model directory.

    Of a run the newest intact checkpoint is taken, or that of `step`; its files are compared with its manifest.
    `hf` overrides where config and tokenizer come from. Raises CheckpointError where there is no
    checkpoint or no such directory is found, ModelError for a torn converted directory.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; name a run, a checkpoint of it, or a converted model")
    if is_weights_directory(path):
        _refuse_step(step, path)
        return MegatronSource(
            shards=checked_shards(path, contents=True), hf=hf or path, what=f"the converted model {path}"
        )
    if (path / SHARDS / _METADATA).is_file():  # the actor's state alone, copied out of a checkpoint
        _refuse_step(step, path)
        run = path.resolve().parent.parent.parent
        return MegatronSource(shards=path / SHARDS, hf=hf or _hf_of_run(run), what=f"the actor state {path}")
    run, step = _run_and_step(path, step)
    checkpoints = run / _CHECKPOINTS if (run / _CHECKPOINTS).is_dir() else path
    store = CheckpointStore(checkpoints, run_id=_run_id(checkpoints), keep=1)
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise CheckpointError(f"{checkpoints} has no checkpoint; the run may have written none yet")
    shards = checkpoint.path / _ACTOR / SHARDS
    if not (shards / _METADATA).is_file():
        raise CheckpointError(f"{checkpoint.path} holds no weights ({shards / _METADATA} is missing)")
    return MegatronSource(shards=shards, hf=hf or _hf_of_run(run), what=f"step {checkpoint.step} of {run}")


def _refuse_step(step: int | None, path: Path) -> None:
    if step is not None:
        raise CheckpointError(f"{path} is one set of weights, so --step {step} means nothing there; leave it out")


def _run_and_step(path: Path, step: int | None) -> tuple[Path, int | None]:
    if (path / _CHECKPOINTS).is_dir():
        return path, step
    if (path / "manifest.json").is_file():
        try:
            own = int(json.loads((path / "manifest.json").read_text())["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is torn: manifest.json is not readable ({error!r})") from error
        if step not in (None, own):
            raise CheckpointError(f"{path} is the checkpoint of step {own}, not of --step {step}; leave it out")
        return path.resolve().parents[1], own
    if any(path.glob("step-*")):
        return path.resolve().parent, step
    raise CheckpointError(
        f"{path} is neither a run directory, nor its {_CHECKPOINTS}, nor one checkpoint, nor a converted model. "
        "A model in Hugging Face form goes the other way: megatrl convert hf-to-megatron"
    )


def _run_id(checkpoints: Path) -> str:
    """The run that most of the manifests name: the store itself says which are foreign to it."""
    names = [
        name
        for manifest in sorted(checkpoints.glob("step-*/manifest.json"), reverse=True)
        if isinstance(name := _json(manifest).get("run_id"), str)
    ]
    if not names:
        raise CheckpointError(f"no checkpoint in {checkpoints} has a readable manifest.json; nothing can be converted")
    return max(names, key=names.count)


def _hf_of_run(run: Path) -> Path:
    """Where a run's config and tokenizer lie: its exported policy, its model, or the tiny model made for it."""
    for candidate in _candidates(run):
        if (candidate / "config.json").is_file() and (candidate / "tokenizer.json").is_file():
            logger.info("config and tokenizer come from %s", candidate)
            return candidate
    raise CheckpointError(
        f"no model directory is known for {run}: name one whose config.json and tokenizer belong to it with --source"
    )


def _candidates(run: Path) -> Iterator[Path]:
    yield run / "policy"
    recipe = _json(run / "config.json")
    model = recipe.get("model", {})
    if model.get("kind") == "hf":
        yield Path(model["path"])
        return
    # A run lies in <runs_dir>/<name>/<id>, an arm of a comparison one level deeper.
    for runs_dir in run.resolve().parents[1:3]:
        for made in sorted((runs_dir / "artifacts").glob("model-*/made_from.json")):
            key = _json(made)
            if key.get("model") == model and key.get("env") == recipe.get("env"):
                yield made.parent


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
