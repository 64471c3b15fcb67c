"""A training step in plain Megatron-Core, as its own examples write it: the yardstick for ours.

It runs on the actor's model, DistributedDataParallel wrapper and optimizer, so both sides compute the same layers with
the same kernels. What it leaves out is what ours adds: the policy loss with its metrics, the check for non-finite
values on every rank, and turning the driver's arrays into tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatrl.actor.worker import ActorWorker
from megatrl.data.samples import PackedBatch
from megatrl.mcore.model import unwrap
from megatrl.mcore.packing import PackedTokens, pack_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BareMicrobatch:
    """One pack on the device, made before the clock starts."""

    pack: PackedTokens
    rows: Tensor  # [A] rows that predict an action token
    targets: Tensor  # [A]
    weights: Tensor  # [A] advantage / action tokens of the batch


Loss = Callable[[Any, Tensor, BareMicrobatch], Tensor]


def bare_microbatches(actor: ActorWorker, batch: PackedBatch) -> list[BareMicrobatch]:
    (minibatch,) = batch.minibatches
    result = []
    for microbatch in minibatch.microbatches[0]:
        positions = torch.from_numpy(microbatch.action_mask).nonzero()[:, 0]
        advantages = torch.from_numpy(microbatch.per_token["advantages"]).float()[positions]
        result.append(
            BareMicrobatch(
                pack=pack_tokens(microbatch.tokens, microbatch.cu_seqlens, actor.layout),
                rows=positions - 1,
                targets=torch.from_numpy(microbatch.tokens)[positions],
                weights=advantages / minibatch.loss_denominator,
            )
        )
    return result


def loss_at_actions(model: Any, hidden: Tensor, microbatch: BareMicrobatch) -> Tensor:
    """Policy gradient on the logits of the same positions as ours."""
    logits = hidden[microbatch.rows, 0] @ model.output_weight().t()
    return (F.cross_entropy(logits.float(), microbatch.targets, reduction="none") * microbatch.weights).sum()


def loss_on_all_logits(model: Any, hidden: Tensor, microbatch: BareMicrobatch) -> Tensor:
    """The same value from the logits of every position, which is what Megatron's own loss functions are given."""
    logits = hidden[:, 0] @ model.output_weight().t()
    targets = logits.new_zeros(len(logits), dtype=torch.int64).index_put((microbatch.rows,), microbatch.targets)
    weights = logits.new_zeros(len(logits), dtype=torch.float32).index_put((microbatch.rows,), microbatch.weights)
    return (F.cross_entropy(logits.float(), targets, reduction="none") * weights).sum()


def bare_step(actor: ActorWorker, microbatches: Sequence[BareMicrobatch], loss: Loss) -> float:
    """Zero, forward, backward, clip, AdamW. Returns the gradient norm before clipping."""
    for model in actor.models:
        model.train()
        model.zero_grad_buffer()  # type: ignore[operator]
    actor.optimizer.zero_grad()
    _run(actor, microbatches, loss, forward_only=False)
    optimizer: Any = actor.optimizer
    _, gradient_norm, _ = optimizer.step()
    return float(gradient_norm or 0.0)


def bare_logprobs(actor: ActorWorker, microbatches: Sequence[BareMicrobatch]) -> list[Tensor]:
    """Forward passes alone: log-probabilities of the action tokens of each pack."""
    answers: list[Tensor] = []

    def read(model: Any, hidden: Tensor, microbatch: BareMicrobatch) -> Tensor:
        logits = hidden[microbatch.rows, 0] @ model.output_weight().t()
        answers.append(-F.cross_entropy(logits.float(), microbatch.targets, reduction="none"))
        return answers[-1].sum()

    for model in actor.models:
        model.eval()
    with torch.no_grad():
        _run(actor, microbatches, read, forward_only=True)
    return answers


def _run(actor: ActorWorker, microbatches: Sequence[BareMicrobatch], on_hidden: Loss, *, forward_only: bool) -> None:
    def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        microbatch = next(iterator)
        hidden = model(microbatch.pack.tokens, None, None, packed_seq_params=microbatch.pack.sequences)

        def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            no_tokens = torch.zeros([], dtype=torch.int, device=output.device)
            return on_hidden(unwrap(model), output, microbatch), no_tokens, {}

        return hidden, reduce

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(microbatches),
        model=list(actor.models),
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].pack.tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )
