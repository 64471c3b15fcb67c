"""A Hugging Face directory from a stream of named tensors: safetensors with an index, and all that is not weights."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatrl.checkpoint.atomic import fsync_directory, fsync_tree
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import CheckpointError

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_NOT_CARRIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")


def export_hf_directory(
    named: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    out: Path,
    is_writer: bool,
    shard_bytes: int = 4 * 1024**3,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `out` as a model directory whose config, tokenizer, chat template and generation config are `source`'s.

    Collective: every rank consumes its whole iterator, the writer alone touches the disk, and it raises only
    after its iterator has ended. `out` appears by rename, so it is complete or absent; an existing one is
    replaced. `dtype` None keeps the tensors' own, and config.json states what was written. Raises
    CheckpointError for a repeated tensor, for names other than the source's, and for a write that failed.
    """
    remaining = iter(named)
    if not is_writer:
        _drain(remaining)
        return
    staging = out.with_name(f".writing-{out.name}")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        weight_map, dtypes = _write_shards(remaining, staging, shard_bytes, dtype)
        carried = _carry_over(source, staging)
        _write_config(source, staging, dtypes)
        _check_files(staging, weight_map)
        _check_names(source, set(weight_map))
        fsync_tree(staging)
        _replace(staging, out)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        _drain(remaining)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"the model was not exported to {out}: {error}") from error
        raise
    logger.info("exported model path=%s tensors=%d carried=%s", out, len(weight_map), ",".join(carried))


def _drain(named: Iterator[tuple[str, Tensor]]) -> None:
    for _ in named:
        pass


def _write_shards(
    named: Iterator[tuple[str, Tensor]], directory: Path, shard_bytes: int, dtype: torch.dtype | None
) -> tuple[dict[str, str], set[torch.dtype]]:
    """Writes bounded shards while the stream runs, then names them; returns tensor -> file, and the dtypes."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size, total, dtypes, seen = 0, 0, set[torch.dtype](), set[str]()

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in named:
        if name in seen:
            raise CheckpointError(f"{name} was exported twice; the name mapping of the exporter is wrong")
        seen.add(name)
        # Cloned: the stream may hand out live parameters, and a file must not hold two names of one memory.
        copied = tensor.detach().to("cpu", dtype or tensor.dtype).clone(memory_format=torch.contiguous_format)
        if pending and size + copied.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = copied
        size += copied.nbytes
        total += copied.nbytes
        dtypes.add(copied.dtype)
    if not seen:
        raise CheckpointError("the export has no tensors")
    flush()
    return _name_shards(directory, shards, total), dtypes


def _name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> dict[str, str]:
    """Their final names need the number of shards, which is known only at the end."""
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return dict.fromkeys(shards[0], "model.safetensors")
    weight_map: dict[str, str] = {}
    for place, names in enumerate(shards):
        file = f"model-{place + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{place}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=1))
    return weight_map


def _carry_over(source: Path, directory: Path) -> list[str]:
    """Copies every file of the source that is not weights; returns their names."""
    carried: list[str] = []
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_CARRIED):
            shutil.copyfile(file, directory / file.name)
            carried.append(file.name)
    return carried


def _write_config(source: Path, directory: Path, dtypes: set[torch.dtype]) -> None:
    read_model_shape(source)  # refuses, by name, what is missing or unsupported
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = str(next(iter(dtypes))).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _check_files(directory: Path, weight_map: dict[str, str]) -> None:
    """Index and files agree, both ways."""
    there = {file.name for file in directory.glob("*.safetensors")}
    named = set(weight_map.values())
    if there != named:
        raise CheckpointError(f"export has files {sorted(there)} but its index names {sorted(named)}")


def _check_names(source: Path, exported: set[str]) -> None:
    """The export has the tensors that the source has; a source without weight files is not compared."""
    original: set[str] = set()
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            original |= set(opened.keys())
    if not original:
        return
    # A tied model may store its output layer or not; rotary tables are derived and stored by old files only.
    tied = {"lm_head.weight"} if read_model_shape(source).tie_word_embeddings else set[str]()
    original = {name for name in original - tied if not name.endswith("rotary_emb.inv_freq")}
    missing, unknown = sorted(original - exported), sorted(exported - tied - original)
    if missing or unknown:
        raise CheckpointError(
            f"the export does not have the tensors of {source}: {len(missing)} missing {missing[:4]}, {len(unknown)} "
            f"unknown {unknown[:4]}; the name mapping of the exporter is wrong"
        )


def _replace(staging: Path, out: Path) -> None:
    replaced = out.with_name(f".replaced-{out.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        out.rename(replaced)
    staging.rename(out)
    fsync_directory(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)
