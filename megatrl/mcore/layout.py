"""Layout: the degrees of parallelism and this rank's place in them; owner of the process groups."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import Chunks, pipeline_chunks
from megatrl.config.plan import check_layout, expert_tensor_degree, length_multiple
from megatrl.errors import LayoutError
from megatrl.mcore import cpu_platform

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

_cuda_index = 0  # of this process, like Megatron's own groups; torch keeps a current device for each thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of TP, PP, CP, EP and DP, and where this rank stands in each.

    Ranks that differ in `context_rank` alone have one `data_rank`: they work on the same microbatches.
    """

    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    context: int = 1
    expert: int
    expert_tensor: int
    data: int
    sequence_parallel: bool
    device: Device
    rank: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int = 0
    expert_rank: int
    data_rank: int

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def length_multiple(self) -> int:
        """What the padded length of a pack is a multiple of; see `config.plan.length_multiple`."""
        return length_multiple(tensor=self.tensor, context=self.context, sequence_parallel=self.sequence_parallel)

    def chunks(self, num_layers: int) -> Chunks:
        """Returns layers[stage][chunk] of a model with `num_layers` on this layout."""
        return pipeline_chunks(
            num_layers,
            pipeline=self.pipeline,
            virtual=self.virtual_pipeline,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
        )

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def initialize(
    config: LayoutConfig,
    *,
    shape: ModelShape,
    rank: int,
    master_addr: str,
    master_port: int,
    device: Device,
    seed: int,
    timeout_s: float,
) -> Layout:
    """Returns this rank's Layout after creating every process group (gloo on CPU, NCCL on GPU).

    Collective over all `config.world_size` ranks. Raises LayoutError, before any communication, for a
    layout that does not fit the model or a device that is not there.
    """
    if violations := check_layout(config, shape):
        raise LayoutError("the layout does not fit the model:\n- " + "\n- ".join(violations))
    if not 0 <= rank < config.world_size:
        raise LayoutError(f"rank is {rank}, must lie in [0, layout.world_size={config.world_size})")
    _claim_device(device, rank)
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _create_groups(config, timeout_s)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    layout = Layout(
        world_size=config.world_size,
        tensor=config.tensor,
        pipeline=config.pipeline,
        virtual_pipeline=config.virtual_pipeline,
        first_stage_layers=config.first_stage_layers,
        last_stage_layers=config.last_stage_layers,
        context=config.context,
        expert=config.expert,
        expert_tensor=expert_tensor_degree(config),
        data=parallel_state.get_data_parallel_world_size(),
        sequence_parallel=config.sequence_parallel,
        device=device,
        rank=rank,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
    )
    logger.info("layout %s", layout)
    return layout


def _create_groups(config: LayoutConfig, timeout_s: float) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=expert_tensor_degree(config),
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )


def destroy() -> None:
    """Ends the process groups, so that another layout can be initialized in this process."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def activate(device: Device) -> None:
    """Makes the calling thread ready for Megatron on `device`; every public entry starts with this."""
    if device == "cpu":
        cpu_platform.activate()
    else:
        torch.cuda.set_device(_cuda_index)


def _claim_device(device: Device, rank: int) -> None:
    if device == "cpu":
        if not cpu_platform.activate():
            raise LayoutError(
                "actor.device is cpu but this process sees a CUDA device, which Megatron would use; set actor.device "
                "to cuda, or start the process with CUDA_VISIBLE_DEVICES set to the empty string"
            )
        return
    if not torch.cuda.is_available():
        raise LayoutError("actor.device is cuda but torch sees no CUDA device; set actor.device to cpu or fix CUDA")
    global _cuda_index
    _cuda_index = rank % torch.cuda.device_count()
    torch.cuda.set_device(_cuda_index)
