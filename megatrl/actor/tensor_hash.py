"""A cheap checksum of a tensor's bits, for state that is moved away and must come back unchanged."""

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Elements hashed at once; bounds the temporary int64 copy at 128 MiB."""
_MASK = (1 << 64) - 1


def tensor_hash(tensor: Tensor) -> str:
    """Checksum of a tensor's bits, equal on every device: shape, dtype and a sum modulo 2^64.

    Each element's bits are mixed with its place before summing, so exchanged elements change the sum.
    Computed where the tensor lives; integer sums do not depend on the order of addition.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(integers) if flat.dtype != torch.bool else flat.to(torch.int8)
    total = 0
    for start in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=chunk.device, dtype=torch.int64)
        total += int(_mixed(chunk + _mixed(places)).sum())
    return f"{tuple(tensor.shape)}:{tensor.dtype}:{total & _MASK:016x}"


def _mixed(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser on int64 (wrapping): every input bit reaches every output bit."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
