"""megatron-core 0.16.1 on CPU: renames of the device, and four repairs. See docs/adr/0001-cpu-platform.md.

`activate()` is called before any Megatron code runs. Where CUDA is available it changes nothing.
Every patch states what upstream does and when it can go. Most only rename the device; `moe` replaces
the dispatcher's device-to-host copy, `collectives` stands in for what gloo lacks and `optimizer` repairs
loading, so CPU tests do not cover those lines of the GPU path.
"""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_modes = threading.local()
_patched = threading.Event()


class CudaNamesMeanCpu(TorchFunctionMode):
    """Serves Megatron's literal "cuda" from the CPU, for the thread that entered it.

    - `device="cuda"` means the CPU (schedules' token count, optimizer scalars, clip_grads).
    - `pin_memory=True` is dropped; there is nothing to pin for.
    - `Tensor.cuda()` is the tensor itself.
    - `Tensor.type()` says `torch.cuda.*Tensor`, because clip_grads and the optimizers compare with
      that string. This one misreports something; nothing else in our code reads `Tensor.type()`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def activate() -> bool:
    """Returns True where Megatron now runs on the CPU in this thread, False where CUDA is available.

    Cheap and repeatable. The mode belongs to the calling thread, so every public entry of the actor
    calls this again: a Ray actor may serve its calls on different threads.
    """
    if torch.cuda.is_available():
        return False
    if not _patched.is_set():
        _rename_device()
        _repair_moe_dispatch()
        _repair_optimizer_loading()
        _repair_uneven_collectives()
        _patched.set()
    if getattr(_modes, "entered", None) is None:
        _modes.entered = CudaNamesMeanCpu()
        _modes.entered.__enter__()
    return True


def _rename_device() -> None:
    """`torch.cuda` functions that Megatron calls without asking whether a device exists (all versions)."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]  # callers pass it on as device=
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _repair_moe_dispatch() -> None:
    """Upstream 0.16.1: the all-to-all dispatcher copies its split sizes on a side stream.

    `moe_utils.te_general_gemm` is undefined without Transformer Engine (None since 0.17): delete that
    line when megatron-core >= 0.17 is pinned. The stream has no CPU equivalent in any version.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = False  # not None, so that no stream is created

    def splits_as_numpy(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if torch.is_tensor(value):
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = splits_as_numpy


def _repair_uneven_collectives() -> None:
    """gloo (torch 2.13) gathers and scatters equal parts only, NCCL also unequal ones.

    Megatron uses unequal ones where an expert is cut over ranks that have received different numbers of tokens.
    Here the gather is one broadcast from each rank, the scatter a sum of which each rank keeps its part.
    """
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        parts = [part.new_empty(size, *part.shape[1:]) for size in output_split_sizes]
        parts[group.rank()] = part.contiguous()
        for rank, tensor in enumerate(parts):
            dist.broadcast(tensor, src=dist.get_global_rank(group, rank), group=group)
        return torch.cat(parts)

    def scatter_parts(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def _repair_optimizer_loading() -> None:
    """Upstream 0.16.1 to 0.19.2, without TE and Apex: torch's AdamW keeps `step` for each parameter.

    Loading a fully reshardable checkpoint first raises KeyError 'step' (the reader skips that key,
    the writer does not), and `load_state_dict` then hands one step tensor to all parameters: AdamW
    adds 1 to it once for each, and the bias correction of every later step is silently wrong
    (3.4e-3 in the parameters after one step). Delete when an oracle test passes without it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer_class: Any = DistributedOptimizer

    def copy_known_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        for name, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if name in tensors:
                target.copy_(tensors[name])

    load_state_dict = optimizer_class.load_state_dict

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer_class._set_main_param_and_optimizer_states = copy_known_states
    optimizer_class.load_state_dict = load_with_own_steps
