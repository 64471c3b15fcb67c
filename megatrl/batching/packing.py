"""Training samples -> packed, balanced microbatches with the same count on every rank.

Normalisation happens here, on the driver: each minibatch carries one global `loss_denominator` and
each token its `loss_weights`, so no rank, microbatch or layout can change a gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatrl.batching.bins import balanced_bins
from megatrl.config.credit import LossConfig
from megatrl.data.routed_experts import UNRECORDED, ExpertArray
from megatrl.data.samples import FloatArray, Microbatch, Minibatch, PackedBatch, TrainingSample
from megatrl.data.trajectories import TrajectoryId
from megatrl.errors import EmptyBatchError, TrajectoryError


def pack(
    samples: Sequence[TrainingSample],
    *,
    num_data_ranks: int,
    num_minibatches: int,
    microbatch_tokens: int,
    loss: LossConfig,
    context_tokens: int | None = None,
) -> PackedBatch:
    """Returns the optimizer steps of one loop step, in order.

    Sample i goes to minibatch i % num_minibatches, so each sees every prompt group. Samples whose
    advantages are all zero are counted in the denominator and left out of the forward passes when no
    other term of the loss needs them.

    Raises EmptyBatchError for no samples, TrajectoryError for one longer than `context_tokens`.
    """
    if not samples:
        raise EmptyBatchError("nothing to pack: no trajectory has a known outcome and an action token")
    for sample in samples:
        if context_tokens is not None and len(sample.tokens) > context_tokens:
            raise TrajectoryError(
                f"sample of {sample.trajectory_id} has {len(sample.tokens)} tokens, the limit is {context_tokens}; "
                "raise rollout.context_tokens"
            )
    weights = loss_weights(samples, loss)
    has_other_terms = loss.kl_coefficient > 0 or loss.entropy_coefficient > 0
    minibatches = []
    for first in range(min(num_minibatches, len(samples))):
        members = range(first, len(samples), num_minibatches)
        active = [i for i in members if has_other_terms or np.any(samples[i].advantages)]
        bins = balanced_bins([len(samples[i].tokens) for i in active], num_data_ranks, microbatch_tokens)
        num_sequences = len({samples[i].trajectory_id for i in members})
        minibatches.append(
            Minibatch(
                microbatches=tuple(
                    tuple(_microbatch([active[j] for j in bin], samples, weights) for bin in rank) for rank in bins
                ),
                loss_denominator=_denominator([samples[i] for i in members], num_sequences, loss),
                num_sequences=num_sequences,
            )
        )
    return PackedBatch(minibatches=tuple(minibatches), samples=tuple(samples))


def loss_weights(samples: Sequence[TrainingSample], loss: LossConfig) -> list[FloatArray]:
    """Returns the weight of every token, [T] for each sample, 0 outside the action mask.

    token_mean, seq_mean_token_sum and constant weigh each action token 1; seq_mean_token_mean weighs
    it 1 / (action tokens of its trajectory), so that a trajectory stored as several segments counts
    as one. A sample's own `loss_weights` multiply these.
    """
    per_trajectory: Counter[TrajectoryId] = Counter()
    for sample in samples:
        per_trajectory[sample.trajectory_id] += sample.num_action_tokens
    weights = []
    for sample in samples:
        scale = 1.0 / per_trajectory[sample.trajectory_id] if loss.reduction == "seq_mean_token_mean" else 1.0
        weight = sample.action_mask * scale
        weights.append(weight if sample.loss_weights is None else weight * sample.loss_weights)
    return weights


def _denominator(members: Sequence[TrainingSample], num_sequences: int, loss: LossConfig) -> float:
    if loss.reduction == "token_mean":
        return float(sum(sample.num_action_tokens for sample in members))
    if loss.reduction == "constant":
        if loss.constant_length is None:
            raise EmptyBatchError("loss.reduction is constant but loss.constant_length is not set; set it in tokens")
        return float(loss.constant_length)
    return float(num_sequences)


def _microbatch(members: Sequence[int], samples: Sequence[TrainingSample], weights: Sequence[FloatArray]) -> Microbatch:
    names = ["advantages", "behavior_logprobs"]
    experts = _routed_experts(members, samples)
    if samples[0].reference_logprobs is not None:
        names.append("reference_logprobs")
    if not members:  # a weightless filler keeps this rank in step with the others
        return Microbatch(
            tokens=np.zeros(1, dtype=np.int64),
            cu_seqlens=np.array([0, 1], dtype=np.int64),
            action_mask=np.zeros(1, dtype=np.bool_),
            per_token={name: np.zeros(1) for name in [*names, "loss_weights"]},
            sample_indices=(-1,),
            routed_experts=experts,
        )
    chosen = [samples[i] for i in members]
    per_token = {name: np.concatenate([getattr(sample, name) for sample in chosen]) for name in names}
    per_token["loss_weights"] = np.concatenate([weights[i] for i in members])
    return Microbatch(
        tokens=np.concatenate([sample.tokens for sample in chosen]),
        cu_seqlens=np.cumsum([0, *(len(sample.tokens) for sample in chosen)]).astype(np.int64),
        action_mask=np.concatenate([sample.action_mask for sample in chosen]),
        per_token=per_token,
        sample_indices=tuple(members),
        routed_experts=experts,
    )


def _routed_experts(members: Sequence[int], samples: Sequence[TrainingSample]) -> ExpertArray | None:
    """Expert choices of a microbatch, [T, layers, top-k]; a filler's one token routes freely."""
    recorded = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not recorded:
        return None
    if len(recorded) != len(samples):
        raise TrajectoryError(
            f"{len(recorded)} of {len(samples)} samples have routed_experts; a batch replays all of them or none"
        )
    if len({(array.shape[1:], array.dtype) for array in recorded}) != 1:
        raise TrajectoryError("the samples' routed_experts differ in layers, top-k or type; they are of several models")
    if not members:
        return np.full_like(recorded[0][:1], UNRECORDED)
    return np.concatenate([recorded[i] for i in members])


def attach_old_logprobs(batch: PackedBatch, old_logprobs: Mapping[int, FloatArray]) -> PackedBatch:
    """Returns the batch with `old_logprobs` in every microbatch.

    `old_logprobs` maps a sample index to its [T] array, as `ActorWorker.logprobs` gives it, merged
    over data-parallel ranks.
    """

    def fill(microbatch: Microbatch) -> Microbatch:
        column = np.zeros(len(microbatch.tokens))
        spans = zip(microbatch.cu_seqlens[:-1], microbatch.cu_seqlens[1:], strict=True)
        for index, (begin, end) in zip(microbatch.sample_indices, spans, strict=True):
            if index >= 0:
                column[begin:end] = np.where(microbatch.action_mask[begin:end], old_logprobs[index], 0.0)
        return replace(microbatch, per_token={**microbatch.per_token, "old_logprobs": column})

    return replace(
        batch,
        minibatches=tuple(
            replace(minibatch, microbatches=tuple(tuple(fill(m) for m in rank) for rank in minibatch.microbatches))
            for minibatch in batch.minibatches
        ),
    )


def mismatch(batch: PackedBatch, old_logprobs: Mapping[int, FloatArray]) -> tuple[float, float]:
    """Returns mean and maximum of |old_logprobs - behavior_logprobs| over the action tokens computed."""
    gaps = [
        np.abs(old_logprobs[i] - batch.samples[i].behavior_logprobs)[batch.samples[i].action_mask] for i in old_logprobs
    ]
    flat = np.concatenate(gaps) if gaps else np.zeros(0)
    return (float(flat.mean()), float(flat.max())) if flat.size else (0.0, 0.0)
