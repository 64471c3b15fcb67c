"""One optimizer step for each minibatch: forward, backward, check, clip, step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatrl.actor.optimizer import optimizer_step, zero_gradients
from megatrl.algorithms.objective import policy_objective
from megatrl.algorithms.policy_losses import LossOutput, supervised_loss
from megatrl.config.credit import LossConfig
from megatrl.config.engines import OptimizerConfig, RouterConfig
from megatrl.data.samples import Microbatch, Minibatch
from megatrl.errors import NonFiniteError, TrajectoryError
from megatrl.mcore.layout import Layout
from megatrl.mcore.logprobs import pair_logprobs, sum_over_context
from megatrl.mcore.model import CausalModel, shape_of
from megatrl.mcore.packing import PackedTokens, pack_tokens
from megatrl.mcore.routing import balance_metrics, training_routing, with_routing
from megatrl.mcore.schedule import forward_backward

LossChoice = LossConfig | Literal["supervised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What the optimizer steps of one loop step did; the same on every rank."""

    metrics: Mapping[str, float]
    """Means over the optimizer steps taken: the loss's own metrics, `loss`, `grad_norm`; also
    `grad_norm_max`, `lr`, `optimizer_steps` and `skipped_minibatches`."""
    num_optimizer_steps: int
    num_skipped_minibatches: int  # without any action token, so there was nothing to learn from


def minibatch_gradients(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    layout: Layout,
    minibatch: Minibatch,
    loss: LossChoice,
    *,
    temperature: float,
    router: RouterConfig | None = None,
) -> dict[str, float]:
    """Leaves the minibatch's summed gradient in the buffers; returns its metrics on every rank.

    Collective over all ranks. Raises NonFiniteError on all of them when the loss is not finite.
    """
    if len(minibatch.microbatches) != layout.data:
        raise TrajectoryError(
            f"the minibatch is packed for {len(minibatch.microbatches)} data ranks, the layout has {layout.data}"
        )
    microbatches = minibatch.microbatches[layout.data_rank]
    # Demonstrations have no recorded choices, and fine-tuning on them no auxiliary loss.
    router = router if router is not None and isinstance(loss, LossConfig) else RouterConfig()
    routings, balance = training_routing(minibatch, layout, shape_of(models), router)
    packs = [
        with_routing(pack_tokens(m.tokens, m.cu_seqlens, layout), routing)
        for m, routing in zip(microbatches, routings, strict=True)
    ]
    zero_gradients(models, optimizer)

    def microbatch_loss(model: CausalModel, hidden: Tensor, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        needs_entropy = isinstance(loss, LossConfig) and loss.entropy_coefficient > 0
        logprobs_T, entropies_T = _action_logprobs(
            model, hidden, microbatches[index], packs[index], layout, temperature, with_entropy=needs_entropy
        )
        output = _loss_of(logprobs_T, entropies_T, microbatches[index], minibatch, loss)
        return output.loss, output.metrics

    metrics = forward_backward(models, layout, packs, microbatch_loss)
    metrics |= balance_metrics(balance, layout, shape_of(models).num_layers)
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteError(
            f"the loss of a minibatch with {minibatch.num_action_tokens} action tokens is {metrics['loss']}; the step "
            "is not taken. Check advantages and old_logprobs of the batch, then precision and learning rate"
        )
    return metrics


def take_minibatches(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    layout: Layout,
    minibatches: Sequence[Minibatch],
    loss: LossChoice,
    *,
    temperature: float,
    lr: float,
    config: OptimizerConfig,
    router: RouterConfig | None = None,
) -> UpdateResult:
    """Takes one optimizer step for each minibatch that has an action token. Collective over all ranks."""
    steps: list[dict[str, float]] = []
    num_skipped = 0
    for minibatch in minibatches:
        if minibatch.num_action_tokens == 0:
            num_skipped += 1
            continue
        metrics = minibatch_gradients(
            models, optimizer, layout, minibatch, loss, temperature=temperature, router=router
        )
        grad_norm = optimizer_step(models, optimizer, layout, lr=lr, config=config)
        steps.append({**metrics, "grad_norm": grad_norm})
    means = {name: sum(step[name] for step in steps) / len(steps) for name in (steps[0] if steps else {})}
    counts = {"lr": lr, "optimizer_steps": float(len(steps)), "skipped_minibatches": float(num_skipped)}
    peak = {"grad_norm_max": max(step["grad_norm"] for step in steps)} if steps else {}
    return UpdateResult(
        metrics={**means, **peak, **counts}, num_optimizer_steps=len(steps), num_skipped_minibatches=num_skipped
    )


def _loss_of(
    logprobs_T: Tensor, entropies_T: Tensor | None, microbatch: Microbatch, minibatch: Minibatch, loss: LossChoice
) -> LossOutput:
    """The loss of one microbatch on the last stage, the same on all its context ranks. A filler's is 0."""
    arrays = {name: torch.from_numpy(a).float().to(logprobs_T.device) for name, a in microbatch.per_token.items()}
    mask_T = torch.from_numpy(microbatch.action_mask).to(logprobs_T.device)
    if not isinstance(loss, LossConfig):
        return supervised_loss(
            logprobs_T, mask_T, loss_denominator=minibatch.loss_denominator, loss_weights_T=arrays.get("loss_weights")
        )
    if missing := {"advantages", "behavior_logprobs", "old_logprobs"} - set(arrays):
        raise TrajectoryError(f"the batch lacks {', '.join(sorted(missing))}; attach_old_logprobs comes before update")
    return policy_objective(
        loss,
        logprobs_T=logprobs_T,
        old_logprobs_T=arrays["old_logprobs"],
        behavior_logprobs_T=arrays["behavior_logprobs"],
        advantages_T=arrays["advantages"],
        action_mask_T=mask_T,
        cu_seqlens=torch.from_numpy(microbatch.cu_seqlens).to(logprobs_T.device),
        loss_denominator=minibatch.loss_denominator,
        num_action_tokens=float(minibatch.num_action_tokens),
        loss_weights_T=arrays.get("loss_weights"),
        reference_logprobs_T=arrays.get("reference_logprobs"),
        entropies_T=entropies_T,
    )


def _action_logprobs(
    model: CausalModel,
    hidden: Tensor,
    microbatch: Microbatch,
    pack: PackedTokens,
    layout: Layout,
    temperature: float,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns logprobs (and entropies) [T], 0 outside the action mask; only its rows are projected.

    Each context rank computes those of its own rows, and all get all of them. Both depend on the hidden
    states even in a filler, so that its backward pass takes place.
    """
    positions = torch.from_numpy(microbatch.action_mask).to(hidden.device).nonzero()[:, 0]
    places, rows = pack.owned(positions - 1)
    positions = positions[places]
    targets = torch.from_numpy(microbatch.tokens).to(hidden.device)[positions]
    logprobs, entropies = pair_logprobs(
        model, hidden, rows, targets, temperature=temperature, with_entropy=with_entropy
    )
    empty_T = hidden.new_zeros(len(microbatch.tokens), dtype=torch.float32)
    logprobs_T = sum_over_context(empty_T.index_put((positions,), logprobs), layout)
    if entropies is None:
        return logprobs_T, None
    return logprobs_T, sum_over_context(empty_T.index_put((positions,), entropies), layout)
