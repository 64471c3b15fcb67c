"""Memory of a device by phase of a step and by component, and what of it does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatrl.config.estimate.activations import (
    Kernels,
    PassTokens,
    handed_on_bytes,
    layer_bytes,
    pass_tokens,
    saved_bytes,
    working_bytes,
)
from megatrl.config.estimate.degrees import Degrees, degrees_of
from megatrl.config.estimate.hardware import GIB, Hardware
from megatrl.config.estimate.logits import logit_bytes
from megatrl.config.estimate.parameters import padded_vocab_size, rank_parameters, total_parameters
from megatrl.config.estimate.serving import MARGIN_TOKENS, ServingBytes, serving_bytes
from megatrl.config.estimate.states import ITEM_BYTES, StateBytes, state_bytes
from megatrl.config.estimate.workload import Workload
from megatrl.config.model_shape import ModelShape
from megatrl.config.recipe import Recipe

Phase = Literal["rollout", "score", "learn", "publish"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "learn", "publish")

COMPONENTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "scorer", "bucket", "server weights", "KV cache",
    "server work", "overhead",
)  # fmt: skip

CUDA_PROCESS_BYTES = int(0.6 * GIB)
"""Allowance for one process on a device: context and loaded kernels. Not measured."""
NCCL_BYTES = 1 * GIB
"""Allowance for the actor's communicators. Not measured."""
FRAGMENTATION = 0.05
"""Allowance of activations, logits and buckets that the allocator cannot use. Not measured."""
CPU_RANK_BYTES = int(0.75 * GIB)
"""Allowance for an actor process on CPU: interpreter and libraries."""
CPU_SERVER_BYTES = int(1.5 * GIB)
HASH_ELEMENTS = 1 << 24
"""Elements that the weight swap hashes at once, in about five int64 copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes of the fullest device of a pool in one phase. On CPU the pool is the host with all its processes."""

    pool: str  # actor | server | shared | host
    phase: Phase
    parts: Mapping[str, int]  # component -> bytes
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    phases: tuple[PhaseMemory, ...]
    serving: ServingBytes
    host_bytes_per_rank: int  # pinned host memory beside a GPU rank: frozen reference, swap, handed-over state
    problems: tuple[str, ...]  # what does not fit, one sentence each

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def excess(self) -> int:
        """Bytes by which the fullest phase is over its limit; negative where all fit."""
        return max(phase.total - phase.limit for phase in self.phases)


def memory_plan(
    recipe: Recipe, shape: ModelShape, workload: Workload, hardware: Hardware, *, host_memory: int
) -> MemoryPlan:
    """Returns the memory of every phase. The recipe's layout must be one that `check_layout` accepts."""
    degrees = degrees_of(recipe.actor.layout, shape)
    serving = serving_bytes(shape, recipe.rollout, workload, hardware.memory_bytes)
    stages = [_actor_phases(recipe, shape, degrees, workload, stage) for stage in range(degrees.pipeline)]
    worst: dict[Phase, dict[str, int]] = {
        phase: max((stage[phase] for stage in stages), key=lambda p: sum(p.values())) for phase in PHASES
    }
    is_cpu = recipe.actor.device == "cpu"
    if is_cpu:
        pools = _host_pool(recipe, worst, serving, host_memory)
    elif recipe.placement.kind == "colocated":
        pools = _shared_pool(recipe, worst, serving, hardware.memory_bytes)
    else:
        pools = _separate_pools(recipe, worst, serving, hardware.memory_bytes)
    states = max((_states(recipe, shape, degrees, stage) for stage in range(degrees.pipeline)), key=lambda s: s.total)
    host = 0 if is_cpu else _host_bytes(recipe, workload, states)
    return MemoryPlan(
        phases=tuple(pools),
        serving=serving,
        host_bytes_per_rank=host,
        problems=tuple(_problems(recipe, pools, serving, workload)),
    )


def _states(recipe: Recipe, shape: ModelShape, degrees: Degrees, stage: int) -> StateBytes:
    return state_bytes(shape, degrees, recipe.actor, stage=stage)


def _actor_phases(
    recipe: Recipe, shape: ModelShape, degrees: Degrees, workload: Workload, stage: int
) -> dict[Phase, dict[str, int]]:
    """Bytes of one actor rank in every phase, without overheads."""
    actor = recipe.actor
    kernels: Kernels = "local" if actor.device == "cpu" else "fused"
    tokens = pass_tokens(shape, degrees, workload.microbatch_tokens, workload.longest)
    states = _states(recipe, shape, degrees, stage)
    passes = workload.microbatches(degrees.data)
    is_last = stage == degrees.pipeline - 1
    idle = {"weights": states.weights, "gradients": states.gradients, "optimizer": states.optimizer}
    meter = sum(rank_parameters(shape, degrees, stage)) * ITEM_BYTES[actor.precision] if workload.has_meter else 0
    swap = 0
    if workload.has_answer_probe or workload.has_reference:
        largest = padded_vocab_size(shape, degrees.tensor) // degrees.tensor * shape.hidden_size
        swap = 5 * 8 * min(HASH_ELEMENTS, largest)
    idle["scorer"] = meter
    rows = min(tokens.whole, max(1, int(workload.microbatch_tokens * min(1.0, workload.action_share))))
    learn, score = dict(idle), dict(idle)
    pack = (shape, degrees, actor.precision, tokens)
    held = saved_bytes(*pack, kernels=kernels, recompute=actor.recompute, stage=stage, num_microbatches=passes)
    held += handed_on_bytes(*pack, stage=stage, num_microbatches=passes)
    learn["activations"] = held + working_bytes(*pack, kernels=kernels, recompute=actor.recompute)
    score["activations"] = forward_bytes(shape, degrees, recipe, tokens, kernels)
    score["scorer"] = meter + swap
    if is_last:
        logits = (shape, degrees, actor.precision, tokens, rows)
        learn["logits"] = logit_bytes(*logits, with_gradient=True, with_entropy=workload.has_entropy)
        score["logits"] = logit_bytes(*logits, with_gradient=False)
    publish = dict(idle)
    publish["bucket"] = bucket_bytes(recipe, shape)
    return {"rollout": idle, "score": score, "learn": learn, "publish": publish}


def forward_bytes(shape: ModelShape, degrees: Degrees, recipe: Recipe, tokens: PassTokens, kernels: Kernels) -> int:
    """Returns the peak of a pass without gradients: at most what one layer makes, and its input."""
    precision = recipe.actor.precision
    layer = layer_bytes(shape, degrees, precision, tokens, kernels=kernels, recompute="none")
    return layer + 2 * tokens.cut * shape.hidden_size * ITEM_BYTES[precision]


def bucket_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Returns the peak of publishing on the sending rank: a bucket, its flat copy, and the tensor being gathered.

    One tensor larger than `publish.bucket_bytes` is a bucket of its own.
    """
    largest = shape.vocab_size * shape.hidden_size * ITEM_BYTES[recipe.actor.precision]
    return 2 * max(min(recipe.publish.bucket_bytes, _model_bytes(recipe, shape)), largest) + largest


def _model_bytes(recipe: Recipe, shape: ModelShape) -> int:
    return total_parameters(shape) * ITEM_BYTES[recipe.actor.precision]


def _received_bytes(parts: Mapping[str, int]) -> int:
    """A server holds the bucket that it takes its tensors from."""
    return parts.get("bucket", 0) // 2


def _with_overhead(parts: dict[str, int], num_processes: int, *, has_actor: bool) -> dict[str, int]:
    loose = sum(parts.get(name, 0) for name in ("activations", "logits", "bucket"))
    overhead = num_processes * CUDA_PROCESS_BYTES + (NCCL_BYTES if has_actor else 0) + int(FRAGMENTATION * loose)
    return {name: parts[name] for name in COMPONENTS if parts.get(name)} | {"overhead": overhead}


def _server_parts(serving: ServingBytes) -> dict[str, int]:
    return {"server weights": serving.weights, "KV cache": max(0, serving.cache), "server work": serving.work}


def _shared_pool(
    recipe: Recipe, actor: Mapping[Phase, dict[str, int]], serving: ServingBytes, limit: int
) -> list[PhaseMemory]:
    """Colocated roles: the actor is in host memory while episodes are played, the servers hand their memory over while
    it scores and learns, and both are on the device while weights are published."""
    server = _server_parts(serving)
    publish = actor["publish"] | {"server weights": serving.weights, "KV cache": max(0, serving.cache)}
    publish["bucket"] = actor["publish"]["bucket"] + _received_bytes(actor["publish"])
    parts: dict[Phase, dict[str, int]] = {
        "rollout": server,
        "score": actor["score"],
        "learn": actor["learn"],
        "publish": publish,
    }
    return [
        PhaseMemory(pool="shared", phase=phase, parts=_with_overhead(parts[phase], 2, has_actor=True), limit=limit)
        for phase in PHASES
    ]


def _separate_pools(
    recipe: Recipe, actor: Mapping[Phase, dict[str, int]], serving: ServingBytes, limit: int
) -> list[PhaseMemory]:
    pools = [
        PhaseMemory(pool="actor", phase=phase, parts=_with_overhead(actor[phase], 1, has_actor=True), limit=limit)
        for phase in PHASES
    ]
    if recipe.rollout.servers.device == "cuda":
        server = _server_parts(serving)
        received = server | {"bucket": _received_bytes(actor["publish"])}
        served: dict[Phase, dict[str, int]] = {"rollout": server, "publish": received}
        for phase, parts in served.items():
            held = _with_overhead(parts, 1, has_actor=False)
            pools.append(PhaseMemory(pool="server", phase=phase, parts=held, limit=limit))
    return pools


def _host_pool(
    recipe: Recipe, actor: Mapping[Phase, dict[str, int]], serving: ServingBytes, limit: int
) -> list[PhaseMemory]:
    """All processes share the host: nothing is handed over, and the frozen reference lives beside the actor."""
    ranks, servers = recipe.actor.layout.world_size, recipe.rollout.servers
    num_servers = servers.num_servers * servers.tensor if servers.device == "cpu" else 0
    frozen = recipe.credit.kind == "trace" or recipe.loss.kl_coefficient > 0
    pools = []
    for phase in PHASES:
        parts = {name: ranks * size for name, size in actor[phase].items()}
        if frozen:
            copies = 2 if phase == "score" else 1
            parts["scorer"] = parts.get("scorer", 0) + copies * ranks * actor[phase]["weights"]
        if num_servers:
            parts |= {name: num_servers * size for name, size in _server_parts(serving).items()}
        held = {name: parts[name] for name in COMPONENTS if parts.get(name)}
        held["overhead"] = ranks * CPU_RANK_BYTES + num_servers * CPU_SERVER_BYTES
        pools.append(PhaseMemory(pool="host", phase=phase, parts=held, limit=limit))
    return pools


def _host_bytes(recipe: Recipe, workload: Workload, states: StateBytes) -> int:
    reference = 2 * states.weights if workload.has_answer_probe or workload.has_reference else 0
    handed_over = states.total if recipe.placement.kind == "colocated" else 0
    meter = states.weights if workload.has_meter and recipe.placement.kind == "colocated" else 0
    return reference + handed_over + meter


def _problems(recipe: Recipe, pools: list[PhaseMemory], serving: ServingBytes, workload: Workload) -> list[str]:
    found = [
        f"{phase.phase} needs {phase.total / GIB:.1f} GiB on {_device(phase)}, which has {phase.limit / GIB:.1f} GiB: "
        f"{(phase.total - phase.limit) / GIB:.1f} GiB too much"
        for phase in pools
        if not phase.fits
    ]
    needed = workload.longest + MARGIN_TOKENS
    if serving.cache_tokens < needed:
        found.append(
            f"the key-value cache holds {max(0, serving.cache_tokens)} tokens, one trajectory may need {needed}: "
            f"{serving.weights / GIB:.1f} GiB of weights leave too little of rollout.servers.mem_fraction_static="
            f"{recipe.rollout.servers.mem_fraction_static}"
        )
    return found


def _device(phase: PhaseMemory) -> str:
    names = {"host": "the host", "shared": "a shared device", "actor": "an actor device", "server": "a server device"}
    return names[phase.pool]
