"""Proof by checksum that a server holds the published weights.

The expected checksums are computed from the Hugging Face tensors while they stream by; the server computes its
own over the parameters it would use (`/weights_checker`). HTTP 200 alone proves nothing: SGLang skips names it
does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatrl.config.model_shape import ModelShape
from megatrl.errors import WeightSyncError
from megatrl.weight_sync.digests import Digest, Sha256Digest, TileDigest
from megatrl.weight_sync.expected import ExpectedTensors
from megatrl.weight_sync.fused_names import FusedPiece, fused_pieces, rank_bytes, rank_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShape:
    """What the server's side of a checksum depends on. Only tensor parallelism is covered."""

    tensor: int = 1
    device: Literal["cpu", "cuda"] = "cpu"


class FusedLayout:
    """Where every expected tensor lies in the server's fused parameters. Built once; publishes share it."""

    def __init__(self, model: ModelShape, expected: ExpectedTensors, server: ServerShape) -> None:
        self.pieces = fused_pieces(model, expected)
        self.num_kv_heads = model.num_kv_heads
        self.server = server
        self.num_bytes: dict[str, int] = {}
        """Fused name -> bytes on one rank of the server."""
        for name, piece in self.pieces.items():
            spec = expected[name]
            self.num_bytes[piece.fused_name] = self.num_bytes.get(piece.fused_name, 0) + rank_bytes(
                piece, spec.shape, spec.dtype.itemsize, size=server.tensor, num_kv_heads=model.num_kv_heads
            )


class ExpectedChecksums:
    """Accumulates the checksums a server must report, from full Hugging Face tensors in any order.

    Tensors that come before their neighbors in a fused parameter are held until those have come.
    """

    def __init__(self, layout: FusedLayout) -> None:
        self._pieces = layout.pieces
        self._num_kv_heads = layout.num_kv_heads
        self._tensor = layout.server.tensor
        self._ranks = [
            {fused: _OrderedDigest(_start_digest(layout.server, size)) for fused, size in layout.num_bytes.items()}
            for _ in range(layout.server.tensor)
        ]

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one full tensor, in the dtype the server holds."""
        piece = self._pieces[name]
        for rank, digests in enumerate(self._ranks):
            kept = rank_slice(piece, tensor, rank=rank, size=self._tensor, num_kv_heads=self._num_kv_heads)
            digests[piece.fused_name].put(piece, kept)

    def table(self) -> dict[str, str]:
        """`rank/fused name` -> checksum, as `ServerControl.weights_checksum` gives it. Raises when pieces lack."""
        return {
            f"{rank}/{name}": digest.hex(name)
            for rank, digests in enumerate(self._ranks)
            for name, digest in digests.items()
        }


class _OrderedDigest:
    """Feeds a digest in the order of the fused tensor; pieces that come early wait."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._next = 0
        self._num_pieces = 1
        self._waiting: dict[int, Tensor] = {}

    def put(self, piece: FusedPiece, tensor: Tensor) -> None:
        self._num_pieces = piece.num_pieces
        self._waiting[piece.index] = tensor
        while self._next in self._waiting:
            self._digest.update(self._waiting.pop(self._next))
            self._next += 1

    def hex(self, name: str) -> str:
        if self._next != self._num_pieces:
            raise WeightSyncError(
                f"checksum of {name} needs {self._num_pieces} tensors in a row and got the first {self._next}"
            )
        return self._digest.hex()


def _start_digest(server: ServerShape, num_bytes: int) -> Digest:
    return Sha256Digest() if server.device == "cpu" else TileDigest(num_bytes)


def checksum_differences(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """What a server's checksums contradict, one line a tensor; empty where it holds exactly the expected weights."""
    return (
        [f"{name} is not on the server" for name in expected if name not in reported]
        + [f"{name} is on the server only" for name in reported if name not in expected]
        + [
            f"{name} is {reported[name]} on the server, {wanted} here"
            for name, wanted in expected.items()
            if name in reported and reported[name] != wanted
        ]
    )
