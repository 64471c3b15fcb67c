"""A small random model in Hugging Face form whose tokenizer knows the words of one environment.

Enough of a model to run every engine, and to learn the environment on a CPU. The tokenizer splits at
whitespace only: one word, one token. Special tokens are no words, so text cannot spell them. There
is no <think> among the words: a tiny policy acts at once.

The same arguments give the same bytes.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from megatrl.checkpoint.atomic import fsync_directory, fsync_tree
from megatrl.config.engines import TinyModel
from megatrl.config.environments import EnvConfig
from megatrl.config.model_shape import TINY_MAX_POSITIONS, TINY_ROPE_THETA
from megatrl.envs.registry import vocabulary
from megatrl.envs.tools import CUT_MARKER
from megatrl.errors import CheckpointError, ConfigError

UNKNOWN = "<unk>"
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
CHAT_WORDS = (
    *("system", "user", "assistant", "tool", "ipython", "<answer>", "</answer>", CUT_MARKER),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
MAX_FORECAST = 128  # the meter's numbers that are words: 0 to 127 tokens to go
METER_WORDS = (
    *("forecast", '{"completion":', "0,", "1,", '"tokens_to_go":', "null}"),
    *(f"{tokens}}}" for tokens in range(MAX_FORECAST)),
)
VOCAB_MULTIPLE = 8  # so that tensor parallelism divides the vocabulary

# Chosen by measuring how fast EvidenceHunt is learnt; Hugging Face's 0.02 everywhere learns many times slower.
EMBEDDING_STD = 0.5
MATRIX_GAIN = 0.7  # over the square root of the fan-in
HEAD_GAIN = 0.35  # likewise; low, so that first predictions are close to uniform
QUERY_KEY_NORM = 2.0  # normalised queries and keys need room for sharp attention

_CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(config: TinyModel, env: EnvConfig, out: Path) -> None:
    """Write the model directory `out`: weights, config.json, tokenizer.json, generation_config.json.

    It appears by a rename, whole or not at all. Raises CheckpointError where `out` already holds
    something, and ConfigError where the sizes contradict each other.
    """
    _check_sizes(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists; name a directory that is not there yet, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tokenizer = make_tokenizer(config, env)
        _write_tokenizer(tokenizer, config, building)
        model = _make_model(config, tokenizer)
        with no_progress_bars():
            model.save_pretrained(building)
        building.chmod(0o755)
        fsync_tree(building)
        os.replace(building, out)
        fsync_directory(out.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hides transformers' bars: one of milliseconds would be all that stays on the screen of a command that trains."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def make_tokenizer(config: TinyModel, env: EnvConfig) -> Tokenizer:
    """The word-level tokenizer: unknown, words of chat, environment and meter, then the special tokens."""
    words = dict.fromkeys((UNKNOWN, *CHAT_WORDS, *vocabulary(env), *METER_WORDS))
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = (*CHATML_TOKENS, *(LLAMA3_TOKENS if config.family == "llama3" else ()))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _check_sizes(config: TinyModel) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={config.num_heads} is not a multiple of model.num_kv_heads={config.num_kv_heads}; "
            "change one of them"
        )
    if config.family == "qwen3_moe" and config.num_experts_per_token > config.num_experts:
        raise ConfigError(
            f"model.num_experts_per_token={config.num_experts_per_token} is more than "
            f"model.num_experts={config.num_experts}; lower it"
        )


def _write_tokenizer(tokenizer: Tokenizer, config: TinyModel, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "pad_token": "<|endoftext|>",
        "eos_token": _end_tokens(config)[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY_MAX_POSITIONS,
        "chat_template": _CHATML_TEMPLATE,
    }
    if config.family == "llama3":
        settings["bos_token"] = "<|begin_of_text|>"
        del settings["chat_template"]  # the renderer knows Llama's; this file's readers need none
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _end_tokens(config: TinyModel) -> tuple[str, ...]:
    return ("<|eot_id|>", "<|end_of_text|>") if config.family == "llama3" else ("<|im_end|>", "<|endoftext|>")


def _make_model(config: TinyModel, tokenizer: Tokenizer) -> transformers.PreTrainedModel:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    shared: dict[str, Any] = {
        "vocab_size": -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": TINY_ROPE_THETA},
        "max_position_embeddings": TINY_MAX_POSITIONS,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": tokenizer.token_to_id("<|begin_of_text|>"),
        "eos_token_id": tokenizer.token_to_id(_end_tokens(config)[0]),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    with torch.random.fork_rng(devices=[]):
        model = _model_class(config, shared)
    model = model.float()
    _initialise(model, config.seed)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=shared["bos_token_id"],
        eos_token_id=[tokenizer.token_to_id(token) for token in _end_tokens(config)],
        pad_token_id=shared["pad_token_id"],
        do_sample=True,
    )
    return model


def _model_class(config: TinyModel, shared: dict[str, Any]) -> transformers.PreTrainedModel:
    if config.family == "llama3":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    if config.family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared))
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **shared,
            moe_intermediate_size=config.ffn_size,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_token,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
        )
    )


def _initialise(model: transformers.PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(QUERY_KEY_NORM)
            elif parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif "embed_tokens" in name:
                tied = bool(model.config.tie_word_embeddings)
                std = HEAD_GAIN * parameter.shape[-1] ** -0.5 if tied else EMBEDDING_STD
                parameter.normal_(0.0, std, generator=generator)
            else:
                gain = HEAD_GAIN if name.startswith("lm_head") else MATRIX_GAIN
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
