"""ModelShape: what the layout, the actor and the weight maps need to know of a model. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrl.config.engines import Family, TinyModel
from megatrl.config.router_flags import check_router_flags
from megatrl.errors import ModelError

MODEL_TYPES: Mapping[str, Family] = {"qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "llama": "llama3"}
"""`model_type` of a Hugging Face config.json -> family."""

TINY_ROPE_THETA = 1_000_000.0
TINY_MAX_POSITIONS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of one decoder-only model; 0 experts means a dense model."""

    family: Family
    vocab_size: int  # rows of the embedding as the files hold it; may exceed the tokenizer's
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # of a dense layer
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True  # weights of the chosen experts are renormalised to sum 1
    tie_word_embeddings: bool = False
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None = None
    max_positions: int

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 0

    @property
    def has_qk_norm(self) -> bool:
        return self.family != "llama3"


def read_model_shape(path: str | Path) -> ModelShape:
    """Returns the shape in `path`/config.json. Raises ModelError where it is missing or unsupported."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"{file} does not exist; model.path must be a Hugging Face model directory on this disk")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    return model_shape_of(config, source=str(file))


def model_shape_of(config: Mapping[str, Any], *, source: str) -> ModelShape:
    """Returns the shape a parsed config.json describes; `source` names it in errors."""
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{source}: model_type is {model_type!r}; supported are {', '.join(MODEL_TYPES)} "
            "(adding a family means a weight map in mcore/weight_map.py and an oracle test)"
        )
    family = MODEL_TYPES[model_type]
    _refuse_unsupported(config, source)
    if family == "qwen3_moe":
        check_router_flags(config, source)
    num_heads, hidden_size = _integer(config, "num_attention_heads", source), _integer(config, "hidden_size", source)
    is_mixture = family == "qwen3_moe"
    theta, scaling = _rope(config, source)
    return ModelShape(
        family=family,
        vocab_size=_integer(config, "vocab_size", source),
        hidden_size=hidden_size,
        num_layers=_integer(config, "num_hidden_layers", source),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        ffn_size=_integer(config, "intermediate_size", source),
        num_experts=_num_experts(config, source) if is_mixture else 0,
        num_experts_per_token=_integer(config, "num_experts_per_tok", source) if is_mixture else 0,
        expert_ffn_size=_integer(config, "moe_intermediate_size", source) if is_mixture else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)) if is_mixture else True,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(_required(config, "rms_norm_eps", source)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_integer(config, "max_position_embeddings", source),
    )


def tiny_model_shape(model: TinyModel, *, vocab_size: int) -> ModelShape:
    """Returns the shape of a tiny random model over a vocabulary of `vocab_size` words."""
    is_mixture = model.family == "qwen3_moe"
    return ModelShape(
        family=model.family,
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_size=model.ffn_size,
        num_experts=model.num_experts if is_mixture else 0,
        num_experts_per_token=model.num_experts_per_token if is_mixture else 0,
        expert_ffn_size=model.ffn_size if is_mixture else 0,
        tie_word_embeddings=model.tie_word_embeddings,
        norm_eps=1e-6,
        rope_theta=TINY_ROPE_THETA,
        max_positions=TINY_MAX_POSITIONS,
    )


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """Returns the config.json content of a shape; `model_shape_of` reads it back to an equal shape."""
    model_type = next(name for name, family in MODEL_TYPES.items() if family == shape.family)
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
    config: dict[str, Any] = {
        "architectures": [architecture[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if shape.is_mixture:
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_token,
            "moe_intermediate_size": shape.expert_ffn_size,
            "norm_topk_prob": shape.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if shape.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_positions,
        }
    return config


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Llama3RopeScaling | None]:
    """Reads both spellings: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (5)."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", scaling.get("rope_theta")))
    if theta is None:
        raise ModelError(
            f"{source} has neither rope_theta nor rope_parameters.rope_theta; a guessed theta gives a model that "
            "talks nonsense at long range, so add the value the model was trained with"
        )
    rope = parameters if parameters.get("rope_type") or not scaling else scaling
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ModelError(f"{source}: rope_type is {kind!r}; supported are default and llama3")
    return float(theta), Llama3RopeScaling(
        factor=float(_required(rope, "factor", source)),
        low_freq_factor=float(_required(rope, "low_freq_factor", source)),
        high_freq_factor=float(_required(rope, "high_freq_factor", source)),
        original_max_positions=_integer(rope, "original_max_position_embeddings", source),
    )


def _num_experts(config: Mapping[str, Any], source: str) -> int:
    """Reads `num_experts`, which transformers 5 writes as `num_local_experts`."""
    return _integer(config, "num_experts" if "num_experts" in config else "num_local_experts", source)


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "attention_dropout": (0, 0.0),
        "pretraining_tp": (1,),
    }
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise ModelError(f"{source}: {key} is {config[key]!r}; supported is {values[0]!r}")


def _required(config: Mapping[str, Any], key: str, source: str) -> Any:
    if config.get(key) is None:
        raise ModelError(f"{source} does not give {key}")
    return config[key]


def _integer(config: Mapping[str, Any], key: str, source: str) -> int:
    return int(_required(config, key, source))
