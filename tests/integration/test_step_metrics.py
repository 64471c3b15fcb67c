"""Names of a step's metrics: each part's own prefix, once."""

from types import SimpleNamespace

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.config.credit import GroupStatisticsConfig, NoCredit, RewardConfig
from megatrl.data.samples import PackedBatch
from megatrl.data.scores import Scores
from megatrl.orchestration.filling import FilledBatch
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
        mismatch=SimpleNamespace(mean=0.0, maximum=0.0),
    )
    update = SimpleNamespace(metrics={"loss": 0.5})
    batch = FilledBatch(kept=(group,), dropped=(), rounds=1)
    metrics = Run.step_metrics(parts, batch, PackedBatch(minibatches=(), samples=()), estimate, update)  # type: ignore[arg-type]
    assert {name.count("/") for name in metrics} == {1}
    assert metrics["credit/zero_signal_groups"] == 0.0
    assert metrics["actor/loss"] == 0.5
    assert {"probe/skipped_overlong", "publish/bytes", "mismatch/mean", "batch/rounds"} <= set(metrics)
