"""Seconds of playing episodes on SGLang servers by roofline: prefill by operations, decoding by bytes."""

from dataclasses import dataclass

from megatrl.config.engines import Precision
from megatrl.config.estimate.parameters import expert_parameters, total_parameters
from megatrl.config.estimate.passes import Machine, forward_operations
from megatrl.config.estimate.states import ITEM_BYTES
from megatrl.config.model_shape import ModelShape

_ALL_REDUCE_S = 10e-6
"""Latency of a small all-reduce inside a node; two for each layer of a tensor parallel server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the servers have to do in one step."""

    num_servers: int
    tensor: int
    num_episodes: int
    mean_tokens: float
    longest_tokens: float
    action_share: float
    cache_tokens: int  # of one server
    cache_token_bytes: int  # on one device
    max_concurrent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSeconds:
    prefill: float
    decode: float
    num_decode_steps: float
    mean_batch: float  # sequences in a decode step
    decode_step_s: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def decode_step_seconds(
    shape: ModelShape, precision: Precision, machine: Machine, *, tensor: int, batch: float, context: float,
    cache_token_bytes: int,
) -> float:  # fmt: skip
    """Returns the seconds in which every sequence of a batch gets one token.

    Weights are read once; of the experts those that some sequence chose, 1 - (1 - k / E)^batch of them on average.
    """
    item = ITEM_BYTES[precision]
    read = total_parameters(shape) - shape.vocab_size * shape.hidden_size  # of the embedding only a few rows
    if shape.is_mixture:
        share = shape.num_experts_per_token / shape.num_experts
        untouched = shape.num_layers * shape.num_experts * expert_parameters(shape) * (1 - share) ** batch
        read -= untouched
    moved = read * item / tensor + batch * context * cache_token_bytes
    operations = batch * forward_operations(shape, attended=context) / tensor
    efficiency = machine.efficiency
    bytes_s = moved / (machine.hardware.memory_bandwidth * efficiency.decode_memory)
    roof = max(bytes_s, operations / (machine.hardware.peak_flops * efficiency.dense_matmul))
    per_layer = machine.efficiency.decode_layer_s + (2 * _ALL_REDUCE_S if tensor > 1 else 0.0)
    return roof + (0.0 if machine.hardware.is_cpu else shape.num_layers * per_layer)


def generation_seconds(
    shape: ModelShape, precision: Precision, machine: Machine, work: Generation
) -> GenerationSeconds:
    """Returns the seconds until the last episode ends; tools and environments are taken to answer at once.

    A server plays as many episodes at a time as its share, the limit and its cache allow. The last of them is the
    longest, so the batch empties towards the end.
    """
    episodes = work.num_episodes / work.num_servers
    by_cache = max(1.0, work.cache_tokens / max(1.0, work.mean_tokens))
    concurrent = max(1.0, min(episodes, work.max_concurrent / work.num_servers, by_cache))
    actions, longest = work.mean_tokens * work.action_share, work.longest_tokens * work.action_share
    steps = max(0.0, episodes / concurrent - 1) * actions + longest
    mean_batch = max(1.0, episodes * actions / steps) if steps else 1.0
    step_s = decode_step_seconds(
        shape, precision, machine, tensor=work.tensor, batch=mean_batch, context=work.mean_tokens / 2,
        cache_token_bytes=work.cache_token_bytes,
    )  # fmt: skip
    read = episodes * work.mean_tokens * (1 - work.action_share)
    operations = read * forward_operations(shape, attended=work.mean_tokens / 2, head_share=0.0) / work.tensor
    efficiency = machine.efficiency.expert_matmul if shape.is_mixture else machine.efficiency.dense_matmul
    return GenerationSeconds(
        prefill=operations / (machine.hardware.peak_flops * efficiency),
        decode=steps * step_s,
        num_decode_steps=steps,
        mean_batch=mean_batch,
        decode_step_s=step_s,
    )
