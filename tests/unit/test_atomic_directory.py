"""A directory takes another's place whole, or the other stays."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrl.checkpoint.atomic_directory import replacing_directory
from megatrl.errors import CheckpointError


def write(out: Path, text: str) -> None:
    with replacing_directory(out) as staging:
        (staging / "file").write_text(text)


def write_half(out: Path, still_there: str) -> None:
    with replacing_directory(out) as staging:
        assert list(staging.iterdir()) == []
        (staging / "file").write_text("half")
        assert (out / "file").read_text() == still_there
        raise RuntimeError


@pytest.fixture(params=["in one step", "by two renames"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "by two renames":  # as on a file system or kernel that cannot exchange
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    return tmp_path / "parent" / "out"


def test_the_new_directory_replaces_the_old_and_leaves_nothing_beside_it(out: Path) -> None:
    write(out, "old")
    write(out, "new")
    assert (out / "file").read_text() == "new"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_an_error_leaves_the_old_directory_and_nothing_beside_it(out: Path) -> None:
    write(out, "old")
    with pytest.raises(RuntimeError):
        write_half(out, still_there="old")
    assert (out / "file").read_text() == "old"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_what_killed_writers_left_is_removed_and_a_half_done_swap_is_undone(out: Path) -> None:
    write(out, "old")
    out.rename(out.with_name(".replaced-out"))  # killed between the two renames
    out.with_name(".writing-out").mkdir()
    (out.with_name(".writing-out") / "file").write_text("half")
    with pytest.raises(RuntimeError):
        write_half(out, still_there="old")
    assert (out / "file").read_text() == "old"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_two_writers_of_one_directory_do_not_delete_each_others_files(out: Path) -> None:
    with replacing_directory(out) as staging:
        (staging / "file").write_text("first")
        with pytest.raises(CheckpointError, match="is being written by another process"):
            write(out, "second")
    assert (out / "file").read_text() == "first"
