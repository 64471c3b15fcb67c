"""Which checkpoint and whose tokenizer a path means."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from megatrl.checkpoint.conversion_source import find_megatron_source
from megatrl.checkpoint.store import CheckpointStore
from megatrl.errors import CheckpointError

MODEL = {"kind": "tiny", "family": "qwen3"}
ENV = {"kind": "evidence_hunt"}


def write_model(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, and no model directory yet."""
    run = tmp_path / "runs" / "demo" / "one"
    store = CheckpointStore(run / "checkpoints", run_id="demo", keep=5)
    for step in (2, 4):
        with store.writing(step) as directory:
            (directory / "actor" / "shards").mkdir(parents=True)
            (directory / "actor" / "shards" / ".metadata").write_text(f"of step {step}")
    (run / "config.json").write_text(json.dumps({"name": "demo", "model": MODEL, "env": ENV}))
    return run


def found_step(path: Path, hf: Path, step: int | None = None) -> str:
    return (find_megatron_source(path, step=step, hf=hf).shards / ".metadata").read_text()


def test_a_run_means_its_newest_intact_checkpoint_or_the_step_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf")
    assert found_step(run, hf) == "of step 4"
    assert found_step(run / "checkpoints", hf) == "of step 4"
    assert found_step(run, hf, step=2) == "of step 2"
    assert found_step(run / "checkpoints" / "step-000002", hf) == "of step 2"
    assert found_step(run / "checkpoints" / "step-000002" / "actor", hf) == "of step 2"
    newest = run / "checkpoints" / "step-000004" / "actor" / "shards" / ".metadata"
    newest.write_text("damaged")
    assert found_step(run, hf) == "of step 2"
    with pytest.raises(CheckpointError, match="step-000004 is torn"):
        found_step(run, hf, step=4)
    with pytest.raises(CheckpointError, match="step-000004 is torn"):
        found_step(run / "checkpoints" / "step-000004", hf)


def test_config_and_tokenizer_come_from_the_policy_or_the_model_of_the_run(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model directory is known .* --source"):
        find_megatron_source(run)
    artifacts = tmp_path / "runs" / "artifacts"
    for number, env in enumerate([{"kind": "other"}, ENV]):
        made = write_model(artifacts / f"model-{number}")
        (made / "made_from.json").write_text(json.dumps({"sources": "x", "model": MODEL, "env": env}))
    assert find_megatron_source(run).hf.resolve() == (artifacts / "model-1").resolve()
    hf = write_model(tmp_path / "hf")
    (run / "config.json").write_text(json.dumps({"name": "demo", "model": {"kind": "hf", "path": str(hf)}}))
    assert find_megatron_source(run).hf == hf
    assert find_megatron_source(run / "checkpoints" / "step-000002" / "actor").hf == hf
    policy = write_model(run / "policy")
    assert find_megatron_source(run).hf == policy
    assert find_megatron_source(run, hf=hf).hf == hf


def test_what_is_no_checkpoint_is_said_to_be_none(run: Path, tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is no directory"):
        find_megatron_source(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="neither a run directory"):
        find_megatron_source(hf, hf=hf)
    with pytest.raises(CheckpointError, match="step 2, not of --step 4"):
        find_megatron_source(run / "checkpoints" / "step-000002", step=4, hf=hf)
    with pytest.raises(CheckpointError, match="--step 4 means nothing there"):
        find_megatron_source(run / "checkpoints" / "step-000002" / "actor", step=4, hf=hf)
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="nothing can be converted"):
        find_megatron_source(empty, hf=hf)
