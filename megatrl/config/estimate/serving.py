"""Memory of one device of an SGLang server: weights, key-value cache and work space."""

from dataclasses import dataclass

from megatrl.config.engines import RolloutConfig
from megatrl.config.estimate.hardware import GIB
from megatrl.config.estimate.parameters import total_parameters
from megatrl.config.estimate.states import ITEM_BYTES
from megatrl.config.estimate.workload import Workload
from megatrl.config.model_shape import ModelShape

PREFILL_TOKENS = 8192
"""Tokens of one prefill chunk, SGLang's own choice on large devices."""
GRAPH_BYTES = 2 * GIB
"""Allowance for captured decode graphs; not measured."""
CPU_CACHE_TOKENS = 262_144
"""What `rollout/server.py` gives a CPU server without max_total_tokens."""
MARGIN_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBytes:
    """Of one device of a server."""

    weights: int
    cache: int
    work: int
    cache_tokens: int  # of the whole server: its devices hold the same tokens, different heads
    token_bytes: int  # of one token in the cache of one device
    wanted_tokens: int  # for every concurrent episode at its longest


def cache_token_bytes(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Returns the key-value bytes of a token on one device; groups are repeated where TP has more ranks."""
    servers = rollout.servers
    groups = max(1, shape.num_kv_heads // servers.tensor)
    return 2 * shape.num_layers * groups * shape.head_dim * ITEM_BYTES[servers.precision]


def serving_bytes(shape: ModelShape, rollout: RolloutConfig, workload: Workload, memory_bytes: int) -> ServingBytes:
    """Returns the bytes on a device of `memory_bytes`, of which SGLang takes mem_fraction_static for weights and cache.

    With max_total_tokens the cache is no larger than that. It can come out negative: then the weights do not fit.
    """
    servers = rollout.servers
    item = ITEM_BYTES[servers.precision]
    weights = total_parameters(shape) * item // servers.tensor
    token = cache_token_bytes(shape, rollout)
    episodes = min(workload.num_episodes, rollout.max_concurrent_episodes)
    wanted = -(-episodes // servers.num_servers) * (workload.longest + MARGIN_TOKENS)
    if servers.device == "cpu":
        tokens = servers.max_total_tokens or CPU_CACHE_TOKENS
        return ServingBytes(
            weights=weights, cache=tokens * token, work=0, cache_tokens=tokens, token_bytes=token, wanted_tokens=wanted
        )
    tokens = (int(memory_bytes * servers.mem_fraction_static) - weights) // token
    if servers.max_total_tokens is not None:
        tokens = min(tokens, servers.max_total_tokens)
    widest = 2 * shape.ffn_size // servers.tensor
    if shape.is_mixture:
        widest = shape.num_experts_per_token * (2 * shape.expert_ffn_size // servers.tensor + shape.hidden_size)
    work = PREFILL_TOKENS * (4 * shape.hidden_size + 2 * widest) * item + GRAPH_BYTES
    return ServingBytes(
        weights=weights, cache=tokens * token, work=work, cache_tokens=tokens, token_bytes=token, wanted_tokens=wanted
    )
