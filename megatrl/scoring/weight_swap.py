"""Frozen weights that share the actor's module: swapped in for scoring, out again whatever happens.

The frozen copy lives in host memory. Values are copied into the existing parameter storage, so views
into Megatron's parameter and gradient buffers, and the distributed optimizer's shards, stay valid.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatrl.actor.tensor_hash import tensor_hash
from megatrl.errors import ScoringError


def named_state(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of all modules by name, the module's index first. Shared tensors once."""
    state: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            state[f"{index}.{name}"] = parameter.data
        for name, buffer in module.named_buffers():
            state[f"{index}.{name}"] = buffer.data
    return state


def state_hashes(modules: Sequence[nn.Module]) -> dict[str, str]:
    """`tensor_hash` of every parameter and buffer by name."""
    return {name: tensor_hash(tensor) for name, tensor in named_state(modules).items()}


def combined_hash(hashes: dict[str, str]) -> str:
    """One identity of a whole state, 16 hex digits."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FrozenWeights:
    """This rank's frozen shards in host memory, with the hash they had when they were taken."""

    def __init__(self, copies: dict[str, Tensor]) -> None:
        self._copies = copies
        self._hashes = {name: tensor_hash(tensor) for name, tensor in self._copies.items()}

    @classmethod
    def capture(cls, modules: Sequence[nn.Module]) -> "FrozenWeights":
        """Takes a copy of the modules' present state."""
        return cls({name: _to_host(tensor) for name, tensor in named_state(modules).items()})

    @property
    def identity(self) -> str:
        """Hash of the frozen shards; constant over the run, stored in checkpoints."""
        return combined_hash(self._hashes)

    def verify(self) -> None:
        """Raises ScoringError with the names of frozen tensors that are no longer what was taken."""
        changed = [name for name, tensor in self._copies.items() if tensor_hash(tensor) != self._hashes[name]]
        if changed:
            raise ScoringError(f"frozen weights changed in host memory: {_listing(changed)}")

    @contextmanager
    def swapped_into(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """The modules hold the frozen weights inside the context and their own again after it.

        Every rank must enter. Raises ScoringError naming the tensors when the modules do not match the
        frozen state, when the frozen weights were altered inside, or when restoring failed.
        """
        current = named_state(modules)
        self._check_matching(current)
        before = {name: tensor_hash(tensor) for name, tensor in current.items()}
        own = {name: _to_host(tensor) for name, tensor in current.items()}
        try:
            _fill(modules, self._copies)
            self._check_hashes(modules, self._hashes, "the frozen weights did not arrive in the module")
            yield
            self._check_hashes(modules, self._hashes, "the frozen weights were changed while they were scoring")
        finally:
            _fill(modules, own)
            self._check_hashes(modules, before, "the module's own weights were not restored")

    def _check_matching(self, current: dict[str, Tensor]) -> None:
        missing = sorted(set(self._copies) ^ set(current))
        if missing:
            raise ScoringError(f"frozen weights and module have different tensors: {_listing(missing)}")
        for name, tensor in current.items():
            frozen = self._copies[name]
            if (tensor.shape, tensor.dtype) != (frozen.shape, frozen.dtype):
                raise ScoringError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} in the module but {tuple(frozen.shape)} "
                    f"{frozen.dtype} in the frozen weights; take them from the same model and layout"
                )

    @staticmethod
    def _check_hashes(modules: Sequence[nn.Module], expected: dict[str, str], what: str) -> None:
        seen = state_hashes(modules)
        wrong = [name for name in expected if seen.get(name) != expected[name]]
        if wrong:
            raise ScoringError(f"{what}: {_listing(wrong)}")


def _fill(modules: Sequence[nn.Module], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in named_state(modules).items():
            tensor.copy_(values[name])


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where it came from a device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    return host.copy_(tensor.detach())


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
