"""Weights out of a distributed checkpoint, one parameter at a time: no process group, no model, no optimizer state.

The checkpoint is torch's (DCP) under Megatron's keys. Its metadata say which chunk of which tensor lies where;
a parameter is put together from the chunks that touch it, whatever layout wrote them.
"""

import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from megatrl.config.model_shape import ModelShape
from megatrl.errors import CheckpointError
from megatrl.mcore.sharded_keys import ShardedPlace, is_weight_key, sharded_place
from megatrl.mcore.weight_map import WeightRule, hf_tensor_shape, unfuse, weight_rules

_READ_FAILURES = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, AssertionError)


@dataclass(frozen=True, slots=True)
class _Tensor:
    metadata: TensorStorageMetadata
    chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]]  # place on the stacked axes -> chunks that touch it


class MegatronReader:
    """Hugging Face tensors of the checkpoint in `shards`, read for the sizes in `shape`."""

    def __init__(self, shards: Path, shape: ModelShape) -> None:
        """Reads the metadata only. Raises CheckpointError, naming keys, where they do not fit `shape`."""
        self.shards, self._shape = shards, shape
        self._reader = FileSystemReader(shards)
        self._metadata = self._read_metadata()
        self._rules = tuple(weight_rules(shape))
        self._places = [self._found(sharded_place(rule)) for rule in self._rules]
        self._check_keys()
        stacked = {key: len(place) for key, place in self._places if key is not None}
        self._tensors = {key: self._indexed(key, depth) for key, depth in stacked.items()}
        self._check_stacks()

    @property
    def names(self) -> tuple[str, ...]:
        """Every Hugging Face name, in the order of `tensors`."""
        return tuple(name for rule in self._rules for name in rule.hf_names)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """What the weights are stored in; one unless the source had several."""
        return {tensor.metadata.properties.dtype for tensor in self._tensors.values()}

    def num_bytes(self, dtype: torch.dtype | None) -> dict[str, int]:
        """Bytes of every tensor as it will be written, without reading one."""
        sizes = {}
        for rule, (key, _) in zip(self._rules, self._places, strict=True):
            stored = self._tensors[str(key)].metadata.properties.dtype
            for name in rule.hf_names:
                sizes[name] = math.prod(hf_tensor_shape(self._shape, name)) * (dtype or stored).itemsize
        return sizes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, tensor); the next parameter is read when its first tensor is asked for."""
        for rule, (key, stacked) in zip(self._rules, self._places, strict=True):
            parts = unfuse(rule, self._checked(rule, self._read(str(key), stacked)), self._shape)
            for name, part in zip(rule.hf_names, parts, strict=True):
                expected = hf_tensor_shape(self._shape, name)
                if tuple(part.shape) != expected:
                    raise CheckpointError(
                        f"{name} from {key} in {self.shards} has shape {tuple(part.shape)}, config.json "
                        f"implies {expected}"
                    )
                yield name, part
                del part
            del parts  # or its memory would stay while the next parameter is read

    def _read_metadata(self) -> Metadata:
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        except (*_READ_FAILURES, AttributeError, ImportError) as error:
            raise CheckpointError(f"{self.shards} is no readable distributed checkpoint: {error!r}") from error
        files = {info.relative_path for info in self._reader.storage_data.values()}
        if absent := sorted(file for file in files if not (self.shards / file).is_file()):
            raise CheckpointError(
                f"{self.shards} is torn: {len(absent)} of {len(files)} files are missing {absent[:3]}"
            )
        return metadata

    def _found(self, place: ShardedPlace) -> tuple[str | None, tuple[int, ...]]:
        found = next((key for key in place.keys if key in self._metadata.state_dict_metadata), None)
        return found, place.stacked

    def _check_keys(self) -> None:
        """Every weight in the checkpoint belongs to a rule, and every rule finds its weight."""
        present = {
            key
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and is_weight_key(key)
        }
        unknown = sorted(present - {key for key, _ in self._places if key is not None})
        missing = sorted(
            rule.megatron_name for rule, (key, _) in zip(self._rules, self._places, strict=True) if key not in present
        )
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint in {self.shards} does not hold the model of config.json: {len(missing)} missing "
                f"{missing[:4]}, {len(unknown)} unknown {unknown[:4]}"
            )

    def _indexed(self, key: str, depth: int) -> _Tensor:
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata), "checked by _check_keys"
        chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in entry.chunks:
            ranges = [range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)]
            for place in itertools.product(*ranges):
                chunks.setdefault(place, []).append(chunk)
        return _Tensor(entry, chunks)

    def _check_stacks(self) -> None:
        """The stacked axes are as long as the model has layers and experts; a shorter model must not pass as whole."""
        wanted = (self._shape.num_layers, self._shape.num_experts)
        for key, place in self._places:
            size = tuple(self._tensors[str(key)].metadata.size[: len(place)])
            if size != wanted[: len(place)]:
                raise CheckpointError(
                    f"{key} in {self.shards} is stacked {size}, config.json has {wanted[: len(place)]} "
                    "(layers, experts); the checkpoint is of another model"
                )

    def _checked(self, rule: WeightRule, parameter: Tensor) -> Tensor:
        """Refuses what `unfuse` would cut without a word: all that exceeds the vocabulary is padding, nothing else."""
        expected = [hf_tensor_shape(self._shape, name) for name in rule.hf_names]
        rows = sum(shape[0] for shape in expected)
        fits = parameter.shape[0] >= rows if rule.fusion == "vocab" else parameter.shape[0] == rows
        if not fits or tuple(parameter.shape[1:]) != expected[0][1:]:
            raise CheckpointError(
                f"{rule.megatron_name} in {self.shards} has shape {tuple(parameter.shape)}, config.json implies "
                f"{(rows, *expected[0][1:])}"
            )
        return parameter

    def _read(self, key: str, stacked: tuple[int, ...]) -> Tensor:
        """The parameter at one place on the stacked axes, put together from its chunks."""
        tensor = self._tensors[key]
        shape = tensor.metadata.size[len(stacked) :]
        num_values = math.prod(shape)
        chunks = tensor.chunks.get(stacked, [])
        covered = sum(math.prod(chunk.sizes[len(stacked) :]) for chunk in chunks)
        if covered != num_values or len({tuple(chunk.offsets) for chunk in chunks}) != len(chunks):
            raise CheckpointError(
                f"{key} {list(stacked)} in {self.shards} has {covered} of its {num_values} values; the "
                "checkpoint is torn"
            )
        items = [_read_item(key, chunk, stacked) for chunk in chunks]
        whole = _IntoOneTensor(shape, tensor.metadata.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), whole).wait()
        except _READ_FAILURES as error:
            raise CheckpointError(f"{key} {list(stacked)} in {self.shards} is not readable: {error}") from error
        return whole.take()


def _read_item(key: str, chunk: ChunkStorageMetadata, stacked: tuple[int, ...]) -> ReadItem:
    depth = len(stacked)
    inside = [place - offset for place, offset in zip(stacked, chunk.offsets[:depth], strict=True)]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key),
        dest_offsets=torch.Size(chunk.offsets[depth:]),
        storage_index=MetadataIndex(key, chunk.offsets),
        storage_offsets=torch.Size([*inside, *[0] * (len(chunk.sizes) - depth)]),
        lengths=torch.Size([*[1] * depth, *chunk.sizes[depth:]]),
    )


class _IntoOneTensor(LoadPlanner):
    """Tells torch's reader to copy every chunk to its place in one tensor.

    The tensor is made when the first chunk has been read: reading takes twice a chunk's memory for a moment.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._out: Tensor | None = None

    def take(self) -> Tensor:
        """Returns the tensor, which then belongs to the caller alone."""
        out, self._out = self._out, None
        assert out is not None, "there is at least one chunk, its coverage was checked"
        return out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        if self._out is None:
            self._out = torch.empty(tuple(self._shape), dtype=self._dtype)
        view = self._out
        depth = len(read_item.lengths) - view.dim()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths[depth:], strict=True)):
            view = view.narrow(dim, offset, length)
        return view[(None,) * depth]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the copy went into a view."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError("the plan is made by MegatronReader")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by MegatronReader")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made by MegatronReader")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made by MegatronReader")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("weights are tensors")
