"""Megatron's data-parallel wrapper and optimizer, and the step that checks before it moves."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatrl.config.engines import ActorConfig, OptimizerConfig
from megatrl.errors import NonFiniteError
from megatrl.mcore.layout import Layout
from megatrl.mcore.model import DTYPES, unwrap


def wrap_data_parallel(models: Sequence[torch.nn.Module], actor: ActorConfig) -> list[torch.nn.Module]:
    """Returns the chunks with fp32 gradient buffers that are summed, never averaged, over data ranks.

    Summing follows from `calculate_per_token_loss` in the model's configuration.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=actor.distributed_optimizer,
        overlap_grad_reduce=False,
    )
    wrapped: list[torch.nn.Module] = []
    for model in models:
        model_config = unwrap(model).config
        assert model_config.calculate_per_token_loss, "otherwise Megatron averages gradients over data ranks"
        model_config.finalize_model_grads_func = finalize_model_grads
        wrapped.append(DistributedDataParallel(config=model_config, ddp_config=config, module=model))
    return wrapped


def build_optimizer(
    models: Sequence[torch.nn.Module], optimizer: OptimizerConfig, actor: ActorConfig
) -> MegatronOptimizer:
    """Returns a fresh AdamW over the wrapped chunks. Collective over all ranks."""
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad_norm,
        bf16=actor.precision == "bf16",
        params_dtype=DTYPES[actor.precision],
        use_distributed_optimizer=actor.distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(models))  # type: ignore[arg-type]


def zero_gradients(models: Sequence[Any], optimizer: MegatronOptimizer) -> None:
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()


def optimizer_step(
    models: Sequence[torch.nn.Module], optimizer: Any, layout: Layout, *, lr: float, config: OptimizerConfig
) -> float:
    """Clips, steps, and returns the gradient norm over all parameters before clipping.

    Collective over all ranks. Raises NonFiniteError on every rank, naming this rank's parameters, and
    before anything moves, when the norm is NaN or infinite. Weight decay spares one-dimensional
    parameters (norms): Megatron marks them with a multiplier that only its own scheduler would apply.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    is_broken = torch.tensor([0.0 if math.isfinite(grad_norm) else 1.0], device=layout.torch_device)
    dist.all_reduce(is_broken, op=dist.ReduceOp.MAX)
    if is_broken.item():
        names = _non_finite_gradients(models)
        raise NonFiniteError(
            f"gradient norm is {grad_norm}; the step is not taken. Parameters with NaN or infinite gradients on rank "
            f"{layout.rank}: {', '.join(names[:5]) or 'none'}{' ...' if len(names) > 5 else ''}"
        )
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=config.clip_grad_norm, total_norm=grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    optimizer.step_with_ready_grads()
    return grad_norm


def _non_finite_gradients(models: Sequence[torch.nn.Module]) -> list[str]:
    return [
        name
        for model in models
        for name, parameter in unwrap(model).named_parameters()
        if not bool(torch.isfinite(parameter.main_grad).all())  # type: ignore[attr-defined]
    ]
