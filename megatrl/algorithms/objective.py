"""The training loss of one microbatch, as the recipe's `loss` section composes it."""

import torch
from torch import Tensor

from megatrl.algorithms.off_policy import mismatch_weights
from megatrl.algorithms.policy_losses import (
    LossOutput,
    clipped_policy_loss,
    entropy_loss,
    kl_loss,
    masked_sum,
    sequence_policy_loss,
)
from megatrl.config.credit import ClippedLoss, LossConfig
from megatrl.errors import ConfigError


def policy_objective(
    config: LossConfig,
    *,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    advantages_T: Tensor,
    action_mask_T: Tensor,
    cu_seqlens: Tensor,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    entropies_T: Tensor | None = None,
) -> LossOutput:
    """Returns  policy + kl_coefficient * KL - entropy_coefficient * H  over this shard's action tokens.

    All tensors are token-aligned [T]; only `logprobs_T` and `entropies_T` carry gradients.
    `loss_denominator`, `num_action_tokens` and `loss_weights_T` belong to the whole minibatch, see
    policy_losses. Raises ConfigError where a term is on and its input is missing.
    """
    if config.kl_coefficient > 0 and reference_logprobs_T is None:
        raise ConfigError(f"loss.kl_coefficient={config.kl_coefficient} needs reference_logprobs, the batch has none")
    if config.entropy_coefficient > 0 and entropies_T is None:
        raise ConfigError(f"loss.entropy_coefficient={config.entropy_coefficient} needs entropies, none were computed")
    off_policy = config.off_policy
    clips = {"low": off_policy.low, "high": off_policy.high}
    mismatch = mismatch_weights(old_logprobs_T, behavior_logprobs_T, action_mask_T, kind=off_policy.kind, **clips)
    policy = _policy_term(
        config,
        (logprobs_T, old_logprobs_T, advantages_T, action_mask_T),
        cu_seqlens=cu_seqlens,
        loss_denominator=loss_denominator,
        num_action_tokens=num_action_tokens,
        loss_weights_T=loss_weights_T,
        mismatch_weights_T=None if off_policy.kind == "none" else mismatch.weights_T,
    )
    loss = policy.loss
    metrics = {
        "policy_loss": policy.loss.detach(),
        **policy.metrics,
        "mismatch_ratio_mean": masked_sum(mismatch.ratio_T, action_mask_T) / num_action_tokens,
        "mismatch_rejected_fraction": mismatch.is_rejected_T.sum(dtype=torch.float64) / num_action_tokens,
    }
    reduction = {"loss_denominator": loss_denominator, "num_action_tokens": num_action_tokens}
    if reference_logprobs_T is not None:
        estimator = config.kl_estimator
        kl = kl_loss(
            logprobs_T, reference_logprobs_T, action_mask_T, estimator, loss_weights_T=loss_weights_T, **reduction
        )
        metrics |= kl.metrics
        loss = loss + config.kl_coefficient * kl.loss if config.kl_coefficient > 0 else loss
    if entropies_T is not None:
        entropy = entropy_loss(entropies_T, action_mask_T, loss_weights_T=loss_weights_T, **reduction)
        metrics |= entropy.metrics
        loss = loss + config.entropy_coefficient * entropy.loss if config.entropy_coefficient > 0 else loss
    return LossOutput(loss=loss, metrics={"loss": loss.detach(), **metrics})


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Returns [T]: the index 0..S-1 of the packed sequence that each token belongs to."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def _policy_term(
    config: LossConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    cu_seqlens: Tensor,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None,
    mismatch_weights_T: Tensor | None,
) -> LossOutput:
    if isinstance(config.policy, ClippedLoss):
        return clipped_policy_loss(
            *inputs,
            clip_low=config.policy.clip_low,
            clip_high=config.policy.clip_high,
            dual_clip=config.policy.dual_clip,
            loss_denominator=loss_denominator,
            num_action_tokens=num_action_tokens,
            loss_weights_T=loss_weights_T,
            mismatch_weights_T=mismatch_weights_T,
        )
    return sequence_policy_loss(
        *inputs,
        sequence_ids(cu_seqlens),
        num_sequences=len(cu_seqlens) - 1,
        clip_low=config.policy.clip_low,
        clip_high=config.policy.clip_high,
        loss_denominator=loss_denominator,
        num_action_tokens=num_action_tokens,
        loss_weights_T=loss_weights_T,
        mismatch_weights_T=mismatch_weights_T,
    )
