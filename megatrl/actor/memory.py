"""Hands the device memory of a model and its optimizer to others and takes it back; the same code on CPU and CUDA.

What moves is found by following references: every distinct storage on the device that the owner's modules,
Megatron's buffers and the optimizer lead to, whatever Megatron calls it. A storage shrinks to zero bytes in place and
grows again in place, so parameters, the views into Megatron's buffers and the distributed optimizer's shards keep
their addresses in Python and never have to be rebuilt.

Gradients are not copied: between two optimizer steps nothing reads them, and each step begins by zeroing them. They
come back as zeros.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatrl.actor.tensor_hash import tensor_hash
from megatrl.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

Owner = Mapping[str, object]
"""Modules and optimizers by the names that error messages should use."""

_GRADIENTS = frozenset({"grad", "main_grad", "decoupled_grad", "grad_data", "cached_grad_buffer_shard_list"})
"""Attributes that hold gradients and nothing else, in torch and in Megatron's data-parallel buffers."""


@dataclass(slots=True, kw_only=True)
class DeviceBlock:
    """One storage on the device, under the first name that led to it."""

    name: str
    storage: torch.UntypedStorage
    dtype: torch.dtype
    num_bytes: int
    is_gradient: bool  # nothing but gradients lives in it
    host: Tensor | None = None
    hash: str = ""

    def values(self) -> Tensor:
        """The whole storage as a flat tensor that shares its memory."""
        return torch.empty(0, dtype=self.dtype, device=self.storage.device).set_(self.storage)  # type: ignore[call-overload]


def device_blocks(owner: Owner, device: torch.device) -> list[DeviceBlock]:
    """Returns every distinct storage of `owner` on `device`, those with zero bytes included."""
    blocks: dict[int, DeviceBlock] = {}
    for name, tensor, is_gradient in _reachable_tensors(owner):
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        block = blocks.get(storage._cdata)
        if block is None:
            blocks[storage._cdata] = DeviceBlock(
                name=name, storage=storage, dtype=tensor.dtype, num_bytes=storage.nbytes(), is_gradient=is_gradient
            )
        elif block.is_gradient and not is_gradient:
            block.name, block.dtype, block.is_gradient = name, tensor.dtype, False
    return sorted(blocks.values(), key=lambda block: block.name)


class HandedOver:
    """Device memory that is away. `take_back` brings it home; the host copies live until then."""

    def __init__(self, owner: Owner, device: torch.device, blocks: Sequence[DeviceBlock]) -> None:
        self._owner, self._device, self._blocks = owner, device, blocks

    @property
    def released_bytes(self) -> int:
        """Device memory given away."""
        return sum(block.num_bytes for block in self._blocks)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds what must come back; less than `released_bytes` by the gradients."""
        return sum(block.host.nbytes for block in self._blocks if block.host is not None)

    def check_released(self) -> None:
        """Raises DeviceMemoryError with the names of tensors that are on the device although it was handed over."""
        left = [block.name for block in device_blocks(self._owner, self._device) if block.storage.nbytes()]
        if left:
            raise DeviceMemoryError(
                f"{len(left)} tensors are on {self._device.type} although the memory was handed over: {_listing(left)}"
            )

    def take_back(self) -> None:
        """Restores every storage and compares hashes. A second call does nothing.

        Raises DeviceMemoryError naming the tensors that did not come back as they were.
        """
        for block in self._blocks:
            if block.storage.nbytes() == 0:
                block.storage.resize_(block.num_bytes)
            if block.host is None:
                block.values().zero_()
            else:
                block.values().copy_(block.host, non_blocking=True)
        _synchronize(self._device)
        changed = [block.name for block in self._blocks if block.hash and tensor_hash(block.values()) != block.hash]
        if changed:
            raise DeviceMemoryError(
                f"{len(changed)} tensors came back from host memory with other values: {_listing(changed)}; "
                "do not train on, resume from the last checkpoint"
            )
        self._blocks = ()


def hand_to_host(owner: Owner, device: torch.device) -> HandedOver:
    """Copies weights and optimizer state to host memory, then frees every storage of `owner` on the device.

    Until `take_back` nothing may touch the tensors: reading a storage without memory ends the process. Raises
    DeviceMemoryError, with weights and optimizer state as they were, when a storage cannot be freed.
    """
    _drop_caches()
    blocks = [block for block in device_blocks(owner, device) if block.num_bytes]
    if fixed := [block.name for block in blocks if not block.storage.resizable()]:
        raise DeviceMemoryError(
            f"{len(fixed)} tensors live in memory that torch cannot free: {_listing(fixed)}; on CPU, "
            "a tensor gets there by .numpy() or share_memory_(), so take those of a copy"
        )
    for block in blocks:
        if not block.is_gradient:
            values = block.values()
            block.hash = tensor_hash(values)
            block.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type == "cuda")
            block.host.copy_(values, non_blocking=True)
    _synchronize(device)
    handed = HandedOver(owner, device, blocks)
    try:
        for block in blocks:
            block.storage.resize_(0)
        handed.check_released()
    except BaseException:
        handed.take_back()
        raise
    _return_freed_memory(device)
    return handed


@contextmanager
def handed_to_host(owner: Owner, device: torch.device) -> Iterator[HandedOver]:
    """The device memory of `owner` is free inside the context and home again after it, whatever happens."""
    handed = hand_to_host(owner, device)
    try:
        yield handed
    finally:
        handed.take_back()


class DeviceMemory:
    """The gate to one owner's device memory: at home, or away with a colocated role. Used over separate calls."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name` is what error messages call the owner."""
        self._name, self._device = name, device
        self._handed: HandedOver | None = None

    def require(self) -> None:
        """Raises DeviceMemoryError while the memory is away. Comes before every use of the owner's tensors."""
        if self._handed is not None:
            raise DeviceMemoryError(
                f"{self._name} was called while its device memory is handed over; bring it back with onload first"
            )

    def hand_over(self, owner: Owner) -> None:
        """Frees the owner's device memory; a second call only checks that it is still free."""
        if self._handed is None:
            self._handed = hand_to_host(owner, self._device)
            logger.debug(
                "%s handed over %d bytes, %d of them copied", self._name, self._handed.released_bytes, self.host_bytes
            )
        else:
            self._handed.check_released()

    def take_back(self) -> None:
        """Brings the memory home and verifies it; nothing to do when it is there."""
        if self._handed is not None:
            self._handed.take_back()
            self._handed = None

    @property
    def released_bytes(self) -> int:
        """Device memory that is away."""
        return 0 if self._handed is None else self._handed.released_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that holds it."""
        return 0 if self._handed is None else self._handed.host_bytes


def _reachable_tensors(owner: Owner) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields (name, tensor, whether a gradient attribute led to it), each pair of tensor and kind once."""
    waiting: list[tuple[str, Any, bool]] = [(name, value, False) for name, value in reversed(list(owner.items()))]
    seen: dict[tuple[int, bool], Any] = {}  # values are kept, so that no id is used twice
    while waiting:
        name, value, is_gradient = waiting.pop()
        if (id(value), is_gradient) in seen:
            continue
        children: list[tuple[str, Any]] = []
        if isinstance(value, Tensor):
            yield name, value, is_gradient
            children = list(vars(value).items())
            if value.is_leaf and value.grad is not None:  # asking others for it warns
                children.append(("grad", value.grad))
        elif isinstance(value, Mapping):
            children = [(f"key{i}", key) for i, key in enumerate(value) if isinstance(key, Tensor)]
            children += [(str(key) if isinstance(key, (str, int)) else f"value{i}", item)
                         for i, (key, item) in enumerate(value.items())]  # fmt: skip
        elif isinstance(value, (list, tuple, set, frozenset)):
            children = [(str(i), item) for i, item in enumerate(value)]
        elif isinstance(value, (nn.Module, torch.optim.Optimizer)) or type(value).__module__.startswith("megatron."):
            children = list(getattr(value, "__dict__", {}).items())
        else:
            continue
        seen[id(value), is_gradient] = value
        waiting += [(f"{name}.{key}", item, is_gradient or key in _GRADIENTS) for key, item in reversed(children)]


def _drop_caches() -> None:
    """Device memory that Megatron keeps outside of any model: rotary tables and sequence-parallel scratch."""
    forward: Any = RotaryEmbedding.forward
    forward.cache_clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()  # type: ignore[no-untyped-call]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _return_freed_memory(device: torch.device) -> None:
    """Freed blocks go back to the driver, so that another process can have them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
