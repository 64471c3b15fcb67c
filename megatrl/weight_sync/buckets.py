"""Buckets: a bounded number of tensors as one flat run of bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    index: int
    """Position in this publish, from 0."""
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def flatten(self) -> Tensor:
        """All tensors one after the other, as uint8 [num_bytes] on their own device."""
        return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in self.tensors])


def into_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`; one larger tensor gets a bucket of its own.

    A bucket is given out only when the next tensor does not fit or the stream has ended without an error,
    so weights that fit in one bucket are refused as a whole when any of their names is wrong or missing.
    """
    index, size = 0, 0
    names: list[str] = []
    tensors: list[Tensor] = []
    for name, tensor in named:
        # A smaller item size after a larger one stays aligned; the reverse would not be, so split there.
        is_aligned = size % tensor.dtype.itemsize == 0
        if names and (size + tensor.nbytes > bucket_bytes or not is_aligned):
            yield Bucket(index=index, names=tuple(names), tensors=tuple(tensors))
            index, size = index + 1, 0
            names, tensors = [], []
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    if names:
        yield Bucket(index=index, names=tuple(names), tensors=tuple(tensors))
