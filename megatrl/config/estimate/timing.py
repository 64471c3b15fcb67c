"""Seconds of one step by verb, and GPU hours of a run."""

from dataclasses import dataclass

from megatrl.config.estimate.degrees import Degrees, degrees_of
from megatrl.config.estimate.generation import Generation, GenerationSeconds, generation_seconds
from megatrl.config.estimate.parameters import total_parameters
from megatrl.config.estimate.passes import Machine, Passes, optimizer_seconds, pass_seconds
from megatrl.config.estimate.serving import ServingBytes
from megatrl.config.estimate.states import ITEM_BYTES, state_bytes
from megatrl.config.estimate.workload import Workload
from megatrl.config.model_shape import ModelShape
from megatrl.config.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    verb: str
    what: str
    seconds: float
    bound: str  # what limits it


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    rows: tuple[TimeRow, ...]
    num_devices: int
    num_steps: int
    tokens_per_step: float

    @property
    def step_s(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def device_hours(self) -> float:
        return self.step_s * self.num_steps * self.num_devices / 3600

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_step / self.step_s / self.num_devices


def time_plan(
    recipe: Recipe, shape: ModelShape, workload: Workload, serving: ServingBytes, machine: Machine
) -> TimePlan:
    """Returns the seconds of every verb of a step. Scripted starts and the meter's own training are left out."""
    degrees = degrees_of(recipe.actor.layout, shape)
    generation = _generation(recipe, shape, workload, serving, machine)
    rows = [
        TimeRow(verb="act", what="decode", seconds=generation.decode, bound="memory bandwidth, launches"),
        TimeRow(verb="act", what="prefill", seconds=generation.prefill, bound="operations"),
    ]
    rows += _actor_rows(recipe, shape, workload, degrees, machine)
    rows += _movement_rows(recipe, shape, degrees, machine)
    if recipe.evaluation.num_episodes:
        share = recipe.evaluation.num_episodes / workload.num_episodes / recipe.evaluation.every_steps
        rows.append(TimeRow(verb="evaluate", what="mean of a step", seconds=share * generation.total, bound="as act"))
    on_driver = 0.0 if machine.hardware.is_cpu else machine.efficiency.step_s
    rows.append(TimeRow(verb="record", what="driver: credit, packing, files", seconds=on_driver, bound="allowance"))
    return TimePlan(
        rows=tuple(row for row in rows if row.seconds > 0),
        num_devices=num_devices(recipe),
        num_steps=recipe.train.num_steps,
        tokens_per_step=workload.num_tokens,
    )


def num_devices(recipe: Recipe) -> int:
    """Returns the devices that a run reserves; on CPU the processes that compute."""
    servers = recipe.rollout.servers.num_servers * recipe.rollout.servers.tensor
    world = recipe.actor.layout.world_size
    return max(world, servers) if recipe.placement.kind == "colocated" else world + servers


def _generation(
    recipe: Recipe, shape: ModelShape, workload: Workload, serving: ServingBytes, machine: Machine
) -> GenerationSeconds:
    servers = recipe.rollout.servers
    work = Generation(
        num_servers=servers.num_servers,
        tensor=servers.tensor,
        num_episodes=workload.num_episodes,
        mean_tokens=workload.mean_tokens,
        longest_tokens=workload.longest,
        action_share=workload.action_share,
        cache_tokens=max(1, serving.cache_tokens),
        cache_token_bytes=serving.token_bytes,
        max_concurrent=recipe.rollout.max_concurrent_episodes,
    )
    return generation_seconds(shape, servers.precision, machine, work)


def _actor_rows(
    recipe: Recipe, shape: ModelShape, workload: Workload, degrees: Degrees, machine: Machine
) -> list[TimeRow]:
    precision = recipe.actor.precision

    def seconds(tokens: float, *, rows_share: float, with_backward: bool = False, attended: float) -> float:
        per_rank = tokens / degrees.data
        pack = min(per_rank, workload.microbatch_tokens)
        passes = Passes(
            num_packs=per_rank / pack, tokens=pack, attended=attended, rows=pack * rows_share,
            with_backward=with_backward, recompute=recipe.actor.recompute,
        )  # fmt: skip
        return pass_seconds(shape, degrees, precision, machine, passes).total

    half, share = workload.mean_tokens / 2, workload.action_share
    rows = []
    for wanted, what in ((workload.has_answer_probe, "answer probe"), (workload.has_meter, "meter")):
        if wanted and recipe.scoring.backend != "independent":
            spent = seconds(workload.tokens_shared, rows_share=0.01, attended=half)
            rows.append(TimeRow(verb="score", what=what, seconds=spent, bound="operations"))
        elif wanted:  # every state is a sequence of its own: mean prefix half a trajectory
            spent = seconds(workload.tokens_apart, rows_share=0.01, attended=half / 2)
            rows.append(
                TimeRow(verb="score", what=f"{what}, every state on its own", seconds=spent, bound="operations")
            )
    is_in_probe = workload.has_answer_probe and recipe.scoring.backend != "independent"  # one pass reads both
    if workload.has_reference and not is_in_probe:
        spent = seconds(workload.num_tokens, rows_share=share, attended=half)
        rows.append(TimeRow(verb="score", what="reference", seconds=spent, bound="operations"))
    old = seconds(workload.num_tokens, rows_share=share, attended=half)
    trained = seconds(workload.num_tokens, rows_share=share, with_backward=True, attended=half)
    step = workload.num_minibatches * optimizer_seconds(shape, degrees, precision, machine)
    return [
        *rows,
        TimeRow(verb="learn", what="old logprobs", seconds=old, bound="operations, messages"),
        TimeRow(verb="learn", what="forward and backward", seconds=trained, bound="operations, messages"),
        TimeRow(verb="learn", what="gradient sums, optimizer", seconds=step, bound="network"),
    ]


def _movement_rows(recipe: Recipe, shape: ModelShape, degrees: Degrees, machine: Machine) -> list[TimeRow]:
    """Weights into the servers, and the actor's state to host memory and back."""
    efficiency, servers = machine.efficiency, recipe.rollout.servers
    size = total_parameters(shape) * ITEM_BYTES[recipe.actor.precision]
    is_one_node = degrees.world_size <= machine.devices_per_node
    gather = 0.0 if degrees.world_size == 1 else size / (machine.link if is_one_node else machine.network)
    route = {
        # base64 makes four bytes of three; one sender feeds all servers
        "tensor": max(size / efficiency.http_bandwidth, size * servers.num_servers * 4 / 3 / machine.network),
        "broadcast": size / machine.network,
        "disk": 2 * size / efficiency.disk_bandwidth,
    }[recipe.publish.route]
    rows = [TimeRow(verb="publish", what=f"gather, {recipe.publish.route}", seconds=gather + route, bound="network")]
    if recipe.placement.kind == "colocated" and not machine.hardware.is_cpu:
        states = max(state_bytes(shape, degrees, recipe.actor, stage=stage).total for stage in range(degrees.pipeline))
        moved = 2 * states / (machine.hardware.host_bandwidth * efficiency.host)
        rows.append(TimeRow(verb="act", what="actor to host and back", seconds=moved, bound="host bandwidth"))
    return rows
