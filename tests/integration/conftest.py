"""A tiny Qwen3-MoE on disk and one real SGLang server on it, shared by the whole session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrl.config.engines import ServerConfig
from megatrl.rollout.server import RolloutServer, ServerSpec

os.environ.setdefault("OMP_NUM_THREADS", "1")

CPU_SERVER = ServerConfig(
    device="cpu",
    precision="fp32",
    start_timeout_s=300.0,
    request_timeout_s=60.0,
    mem_fraction_static=0.1,
    max_total_tokens=65_536,
)


def make_tiny_qwen3_moe(directory: Path, *, seed: int = 0, vocab_size: int = 512) -> Path:
    """A random fp32 Qwen3-MoE (2 layers, 8 experts, untied) with a word-level tokenizer, saved in HF form."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue]
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(directory)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"w{index}" for index in range(vocab_size - 20))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[2], pad_token=words[0])
    fast.add_special_tokens({"additional_special_tokens": words[1:3]})
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "qwen3-moe")


@pytest.fixture(scope="session")
def sglang_server(tiny_moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    """A ready server on the tiny model. A test that changes its weights or version puts them back."""
    log_path = tmp_path_factory.mktemp("server") / "sglang.log"
    server = RolloutServer(ServerSpec(model_path=str(tiny_moe_path), config=CPU_SERVER, log_path=log_path))
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
