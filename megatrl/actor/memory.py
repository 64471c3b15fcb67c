"""Hands the actor's device memory to a colocated rollout server and takes it back. CUDA only; not run here."""

from collections.abc import Sequence
from typing import Any

import torch


def offload(models: Sequence[Any], optimizer: Any) -> None:
    """Moves weights, gradients and optimizer state to host memory. Calling it twice is harmless."""
    optimizer.offload_to_cpu()
    for model in models:
        for buffer in model.buffers + model.expert_parallel_buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=True)
        for parameter in _outside_buffers(model):
            parameter.data = parameter.data.cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def onload(models: Sequence[Any], optimizer: Any) -> None:
    """Brings everything back to the device. Calling it twice is harmless."""
    for model in models:
        for buffer in model.buffers + model.expert_parallel_buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=True)
        for parameter in _outside_buffers(model):
            parameter.data = parameter.data.cuda()
    optimizer.restore_from_cpu()
    torch.cuda.synchronize()


def _outside_buffers(model: Any) -> list[torch.nn.Parameter]:
    """Without the distributed optimizer, weights are not views of a buffer and move one by one."""
    return [] if model.ddp_config.use_distributed_optimizer else list(model.parameters())
