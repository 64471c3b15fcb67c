"""Where a Megatron parameter lies in a distributed checkpoint: its key, and its place on the stacked axes.

Megatron stacks equal layers on a first axis and the experts of a layer on a second, so keys and shapes are the
same whatever layout saved them.
"""

import re
from dataclasses import dataclass

from megatrl.mcore.weight_map import WeightRule

_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.\d+\.(?P<rest>.+)$")
_LAYER = re.compile(r"^decoder\.layers\.\d+\.(?P<rest>.+)$")
# The keys follow Transformer Engine, which fuses these norms into the linear layer that follows them. Its
# mixture-of-experts layers have nothing to fuse the second norm with, Megatron's plain ones rename it all the same.
_NORMS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
_OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPlace:
    """One parameter in a distributed checkpoint."""

    keys: tuple[str, ...]  # the first is what is written here; the others are other spellings
    stacked: tuple[int, ...]  # its index on the leading axes: (), (layer,) or (layer, expert)


def sharded_place(rule: WeightRule) -> ShardedPlace:
    """Returns where the parameter of a rule lies."""
    if rule.layer is None:
        return ShardedPlace(keys=(rule.megatron_name,), stacked=())
    match = _LAYER.match(rule.megatron_name)
    assert match is not None, f"{rule.megatron_name} has a layer, so its name has one"
    rest = match["rest"]
    if rule.expert is not None:
        inner = _EXPERT.match(rest)
        assert inner is not None, f"{rule.megatron_name} is an expert's, so its name has one"
        key = f"decoder.layers.mlp.experts.experts.{inner['rest']}"
        return ShardedPlace(keys=(key,), stacked=(rule.layer, rule.expert))
    keys = tuple(f"decoder.layers.{name}" for name in _NORMS.get(rest, (rest,)))
    return ShardedPlace(keys=keys, stacked=(rule.layer,))


def is_weight_key(key: str) -> bool:
    """False for optimizer state and for the modules' extra state, which bf16 and fp32 models leave empty."""
    return not _OPTIMIZER.match(key) and "._extra_state" not in key
