"""Degrees of parallelism, which layers a pipeline stage holds, and where every rank stands."""

from dataclasses import dataclass

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import Chunks, pipeline_chunks, split_of
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
    chunks: Chunks  # [stage][chunk] -> the layers it holds

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
        """Returns how many layers a stage holds in all its chunks."""
        return sum(len(chunk) for chunk in self.chunks[stage])


def degrees_of(layout: LayoutConfig, shape: ModelShape) -> Degrees:
    """Returns the degrees of a layout that `check_layout` accepts for the shape. Raises LayoutError for a split of
    layers that does not come out even."""
    return Degrees(
        world_size=layout.world_size,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual_pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=expert_tensor_degree(layout) if shape.is_mixture else 1,
        sequence_parallel=layout.sequence_parallel,
        chunks=pipeline_chunks(shape.num_layers, **split_of(layout)),  # type: ignore[arg-type]  # of one type by name
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
    layers: tuple[range, ...]  # of each model chunk


def rank_places(degrees: Degrees, devices_per_node: int) -> tuple[RankPlace, ...]:
    """Returns where every rank stands. Megatron's order: tensor varies fastest, then context, data, pipeline;
    of experts: expert tensor, expert, expert data, pipeline."""
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
                layers=degrees.chunks[pipeline],
            )
        )
    return tuple(places)


def is_within_node(size: int, stride: int, devices_per_node: int) -> bool:
    """Whether a group of `size` ranks, `stride` apart, fits into one node (nodes hold whole groups or parts)."""
    return size * stride <= devices_per_node
