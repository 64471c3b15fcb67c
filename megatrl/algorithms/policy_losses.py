"""Loss terms over the action tokens of one microbatch.

Shape letters: T = packed action and observation tokens of one microbatch, S = its sequences.

Every term is  sum_t w_t l_t / loss_denominator  over this shard's action tokens. Weights and the
denominator come from the driver and belong to the whole minibatch, over all ranks and microbatches:

    token_mean           w = 1        denominator = action tokens
    seq_mean_token_mean  w = 1/|seq|  denominator = sequences
    seq_mean_token_sum   w = 1        denominator = sequences
    constant             w = 1        denominator = a constant length, see batching.packing

so that summing shard losses gives the loss, and summing shard gradients the gradient, of one large
batch. Tokens outside the mask may hold NaN: they add exactly 0 to the value and to the gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrl.algorithms.kl import kl_estimate

# Keeps exp finite in fp32. A clamped log-ratio has gradient 0, as has any ratio this far outside.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossOutput:
    loss: Tensor  # [] this shard's part
    metrics: dict[str, Tensor]  # each [], detached, already divided: SUM over microbatches and ranks


def masked_sum(values_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """Returns the sum of `values_T` over action tokens; 0, with a gradient of 0, over none."""
    return torch.where(action_mask_T, values_T, 0.0).sum()


def clipped_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    action_mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None = None,
    mismatch_weights_T: Tensor | None = None,
) -> LossOutput:
    """PPO's clipped surrogate with dual clip for negative advantages.

        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  A < 0: l = min(l, -c A)

    `num_action_tokens` counts the minibatch's action tokens, for metrics that are fractions of
    tokens whatever the reduction. `mismatch_weights_T` multiply l (detached).
    """
    log_ratio_T = torch.where(action_mask_T, logprobs_T - old_logprobs_T, 0.0)
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_T = torch.where(action_mask_T, advantages_T, 0.0)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    unclipped_loss_T, clipped_loss_T = -advantages_T * ratio_T, -advantages_T * clipped_T
    losses_T = torch.maximum(unclipped_loss_T, clipped_loss_T)
    metrics = {"clip_fraction": (clipped_loss_T > unclipped_loss_T).sum(dtype=torch.float64) / num_action_tokens}
    if dual_clip is not None:
        bound_T = -dual_clip * advantages_T
        is_bounded_T = (advantages_T < 0) & (losses_T > bound_T)
        losses_T = torch.where(is_bounded_T, bound_T, losses_T)
        metrics["dual_clip_fraction"] = is_bounded_T.sum(dtype=torch.float64) / num_action_tokens
    metrics |= _drift_metrics(log_ratio_T, action_mask_T, num_action_tokens)
    loss = _weighted(losses_T, action_mask_T, loss_weights_T, mismatch_weights_T) / loss_denominator
    return LossOutput(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


def sequence_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    action_mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None = None,
    mismatch_weights_T: Tensor | None = None,
) -> LossOutput:
    """GSPO's clipped surrogate: one length-normalised ratio for each sequence (arXiv 2507.18071).

        s = exp(mean over the sequence's action tokens of logprobs - old_logprobs)
        l_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))
        s_t = stop(s) exp(logprobs_t - stop(logprobs_t))

    s_t has the value of s and the gradient of the token's own logprob. `sequence_ids_T` numbers the
    packed sequences 0..S-1; a sequence must lie whole in this microbatch. There is no dual clip.
    """
    log_ratio_S = mean_log_ratio(
        logprobs_T.detach() - old_logprobs_T, action_mask_T, sequence_ids_T, num_sequences=num_sequences
    )
    own_T = torch.where(action_mask_T, logprobs_T, 0.0)
    log_ratio_T = log_ratio_S[sequence_ids_T].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own_T - own_T.detach()
    ratio_T = log_ratio_T.exp()
    advantages_T = torch.where(action_mask_T, advantages_T, 0.0)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    unclipped_loss_T, clipped_loss_T = -advantages_T * ratio_T, -advantages_T * clipped_T
    losses_T = torch.maximum(unclipped_loss_T, clipped_loss_T)
    metrics = {"clip_fraction": (clipped_loss_T > unclipped_loss_T).sum(dtype=torch.float64) / num_action_tokens}
    token_log_ratio_T = torch.where(action_mask_T, logprobs_T - old_logprobs_T, 0.0)
    metrics |= _drift_metrics(token_log_ratio_T, action_mask_T, num_action_tokens)
    loss = _weighted(losses_T, action_mask_T, loss_weights_T, mismatch_weights_T) / loss_denominator
    return LossOutput(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


def mean_log_ratio(log_ratio_T: Tensor, action_mask_T: Tensor, sequence_ids_T: Tensor, *, num_sequences: int) -> Tensor:
    """Returns [S], each sequence's mean over its action tokens; 0 for a sequence without any.

    The length mean, whose exp is GSPO's ratio; the product of token ratios would be exp of the sum.
    """
    log_ratio_T = torch.where(action_mask_T, log_ratio_T, 0.0)
    sums_S = log_ratio_T.new_zeros(num_sequences).index_add(0, sequence_ids_T, log_ratio_T)
    counts_S = log_ratio_T.new_zeros(num_sequences).index_add(0, sequence_ids_T, action_mask_T.to(log_ratio_T.dtype))
    return sums_S / counts_S.clamp(min=1)


def kl_loss(
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    action_mask_T: Tensor,
    estimator: Literal["k1", "k2", "k3"],
    *,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None = None,
) -> LossOutput:
    """KL to the reference on action tokens, reduced like the policy term; not yet times its coefficient."""
    # Masked before the estimator: its gradient at a NaN would otherwise be 0 * NaN.
    own_T = torch.where(action_mask_T, logprobs_T, 0.0)
    reference_T = torch.where(action_mask_T, reference_logprobs_T, 0.0)
    estimates_T = kl_estimate(own_T, reference_T, estimator)
    loss = _weighted(estimates_T, action_mask_T, loss_weights_T, None) / loss_denominator
    metric = masked_sum(estimates_T, action_mask_T) / num_action_tokens
    return LossOutput(loss=loss, metrics={"kl": metric.detach()})


def entropy_loss(
    entropies_T: Tensor,
    action_mask_T: Tensor,
    *,
    loss_denominator: float,
    num_action_tokens: float,
    loss_weights_T: Tensor | None = None,
) -> LossOutput:
    """Minus the entropy (nats) of the policy at action tokens, reduced like the policy term."""
    loss = -_weighted(entropies_T, action_mask_T, loss_weights_T, None) / loss_denominator
    metric = masked_sum(entropies_T, action_mask_T) / num_action_tokens
    return LossOutput(loss=loss, metrics={"entropy": metric.detach()})


def supervised_loss(
    logprobs_T: Tensor,
    action_mask_T: Tensor,
    *,
    loss_denominator: float,
    loss_weights_T: Tensor | None = None,
) -> LossOutput:
    """Cross-entropy of the target tokens (`action_mask_T`) in nats."""
    loss = -_weighted(logprobs_T, action_mask_T, loss_weights_T, None) / loss_denominator
    return LossOutput(loss=loss, metrics={"supervised_loss": loss.detach()})


def _weighted(
    losses_T: Tensor, action_mask_T: Tensor, loss_weights_T: Tensor | None, mismatch_weights_T: Tensor | None
) -> Tensor:
    if mismatch_weights_T is not None:
        losses_T = losses_T * torch.where(action_mask_T, mismatch_weights_T.detach(), 0.0)
    if loss_weights_T is not None:
        losses_T = losses_T * torch.where(action_mask_T, loss_weights_T, 0.0)
    return masked_sum(losses_T, action_mask_T)


def _drift_metrics(log_ratio_T: Tensor, action_mask_T: Tensor, num_action_tokens: float) -> dict[str, Tensor]:
    """approx_kl estimates KL(old || current) by k3 on tokens that the old policy sampled."""
    d_T = log_ratio_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "approx_kl": masked_sum(torch.expm1(d_T) - d_T, action_mask_T) / num_action_tokens,
        "ratio_mean": masked_sum(d_T.exp(), action_mask_T) / num_action_tokens,
    }
