"""Checkpoints that appear whole or not at all, whatever interrupts the writer."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrl.checkpoint import store as store_module
from megatrl.checkpoint.store import CheckpointStore
from megatrl.errors import CheckpointError


def make(path: Path, *, run_id: str = "run-a", keep: int = 3) -> CheckpointStore:
    return CheckpointStore(path, run_id=run_id, keep=keep)


def save(store: CheckpointStore, step: int, text: str = "") -> None:
    with store.writing(step) as staging:
        (staging / "actor").mkdir()
        (staging / "actor" / "weights.bin").write_text(text or f"weights of {step} " * 100)
        (staging / "state.json").write_text(json.dumps({"step": step}))


def save_and_fail(store: CheckpointStore, error: Exception | None) -> None:
    with store.writing(2) as staging:
        (staging / "weights.bin").write_text("x" * 1000)
        if error is not None:
            raise error


def listing(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_no_directory_means_no_checkpoint(tmp_path: Path) -> None:
    store = make(tmp_path / "checkpoints")
    assert store.latest() is None
    assert store.steps() == ()


def test_a_saved_checkpoint_is_found_and_holds_what_was_written(tmp_path: Path) -> None:
    save(make(tmp_path), 40)
    found = make(tmp_path).latest()
    assert found is not None
    assert (found.step, found.run_id) == (40, "run-a")
    assert (found.path / "actor" / "weights.bin").read_text().startswith("weights of 40")
    assert listing(tmp_path) == ["latest", "step-000040"]
    assert (tmp_path / "latest").read_text() == "step-000040\n"
    assert make(tmp_path).open(40).path == found.path


def test_the_newest_n_stay(tmp_path: Path) -> None:
    store = make(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        save(store, step)
    assert store.steps() == (3, 10)
    assert listing(tmp_path) == ["latest", "step-000003", "step-000010"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = make(tmp_path)
    save(store, 5, "before")
    save(store, 5, "after")
    assert (store.open(5).path / "actor" / "weights.bin").read_text() == "after"
    assert listing(tmp_path) == ["latest", "step-000005"]


def damage(path: Path, how: str) -> str:
    weights = path / "actor" / "weights.bin"
    if how == "cut":
        weights.write_text(weights.read_text()[:10])
        return "has 10 bytes"
    if how == "changed":
        weights.write_text(weights.read_text().replace("w", "W", 1))
        return "has other content"
    if how == "missing":
        weights.unlink()
        return "is missing"
    if how == "no manifest":
        (path / "manifest.json").unlink()
        return "it has no manifest.json"
    (path / "manifest.json").write_text('{"format": 1')
    return "is not readable"


DAMAGES = ("cut", "changed", "missing", "no manifest", "broken manifest")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_torn_checkpoint_is_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    store = make(tmp_path)
    save(store, 1)
    save(store, 2)
    reason = damage(tmp_path / "step-000002", how)
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert found.step == 1
    assert "step-000002 is torn" in caplog.text
    assert reason in caplog.text
    with pytest.raises(CheckpointError, match="step-000002 is torn"):
        store.open(2)


@pytest.mark.parametrize("how", DAMAGES)
def test_when_all_are_torn_the_run_does_not_begin_again_silently(tmp_path: Path, how: str) -> None:
    store = make(tmp_path)
    save(store, 1)
    save(store, 2)
    for name in ("step-000001", "step-000002"):
        damage(tmp_path / name, how)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* can be used: .*step-000002.*step-000001"):
        store.latest()


def test_another_runs_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    save(make(tmp_path, run_id="run-b"), 7)
    with pytest.raises(CheckpointError, match="belongs to run 'run-b', this is 'run-a'"):
        make(tmp_path).latest()


def test_a_step_that_was_never_saved_is_an_error(tmp_path: Path) -> None:
    save(make(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 in .*there are: 1"):
        make(tmp_path).open(9)


def test_the_pointer_decides_when_someone_set_it_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "latest").write_text("step-000002\n")
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert found.step == 2
    assert "although there are directories of steps [3]" in caplog.text


@pytest.mark.parametrize("pointer", [None, "", "step-000009\n", "garbage\n"])
def test_a_lost_or_wrong_pointer_falls_back_to_the_newest_intact_checkpoint(
    tmp_path: Path, pointer: str | None
) -> None:
    store = make(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    found = store.latest()
    assert found is not None
    assert found.step == 2


def test_an_error_of_the_caller_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    store = make(tmp_path)
    save(store, 1)
    with pytest.raises(RuntimeError, match="worker died"):
        save_and_fail(store, RuntimeError("worker died"))
    assert listing(tmp_path) == ["latest", "step-000001"]


def test_an_empty_checkpoint_is_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    with pytest.raises(CheckpointError, match="no files"), store.writing(2):
        pass
    assert store.steps() == ()


@pytest.mark.parametrize("where", ["body", "manifest", "pointer"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_how_much_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = make(tmp_path)
    save(store, 1)
    write = store_module.write_text_atomically

    def full(path: Path, text: str) -> None:
        if path.name == {"manifest": "manifest.json", "pointer": "latest"}.get(where):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)

    monkeypatch.setattr(store_module, "write_text_atomically", full)
    in_body = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if where == "body" else None
    with pytest.raises(
        CheckpointError, match=r"no space for the checkpoint of step 2 .* GB free now.*checkpoint\.keep"
    ):
        save_and_fail(store, in_body)
    monkeypatch.undo()
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    found = store.latest()
    assert found is not None
    assert found.step == 1
    save(store, 2)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize("free, is_told", [(0, True), (10**12, False)])
def test_a_writer_that_hides_the_full_disk_is_seen_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_told: bool
) -> None:
    store = make(tmp_path)
    save(store, 1)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(CheckpointError, match="rank 1 did not write") as caught, store.writing(2):
        raise CheckpointError("rank 1 did not write the actor's state")
    assert ("no space for the checkpoint of step 2" in caught.value.message) is is_told
    assert store.steps() == (1,)


WRITER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from megatrl.checkpoint import store as module
    from megatrl.checkpoint.store import CheckpointStore

    def hang(*args, **kwargs):
        Path(sys.argv[1], "reached").touch()
        time.sleep(60)

    where = sys.argv[2]
    store = CheckpointStore(Path(sys.argv[1], "checkpoints"), run_id="run-a", keep=1)
    with store.writing(2) as staging:
        (staging / "weights.bin").write_bytes(b"x" * 100_000)
        if where == "body":
            hang()
        elif where == "hashing":
            module._measure = hang
        elif where == "pointer":
            write = module.write_text_atomically
            module.write_text_atomically = lambda path, text: hang() if path.name == "latest" else write(path, text)
        elif where == "retention":
            module.shutil.rmtree = hang
    """
)


@pytest.mark.parametrize(("where", "expected_step"), [("body", 1), ("hashing", 1), ("pointer", 1), ("retention", 2)])
def test_a_writer_killed_at_any_point_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, where: str, expected_step: int
) -> None:
    store = make(tmp_path / "checkpoints", keep=1)
    save(store, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), where])
    deadline = time.monotonic() + 60
    while not (tmp_path / "reached").exists():
        assert writer.poll() is None, "the writer ended before it reached the point to be killed at"
        assert time.monotonic() < deadline, "the writer did not reach the point to be killed at within 60 s"
        time.sleep(0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=30)
    found = store.latest()
    assert found is not None
    assert found.step == expected_step
    save(store, 3)
    assert store.steps() == (3,)
    assert listing(tmp_path / "checkpoints") == ["latest", "step-000003"], "the leftovers of the killed writer are gone"


def test_pinned_steps_stay_and_are_not_counted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, run_id="run-a", keep=2, pin_every=5)
    for step in (4, 5, 6, 8, 10):
        save(store, step)
    store.pin(6)
    for step in (11, 12, 13):
        save(store, step)
    assert store.pinned_steps() == (5, 6, 10)
    assert store.steps() == (5, 6, 10, 12, 13)
    assert store.open(6).step == 6, "a pin changes nothing that the manifest covers"


def test_a_pin_by_hand_is_a_file_and_can_be_taken_back(tmp_path: Path) -> None:
    store = make(tmp_path, keep=1)
    save(store, 1)
    (tmp_path / "step-000001" / "pinned").touch()
    save(store, 2)
    assert store.steps() == (1, 2)
    store.unpin(1)
    save(store, 3)
    assert store.steps() == (3,)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 to pin; there are \[3\]"):
        store.pin(9)


def test_a_pinned_step_that_is_saved_again_stays_pinned(tmp_path: Path) -> None:
    store = make(tmp_path, keep=1)
    save(store, 1)
    store.pin(1)
    save(store, 1, "again")
    save(store, 2)
    assert (store.open(1).path / "actor" / "weights.bin").read_text() == "again"


def test_a_directory_with_weights_alone_is_named_as_such_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(tmp_path)
    save(store, 1)
    exported = tmp_path / "step-000002"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    (exported / "model.safetensors").write_text("weights")
    (tmp_path / "latest").write_text("step-000002\n")
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert found.step == 1
    assert "weights alone cannot be resumed, start a new run from them with model.path" in caplog.text


def test_begun_checkpoints_appear_at_their_commit_and_leave_nothing_when_abandoned(tmp_path: Path) -> None:
    store = make(tmp_path)
    (store.begin(1) / "weights.bin").write_text("x")
    assert store.latest() is None
    store.commit(1)
    (store.begin(2) / "weights.bin").write_text("y")
    assert store.abandon(2, RuntimeError("a rank died")) is None
    assert listing(tmp_path) == ["latest", "step-000001"]
