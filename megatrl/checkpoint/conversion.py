"""Models from one form into the other: Hugging Face files and Megatron's distributed checkpoints."""

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatrl.checkpoint import hf_export
from megatrl.checkpoint.atomic_directory import replacing_directory
from megatrl.checkpoint.hf_export import carry_over, export_hf_directory, write_config
from megatrl.checkpoint.megatron_reader import MegatronReader
from megatrl.config.model_shape import ModelShape, read_model_shape
from megatrl.errors import CheckpointError
from megatrl.mcore import weights_directory
from megatrl.mcore.safetensors_reader import SafetensorsReader
from megatrl.mcore.weight_map import HF_OUTPUT, weight_rules

logger = logging.getLogger(__name__)

SHARD_BYTES = hf_export.SHARD_BYTES
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written, in Hugging Face's terms: tensors, bytes and files of weights."""

    out: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    largest_file_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What both directions have in common."""

    dtype: torch.dtype | None = None  # None keeps the tensors' own
    shard_bytes: int = SHARD_BYTES  # of one file; a single larger tensor still gets its own
    force: bool = False  # replace a directory that no conversion wrote
    on_progress: Callable[[int, int], None] = lambda done, total: None  # tensors done, tensors in all
    verify: Callable[[Path], None] | None = None  # gets the finished directory, and may refuse it


def megatron_to_hf(shards: Path, *, source: Path, out: Path, options: ConversionOptions) -> Conversion:
    """Write the weights of the distributed checkpoint `shards` as a Hugging Face directory `out`.

    Config, tokenizer and templates are `source`'s. The files do not depend on the layout that saved the
    checkpoint. Memory holds one shard and one parameter. Raises CheckpointError or ModelError, naming tensors,
    where the checkpoint is not the model of `source`, and leaves an earlier `out` as it was.
    """
    check_replaceable(out, force=options.force)
    _check_apart(out, shards, source)
    reader = MegatronReader(shards, read_model_shape(source))
    sizes = reader.num_bytes(options.dtype)
    _check_space(out, sum(sizes.values()))

    def finish(staging: Path) -> None:
        note = {"format": 1, "made_by": "megatrl convert megatron-to-hf", "num_tensors": len(sizes)}
        (staging / hf_export.DESCRIPTION).write_text(json.dumps(note, indent=1) + "\n")
        if options.verify is not None:
            options.verify(staging)

    export_hf_directory(
        _counted(reader.tensors(), len(sizes), options.on_progress),
        source=source,
        out=out,
        is_writer=True,
        shard_bytes=options.shard_bytes,
        dtype=options.dtype,
        sizes=sizes,
        before_publishing=finish,
    )
    dtypes = reader.dtypes if options.dtype is None else {options.dtype}
    return _summary(out, out.glob("*.safetensors"), len(sizes), *sorted(str(d).removeprefix("torch.") for d in dtypes))


def hf_to_megatron(source: Path, *, out: Path, options: ConversionOptions) -> Conversion:
    """Write the Hugging Face directory `source` as `out`: shards that every layout loads, and all that is not weights.

    `out` can be the `model.path` of a recipe. Experts may be stored one by one or packed. Memory holds one
    shard and one parameter. Raises ModelError, naming tensors, for files that are not the model of
    config.json, and leaves an earlier `out` as it was.
    """
    from megatrl.checkpoint.megatron_writer import write_megatron_weights  # imports megatron

    check_replaceable(out, force=options.force)
    _check_apart(out, source)
    shape = read_model_shape(source)
    try:
        with SafetensorsReader(source) as reader, replacing_directory(out) as staging:
            expected = _check_names(reader, shape, source)
            _check_space(out, sum(file.stat().st_size for file in source.glob("*.safetensors")))
            shards = staging / weights_directory.SHARDS
            shards.mkdir()
            num_tensors, dtypes = write_megatron_weights(
                reader,
                shards,
                shape,
                shard_bytes=options.shard_bytes,
                dtype=options.dtype,
                on_written=lambda done: options.on_progress(done, len(expected)),
            )
            if num_tensors != len(expected):
                raise CheckpointError(f"{num_tensors} of {len(expected)} tensors were written; nothing is published")
            carried = carry_over(source, staging)
            write_config(source, staging, dtypes)
            names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
            note = weights_directory.description(shards, num_tensors=num_tensors, dtypes=names)
            (staging / weights_directory.DESCRIPTION).write_text(json.dumps(note, indent=1) + "\n")
            if options.verify is not None:
                options.verify(staging)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"the model was not converted to {out}: {_reason(error)}") from error
    logger.info("converted model path=%s tensors=%d carried=%s", out, num_tensors, ",".join(carried))
    return _summary(out, (out / weights_directory.SHARDS).glob("*.distcp"), num_tensors, *names)


def check_replaceable(out: Path, *, force: bool) -> None:
    """Raises CheckpointError for an existing `out` that no conversion wrote, unless `force` is given."""
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file; name a directory that is not there yet")
    is_ours = any((out / name).is_file() for name in (hf_export.DESCRIPTION, weights_directory.DESCRIPTION))
    if any(out.iterdir()) and not is_ours and not force:
        raise CheckpointError(
            f"{out} exists and was not written by `megatrl convert`; name another directory, or give --force to "
            "replace it"
        )


def _check_apart(out: Path, *sources: Path) -> None:
    """Raises CheckpointError where `out` would take the place of what is read, whatever --force says."""
    place = out.resolve()
    for source in (path.resolve() for path in sources):
        if place == source or place in source.parents:
            raise CheckpointError(
                f"{out} is or contains {source}, which is read here and would be gone; name another directory"
            )


def _check_names(reader: SafetensorsReader, shape: ModelShape, source: Path) -> set[str]:
    expected = {name for rule in weight_rules(shape) for name in rule.hf_names}
    # a tied checkpoint may store lm_head as well; rotary tables are derived, old files store them
    ignored = {HF_OUTPUT} if shape.tie_word_embeddings else set[str]()
    unknown = {n for n in reader.names - expected - ignored if not n.endswith(".rotary_emb.inv_freq")}
    missing = expected - reader.names
    if missing or unknown:
        raise CheckpointError(
            f"the weights in {source} do not match its config.json: {len(missing)} missing {sorted(missing)[:4]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:4]}"
        )
    return expected


def _check_space(out: Path, num_bytes: int) -> None:
    """A write that cannot succeed fails before it begins. The earlier output stays until the end, so both must fit."""
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise CheckpointError(
            f"{out} needs {num_bytes / 1e9:.2f} GB beside what is there, {place} has {free / 1e9:.2f} GB free; free "
            "space, or choose another disk"
        )


def _counted(
    tensors: Iterator[tuple[str, Tensor]], total: int, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    while (item := next(tensors, None)) is not None:
        yield item
        del item  # or its memory would stay while the next one is read
        done += 1
        on_progress(done, total)


def _reason(error: Exception) -> str:
    """torch's writers report a failed write as a RuntimeError without the errno."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{error}. Free space there, or choose another disk; what was there before is intact"
    return f"{type(error).__name__}: {error}"


def _summary(out: Path, files: Iterable[Path], num_tensors: int, *dtypes: str) -> Conversion:
    sizes = [file.stat().st_size for file in files]
    return Conversion(
        out=out,
        num_tensors=num_tensors,
        num_bytes=sum(sizes),
        num_files=len(sizes),
        largest_file_bytes=max(sizes),
        dtypes=dtypes,
    )
