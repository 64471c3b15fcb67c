"""Model directories and comparisons for the tests of conversion."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import Kind, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"w{index}" for index in range(64))]


def write_source(path: Path, kind: Kind, **overrides: Any) -> Path:
    """A tiny model with tokenizer, chat template and generation config in one file of weights."""
    model = tiny_model(kind, **overrides)
    model.generation_config.eos_token_id = [2, 1]
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[2], pad_token=WORDS[0])
    fast.chat_template = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}"
    fast.save_pretrained(path)
    return path


def all_tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_tensors(left: Path, right: Path) -> bool:
    """Names, shapes, dtypes and bits."""
    one, other = all_tensors(left), all_tensors(right)
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def file_bytes(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def change_weights(path: Path, change: Any) -> None:
    """Applies `change` to the tensors of a one-file directory."""
    tensors = all_tensors(path)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def pack_experts(tensors: dict[str, Tensor]) -> None:
    """As transformers 5 holds experts in memory: one tensor for all of a layer."""
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        pairs = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up")] for e in range(8)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        down = [tensors.pop(f"{prefix}.{e}.down_proj.weight") for e in range(8)]
        tensors[f"{prefix}.down_proj"] = torch.stack(down)
