"""Forward and backward of one minibatch through Megatron's pipeline schedules (1F1B)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatrl.mcore.groups import data_group, pipeline_group
from megatrl.mcore.layout import Layout
from megatrl.mcore.model import CausalModel, unwrap
from megatrl.mcore.packing import PackedTokens, pack_tokens

Loss = Callable[[CausalModel, Tensor, int], tuple[Tensor, dict[str, Tensor]]]
"""(model, hidden states, microbatch index) -> (loss already divided by its global denominator, metrics)."""

Readout = Callable[[CausalModel, Tensor, int], Any]
"""(model, hidden states, microbatch index) -> whatever a forward-only pass is made for."""


def forward_backward(
    models: Sequence[torch.nn.Module], layout: Layout, packs: Sequence[PackedTokens], loss: Loss
) -> dict[str, float]:
    """Returns the metrics summed over microbatches and data ranks, on every rank; gradients are accumulated.

    Collective over all ranks, which all bring the same number of packs. Gradients and metrics are
    plain sums over microbatches and data ranks; context ranks share theirs. The metric `loss` is added.
    """
    collected: dict[int, dict[str, Tensor]] = {}

    def summed_loss(model: CausalModel, index: int, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        if index < len(packs):
            value, metrics = loss(model, hidden, index)
            collected[index] = {name: x.detach() for name, x in {**metrics, "loss": value}.items()}
        else:
            value = hidden.float().sum() * 0.0
        # With calculate_per_token_loss Megatron divides gradients by this count, and not at all when it
        # is 0. A two-part result would be divided by the number of microbatches instead.
        no_tokens = torch.zeros([], dtype=torch.int, device=hidden.device)
        return value, no_tokens, None

    _run(models, layout, packs, summed_loss, forward_only=False)
    return _sum_metrics([collected[index] for index in sorted(collected)], layout)


def forward_only(
    models: Sequence[torch.nn.Module], layout: Layout, packs: Sequence[PackedTokens], readout: Readout
) -> list[Any]:
    """Returns readout's result for each pack, on the last pipeline stage; [] on the others.

    Collective over all ranks with the same number of packs. Runs in evaluation mode without
    gradients; the earlier mode comes back afterwards and no random state moves.
    """
    was_training = [model.training for model in models]
    collected: dict[int, Any] = {}

    def read(model: CausalModel, index: int, hidden: Tensor, *, non_loss_data: bool) -> None:
        if index < len(packs):
            collected[index] = readout(model, hidden, index)

    try:
        for model in models:
            model.eval()
        devices = [] if layout.device == "cpu" else [layout.torch_device]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            _run(models, layout, packs, read, forward_only=True)
    finally:
        for model, mode in zip(models, was_training, strict=True):
            model.train(mode)
    return [collected[index] for index in sorted(collected)]


def num_fillers(num_packs: int, layout: Layout) -> int:
    """Returns the weightless packs to add: the interleaved schedule takes multiples of the pipeline's stages only."""
    return -num_packs % layout.pipeline if layout.virtual_pipeline > 1 else 0


def _run(
    models: Sequence[torch.nn.Module],
    layout: Layout,
    packs: Sequence[PackedTokens],
    on_last_stage: Callable[..., Any],
    *,
    forward_only: bool,
) -> None:
    """Calls `on_last_stage(model, index, hidden)` for each pack and filler; fillers have the last indices."""
    filler = pack_tokens(np.zeros(1, dtype=np.int64), np.array([0, 1]), layout)
    packs = [*packs, *[filler] * num_fillers(len(packs), layout)]

    def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        index, pack = next(iterator)
        hidden = model(pack.tokens, None, None, packed_seq_params=pack.sequences)
        return hidden, partial(on_last_stage, unwrap(model), index)

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(list(enumerate(packs))) for _ in models],
        model=list(models),
        num_microbatches=len(packs),
        seq_length=packs[0].tokens.shape[1],  # ignored: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _sum_metrics(per_microbatch: list[dict[str, Tensor]], layout: Layout) -> dict[str, float]:
    """Sums over microbatches, then over data ranks on the last stage, then tells every stage."""
    total: list[Any] = [None]
    if layout.is_last_stage:
        names = sorted(per_microbatch[0])
        values = torch.stack([torch.stack([m[name].double() for m in per_microbatch]).sum() for name in names])
        dist.all_reduce(values, group=data_group())
        total = [dict(zip(names, values.tolist(), strict=True))]
    if layout.pipeline > 1:
        group = pipeline_group()
        dist.broadcast_object_list(total, src=dist.get_global_rank(group, layout.pipeline - 1), group=group)
    return total[0]
