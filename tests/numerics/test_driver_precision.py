"""From rewards to packed batches the driver computes in float64: nothing is rounded before the actor."""

from dataclasses import fields

import numpy as np

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.batching.flatten import flatten_groups
from megatrl.batching.packing import pack
from megatrl.config.credit import GroupStatisticsConfig, LossConfig, RewardConfig, TraceCredit
from megatrl.data.scores import AnswerScore, Scores
from tests.fakes.frozen_models import make_group, make_trajectory

# Not a number of float32: rounding any step would show.
LOGPROBS = (-2.000000001, -1.000000003, -0.500000007)


def test_every_array_up_to_the_packed_batch_is_float64():
    group = make_group(
        *(make_trajectory([((1,), (2, 3)), ((4,), (5,))], index=i, reward=float(i), trailing=(6,)) for i in range(2))
    )
    scores = Scores(answers={t.id: AnswerScore(logprobs=LOGPROBS) for t in group.trajectories})
    estimate = estimate_advantages(
        [group],
        scores,
        credit=TraceCredit(window=1, terminal_weight=0.0, alpha_outcome=0.0, alpha_turn=1.0),
        group_statistics=GroupStatisticsConfig(),
        reward=RewardConfig(),
    )
    samples = flatten_groups([group], estimate.per_turn)
    batch = pack(samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=64, loss=LossConfig())
    arrays = {
        **{f"sample.{f.name}": getattr(samples[0], f.name) for f in fields(samples[0])},
        **batch.minibatches[0].microbatches[0][0].per_token,
    }
    floats = {name: a.dtype for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}
    assert set(floats.values()) == {np.dtype(np.float64)}
    assert {"advantages", "behavior_logprobs", "loss_weights"} <= set(floats)

    exact = np.log((0.1 - LOGPROBS[0]) / (0.1 - LOGPROBS[1]))
    assert samples[0].advantages[1] == np.float64(np.log(0.1 - LOGPROBS[0]) - np.log(0.1 - LOGPROBS[1]))
    assert abs(samples[0].advantages[1] - exact) < 1e-15
