"""The two content hashes of SGLang's weight checker, computed piece by piece.

A fused server tensor arrives here as several Hugging Face tensors, so both digests accept the bytes in parts.
Formulas: sglang 0.5.23, managers/mm_utils.py (CPU) and kernels/ops/memory/gpu_tensor_hash.py (CUDA).
"""

import hashlib
from typing import Protocol

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_SEED = 0x243F6A88
_SEED_2 = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_TILE_WORDS = 8192


class Digest(Protocol):
    def update(self, piece: Tensor) -> None:
        """Append the bytes of a tensor."""
        ...

    def hex(self) -> str:
        """16 hexadecimal digits over everything appended."""
        ...


class Sha256Digest:
    """Of a server on CPU: the first 8 bytes of SHA-256 over the tensor's bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, piece: Tensor) -> None:
        copy = piece.detach().to("cpu", copy=True)  # numpy would keep torch from ever freeing a live weight
        self._hash.update(copy.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def hex(self) -> str:
        return self._hash.digest()[:8].hex()


class TileDigest:
    """Of a server on CUDA: two 32-bit hashes for each tile of 8192 words, summed over the tiles.

    word w at index i:  k = fmix(w ^ (i*C + seed) ^ rotl(i, r)); tile = fmix(sum k ^ num_bytes);
    digest = splitmix64(sum over tiles of (tile_1 << 32 | tile_2)). Runs on the device of the pieces.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_words = (num_bytes + 3) // 4
        self._next_word = 0
        self._rest: Tensor | None = None
        self._sum = 0

    def update(self, piece: Tensor) -> None:
        flat = piece.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._rest is not None:
            flat = torch.cat([self._rest.to(flat.device), flat])
        whole = flat.numel() // (4 * _TILE_WORDS) * 4 * _TILE_WORDS
        self._rest = flat[whole:].clone()
        self._add_words(flat[:whole])

    def hex(self) -> str:
        rest = self._rest
        if rest is not None and rest.numel() > 0:
            padding = torch.zeros(-rest.numel() % 4, dtype=torch.uint8, device=rest.device)
            self._add_words(torch.cat([rest, padding]))
            self._rest = None
        if self._next_word != self._num_words:
            raise ValueError(f"digest got {self._next_word} words of 4 bytes, the tensor has {self._num_words}")
        x = self._sum
        if self._num_words == 0:
            return f"{0:016x}"
        x ^= x >> 30
        x = (x * 0xBF58476D1CE4E5B9) & _MASK_64
        x ^= x >> 27
        x = (x * 0x94D049BB133111EB) & _MASK_64
        x ^= x >> 31
        return f"{x:016x}"

    def _add_words(self, flat: Tensor) -> None:
        # At most 2**22 words at a time bounds the temporaries at about 200 MB.
        for words in flat.clone().view(torch.int32).split(1 << 22):
            if words.numel() == 0:
                continue
            index = torch.arange(self._next_word, self._next_word + words.numel(), device=words.device)
            index = _wrap(index)
            high = self._tiles(words, index, 0x27D4EB2D, _SEED, 15)
            low = self._tiles(words, index, 0x165667B1, _SEED_2, 13)
            self._sum = (self._sum + (sum(high) << 32) + sum(low)) & _MASK_64
            self._next_word += words.numel()

    def _tiles(self, words: Tensor, index: Tensor, factor: int, seed: int, rotation: int) -> list[int]:
        position = (index * _signed(factor) + _signed(seed)) ^ _rotl(index, rotation)
        mixed = _fmix(words ^ position)
        padded = torch.nn.functional.pad(mixed.to(torch.int64) & 0xFFFFFFFF, (0, -mixed.numel() % _TILE_WORDS))
        sums = _wrap(padded.view(-1, _TILE_WORDS).sum(1))
        num_bytes = _signed(self._num_words * 4 & 0xFFFFFFFF)
        return [value & 0xFFFFFFFF for value in _fmix(sums ^ num_bytes).tolist()]


def _signed(word: int) -> int:
    """The int32 with the bits of a uint32: torch multiplies int32 modulo 2**32, and has no uint32 arithmetic."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _wrap(values: Tensor) -> Tensor:
    """int64 -> int32 modulo 2**32."""
    values = values & 0xFFFFFFFF
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift of 32-bit words."""
    return (words >> count) & ((1 << (32 - count)) - 1)


def _rotl(words: Tensor, count: int) -> Tensor:
    return (words << count) | _shift_right(words, 32 - count)


def _fmix(words: Tensor) -> Tensor:
    words = words ^ _shift_right(words, 16)
    words = words * _signed(0x85EBCA6B)
    words = words ^ _shift_right(words, 13)
    words = words * _signed(0xC2B2AE35)
    return words ^ _shift_right(words, 16)
