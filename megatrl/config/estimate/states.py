"""Weights, gradient buffers and optimizer state of one rank, byte for byte as megatron-core 0.16.1 allocates them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrl.config.engines import ActorConfig, Precision
from megatrl.config.estimate.degrees import Degrees
from megatrl.config.estimate.parameters import RankTensor, rank_tensors
from megatrl.config.model_shape import ModelShape

ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
GRADIENT_BYTES = 4
"""Gradients accumulate and are summed in fp32 (`grad_reduce_in_fp32`)."""
MOMENT_BYTES = 8
"""Adam's two moments in fp32."""
MASTER_BYTES = 4
"""The optimizer's own fp32 weights; fp32 models are updated in place and have none."""
_PARAMETER_ALIGNMENT = 64  # elements; starts of parameters in a buffer of the distributed optimizer
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What stays on a rank over the whole learning phase."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            master=self.master + other.master,
            moments=self.moments + other.moments,
        )


def state_bytes(
    shape: ModelShape, degrees: Degrees, actor: ActorConfig, *, stage: int, shard: int = 0, expert_shard: int = 0,
    gradient_bytes: int = GRADIENT_BYTES,
) -> StateBytes:  # fmt: skip
    """Returns the bytes on the rank at `shard` of data x context and `expert_shard` of the expert data ranks.

    With the distributed optimizer each holds an equal range of every buffer. Without it every rank holds all.
    """
    return _state_bytes(
        shape, degrees, actor.precision, actor.distributed_optimizer, stage, shard, expert_shard, gradient_bytes
    )


@functools.lru_cache(maxsize=512)  # a search for what fits asks for the same layouts again and again
def _state_bytes(
    shape: ModelShape,
    degrees: Degrees,
    precision: Precision,
    is_distributed: bool,
    stage: int,
    shard: int,
    expert_shard: int,
    gradient_bytes: int,
) -> StateBytes:
    total = StateBytes(weights=0, gradients=0, master=0, moments=0)
    for chunk in range(degrees.virtual):
        tensors = rank_tensors(shape, degrees, stage=stage, chunk=chunk)
        groups = ((False, degrees.shards, shard), (True, degrees.expert_shards, expert_shard))
        for is_expert, num_shards, index in groups:
            mine = [tensor for tensor in tensors if tensor.is_expert == is_expert]
            if not mine:
                continue
            if is_distributed:
                places, buckets = buffer_layout(mine, num_shards)
                held = buckets[-1][1]
                owned = sum(_overlap(place, _bucket_of(place, buckets), num_shards, index) for place in places)
            else:
                held = owned = sum(tensor.size for tensor in mine)
            total += StateBytes(
                weights=held * ITEM_BYTES[precision],
                gradients=held * gradient_bytes,
                master=owned * MASTER_BYTES if precision == "bf16" else 0,
                moments=owned * MOMENT_BYTES,
            )
    return total


def buffer_layout(
    tensors: Sequence[RankTensor], num_shards: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the elements' ranges of the tensors, last registered first, and of the buckets they lie in.

    The rules of megatron-core's `_ParamAndGradBuffer` with the distributed optimizer and without overlap: one bucket,
    except that a shared embedding has its own; tensors start at multiples of 64, buckets end at multiples of 128 and
    of the number of shards.
    """
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin, bucket_begin, is_open = 0, 0, False
    divisor = math.lcm(num_shards, _BUCKET_ALIGNMENT)
    for tensor in reversed(tensors):
        begin = _round_up(begin, _PARAMETER_ALIGNMENT)
        if tensor.is_shared_embedding and is_open:
            buckets.append((bucket_begin, _round_up(begin, divisor)))
            begin, is_open = buckets[-1][1], False
            bucket_begin = begin
        places.append((begin, begin + tensor.size))
        begin, is_open = begin + tensor.size, True
        if tensor.is_shared_embedding:
            buckets.append((bucket_begin, _round_up(begin, divisor)))
            begin, is_open = buckets[-1][1], False
            bucket_begin = begin
    if is_open:
        buckets.append((bucket_begin, _round_up(begin, divisor)))
    return places, buckets


def _bucket_of(place: tuple[int, int], buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return next(bucket for bucket in buckets if bucket[0] <= place[0] < bucket[1])


def _overlap(place: tuple[int, int], bucket: tuple[int, int], num_shards: int, index: int) -> int:
    """Elements of a tensor in the `index`-th equal part of its bucket."""
    part = (bucket[1] - bucket[0]) // num_shards
    begin = bucket[0] + part * index
    return max(0, min(place[1], begin + part) - max(place[0], begin))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
