"""What a recipe makes once: reused by content, never half there."""

import pytest

from megatrl.orchestration import artifacts
from megatrl.orchestration.artifacts import Artifacts


def test_the_same_key_is_made_once_and_another_key_or_other_sources_again(tmp_path, monkeypatch):
    made = []

    def make(out):
        made.append(out)
        (out / "weights").write_text("w")

    store = Artifacts(tmp_path)
    first = store.get_or_make("start", {"seed": 1}, make)
    assert (first / "weights").read_text() == "w"
    assert store.get_or_make("start", {"seed": 1}, make) == first
    assert len(made) == 1
    assert store.get_or_make("start", {"seed": 2}, make) != first
    monkeypatch.setattr(artifacts, "source_digest", lambda: "other code")
    assert store.get_or_make("start", {"seed": 1}, make) != first
    assert len(made) == 3


def test_a_failed_make_leaves_nothing_behind(tmp_path):
    def make(out):
        (out / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Artifacts(tmp_path).get_or_make("meter", {}, make)
    assert list(tmp_path.iterdir()) == []
