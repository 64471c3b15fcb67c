"""Correction of the mismatch between the actor's and the rollout server's logprobs.

The weight is a detached factor of the policy term alone; it multiplies neither KL nor entropy, and
DeltaTTG's unit-mean property holds before it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatrl.config.credit import LossConfig
from megatrl.data.samples import Microbatch, PackedBatch
from megatrl.errors import ConfigError

# exp of more than this is a fault of the logprobs, and would overflow to inf in fp32 near 88.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchWeights:
    weights_T: Tensor  # [T] detached; 1 outside the action mask
    ratio_T: Tensor  # [T] detached, before clipping; 1 outside the action mask
    is_rejected_T: Tensor  # [T] bool: action tokens with weight 0


def mismatch_weights(
    old_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    action_mask_T: Tensor,
    *,
    kind: Literal["none", "tis", "icepop"],
    low: float,
    high: float,
) -> MismatchWeights:
    """Returns w = exp(old - behavior) per action token.

    tis: min(w, high).  icepop: w where low <= w <= high, else 0.  none: 1.
    """
    log_ratio_T = torch.where(action_mask_T, old_logprobs_T - behavior_logprobs_T, 0.0).detach()
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_rejected_T = torch.zeros_like(action_mask_T)
    weights_T = torch.ones_like(ratio_T)
    if kind == "tis":
        weights_T = ratio_T.clamp(max=high)
    elif kind == "icepop":
        is_rejected_T = action_mask_T & ((ratio_T < low) | (ratio_T > high))
        weights_T = torch.where(is_rejected_T, 0.0, ratio_T)
    weights_T = torch.where(action_mask_T, weights_T, 1.0)
    return MismatchWeights(weights_T=weights_T, ratio_T=ratio_T, is_rejected_T=is_rejected_T)


def exclude_rejected(batch: PackedBatch, loss: LossConfig) -> PackedBatch:
    """Returns the batch with rejected tokens taken out of each minibatch's denominator, where configured.

    By default IcePop's rejected tokens stay in it: they add 0 to the sum but count in the mean. With
    `keep_rejected_in_denominator: false` the mean runs over kept tokens. Driver code; needs
    old_logprobs in the batch. Tokens that are not computed (zero advantage) count as kept.
    Raises ConfigError for reductions whose denominator does not count tokens.
    """
    if loss.off_policy.kind != "icepop" or loss.off_policy.keep_rejected_in_denominator:
        return batch
    if loss.reduction != "token_mean":
        raise ConfigError(
            f"loss.off_policy.keep_rejected_in_denominator=false needs reduction=token_mean, got {loss.reduction}; "
            "other reductions do not divide by a number of tokens"
        )

    def num_rejected(microbatch: Microbatch) -> int:
        weights = mismatch_weights(
            torch.from_numpy(microbatch.per_token["old_logprobs"]),
            torch.from_numpy(microbatch.per_token["behavior_logprobs"]),
            torch.from_numpy(microbatch.action_mask),
            kind="icepop",
            low=loss.off_policy.low,
            high=loss.off_policy.high,
        )
        return int(weights.is_rejected_T.sum())

    minibatches = []
    for minibatch in batch.minibatches:
        rejected = sum(num_rejected(microbatch) for rank in minibatch.microbatches for microbatch in rank)
        # With every token rejected the loss is 0 whatever it is divided by.
        minibatches.append(replace(minibatch, loss_denominator=max(minibatch.loss_denominator - rejected, 1.0)))
    return replace(batch, minibatches=tuple(minibatches))
