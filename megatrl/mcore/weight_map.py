"""Which Hugging Face tensors make one Megatron parameter, and how it is cut over ranks. Pure functions.

Megatron names here are global: layer and expert numbers count over all pipeline and expert ranks,
and are spelled as in Megatron's local modules whatever spec built the model.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrl.config.model_shape import ModelShape

EMBEDDING, OUTPUT, FINAL_NORM = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)
HF_EMBEDDING, HF_OUTPUT, HF_FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Fusion = Literal["none", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How one Megatron parameter relates to Hugging Face tensors."""

    megatron_name: str
    hf_names: tuple[str, ...]
    fusion: Fusion
    split_dim: int | None  # dimension cut over TP, an expert's over expert-TP; None: replicated
    layer: int | None  # None: embedding, final norm, output
    expert: int | None  # None: not an expert's


@functools.lru_cache(maxsize=8)
def weight_rules(shape: ModelShape) -> tuple[WeightRule, ...]:
    """Returns the rules of the whole model in the order of export: embedding, layers, norm, output.

    Made once for a shape: every publish goes by them, and a large mixture has tens of thousands.
    """
    return tuple(_rules(shape))


def _rules(shape: ModelShape) -> Iterator[WeightRule]:
    yield _rule(EMBEDDING, (HF_EMBEDDING,), "vocab", 0)
    for layer in range(shape.num_layers):
        yield from _layer_rules(shape, layer)
    yield _rule(FINAL_NORM, (HF_FINAL_NORM,), "none", None)
    if not shape.tie_word_embeddings:
        yield _rule(OUTPUT, (HF_OUTPUT,), "vocab", 0)


def _layer_rules(shape: ModelShape, layer: int) -> Iterator[WeightRule]:
    mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."

    def rule(
        name: str, hf: Sequence[str], fusion: Fusion = "none", split: int | None = None, expert: int | None = None
    ) -> WeightRule:
        hf_names = tuple(f"{theirs}{part}.weight" for part in hf)
        return _rule(f"{mine}{name}.weight", hf_names, fusion, split, layer=layer, expert=expert)

    yield rule("input_layernorm", ["input_layernorm"])
    yield rule("self_attention.linear_qkv", [f"self_attn.{x}_proj" for x in "qkv"], "qkv", 0)
    if shape.has_qk_norm:
        yield rule("self_attention.q_layernorm", ["self_attn.q_norm"])
        yield rule("self_attention.k_layernorm", ["self_attn.k_norm"])
    yield rule("self_attention.linear_proj", ["self_attn.o_proj"], split=1)
    yield rule("pre_mlp_layernorm", ["post_attention_layernorm"])
    if not shape.is_mixture:
        yield rule("mlp.linear_fc1", ["mlp.gate_proj", "mlp.up_proj"], "gate_up", 0)
        yield rule("mlp.linear_fc2", ["mlp.down_proj"], split=1)
        return
    yield rule("mlp.router", ["mlp.gate"])
    for e in range(shape.num_experts):
        local, hf = f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}"
        yield rule(f"{local}.linear_fc1", [f"{hf}.gate_proj", f"{hf}.up_proj"], "gate_up", 0, expert=e)
        yield rule(f"{local}.linear_fc2", [f"{hf}.down_proj"], split=1, expert=e)


def _rule(
    name: str,
    hf_names: tuple[str, ...],
    fusion: Fusion,
    split_dim: int | None,
    *,
    layer: int | None = None,
    expert: int | None = None,
) -> WeightRule:
    return WeightRule(
        megatron_name=name, hf_names=hf_names, fusion=fusion, split_dim=split_dim, layer=layer, expert=expert
    )


def hf_tensor_shape(shape: ModelShape, hf_name: str) -> tuple[int, ...]:
    """Returns the shape of a Hugging Face tensor as config.json implies it."""
    ffn = shape.expert_ffn_size if shape.is_mixture else shape.ffn_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    by_part: dict[str, tuple[int, ...]] = {
        "embed_tokens": (shape.vocab_size, shape.hidden_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
        "q_proj": (query, shape.hidden_size),
        "k_proj": (keys, shape.hidden_size),
        "v_proj": (keys, shape.hidden_size),
        "o_proj": (shape.hidden_size, query),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "gate": (shape.num_experts, shape.hidden_size),
        "gate_proj": (ffn, shape.hidden_size),
        "up_proj": (ffn, shape.hidden_size),
        "down_proj": (shape.hidden_size, ffn),
    }
    return by_part.get(hf_name.split(".")[-2], (shape.hidden_size,))


def fuse(rule: WeightRule, tensors: Sequence[Tensor], shape: ModelShape, *, padded_vocab: int) -> Tensor:
    """Returns the full Megatron parameter of a rule's Hugging Face tensors; vocabulary padding is zero.

    linear_qkv holds, for each KV group, its query heads, then its key, then its value.
    """
    if rule.fusion == "qkv":
        grouped = [t.reshape(shape.num_kv_heads, -1, shape.hidden_size) for t in tensors]
        return torch.cat(grouped, dim=1).reshape(-1, shape.hidden_size)
    if rule.fusion == "gate_up":
        return torch.cat(list(tensors))
    if rule.fusion == "vocab":
        (rows,) = tensors
        return torch.cat([rows, rows.new_zeros(padded_vocab - rows.shape[0], rows.shape[1])])
    (tensor,) = tensors
    return tensor


def unfuse(rule: WeightRule, parameter: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Returns the Hugging Face tensors of a full Megatron parameter; the inverse of `fuse`."""
    if rule.fusion == "qkv":
        grouped = parameter.reshape(shape.num_kv_heads, -1, shape.hidden_size)
        queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
        parts = grouped.split([queries, shape.head_dim, shape.head_dim], dim=1)
        return tuple(part.reshape(-1, shape.hidden_size) for part in parts)
    if rule.fusion == "gate_up":
        gate, up = parameter.chunk(2)
        return gate, up
    if rule.fusion == "vocab":
        return (parameter[: shape.vocab_size],)
    return (parameter,)


def cut(rule: WeightRule, parameter: Tensor, *, num_ranks: int, rank: int) -> Tensor:
    """Returns a tensor rank's part of a full parameter. Gate and up are each cut, then joined."""
    if rule.split_dim is None:
        return parameter
    blocks = parameter.chunk(2) if rule.fusion == "gate_up" else (parameter,)
    return torch.cat([block.chunk(num_ranks, dim=rule.split_dim)[rank] for block in blocks], dim=rule.split_dim)


def join(rule: WeightRule, parts: Sequence[Tensor]) -> Tensor:
    """Returns the full parameter from the parts of all tensor ranks; the inverse of `cut`."""
    if rule.split_dim is None:
        return parts[0]
    if rule.fusion == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(list(parts), dim=rule.split_dim)


def local_name(name: str) -> str:
    """Returns a parameter's name in Megatron's local spelling, given that or Transformer Engine's."""
    name = name.replace(".self_attention.linear_qkv.layer_norm_weight", ".input_layernorm.weight")
    name = name.replace(".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight")
    return re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)


def global_name(name: str, *, first_layer: int, first_expert: int) -> str:
    """Returns the name with layer and expert numbers counted over the whole model."""
    name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda m: str(int(m[0]) + first_layer), local_name(name))
    return re.sub(r"(?<=\.local_experts\.)\d+", lambda m: str(int(m[0]) + first_expert), name)
