"""Seconds of passes through the actor by roofline: operations, bytes and messages over what the hardware gives.

Every layer costs max(operations / peak, weight bytes / memory bandwidth, launches) + messages; messages overlap with
nothing.
"""

from dataclasses import dataclass
from typing import Literal

from megatrl.config.engines import Precision
from megatrl.config.estimate.activations import Recompute
from megatrl.config.estimate.degrees import Degrees, is_within_node
from megatrl.config.estimate.hardware import Efficiency, Hardware
from megatrl.config.estimate.parameters import (
    attention_parameters,
    expert_parameters,
    padded_vocab_size,
    rank_parameters,
)
from megatrl.config.estimate.states import GRADIENT_BYTES, ITEM_BYTES
from megatrl.config.model_shape import ModelShape

Dispatcher = Literal["alltoall", "deduplicating"]
"""How token copies reach their experts: megatron-core's all-to-all sends every copy on its own; HybridEP and DeepEP
send a token to a node once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware with its assumed efficiencies and the shape of a node."""

    hardware: Hardware
    efficiency: Efficiency
    devices_per_node: int

    @property
    def link(self) -> float:
        return self.hardware.link_bandwidth * self.efficiency.link

    @property
    def network(self) -> float:
        return self.hardware.network_bandwidth * self.efficiency.network

    @property
    def memory(self) -> float:
        return self.hardware.memory_bandwidth * self.efficiency.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Equal packs that one data rank runs one after the other."""

    num_packs: float
    tokens: float  # of one pack
    attended: float  # tokens that a token attends to, on average
    rows: float  # positions of a pack that are projected to the vocabulary
    with_backward: bool = False
    recompute: Recompute = "none"
    dispatcher: Dispatcher = "alltoall"
    is_balanced: bool = False  # routing forced to be even, as benchmarks of pretraining do


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    compute: float = 0.0
    messages: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.messages + self.bubble


def forward_operations(shape: ModelShape, *, attended: float, head_share: float = 1.0) -> float:
    """Returns the operations of a token's forward pass: two for each matrix parameter it meets, and four for each
    attended token, head and head dimension. `head_share` is the share of positions that are projected."""
    if shape.is_mixture:
        feed_forward = shape.hidden_size * shape.num_experts
        feed_forward += shape.num_experts_per_token * expert_parameters(shape)
    else:
        feed_forward = 3 * shape.hidden_size * shape.ffn_size
    layer = 2 * (attention_parameters(shape) + feed_forward) + 4 * attended * shape.num_heads * shape.head_dim
    return shape.num_layers * layer + 2 * head_share * shape.vocab_size * shape.hidden_size


def pass_seconds(
    shape: ModelShape, degrees: Degrees, precision: Precision, machine: Machine, passes: Passes
) -> Seconds:
    """Returns the seconds that the whole layout takes for one data rank's packs, the slowest stage deciding."""
    if passes.num_packs <= 0 or passes.tokens <= 0:
        return Seconds()
    layer_compute, layer_messages = _layer(shape, degrees, precision, machine, passes)
    head = _head(shape, degrees, machine, passes)
    num_layers = [degrees.layers(stage) for stage in range(degrees.pipeline)]
    stages = [layers * layer_compute for layers in num_layers]
    stages[-1] += head
    slowest = max(range(degrees.pipeline), key=lambda stage: stages[stage] + num_layers[stage] * layer_messages)
    compute, messages = stages[slowest], num_layers[slowest] * layer_messages
    if degrees.pipeline > 1:
        handed = passes.tokens / degrees.context * shape.hidden_size * ITEM_BYTES[precision]
        stride = degrees.world_size // degrees.pipeline
        rate = machine.link if is_within_node(degrees.pipeline, stride, machine.devices_per_node) else machine.network
        messages += (2 if passes.with_backward else 1) * degrees.virtual * handed / rate
    idle = (degrees.pipeline - 1) / degrees.virtual * (compute + messages)
    return Seconds(compute=passes.num_packs * compute, messages=passes.num_packs * messages, bubble=idle)


def _layer(
    shape: ModelShape, degrees: Degrees, precision: Precision, machine: Machine, passes: Passes
) -> tuple[float, float]:
    """Seconds of (operations, messages) of one layer for one pack, with what the backward pass adds."""
    tokens = passes.tokens / degrees.context
    cut = tokens / degrees.tensor if degrees.sequence_parallel else tokens
    peak, efficiency = machine.hardware.peak_flops, machine.efficiency
    projections = 2 * tokens * attention_parameters(shape) / degrees.tensor
    core = 4 * tokens * passes.attended * shape.num_heads * shape.head_dim / degrees.tensor
    weights = attention_parameters(shape) / degrees.tensor
    experts = 0.0
    if shape.is_mixture:
        projections += 2 * cut * shape.hidden_size * shape.num_experts
        experts = 2 * cut * shape.num_experts_per_token * expert_parameters(shape) * _busiest(degrees, machine, passes)
        weights += expert_parameters(shape) * shape.num_experts / degrees.expert / degrees.expert_tensor
    else:
        projections += 6 * tokens * shape.hidden_size * shape.ffn_size / degrees.tensor
        weights += 3 * shape.hidden_size * shape.ffn_size / degrees.tensor
    core_s = core / (peak * efficiency.attention)
    operations = projections / (peak * efficiency.dense_matmul) + experts / (peak * efficiency.expert_matmul) + core_s
    launches = 0.0
    if not machine.hardware.is_cpu:
        launches = efficiency.mixture_layer_s if shape.is_mixture else efficiency.dense_layer_s
    forward = max(operations, weights * ITEM_BYTES[precision] / machine.memory, launches)
    forward_messages, extra_gathers = layer_messages(shape, degrees, precision, machine, passes)
    if not passes.with_backward:
        return forward, forward_messages
    again = {"none": 0.0, "selective": core_s, "full": forward}[passes.recompute]
    messages = 2 * forward_messages + extra_gathers + (forward_messages if passes.recompute == "full" else 0.0)
    return 3 * forward + again, messages


def _busiest(degrees: Degrees, machine: Machine, passes: Passes) -> float:
    """Work of the busiest expert rank over the mean. All experts on one rank are never out of balance."""
    return 1.0 if passes.is_balanced or degrees.expert == 1 else machine.efficiency.imbalance


def layer_messages(
    shape: ModelShape, degrees: Degrees, precision: Precision, machine: Machine, passes: Passes
) -> tuple[float, float]:
    """Returns the seconds of one layer's forward messages, and of the gathers that only the backward pass needs."""
    item, latency = ITEM_BYTES[precision], machine.efficiency.collective_s
    tokens = passes.tokens / degrees.context
    cut = tokens / degrees.tensor if degrees.sequence_parallel else tokens
    seconds = extra = 0.0
    if degrees.tensor > 1:
        rate = machine.link if is_within_node(degrees.tensor, 1, machine.devices_per_node) else machine.network
        once = (degrees.tensor - 1) / degrees.tensor * tokens * shape.hidden_size * item / rate + latency
        blocks = 1 if shape.is_mixture else 2  # attention, and a dense feed-forward
        seconds += 2 * blocks * once  # gather and scatter, or the two halves of an all-reduce
        extra += blocks * once if degrees.sequence_parallel else 0.0
    if degrees.context > 1:
        stride = degrees.tensor
        in_node = is_within_node(degrees.context, stride, machine.devices_per_node)
        keys = 2 * max(1, shape.num_kv_heads // degrees.tensor) * shape.head_dim * item
        seconds += (degrees.context - 1) * tokens * keys / (machine.link if in_node else machine.network) + latency
    if shape.is_mixture and degrees.expert > 1:
        exchange = exchange_seconds(shape, degrees, item, machine, cut, passes.dispatcher)
        seconds += 2 * (exchange * _busiest(degrees, machine, passes) + latency)
    if shape.is_mixture and degrees.expert_tensor > 1:
        routed = cut * shape.num_experts_per_token * (degrees.expert_tensor - 1)
        seconds += 2 * (routed * shape.hidden_size * item / machine.link + latency)
    return seconds, extra


def exchange_seconds(
    shape: ModelShape, degrees: Degrees, item: int, machine: Machine, tokens: float, dispatcher: Dispatcher
) -> float:
    """Returns the seconds in which one rank's token copies reach their experts' ranks; links and network at once."""
    copies = tokens * shape.num_experts_per_token
    here = min(degrees.expert, max(1, machine.devices_per_node // degrees.expert_tensor))
    num_nodes = max(1, degrees.expert // here)
    inside, outside = copies * (here - 1) / degrees.expert, copies * (degrees.expert - here) / degrees.expert
    if dispatcher == "deduplicating":
        reached = 1 - (1 - 1 / num_nodes) ** shape.num_experts_per_token
        inside += outside  # spread over the links of the node that a token has reached
        outside = tokens * (num_nodes - 1) * reached
    width = shape.hidden_size * item
    return max(inside * width / machine.link, outside * width / machine.network)


def _head(shape: ModelShape, degrees: Degrees, machine: Machine, passes: Passes) -> float:
    rows_here = padded_vocab_size(shape, degrees.tensor) / degrees.tensor
    operations = 2 * passes.rows / degrees.context * rows_here * shape.hidden_size
    forward = operations / (machine.hardware.peak_flops * machine.efficiency.dense_matmul)
    return forward * (4 if passes.with_backward else 1)  # chunks are made again in the backward pass


def optimizer_seconds(
    shape: ModelShape, degrees: Degrees, precision: Precision, machine: Machine, *,
    gradient_bytes: int = GRADIENT_BYTES, is_overlapped: bool = False,
) -> float:  # fmt: skip
    """Returns the seconds of one optimizer step: gradients summed and scattered, moments moved, weights gathered."""
    slowest = 0.0
    for stage in range(degrees.pipeline):
        seconds = 0.0
        dense, experts = rank_parameters(shape, degrees, stage)
        strides = (degrees.tensor, degrees.expert * degrees.expert_tensor)
        for size, shards, stride in zip(
            (dense, experts), (degrees.shards, degrees.expert_shards), strides, strict=True
        ):
            seconds += size / shards * (16 + 12 + 4) / machine.memory
            if shards > 1 and not is_overlapped:
                in_node = is_within_node(shards, stride, machine.devices_per_node)
                moved = size * (shards - 1) / shards * (gradient_bytes + ITEM_BYTES[precision])
                seconds += moved / (machine.link if in_node else machine.network)
        slowest = max(slowest, seconds)
    return slowest
