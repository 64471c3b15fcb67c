"""Tiny random Hugging Face models on disk, with weights spread so that comparisons mean something."""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Kind = Literal["qwen3", "qwen3_moe", "llama3"]

VOCAB_SIZE = 67  # odd, so that tensor parallelism has to pad the vocabulary


def tiny_config(kind: Kind, **overrides: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if kind == "qwen3_moe":
        experts = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**(sizes | experts | overrides))
    if kind == "qwen3":
        return transformers.Qwen3Config(**(sizes | overrides))
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**(sizes | {"rms_norm_eps": 1e-5, "rope_parameters": scaling} | overrides))


def tiny_model(kind: Kind, *, seed: int = 0, **overrides: Any) -> Any:
    """Returns an eager fp32 transformers model in evaluation mode."""
    torch.manual_seed(seed)
    config = tiny_config(kind, **overrides)
    config._attn_implementation = "eager"
    classes = {
        "qwen3": transformers.Qwen3ForCausalLM,
        "qwen3_moe": transformers.Qwen3MoeForCausalLM,
        "llama3": transformers.LlamaForCausalLM,
    }
    model = classes[kind](config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(5.0)
    return model.eval()


def write_tiny_model(path: Path, kind: Kind, *, seed: int = 0, **overrides: Any) -> Any:
    """Writes the model to `path` and returns it."""
    model = tiny_model(kind, seed=seed, **overrides)
    model.save_pretrained(path)
    return model
