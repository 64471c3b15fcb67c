"""This rank's process groups: the one place that asks Megatron's parallel_state for them."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup


def tensor_group() -> ProcessGroup:
    return _only(parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> ProcessGroup:
    return _only(parallel_state.get_pipeline_model_parallel_group())


def expert_group() -> ProcessGroup:
    return _only(parallel_state.get_expert_model_parallel_group())


def expert_tensor_group() -> ProcessGroup:
    """The ranks among which one expert is cut; see `expert_tensor_degree`."""
    return _only(parallel_state.get_expert_tensor_parallel_group())


def context_group() -> ProcessGroup:
    """The ranks that share the tokens of the same sequences, in the order of their chunks."""
    return _only(parallel_state.get_context_parallel_group())


def data_group() -> ProcessGroup:
    """Ranks with different microbatches; context ranks, which share theirs, are in different groups."""
    return _only(parallel_state.get_data_parallel_group())


def broadcast(tensor: Tensor, *, source: int, group: ProcessGroup) -> None:
    """Broadcasts from the group's own rank `source`, which is what Megatron's places count."""
    dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def _only(group: Any) -> ProcessGroup:
    """Megatron annotates groups as possibly int, None or a list, none of which happens with our layouts."""
    assert isinstance(group, ProcessGroup), f"no process group: {group!r}; layout.initialize comes first"
    return group
