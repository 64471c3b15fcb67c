"""A distributed checkpoint of weights alone, written one parameter at a time from Hugging Face files.

It has the keys and global shapes that every layout of the model asks for, so any of them loads it.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatrl.config.model_shape import ModelShape
from megatrl.errors import CheckpointError, ModelError
from megatrl.mcore.safetensors_reader import SafetensorsReader
from megatrl.mcore.sharded_keys import sharded_place
from megatrl.mcore.weight_map import WeightRule, fuse, hf_tensor_shape, weight_rules


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter to write: what makes it, and where it goes."""

    rule: WeightRule
    key: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...]  # without the stacked axes

    def item(self, dtype: torch.dtype, num_stacked: tuple[int, ...]) -> WriteItem:
        offsets = torch.Size([*self.stacked, *[0] * len(self.shape)])
        sizes = torch.Size([*[1] * len(self.stacked), *self.shape])
        return WriteItem(
            index=MetadataIndex(self.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=dtype),
                size=torch.Size([*num_stacked, *self.shape]),
            ),
        )


def write_megatron_weights(
    reader: SafetensorsReader,
    shards: Path,
    shape: ModelShape,
    *,
    shard_bytes: int,
    dtype: torch.dtype | None,
    on_written: Callable[[int], None],
) -> tuple[int, set[torch.dtype]]:
    """Writes every parameter of `shape` into `shards`; returns the number of Hugging Face tensors and the dtypes.

    `on_written` is told the number of tensors that are done. The caller has compared the names. Raises ModelError
    for a tensor of a wrong shape or with NaN, CheckpointError where a stacked tensor has several dtypes.
    """
    writer = FileSystemWriter(shards, sync_files=False)  # whoever publishes the directory makes it durable
    planner = _FromFiles(reader, shape, dtype, on_written)
    parameters = [_parameter(rule, shape) for rule in weight_rules(shape)]
    axes = (shape.num_layers, shape.num_experts)
    dtypes = {p.key: dtype or planner.stored_dtype(p) for p in parameters}
    buckets = list(_buckets(parameters, dtypes, shard_bytes))
    items = [[p.item(dtypes[p.key], axes[: len(p.stacked)]) for p in bucket] for bucket in buckets]
    results = []
    # As if every bucket were another rank's: the writer names the files by that number.
    for bucket, plan in zip(buckets, writer.prepare_global_plan([SavePlan(part) for part in items]), strict=True):
        planner.expect(bucket, dtypes)
        results.append(writer.write_data(plan, planner).wait())
        if len(results[-1]) != len(bucket):
            raise CheckpointError(f"{len(results[-1])} of {len(bucket)} parameters were written into {shards}")
    writer.finish(_metadata(parameters, dtypes, axes), results)
    torch.save({}, shards / "common.pt")
    save_config(CheckpointingConfig("torch_dist"), str(shards))
    return planner.num_tensors, set(dtypes.values())


def _parameter(rule: WeightRule, shape: ModelShape) -> _Parameter:
    place = sharded_place(rule)
    parts = [hf_tensor_shape(shape, name) for name in rule.hf_names]
    rows = sum(part[0] for part in parts)
    return _Parameter(rule, place.keys[0], place.stacked, (rows, *parts[0][1:]))


def _buckets(
    parameters: list[_Parameter], dtypes: dict[str, torch.dtype], shard_bytes: int
) -> Iterator[list[_Parameter]]:
    """Runs of parameters for one file each: torch's writer holds what it writes until the file is closed."""
    bucket: list[_Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = math.prod(parameter.shape) * dtypes[parameter.key].itemsize
        if bucket and size + num_bytes > shard_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    yield bucket


def _metadata(parameters: list[_Parameter], dtypes: dict[str, torch.dtype], axes: tuple[int, ...]) -> Metadata:
    entries: dict[str, Any] = {}
    for key, group in itertools.groupby(sorted(parameters, key=lambda p: (p.key, p.stacked)), lambda p: p.key):
        data = [p.item(dtypes[key], axes[: len(p.stacked)]).tensor_data for p in group]
        first = data[0]
        assert first is not None, "every item is a tensor"
        entries[key] = TensorStorageMetadata(
            properties=first.properties, size=first.size, chunks=[d.chunk for d in data if d is not None]
        )
    return Metadata(state_dict_metadata=entries)


class _FromFiles(SavePlanner):
    """Hands torch's writer each parameter when it asks for it, read and fused at that moment."""

    def __init__(
        self, reader: SafetensorsReader, shape: ModelShape, dtype: torch.dtype | None, on_written: Callable[[int], None]
    ) -> None:
        self._reader, self._shape, self._dtype, self._on_written = reader, shape, dtype, on_written
        self._expected: dict[MetadataIndex, _Parameter] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.num_tensors = 0

    def stored_dtype(self, parameter: _Parameter) -> torch.dtype:
        return self._reader.dtype(parameter.rule.hf_names[0])

    def expect(self, parameters: list[_Parameter], dtypes: dict[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._expected = {MetadataIndex(p.key, torch.Size([*p.stacked, *[0] * len(p.shape)])): p for p in parameters}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Each parameter is given out once; asking twice is an error."""
        parameter = self._expected.pop(write_item.index)
        rule, wanted = parameter.rule, self._dtypes[parameter.key]
        parts = [self._part(name, wanted) for name in rule.hf_names]
        # Alone it is the parameter; `fuse` would copy an embedding for its padding, of which there is none here.
        full = parts[0] if len(parts) == 1 else fuse(rule, parts, self._shape, padded_vocab=self._shape.vocab_size)
        if tuple(full.shape) != parameter.shape:
            raise ModelError(f"{rule.megatron_name} came out as {tuple(full.shape)}, wanted {parameter.shape}")
        self.num_tensors += len(parts)
        self._on_written(self.num_tensors)
        return full.reshape([*[1] * len(parameter.stacked), *parameter.shape]).contiguous()

    def _part(self, name: str, wanted: torch.dtype) -> Tensor:
        self._reader.dtype(name)  # refuses what is no plain floating-point tensor
        tensor, expected = self._reader.read(name), hf_tensor_shape(self._shape, name)
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, config.json implies {expected}")
        if bool(tensor.aminmax().max.isnan()):  # without a mask as large as the tensor
            raise ModelError(f"{name} holds NaN; fetch the model directory again")
        if self._dtype is None and tensor.dtype != wanted:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, the same parameter of other layers {wanted}; Megatron stacks them, so give "
                "--dtype"
            )
        return tensor.to(wanted)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the plan is made by write_megatron_weights")

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError("the plan is made by write_megatron_weights")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError("the plan is made by write_megatron_weights")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError("the plan is made by write_megatron_weights")
