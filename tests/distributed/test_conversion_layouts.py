"""Whatever layout saved a checkpoint, its export is the same; whatever layout loads a converted one, it trains."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conversion_case import all_tensors, file_bytes, same_tensors, write_source
from oracle import make_case
from world import run_world

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf

pytestmark = pytest.mark.slow

SMALL = ConversionOptions(shard_bytes=60_000)
TP2 = {"tensor": 2, "sequence_parallel": True}
FOUR = {"world_size": 4, **TP2, "expert": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of every family, tied and untied, each with its converted directory."""
    base = tmp_path_factory.mktemp("layouts")
    make_case(base / "case", "qwen3_moe")
    shutil.copytree(base / "case" / "model", base / "moe")
    write_source(base / "qwen3-tied", "qwen3", tie_word_embeddings=True, head_dim=12)
    write_source(base / "llama3", "llama3", num_key_value_heads=1)  # fewer than tensor ranks
    for name in ("moe", "qwen3-tied", "llama3"):
        hf_to_megatron(base / name, out=base / f"{name}-converted", options=SMALL)
    return base


def run_of(base: Path, model: str, out: str, **more: Any) -> dict[str, Any]:
    (base / out).mkdir()
    return {"hf": str(base / model), "converted": str(base / f"{model}-converted"), "out": str(base / out), **more}


def exported(base: Path, model: str, saved: str) -> Path:
    out = base / saved / "exported"
    megatron_to_hf(base / saved / "actor" / "shards", source=base / model, out=out, options=SMALL)
    return out


@pytest.fixture(scope="module")
def two_ranks(base: Path) -> list[Any]:
    case = str(base / "case" / "case.pickle")
    two = {"world_size": 2}
    runs = [
        run_of(base, "moe", "tp", layout=two | TP2),
        run_of(base, "moe", "pp", layout=two | {"pipeline": 2}),
        run_of(base, "moe", "ep", layout=two | {"expert": 2}),
        run_of(base, "moe", "tp-trained", layout=two | TP2, case=case),
        run_of(base, "moe", "ep-trained", layout=two | {"expert": 2}, case=case, distributed=False),
        run_of(base, "qwen3-tied", "tied-pp", layout=two | {"pipeline": 2, "first_stage_layers": 1}),
        run_of(base, "qwen3-tied", "tied-tp-bf16", layout=two | TP2, precision="bf16"),
        run_of(base, "llama3", "llama-tp", layout=two | TP2),
        run_of(base, "moe", "vpp", layout=two | {"pipeline": 2, "virtual_pipeline": 2}),
    ]
    return run_world("conversion_rank.py", 2, {"runs": runs}, base / "two", timeout_s=240)


def test_a_converted_directory_loads_in_every_layout_of_two_ranks(two_ranks: list[Any]) -> None:
    for results in two_ranks:
        assert [r["hf_is_source"] for r in results] == [True] * 9
        assert [r["converted_is_source"] for r in results] == [True] * 9


def test_training_from_the_converted_directory_is_training_from_the_files(two_ranks: list[Any]) -> None:
    for results in two_ranks:
        for trained in (results[3], results[4]):
            assert len(trained["losses"]) == 2
            assert trained["losses"][0] == trained["losses"][1]


@pytest.mark.usefixtures("two_ranks")
def test_files_are_equal_byte_for_byte_whatever_layout_saved_them(base: Path) -> None:
    converted = base / "moe-converted" / "shards"
    megatron_to_hf(converted, source=base / "moe", out=base / "reference", options=SMALL)
    reference = file_bytes(base / "reference")
    assert same_tensors(base / "reference", base / "moe")
    for saved in ("tp", "pp", "ep", "vpp"):
        assert file_bytes(exported(base, "moe", saved)) == reference, saved
    assert same_tensors(exported(base, "qwen3-tied", "tied-pp"), base / "qwen3-tied")
    assert same_tensors(exported(base, "llama3", "llama-tp"), base / "llama3")


@pytest.mark.usefixtures("two_ranks")
def test_an_export_of_a_trained_checkpoint_is_the_live_weights_without_padding(base: Path) -> None:
    for saved, model in (("tp-trained", "moe"), ("ep-trained", "moe"), ("tied-tp-bf16", "qwen3-tied")):
        out = exported(base, model, saved)
        assert same_tensors(out, base / saved / "live"), saved
        assert all(float(tensor.abs().max()) < 1e4 for tensor in all_tensors(out).values()), "padding leaked"
    assert not same_tensors(base / "tp-trained" / "exported", base / "moe"), "the step moved the weights"


def test_tensor_and_expert_ranks_together_save_and_load_the_same(base: Path) -> None:
    run = run_of(base, "moe", "four", layout=FOUR)
    for (result,) in run_world("conversion_rank.py", 4, {"runs": [run]}, base / "four-world", timeout_s=240):
        assert result["hf_is_source"]
        assert result["converted_is_source"]
    assert same_tensors(exported(base, "moe", "four"), base / "moe")


def test_verification_passes_whole_conversions_and_refuses_damaged_ones(base: Path) -> None:
    sources = base / "verify"
    for kind in ("qwen3", "qwen3_moe", "llama3"):
        write_source(sources / kind, kind)
    (seen,) = run_world("conversion_rank.py", 1, {"verify": str(sources)}, base / "verify-world", timeout_s=240)
    for name in ("qwen3", "qwen3_moe", "llama3", "back", "rounded"):
        assert seen[name]["difference"] < 1e-5, name
        assert seen[name]["is_published"]
    for name in ("damaged", "wrong_rope"):
        assert "the converted model is not the original" in seen[name]["error"], name
        assert not seen[name]["is_published"]
