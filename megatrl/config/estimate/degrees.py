"""Degrees of parallelism, which layers a pipeline stage holds, and where every rank stands."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape
from megatrl.config.plan import expert_tensor_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A layout with everything that follows from it."""

    world_size: int
    tensor: int
    pipeline: int
    virtual: int  # model chunks on each stage
    context: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool
    chunk_layers: tuple[tuple[int, ...], ...]  # [stage][chunk] -> layers

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer state of dense parameters: data x context."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer state of expert parameters."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    def layers(self, stage: int) -> int:
        return sum(self.chunk_layers[stage])


def degrees_of(layout: LayoutConfig, shape: ModelShape) -> Degrees:
    """Returns the degrees of a layout that `check_layout` accepts for the shape."""
    layers = shape.num_layers // layout.pipeline
    return Degrees(
        world_size=layout.world_size,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=1,
        context=1,
        expert=layout.expert,
        expert_tensor=expert_tensor_degree(layout),
        sequence_parallel=layout.sequence_parallel,
        chunk_layers=((layers,),) * layout.pipeline,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's coordinates; node and device by rank order, as Ray packs them."""

    rank: int
    node: int
    device: int  # within the node
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[tuple[int, int], ...]  # for each model chunk: first layer and the one after its last


def rank_places(degrees: Degrees, devices_per_node: int) -> tuple[RankPlace, ...]:
    """Returns where every rank stands. Megatron's order: tensor varies fastest, then context, data, pipeline;
    of experts: expert tensor, expert, expert data, pipeline."""
    bounds = chunk_bounds(degrees.chunk_layers)
    places = []
    for rank in range(degrees.world_size):
        rest, tensor = divmod(rank, degrees.tensor)
        rest, context = divmod(rest, degrees.context)
        pipeline, data = divmod(rest, degrees.data)
        rest, expert_tensor = divmod(rank, degrees.expert_tensor)
        rest, expert = divmod(rest, degrees.expert)
        places.append(
            RankPlace(
                rank=rank,
                node=rank // devices_per_node,
                device=rank % devices_per_node,
                tensor=tensor,
                context=context,
                data=data,
                pipeline=pipeline,
                expert=expert,
                expert_tensor=expert_tensor,
                expert_data=rest % degrees.expert_shards,
                layers=bounds[pipeline],
            )
        )
    return tuple(places)


def chunk_bounds(chunk_layers: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns [stage][chunk] -> (first layer, end). Chunk c of every stage comes before chunk c + 1 of any."""
    bounds: list[list[tuple[int, int]]] = [[] for _ in chunk_layers]
    begin = 0
    for chunk in range(len(chunk_layers[0])):
        for stage, layers in enumerate(chunk_layers):
            bounds[stage].append((begin, begin + layers[chunk]))
            begin += layers[chunk]
    return tuple(tuple(stage) for stage in bounds)


def is_within_node(size: int, stride: int, devices_per_node: int) -> bool:
    """Whether a group of `size` ranks, `stride` apart, fits into one node (nodes hold whole groups or parts)."""
    return size * stride <= devices_per_node
