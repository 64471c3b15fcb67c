"""The checksums of SGLang's weight checker, against values that its own code gave."""

import hashlib

import pytest
import torch

from megatrl.config.engines import TinyModel
from megatrl.config.model_shape import tiny_model_shape
from megatrl.weight_sync.digests import Sha256Digest, TileDigest
from megatrl.weight_sync.expected import expected_tensors
from megatrl.weight_sync.fused_names import FusedPiece, fused_pieces, rank_bytes, rank_slice
from megatrl.weight_sync.verify import ExpectedChecksums, FusedLayout, ServerShape

# From sglang 0.5.23's own Triton kernel (kernels/ops/memory/gpu_tensor_hash.py), run in Triton's interpreter
# on word i = i * 2654435761 mod 65521.
KERNEL_VALUES = {3: "65d016abbce7308e", 20_001: "6706b1c00004e05b", 33_300: "145957419ac0c400"}


def words(count: int) -> torch.Tensor:
    return (torch.arange(count) * 2654435761 % 65521).to(torch.int32)


@pytest.mark.parametrize("count", KERNEL_VALUES)
def test_the_tile_digest_equals_the_cuda_kernel(count: int) -> None:
    digest = TileDigest(4 * count)
    digest.update(words(count))
    assert digest.hex() == KERNEL_VALUES[count]


@pytest.mark.parametrize("cuts", [(1, 2), (8191, 8193), (5, 16_384), (20_000, 20_000)])
def test_the_tile_digest_does_not_depend_on_how_the_bytes_arrive(cuts: tuple[int, int]) -> None:
    digest = TileDigest(4 * 20_001)
    everything = words(20_001).view(torch.int16)  # pieces may end inside a word
    for piece in (everything[: cuts[0]], everything[cuts[0] : cuts[1]], everything[cuts[1] :]):
        digest.update(piece)
    assert digest.hex() == KERNEL_VALUES[20_001]


def test_the_tile_digest_refuses_to_conclude_before_all_bytes_are_there() -> None:
    digest = TileDigest(16)
    digest.update(words(3))
    with pytest.raises(ValueError, match="3 words of 4 bytes, the tensor has 4"):
        digest.hex()


def test_the_cpu_digest_is_the_head_of_sha256_over_the_raw_bytes() -> None:
    tensor = torch.randn(33, 7).to(torch.bfloat16)
    digest = Sha256Digest()
    digest.update(tensor[:10])
    digest.update(tensor[10:])
    raw = tensor.view(torch.int16).numpy().tobytes()
    assert digest.hex() == hashlib.sha256(raw).hexdigest()[:16]


def piece(kept: str) -> FusedPiece:
    return FusedPiece(fused_name="x", index=0, num_pieces=1, slice=kept)  # pyright: ignore[reportArgumentType]


def test_ranks_of_a_server_hold_these_parts() -> None:
    tensor = torch.arange(32.0).view(8, 4)
    assert torch.equal(rank_slice(piece("rows"), tensor, rank=1, size=2, num_kv_heads=2), tensor[4:])
    assert torch.equal(rank_slice(piece("columns"), tensor, rank=0, size=2, num_kv_heads=2), tensor[:, :2])
    assert torch.equal(rank_slice(piece("whole"), tensor, rank=1, size=2, num_kv_heads=2), tensor)
    # 2 key/value heads of 4 rows on 4 ranks: each head on two neighboring ranks.
    for rank, rows in enumerate((tensor[:4], tensor[:4], tensor[4:], tensor[4:])):
        assert torch.equal(rank_slice(piece("key_value"), tensor, rank=rank, size=4, num_kv_heads=2), rows)


def test_the_vocabulary_is_padded_with_zero_rows_and_cut() -> None:
    tensor = torch.ones(70, 2)
    parts = [rank_slice(piece("vocabulary"), tensor, rank=rank, size=2, num_kv_heads=2) for rank in (0, 1)]
    assert [part.shape[0] for part in parts] == [64, 64]  # 70 -> 128
    assert torch.cat(parts).sum() == 140
    thirds = rank_slice(piece("vocabulary"), tensor, rank=0, size=3, num_kv_heads=3)
    assert thirds.shape[0] == 64  # 128 does not divide by 3, so 70 -> 192
    assert rank_bytes(piece("vocabulary"), (70, 2), 2, size=2, num_kv_heads=2) == 64 * 2 * 2


@pytest.mark.parametrize("kind", ["rows", "columns", "key_value", "vocabulary", "whole"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_bytes_of_a_ranks_part_are_those_of_the_part(kind: str, size: int, num_kv_heads: int) -> None:
    rows = 70 if kind == "vocabulary" else 32
    part = rank_slice(piece(kind), torch.zeros(rows, 16), rank=size - 1, size=size, num_kv_heads=num_kv_heads)
    assert rank_bytes(piece(kind), (rows, 16), 4, size=size, num_kv_heads=num_kv_heads) == part.nbytes


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama3"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_expected_checksums_do_not_depend_on_the_order_of_the_export(family: str, tensor: int, device: str) -> None:
    model = tiny_model_shape(TinyModel(family=family), vocab_size=100)  # pyright: ignore[reportArgumentType]
    expected = expected_tensors(model, torch.bfloat16)
    torch.manual_seed(0)
    weights = {name: torch.randn(spec.shape).to(spec.dtype) for name, spec in expected.items()}
    tables = []
    for names in (list(weights), list(reversed(weights))):
        shape = ServerShape(tensor=tensor, device=device)  # pyright: ignore[reportArgumentType]
        checksums = ExpectedChecksums(FusedLayout(model, expected, shape))
        for name in names:
            checksums.add(name, weights[name])
        tables.append(checksums.table())
    assert tables[0] == tables[1]
    assert len(tables[0]) == tensor * len({piece.fused_name for piece in fused_pieces(model, expected).values()})


def test_each_of_eighteen_thousand_expert_names_has_its_piece() -> None:
    model = tiny_model_shape(
        TinyModel(family="qwen3_moe", num_layers=48, num_experts=128, num_experts_per_token=8), vocab_size=100
    )
    expected = expected_tensors(model, torch.bfloat16)
    pieces = fused_pieces(model, expected)
    assert sum(".experts." in name for name in expected) == 48 * 128 * 3 == 18_432
    assert len(pieces) == len(expected)
