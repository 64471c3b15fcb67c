"""Weights on disk that are cut, foreign or missing are told as a fault of the model directory, by file."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from megatrl.errors import ModelError  # noqa: E402
from megatrl.mcore.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader  # noqa: E402


def write(path: Path) -> None:
    safetensors_torch.save_file({"a.weight": torch.arange(64.0)}, path)


def read(directory: Path, name: str = "a.weight") -> Any:
    with SafetensorsReader(directory) as reader:
        return reader.read(name)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / SINGLE_FILE)
    assert torch.equal(read(tmp_path), torch.arange(64.0))


@pytest.mark.parametrize("keep", [0, 7, 40, 200])
def test_a_cut_file_is_named_with_its_size(tmp_path: Path, keep: int) -> None:
    write(tmp_path / SINGLE_FILE)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=rf"{SINGLE_FILE} \({keep} bytes\) is not readable"):
        read(tmp_path)


def test_an_index_that_is_no_index_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors")
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        (tmp_path / INDEX_FILE).write_text(text)
        with pytest.raises(ModelError, match=f"{INDEX_FILE} is not readable"):
            read(tmp_path)


def test_an_index_that_points_elsewhere_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a.weight": "two.safetensors"}}))
    with pytest.raises(ModelError, match=r"two.safetensors is named in .* but does not exist"):
        read(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"b.weight": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"one.safetensors holds no readable b.weight"):
        read(tmp_path, "b.weight")
