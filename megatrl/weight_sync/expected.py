"""Which tensors a complete set of weights consists of, by Hugging Face name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrl.config.model_shape import ModelShape
from megatrl.errors import WeightSyncError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    """As the server holds it; published tensors are cast to it before they are sent."""


ExpectedTensors = Mapping[str, TensorSpec]


def expected_tensors(model: ModelShape, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Returns Hugging Face name -> spec of every tensor that SGLang needs.

    A tied Qwen3-MoE lists `lm_head.weight` although its checkpoint has none: SGLang gives that family an
    output layer of its own and never ties it, so it has to be published (see `with_untied_head`).
    """
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        shapes.update({prefix + name: shape for name, shape in _attention_shapes(model).items()})
        shapes.update({prefix + name: shape for name, shape in _mlp_shapes(model).items()})
    shapes["model.norm.weight"] = (model.hidden_size,)
    if has_own_head(model):
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return {name: TensorSpec(shape=shape, dtype=dtype) for name, shape in shapes.items()}


def has_own_head(model: ModelShape) -> bool:
    """True where SGLang holds `lm_head.weight` as a parameter of its own."""
    return not model.tie_word_embeddings or model.family == "qwen3_moe"


def _attention_shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden = model.hidden_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if model.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
    return shapes


def _mlp_shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    def gated(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}gate_proj.weight": (size, model.hidden_size),
            f"{prefix}up_proj.weight": (size, model.hidden_size),
            f"{prefix}down_proj.weight": (model.hidden_size, size),
        }

    if not model.is_mixture:
        return gated("mlp.", model.ffn_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (model.num_experts, model.hidden_size)}
    for expert in range(model.num_experts):
        shapes |= gated(f"mlp.experts.{expert}.", model.expert_ffn_size)
    return shapes


def with_untied_head(named: Iterable[tuple[str, Tensor]], model: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The stream itself, plus the embedding as `lm_head.weight` where SGLang does not tie a tied model."""
    adds_head = model.tie_word_embeddings and has_own_head(model)
    for name, tensor in named:
        if adds_head and name == "lm_head.weight":
            continue
        yield name, tensor
        if adds_head and name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


def checked(named: Iterable[tuple[str, Tensor]], expected: ExpectedTensors) -> Iterator[tuple[str, Tensor]]:
    """The stream with every name checked before it is passed on, each tensor in its expected dtype.

    Raises WeightSyncError at an unknown, repeated or misshapen tensor, and at the end of the stream when
    expected ones are missing. SGLang would ignore an unknown name with HTTP 200, and a wrong shape kills it.
    """
    seen: set[str] = set()
    for name, tensor in named:
        spec = expected.get(name)
        if spec is None:
            raise WeightSyncError(
                f"refused to publish {name!r}: not one of the {len(expected)} tensors of this model "
                f"(the first is {next(iter(expected), None)!r}); the name mapping of the exporter is wrong"
            )
        if name in seen:
            raise WeightSyncError(f"refused to publish {name!r}: the exporter gave it twice")
        if tuple(tensor.shape) != spec.shape:
            raise WeightSyncError(
                f"refused to publish {name!r}: shape {tuple(tensor.shape)}, expected {spec.shape} from the model config"
            )
        if not tensor.dtype.is_floating_point:
            raise WeightSyncError(f"refused to publish {name!r}: dtype {tensor.dtype}, expected {spec.dtype}")
        seen.add(name)
        yield name, tensor.detach().to(spec.dtype).contiguous()
    missing = [name for name in expected if name not in seen]
    if missing:
        raise WeightSyncError(
            f"refused to complete the publish: {len(missing)} of {len(expected)} tensors were not exported: "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
