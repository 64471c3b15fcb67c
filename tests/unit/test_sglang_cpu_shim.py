"""The stand-ins that let SGLang run on a plain CPU: exact where they compute, absent where not needed."""

import sys

import pytest
import torch

from megatrl.rollout.sglang_cpu import shim


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, straight from its published description, for whole 4-byte blocks."""

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF

    state = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little")
        block = rotate(block * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & 0xFFFFFFFF
    return state ^ (state >> 16)


def test_reference_hash_gives_the_published_value() -> None:
    assert murmur3_32(b"test") == 0xBA6BD213


def test_hash_of_seed_position_and_column_is_murmur3() -> None:
    seeds, positions = [0, 5, 2**31, 2**63 - 1, 1234567890123456789], [0, 7, 4095, 2**31 - 1, 9]
    hashed = shim.murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64), torch.tensor(positions), torch.arange(300)
    )
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in (0, 1, 37, 299):
            block = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(hashed[row, column]) == murmur3_32(block)


def test_nothing_is_done_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    assert shim.install() is False
    assert sys.meta_path == before


def test_stand_ins_answer_only_for_what_is_missing() -> None:
    finder = shim._Finder()
    for name in ("triton", "triton.language", "torchvision.transforms", "sgl_kernel"):
        assert finder.find_spec(name, None) is not None
    for name in ("torch", "tritonclient", "sgl_kernel_extra", "numpy"):
        assert finder.find_spec(name, None) is None


def test_stub_serves_as_module_decorator_and_base_class() -> None:
    triton = shim._Stub("triton")

    @triton.jit
    def kernel() -> int:
        return 3

    @triton.autotune(configs=[], key=[])
    def tuned() -> int:
        return 4

    assert (kernel(), tuned()) == (3, 4)
    assert issubclass(type("Mine", (triton.Config,), {}), triton.Config)
    assert triton.language.float32 is triton.language.float32


def test_request_to_token_rows_are_written_in_place() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 2])
    shim._assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([7, 8, 5, 6]), 6)
    assert table.tolist() == [[5, 6, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


def test_kernels_without_a_stand_in_say_so_when_called() -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts_cpu has no stand-in"):
        shim._sgl_kernel_getattr("fused_experts_cpu")()
    with pytest.raises(AttributeError):
        shim._sgl_kernel_getattr("optional_probe")
