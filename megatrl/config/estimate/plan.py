"""Plan: everything `megatrl plan` says about one recipe, as one object."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrl.config.engines import HFModel, TinyModel
from megatrl.config.estimate.changes import Proposal, proposals
from megatrl.config.estimate.degrees import Degrees, RankPlace, degrees_of, rank_places
from megatrl.config.estimate.hardware import CPU_CORE, GIB, GPUS, Efficiency
from megatrl.config.estimate.memory import MemoryPlan, memory_plan
from megatrl.config.estimate.parameters import active_parameters, total_parameters
from megatrl.config.estimate.passes import Machine
from megatrl.config.estimate.shapes import KNOWN_SHAPES, known_shape_of
from megatrl.config.estimate.timing import TimePlan, time_plan
from megatrl.config.estimate.workload import Workload, workload_of
from megatrl.config.model_shape import ModelShape, read_model_shape, tiny_model_shape
from megatrl.config.plan import check_layout
from megatrl.config.recipe import Recipe
from megatrl.errors import ConfigError, ModelError

TINY_VOCABULARY = 512
"""Words assumed for a tiny model: its real vocabulary is made with the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    name: str
    model: str  # where the shape came from
    num_parameters: int
    num_active_parameters: int
    degrees: Degrees
    ranks: tuple[RankPlace, ...]
    workload: Workload
    memory: MemoryPlan
    time: TimePlan
    proposals: tuple[Proposal, ...]  # only where something does not fit
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; bytes and seconds as numbers."""
        memory = [
            {"pool": p.pool, "phase": p.phase, "parts": dict(p.parts), "total": p.total, "limit": p.limit,
             "fits": p.fits}
            for p in self.memory.phases
        ]  # fmt: skip
        return {
            "recipe": self.name,
            "model": self.model,
            "parameters": {"total": self.num_parameters, "active": self.num_active_parameters},
            "layout": dataclasses.asdict(self.degrees)
            | {"data": self.degrees.data, "chunks": _spans(self.degrees.chunks)},
            "ranks": [dataclasses.asdict(rank) | {"layers": _spans([rank.layers])[0]} for rank in self.ranks],
            "workload": dataclasses.asdict(self.workload),
            "memory": memory,
            "serving": dataclasses.asdict(self.memory.serving),
            "host_bytes_per_rank": self.memory.host_bytes_per_rank,
            "fits": self.fits,
            "problems": list(self.memory.problems),
            "proposals": [dict(p.change.values) for p in self.proposals],
            "time": {
                "rows": [dataclasses.asdict(row) for row in self.time.rows],
                "step_s": self.time.step_s,
                "device_hours": self.time.device_hours,
                "devices": self.time.num_devices,
                "steps": self.time.num_steps,
            },
            "assumptions": list(self.assumptions),
        }


def _spans(chunks: Sequence[Sequence[range]]) -> list[list[list[int]]]:
    """First layer and the one after the last of every chunk, [stage][chunk]."""
    return [[[chunk.start, chunk.stop] for chunk in stage] for stage in chunks]


def planned_shape(recipe: Recipe, shape_name: str | None = None) -> tuple[ModelShape, str]:
    """Returns the model's shape and where it came from: the files, a known name, or the tiny model's sizes.

    Raises ConfigError where the files are not here and no known shape is named.
    """
    if shape_name is not None:
        if shape_name not in KNOWN_SHAPES:
            raise ConfigError(f"--shape = {shape_name}: not a known shape; choose from {', '.join(KNOWN_SHAPES)}")
        return KNOWN_SHAPES[shape_name], f"known shape {shape_name}"
    model = recipe.model
    if isinstance(model, TinyModel):
        return tiny_model_shape(
            model, vocab_size=TINY_VOCABULARY
        ), f"tiny {model.family}, {TINY_VOCABULARY} words assumed"
    assert isinstance(model, HFModel)
    try:
        return read_model_shape(model.path), f"{model.path}/config.json"
    except ModelError as error:
        name = known_shape_of(model.path)
        if name is None:
            raise ConfigError(f"{error.message}. Or name its shape: --shape {' | '.join(KNOWN_SHAPES)}") from error
        return KNOWN_SHAPES[name], f"known shape {name}, as {model.path} is not on this disk"


def make_plan(
    recipe: Recipe, *, gpu: str = "h200", gpus_per_node: int = 8, host_memory: int, shape_name: str | None = None,
    mean_tokens: float | None = None, action_share: float | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan of a recipe. Pure but for reading the model's config.json.

    Raises ConfigError for a layout that cannot be, an unknown GPU and an unknown model.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu = {gpu}: not in the table; choose from {', '.join(GPUS)}")
    shape, source = planned_shape(recipe, shape_name)
    if violations := check_layout(recipe.actor.layout, shape):
        raise ConfigError("the layout does not fit the model:\n- " + "\n- ".join(violations))
    is_cpu = recipe.actor.device == "cpu"
    hardware = CPU_CORE if is_cpu else GPUS[gpu]
    per_node = max(gpus_per_node, recipe.actor.layout.world_size) if is_cpu else gpus_per_node
    machine = Machine(hardware=hardware, efficiency=Efficiency(), devices_per_node=per_node)
    workload = workload_of(recipe, mean_tokens=mean_tokens, action_share=action_share)
    memory = memory_plan(recipe, shape, workload, hardware, host_memory=host_memory)
    degrees = degrees_of(recipe.actor.layout, shape)
    found = () if memory.fits else proposals(recipe, shape, workload, hardware, host_memory=host_memory)
    return Plan(
        name=recipe.name,
        model=source,
        num_parameters=total_parameters(shape),
        num_active_parameters=active_parameters(shape),
        degrees=degrees,
        ranks=rank_places(degrees, per_node),
        workload=workload,
        memory=memory,
        time=time_plan(recipe, shape, workload, memory.serving, machine),
        proposals=found,
        assumptions=tuple(_assumptions(recipe, workload, machine)),
    )


def _assumptions(recipe: Recipe, workload: Workload, machine: Machine) -> list[str]:
    hardware, used = machine.hardware, machine.efficiency
    tokens = (
        f"trajectories: {workload.mean_tokens:.0f} tokens on average, {workload.action_share:.0%} of them sampled, "
        f"{workload.mean_turns:.0f} turns; the longest {workload.longest} (memory is for these, time for the average)"
    )
    if hardware.is_cpu:
        return [tokens, "CPU: seconds are a lower bound, as tiny models are far from any peak; memory is the host's"]
    return [
        tokens,
        f"{hardware.name}: {hardware.memory_bytes / GIB:.1f} GiB, {hardware.peak_flops / 1e12:.0f} TFLOP/s bf16, "
        f"{hardware.memory_bandwidth / 1e12:.2f} TB/s memory, {hardware.link_bandwidth / 1e9:.0f} GB/s links, "
        f"{hardware.network_bandwidth / 1e9:.0f} GB/s network, {machine.devices_per_node} devices a node",
        f"of these peaks: dense products {used.dense_matmul:.0%}, experts {used.expert_matmul:.0%}, attention "
        f"{used.attention:.0%}, memory {used.memory:.0%} (decoding {used.decode_memory:.0%}), links {used.link:.0%}, "
        f"network {used.network:.0%}; busiest expert rank {used.imbalance:g} times the mean; no overlap of messages",
        "not in the time: tools and environments, checkpoints, the start's SFT and the meter's training",
        "not measured on a GPU: activations of fused kernels, contexts, NCCL, fragmentation, captured graphs",
    ]
