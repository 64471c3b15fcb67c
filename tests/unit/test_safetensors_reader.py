"""Weights on disk that are cut, foreign or missing are told as a fault of the model directory, by file."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from megatrl.errors import ModelError  # noqa: E402
from megatrl.mcore.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader  # noqa: E402

EXPERTS = "model.layers.0.mlp.experts"


def write(path: Path) -> None:
    safetensors_torch.save_file({"a.weight": torch.arange(64.0)}, path)


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


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


def test_an_index_that_names_a_file_which_is_not_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors")
    write_index(tmp_path, {"a.weight": "two.safetensors"})
    with pytest.raises(ModelError, match=r"two.safetensors is named in .* but does not exist"):
        read(tmp_path)


def test_a_stale_index_is_refused_whichever_side_has_more(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors")
    write_index(tmp_path, {"a.weight": "one.safetensors", "b.weight": "one.safetensors"})
    with pytest.raises(ModelError, match=r"1 tensors are not where it says \['b.weight'\], 0 are not in it"):
        read(tmp_path)
    safetensors_torch.save_file({"a.weight": torch.ones(2), "c.weight": torch.ones(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a.weight": "one.safetensors"})
    with pytest.raises(ModelError, match=r"1 are not in it \['c.weight'\]"):
        read(tmp_path)


def test_a_file_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors")
    write_index(tmp_path, {"a.weight": "one.safetensors"})
    assert torch.equal(read(tmp_path), torch.arange(64.0))
    write(tmp_path / "stray.safetensors")
    with pytest.raises(ModelError, match=r"has \['stray.safetensors'\], which .* does not name"):
        read(tmp_path)


def test_packed_experts_are_read_one_by_one_in_memory_of_their_own(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    packed = {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}
    safetensors_torch.save_file(packed, tmp_path / SINGLE_FILE)
    with SafetensorsReader(tmp_path) as reader:
        assert len(reader.names) == 9
        gate, up, back = (reader.read(f"{EXPERTS}.2.{part}_proj.weight") for part in ("gate", "up", "down"))
    assert torch.equal(gate, gate_up[2, :4])
    assert torch.equal(up, gate_up[2, 4:])
    assert torch.equal(back, down[2])
    assert [t.untyped_storage().nbytes() for t in (gate, up, back)] == [96, 96, 96], "no other expert comes along"


def test_an_expert_under_two_names_is_refused(tmp_path: Path) -> None:
    twice = {f"{EXPERTS}.down_proj": torch.ones(2, 6, 4), f"{EXPERTS}.1.down_proj.weight": torch.ones(6, 4)}
    safetensors_torch.save_file(twice, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"holds .*experts\.1\.down_proj\.weight twice"):
        SafetensorsReader(tmp_path)


def test_packed_experts_without_an_expert_axis_are_refused(tmp_path: Path) -> None:
    safetensors_torch.save_file({f"{EXPERTS}.down_proj": torch.ones(12, 4)}, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"shape \[12, 4\], packed experts have 3 dimensions"):
        SafetensorsReader(tmp_path)
