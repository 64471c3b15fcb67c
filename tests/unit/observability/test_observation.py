"""One run's record: what a step hands over arrives in all files, and a resumed run continues them."""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatrl.config.recipe import ObserveConfig
from megatrl.data.trajectories import PromptGroup
from megatrl.errors import MegatrlError
from megatrl.observability.manifest import config_hash, read_manifest
from megatrl.observability.memory import MemoryMeter, tree_rss_bytes
from megatrl.observability.metrics import Mean, Sum
from megatrl.observability.record import Observation
from megatrl.observability.sinks import read_metrics
from megatrl.observability.spans import read_trace
from tests.fakes.recorded_groups import make_group

LOCAL_ONLY = ObserveConfig(wandb="off", tensorboard=False)


@dataclass(frozen=True)
class DroppedGroup:
    group: PromptGroup
    reason: str


def _open(run_dir: Path, resume_step: int = 0, **config: object) -> Observation:
    return Observation.open(
        run_dir, LOCAL_ONLY, num_steps=10, resume_step=resume_step, run_config={"seed": 1, **config}
    )


def _play(observation: Observation, steps: range) -> None:
    for step in steps:
        with observation.step(step) as record:
            with record.span("act"):
                groups = [make_group(step)]
            record.trajectories(groups)


def test_a_step_arrives_in_metrics_trajectories_and_trace(tmp_path: Path) -> None:
    kept, dropped = make_group(0, (1.0, 0.0, None)), make_group(1, (1.0, 1.0))
    advantages = {kept.trajectories[0].id: (np.full(4, 1.0), np.full(4, 0.5))}
    with _open(tmp_path / "demo") as observation, observation.step(1) as record:
        with record.span("act"):
            time.sleep(0.01)
        with record.span("learn"), record.span("forward"):
            record.add({"loss": Mean(2.0, 1), "grad_norm": 3.0})
            record.add({"loss": Mean(5.0, 2), "tokens": Sum(7)})
        record.trajectories([kept], [DroppedGroup(dropped, "equal_rewards")], advantages)
        with record.span("evaluate"):
            time.sleep(0.2)
            record.evaluation({"success": Mean(0.25, 8)}, [make_group(2)])
    (row,) = read_metrics(tmp_path / "demo" / "metrics.jsonl")
    expected = {
        "step": 1, "loss": 4.0, "grad_norm": 3.0, "tokens": 7.0, "eval/success": 0.25,
        "rollout/success": 0.75, "rollout/reward": 0.75, "rollout/num_trajectories": 5,
        "rollout/num_unknown_outcomes": 1, "rollout/num_action_tokens": 40, "rollout/num_tokens": 70,
        "rollout/turns": 2.0, "rollout/tool_call_share": 0.5,
        "rollout/termination/env_error": 0.2, "rollout/termination/timeout": 0.0, "rollout/env/rooms": 2.8,
        "rollout/num_dropped_groups": 1, "rollout/dropped/equal_rewards": 1,
        "credit/advantage_mean": 0.75, "credit/turn_spread": 0.25,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["seconds/act"] >= 0.01
    assert {"seconds/learn", "seconds/learn/forward", "seconds/record", "seconds/evaluate/record"} <= row.keys()
    assert row["seconds/step"] >= row["seconds/act"] + row["seconds/learn"] + row["seconds/record"]
    assert row["throughput/tokens_per_s"] == pytest.approx(
        70 / (row["seconds/step"] - row["seconds/evaluate"]), rel=0.05
    )
    assert row["memory/peak_rss_bytes"] > 1e7
    found = observation.store.read(1)
    assert [(record.group, record.dropped) for record in found] == [(kept, ""), (dropped, "equal_rewards")]
    assert found[0].notes[0].advantages == ((1.0,) * 4, (0.5,) * 4)
    assert [record.group for record in observation.store.read(1, "eval_step")] == [make_group(2)]
    (trace,) = (tmp_path / "demo" / "traces").iterdir()
    assert {"step", "act", "learn", "forward", "record"} <= {event["name"] for event in read_trace(trace)}


def test_a_group_given_both_as_played_and_as_dropped_is_stored_once(tmp_path: Path) -> None:
    group = make_group(0)
    with _open(tmp_path) as observation, observation.step(1) as record:
        record.trajectories([group], [DroppedGroup(group, "equal_rewards")])
    assert [record.dropped for record in observation.store.read(1)] == ["equal_rewards"]


def test_a_step_that_raises_keeps_its_trajectories_and_writes_no_metrics(tmp_path: Path) -> None:
    observation = _open(tmp_path)

    def failing_step() -> None:
        with observation.step(1) as record:
            record.trajectories([make_group(0)])
            with record.span("publish"):
                raise RuntimeError("server")

    with pytest.raises(RuntimeError, match="server"):
        failing_step()
    observation.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert len(observation.store.read(1)) == 1
    (trace,) = (tmp_path / "traces").iterdir()
    assert "publish" in {event["name"] for event in read_trace(trace)}


def test_a_resumed_run_continues_after_its_step_and_keeps_what_it_replaces(tmp_path: Path) -> None:
    with _open(tmp_path) as observation:
        observation.baseline({"success": 0.125})
        _play(observation, range(1, 6))
    with _open(tmp_path, resume_step=3) as observation:
        assert observation.store.steps() == (1, 2, 3)
        _play(observation, range(4, 8))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[0]["eval/success"] == 0.125
    assert [row["step"] for row in read_metrics(tmp_path / "metrics-set-aside.jsonl")] == [4, 5]
    assert observation.store.steps() == tuple(range(1, 8))
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_a_run_that_begins_again_may_write_its_baseline_again(tmp_path: Path) -> None:
    for value in (0.1, 0.2):
        with _open(tmp_path) as observation:
            observation.baseline({"success": value}, [make_group(0)])
            _play(observation, range(1, 3))
    assert [row.get("eval/success") for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.2, None, None]
    assert read_metrics(tmp_path / "metrics-set-aside.jsonl")[0]["eval/success"] == 0.1


def test_a_second_call_replaces_the_trajectories_and_their_metrics(tmp_path: Path) -> None:
    with _open(tmp_path) as observation, observation.step(1) as record:
        record.trajectories([make_group(0, (0.0,)), make_group(1, (0.0,))])
        record.trajectories([make_group(0, (1.0,))])
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["rollout/success"] == 1.0
    assert len(observation.store.read(1)) == 1


def test_the_manifest_lists_every_start_and_a_changed_config_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _open(tmp_path, loss={"clip": 0.2, "kinds": ("a", "b")}).close()
    _open(tmp_path, resume_step=2, loss={"clip": 0.2, "kinds": ("a", "b")}).close()
    assert "config differs" not in caplog.text
    _open(tmp_path, resume_step=4, loss={"clip": 0.3, "kinds": ("a", "b")}).close()
    assert "config differs from the last start in loss.clip;" in caplog.text
    starts = read_manifest(tmp_path)["starts"]
    assert [start["resume_step"] for start in starts] == [0, 2, 4]
    assert starts[0]["config_sha256"] == starts[1]["config_sha256"] != starts[2]["config_sha256"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["loss"]["clip"] == 0.3
    assert config_hash(config) == starts[2]["config_sha256"]
    (earlier,) = tmp_path.glob("config-*.json")
    assert json.loads(earlier.read_text())["loss"]["clip"] == 0.2
    assert starts[0]["packages"]["numpy"] == np.__version__


def test_the_order_of_keys_does_not_change_a_configs_hash() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegatrlError, match="is not a run directory"):
        read_manifest(tmp_path)


def test_memory_counts_children_and_keeps_the_peak() -> None:
    import subprocess
    import sys

    before = tree_rss_bytes()
    if before is None:
        pytest.skip("no /proc on this system")
    meter = MemoryMeter(interval_s=0.02)
    script = "import time; block = bytearray(b'x') * 200_000_000; print('ready', flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.2)
    finally:
        child.kill()
        child.wait(30)
    peak = meter.take_peak_bytes()
    assert peak is not None
    assert peak > before + 150_000_000
    after = meter.take_peak_bytes()
    meter.close()
    assert after is not None
    assert after < peak - 150_000_000


def test_the_headline_is_one_line_per_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megatrl.observability.progress")
    with _open(tmp_path / "demo") as observation:
        _play(observation, range(1, 4))
    lines = [record.getMessage() for record in caplog.records if record.name == "megatrl.observability.progress"]
    assert len(lines) == 3
    assert lines[2].startswith("demo: step=3/10 reward=0.5 success=0.5 tokens_per_s=")
    assert " left=" in lines[2]
