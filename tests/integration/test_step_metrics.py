"""Names of a step's metrics, and the mismatch between actor and server among them."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.config.credit import GroupStatisticsConfig, NoCredit, RewardConfig
from megatrl.data.samples import PackedBatch, TrainingSample
from megatrl.data.scores import Scores
from megatrl.data.trajectories import TrajectoryId
from megatrl.errors import WeightSyncError
from megatrl.orchestration.filling import FilledBatch
from megatrl.orchestration.mismatch import MismatchMonitor
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.run import Run
from tests.fakes.frozen_models import make_group, make_trajectory


def test_every_metric_has_the_prefix_of_its_part_once():
    group = make_group(*(make_trajectory([((1,), (2,))], index=i, reward=float(i)) for i in range(2)))
    estimate = estimate_advantages(
        [group], Scores(), credit=NoCredit(), group_statistics=GroupStatisticsConfig(), reward=RewardConfig()
    )
    parts = SimpleNamespace(
        scorers=SimpleNamespace(metrics={"probe/skipped_overlong": 0.0}),
        weight_sync=SimpleNamespace(metrics={"publish/bytes": 1.0}),
        mismatch=MismatchMonitor(limit=1e-3),
    )
    update = SimpleNamespace(metrics={"loss": 0.5})
    batch = FilledBatch(kept=(group,), dropped=(), rounds=1)
    metrics = Run.step_metrics(parts, batch, PackedBatch(minibatches=(), samples=()), estimate, update)  # type: ignore[arg-type]
    assert {name.count("/") for name in metrics} == {1}
    assert metrics["credit/zero_signal_groups"] == 0.0
    assert metrics["actor/loss"] == 0.5
    assert {"probe/skipped_overlong", "publish/bytes", "batch/rounds"} <= set(metrics)


def test_the_first_step_that_computes_tokens_must_agree_and_one_without_measures_nothing():
    sample = TrainingSample(
        trajectory_id=TrajectoryId(prompt_id="p", group_id="g", index=0),
        segment_index=0,
        tokens=np.arange(3),
        action_mask=np.array([False, True, True]),
        behavior_logprobs=np.array([0.0, -1.0, -2.0]),
        advantages=np.zeros(3),
    )
    batch, progress = PackedBatch(minibatches=(), samples=(sample,)), Progress()
    monitor = MismatchMonitor(limit=0.05)
    monitor.check(progress, batch, {})
    assert monitor.metrics == {}
    with pytest.raises(WeightSyncError, match=r"disagree by 0\.2000 nats"):
        monitor.check(progress, batch, {0: np.array([9.0, -1.1, -2.3])})
    monitor = MismatchMonitor(limit=0.25)
    for _ in range(2):
        monitor.check(progress, batch, {0: np.array([9.0, -1.1, -2.3])})
        assert monitor.metrics == pytest.approx({"mismatch/mean": 0.2, "mismatch/max": 0.3})
    monitor.check(progress, batch, {0: np.array([9.0, -2.0, -3.0])})  # later steps are logged only
    assert monitor.metrics["mismatch/mean"] == pytest.approx(1.0)
