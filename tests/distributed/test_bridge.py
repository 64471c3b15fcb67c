"""Hugging Face directories that must be refused, and those that must load."""

from pathlib import Path
from typing import Any

import pytest
from world import run_world

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base: Path = tmp_path_factory.mktemp("bridge")
    (result,) = run_world("bridge_rank.py", 1, {"base": str(base)}, base / "world", timeout_s=90)
    return result


def test_a_missing_tensor_is_an_error_that_names_it(seen: dict[str, Any]) -> None:
    assert f"1 missing ['{EXPERT}'], 0 unknown" in seen["missing"]


def test_an_unknown_tensor_is_an_error_that_names_it(seen: dict[str, Any]) -> None:
    assert "0 missing [], 1 unknown ['model.layers.9.mystery.weight']" in seen["unknown"]


def test_a_wrong_shape_is_an_error_with_both_shapes(seen: dict[str, Any]) -> None:
    assert seen["shape"] == f"{EXPERT} has shape (23, 32), config.json implies (24, 32)"


def test_nan_in_the_files_is_an_error(seen: dict[str, Any]) -> None:
    assert seen["nan"].startswith("NaN after loading")
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight" in seen["nan"]


def test_derived_rotary_tables_of_old_files_are_ignored(seen: dict[str, Any]) -> None:
    assert seen["old_rotary_table"] == "loaded"


def test_weights_in_several_files_load_bit_for_bit_and_export_in_one_order(seen: dict[str, Any]) -> None:
    assert seen["num_files"] > 2
    assert seen["many"] == "loaded"
    assert seen["many_equal"]
    assert seen["order_is_fixed"]


def test_torn_and_empty_directories_are_refused(seen: dict[str, Any]) -> None:
    assert "does not exist; the model directory is torn" in seen["torn"]
    assert "has neither model.safetensors.index.json nor model.safetensors" in seen["empty"]
