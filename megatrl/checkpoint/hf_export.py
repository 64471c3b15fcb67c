"""A Hugging Face directory from a stream of named tensors: safetensors with an index, and all that is not weights."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatrl.checkpoint.atomic_directory import replacing_directory
from megatrl.config.model_shape import hf_config, read_model_shape
from megatrl.errors import CheckpointError
from megatrl.mcore.safetensors_reader import INDEX_FILE, SafetensorsReader
from megatrl.mcore.weights_directory import DESCRIPTION as MEGATRON_DESCRIPTION

logger = logging.getLogger(__name__)

DESCRIPTION = "megatrl_export.json"
"""Marks a directory that `megatrl convert` wrote, so that it may be replaced."""
SHARD_BYTES = 4 * 1024**3

_NOT_CARRIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_NOT_CARRIED_NAMES = (DESCRIPTION, MEGATRON_DESCRIPTION)
_CARRIED_FOLDERS = ("additional_chat_templates",)


def export_hf_directory(
    named: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    out: Path,
    is_writer: bool,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    sizes: Mapping[str, int] | None = None,
    before_publishing: Callable[[Path], None] | None = None,
) -> None:
    """Write `out` as a model directory whose config, tokenizer, chat template and generation config are `source`'s.

    Collective: every rank consumes its whole iterator, the writer alone touches the disk, and it raises only
    after its iterator has ended. `out` appears by rename, so it is complete or absent; an existing one is
    replaced. `dtype` None keeps the tensors' own, and config.json states what was written. `sizes`, bytes by
    name, lets a full shard be written before the next tensor is asked for. `before_publishing` gets the finished
    directory and may still refuse it. Raises CheckpointError for a repeated tensor, for names other than the
    source's, and for a write that failed.
    """
    remaining = iter(named)
    if not is_writer:
        _drain(remaining)
        return
    try:
        with replacing_directory(out) as staging:
            weight_map, dtypes = _write_shards(remaining, staging, shard_bytes, dtype, sizes or {})
            carried = carry_over(source, staging)
            write_config(source, staging, dtypes)
            _check_files(staging, weight_map)
            _check_names(source, set(weight_map))
            if before_publishing is not None:
                before_publishing(staging)
    except BaseException as error:
        _drain(remaining)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"the model was not exported to {out}: {error}") from error
        raise
    logger.info("exported model path=%s tensors=%d carried=%s", out, len(weight_map), ",".join(carried))


def _drain(named: Iterator[tuple[str, Tensor]]) -> None:
    for _ in named:
        pass


def _write_shards(
    named: Iterator[tuple[str, Tensor]],
    directory: Path,
    shard_bytes: int,
    dtype: torch.dtype | None,
    sizes: Mapping[str, int],
) -> tuple[dict[str, str], set[torch.dtype]]:
    """Writes bounded shards while the stream runs, then names them; returns tensor -> file, and the dtypes."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total, dtypes, seen = 0, set[torch.dtype](), set[str]()
    coming = iter(sizes.values())  # in the stream's order

    def make_room(num_bytes: int) -> None:
        if pending and sum(tensor.nbytes for tensor in pending.values()) + num_bytes > shard_bytes:
            flush()

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    def take(name: str, tensor: Tensor) -> int:
        if name in seen:
            raise CheckpointError(f"{name} was exported twice; the name mapping of the exporter is wrong")
        seen.add(name)
        target = dtype or tensor.dtype
        make_room(tensor.numel() * target.itemsize)
        # Copied: the stream may hand out live parameters, and a file must not hold two names of one memory.
        pending[name] = tensor.detach().to("cpu", target, copy=True, memory_format=torch.contiguous_format)
        dtypes.add(target)
        return pending[name].nbytes

    make_room(next(coming, 0))
    while (item := next(named, None)) is not None:
        total += take(*item)
        del item  # or its memory would stay while the next one is read
        make_room(next(coming, 0))
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
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1))
    return weight_map


def carry_over(source: Path, directory: Path) -> list[str]:
    """Copies everything of a model directory that is not weights; returns the names."""
    carried: list[str] = []
    for entry in sorted(source.iterdir()):
        if entry.is_dir() and entry.name in _CARRIED_FOLDERS:
            shutil.copytree(entry, directory / entry.name)
        elif not _is_carried(entry):
            continue
        else:
            shutil.copyfile(entry, directory / entry.name)
        carried.append(entry.name)
    return carried


def _is_carried(entry: Path) -> bool:
    is_foreign = entry.name.startswith(".") or entry.name in _NOT_CARRIED_NAMES or entry.name.endswith(_NOT_CARRIED)
    return entry.is_file() and not is_foreign


def write_config(source: Path, directory: Path, dtypes: set[torch.dtype]) -> None:
    """Writes `source`'s config.json with the dtype of the tensors beside it.

    Raises ModelError for an unsupported model, CheckpointError for a config that describes quantized tensors.
    """
    shape = read_model_shape(source)  # refuses, by name, what is missing or unsupported
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{source / 'config.json'} has a quantization_config, but the tensors written here are not quantized; "
            "take config.json from the unquantized model"
        )
    config.setdefault("architectures", hf_config(shape)["architectures"])
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
    if not any(source.glob("*.safetensors")):
        return
    with SafetensorsReader(source) as reader:
        original = reader.names
    # A tied model may store its output layer or not; rotary tables are derived and stored by old files only.
    tied = {"lm_head.weight"} if read_model_shape(source).tie_word_embeddings else set[str]()
    original = {name for name in original - tied if not name.endswith("rotary_emb.inv_freq")}
    missing, unknown = sorted(original - exported), sorted(exported - tied - original)
    if missing or unknown:
        raise CheckpointError(
            f"the export does not have the tensors of {source}: {len(missing)} missing {missing[:4]}, {len(unknown)} "
            f"unknown {unknown[:4]}; the name mapping of the exporter is wrong"
        )
