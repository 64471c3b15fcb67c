"""Which changes of a recipe would make it fit: searched, nearest first, each proven by the same memory plan."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megatrl.config.checks import CHECKS
from megatrl.config.estimate.hardware import Hardware
from megatrl.config.estimate.memory import MemoryPlan, memory_plan
from megatrl.config.estimate.workload import Workload
from megatrl.config.model_shape import ModelShape
from megatrl.config.plan import check_layout
from megatrl.config.recipe import Recipe

MAX_PROPOSALS = 3
MAX_CHANGES = 3
MAX_PLANS = 3000
"""Candidates that are planned before the search gives up; bounds its time to seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values by path, and how far they are from the recipe: more devices are further than a smaller bucket."""

    values: Mapping[str, Any]
    distance: float

    def settings(self) -> str:
        return " ".join(f"--set {path}={_shown(value)}" for path, value in self.values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    change: Change
    memory: MemoryPlan


def changed_recipe(recipe: Recipe, values: Mapping[str, Any]) -> Recipe | None:
    """Returns the recipe with values replaced by path; None where its schema refuses them."""
    content = recipe.model_dump()
    for path, value in values.items():
        *sections, name = path.split(".")
        section = content
        for key in sections:
            section = section[key]
        section[name] = value
    try:
        return Recipe.model_validate(content)
    except ValidationError:
        return None


def is_allowed(recipe: Recipe) -> bool:
    """Whether no rule of CHECKS refuses the recipe, as `megatrl train` would."""
    return all(problem.is_warning for check in CHECKS for problem in check(recipe))


def proposals(
    recipe: Recipe, shape: ModelShape, workload: Workload, hardware: Hardware, *, host_memory: int
) -> tuple[Proposal, ...]:
    """Returns up to MAX_PROPOSALS changes that fit, nearest first, each of other settings."""
    axes = list(_axes(recipe, shape))
    candidates = sorted(_combined(axes), key=lambda change: change.distance)
    found: list[Proposal] = []
    for candidate in candidates[:MAX_PLANS]:
        if any(proposal.change.values.keys() <= candidate.values.keys() for proposal in found):
            continue  # the same settings with other values, or with more beside them
        memory = plan_of_change(recipe, candidate, shape, workload, hardware, host_memory=host_memory)
        if memory is not None and memory.fits and is_allowed(_changed(recipe, candidate)):
            found.append(Proposal(change=candidate, memory=memory))
            if len(found) == MAX_PROPOSALS:
                break
    return tuple(found)


def _changed(recipe: Recipe, change: Change) -> Recipe:
    changed = changed_recipe(recipe, change.values)
    assert changed is not None, "it was planned before"
    return changed


def plan_of_change(
    recipe: Recipe, change: Change, shape: ModelShape, workload: Workload, hardware: Hardware, *, host_memory: int
) -> MemoryPlan | None:
    """Returns the memory plan of a recipe with a change; None where schema or layout refuse it."""
    changed = changed_recipe(recipe, change.values)
    if changed is None or check_layout(changed.actor.layout, shape):
        return None
    if changed.rollout.servers.tensor > 1 and shape.num_heads % changed.rollout.servers.tensor:
        return None
    packs = max(changed.batch.microbatch_tokens, workload.longest)
    return memory_plan(changed, shape, replace(workload, microbatch_tokens=packs), hardware, host_memory=host_memory)


def _combined(axes: Sequence[Sequence[Change]]) -> Iterator[Change]:
    for number in range(1, MAX_CHANGES + 1):
        for chosen in itertools.combinations(axes, number):
            for changes in itertools.product(*chosen):
                paths = [path for change in changes for path in change.values]
                if len(paths) == len(set(paths)):
                    merged = {path: value for change in changes for path, value in change.values.items()}
                    yield Change(values=merged, distance=sum(change.distance for change in changes))


def _axes(recipe: Recipe, shape: ModelShape) -> Iterator[list[Change]]:
    """Each axis is a list of alternatives; a candidate takes at most one of each."""
    yield from _actor_axes(recipe, shape)
    yield from _server_axes(recipe)
    sizes = [recipe.publish.bucket_bytes >> shift for shift in range(1, 4)]
    yield [Change(values={"publish.bucket_bytes": size}, distance=0.4 * n) for n, size in enumerate(sizes, 1) if size]
    if recipe.placement.kind == "colocated":
        yield [Change(values={"placement.kind": "separate"}, distance=4.0)]


def _actor_axes(recipe: Recipe, shape: ModelShape) -> Iterator[list[Change]]:
    actor, layout = recipe.actor, recipe.actor.layout
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}[actor.recompute]
    yield [Change(values={"actor.recompute": value}, distance=1.0 + 0.5 * (value == "full")) for value in stronger]
    if not actor.distributed_optimizer:
        yield [Change(values={"actor.distributed_optimizer": True}, distance=1.0)]
    tokens = [recipe.batch.microbatch_tokens >> shift for shift in range(1, 7)]
    yield [Change(values={"batch.microbatch_tokens": t}, distance=0.8 * n) for n, t in enumerate(tokens, 1) if t]
    yield _doublings("actor.layout.pipeline", layout.pipeline, shape.num_layers, 2.0)
    yield [
        Change(values=dict(change.values) | {"actor.layout.sequence_parallel": True}, distance=change.distance)
        for change in _doublings("actor.layout.tensor", layout.tensor, shape.num_heads, 2.0)
    ]
    if shape.is_mixture:
        yield _doublings("actor.layout.expert", layout.expert, shape.num_experts, 1.5)
    yield _doublings("actor.layout.world_size", layout.world_size, 16 * layout.world_size, 5.0)


def _server_axes(recipe: Recipe) -> Iterator[list[Change]]:
    servers = recipe.rollout.servers
    if servers.device == "cpu":
        if servers.max_total_tokens:
            halves = [servers.max_total_tokens >> shift for shift in range(1, 4)]
            path = "rollout.servers.max_total_tokens"
            yield [Change(values={path: half}, distance=0.8 * n) for n, half in enumerate(halves, 1) if half]
        return
    now = servers.mem_fraction_static
    fractions = [hundredths / 100 for hundredths in range(20, 95, 5) if abs(hundredths / 100 - now) > 0.01]
    path = "rollout.servers.mem_fraction_static"
    yield [Change(values={path: value}, distance=0.5 + 4 * abs(value - now)) for value in fractions]
    yield [
        Change(
            values={
                "rollout.servers.tensor": servers.tensor << shift,
                "rollout.servers.num_servers": max(1, servers.num_servers >> shift),
            },
            distance=2.0 * shift,
        )
        for shift in range(1, 4)
    ]


def _doublings(path: str, degree: int, limit: int, distance: float) -> list[Change]:
    degrees = itertools.takewhile(lambda value: value <= limit, (degree << shift for shift in range(1, 5)))
    return [Change(values={path: value}, distance=distance * n) for n, value in enumerate(degrees, 1)]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
