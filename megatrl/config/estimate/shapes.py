"""Shapes of well-known models, for planning where their files are not. The numbers are those of their config.json."""

from collections.abc import Mapping
from typing import Any

from megatrl.config.model_shape import Llama3RopeScaling, ModelShape


def _qwen3(**sizes: Any) -> ModelShape:
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "head_dim": 128,
        "num_kv_heads": 8,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_positions": 40960,
    }
    return ModelShape(family="qwen3", **common, **sizes)


def _qwen3_moe(**sizes: Any) -> ModelShape:
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "head_dim": 128,
        "num_kv_heads": 4,
        "norm_eps": 1e-6,
        "rope_theta": 1e7,
        "num_experts": 128,
        "num_experts_per_token": 8,
        "max_positions": 262144,
    }
    return ModelShape(family="qwen3_moe", **common, **sizes)


_LLAMA31_8B = ModelShape(
    family="llama3",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
    max_positions=131072,
)

KNOWN_SHAPES: Mapping[str, ModelShape] = {
    "Qwen3-0.6B": _qwen3(hidden_size=1024, num_layers=28, num_heads=16, ffn_size=3072, tie_word_embeddings=True),
    "Qwen3-1.7B": _qwen3(hidden_size=2048, num_layers=28, num_heads=16, ffn_size=6144, tie_word_embeddings=True),
    "Qwen3-4B": _qwen3(hidden_size=2560, num_layers=36, num_heads=32, ffn_size=9728, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(hidden_size=4096, num_layers=36, num_heads=32, ffn_size=12288),
    "Qwen3-14B": _qwen3(hidden_size=5120, num_layers=40, num_heads=40, ffn_size=17408),
    "Qwen3-32B": _qwen3(hidden_size=5120, num_layers=64, num_heads=64, ffn_size=25600),
    "Qwen3-30B-A3B": _qwen3_moe(hidden_size=2048, num_layers=48, num_heads=32, ffn_size=6144, expert_ffn_size=768),
    "Qwen3-235B-A22B": _qwen3_moe(hidden_size=4096, num_layers=94, num_heads=64, ffn_size=12288, expert_ffn_size=1536),
    "Llama-3.1-8B": _LLAMA31_8B,
}
"""By the name their directory usually begins with."""


def known_shape_of(path: str) -> str | None:
    """Returns the name in KNOWN_SHAPES that a model directory is called after, such as `Qwen3-8B-Base`; else None."""
    directory = path.rstrip("/").rpartition("/")[2].removeprefix("Meta-")
    return next((name for name in KNOWN_SHAPES if directory == name or directory.startswith(f"{name}-")), None)
