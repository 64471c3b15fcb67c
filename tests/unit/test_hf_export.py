"""An exported directory is complete, loads in transformers, and appears whole or not at all."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatrl.checkpoint import hf_export
from megatrl.checkpoint.hf_export import export_hf_directory
from megatrl.errors import CheckpointError, ModelError

Weights = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
TEMPLATE = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>{% endfor %}"


def make_source(path: Path, *, is_mixture: bool = True, tied: bool = False) -> Path:
    torch.manual_seed(0)
    config_class, sizes = (Qwen3MoeConfig, SIZES | EXPERTS) if is_mixture else (Qwen3Config, SIZES)
    config = config_class(**sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[2, 3], temperature=0.6, do_sample=True)
    model.save_pretrained(path)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"w{index}" for index in range(37))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[2], pad_token=words[0])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


def changed_weights(source: Path) -> Weights:
    return {name: tensor + 0.01 for name, tensor in load_file(source / "model.safetensors").items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


def all_weights(path: Path) -> Weights:
    found: Weights = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def export(named: object, source: Path, out: Path, **more: object) -> None:
    export_hf_directory(named, source=source, out=out, **({"is_writer": True} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
def test_an_export_loads_in_transformers_with_exactly_the_exported_weights(
    source: Path, tmp_path: Path, shard_bytes: int
) -> None:
    weights = changed_weights(source)
    export(weights.items(), source, tmp_path / "out", shard_bytes=shard_bytes)
    found = all_weights(tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    original = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[4, 5, 6]])
    assert not torch.equal(model(ids).logits, original(ids).logits)


def test_everything_that_is_not_weights_comes_from_the_source(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(changed_weights(source).items(), source, out)
    expected = {file.name for file in source.iterdir()}
    assert {file.name for file in out.iterdir()} == expected
    assert "chat_template.jinja" in expected
    messages = [{"role": "w1", "content": "w2 w3"}]
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (source, out)]
    rendered = [tokenizer.apply_chat_template(messages, return_dict=False) for tokenizer in tokenizers]
    assert rendered[0] == rendered[1] == [1, 4, 5, 6, 2]
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 3]


def test_shards_are_indexed_once_for_each_tensor_and_bounded(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    weights = changed_weights(source)
    export(weights.items(), source, out, shard_bytes=3000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        content = load_file(out / file)
        assert sum(tensor.nbytes for tensor in content.values()) <= 3000 or len(content) == 1


def test_config_states_the_dtype_that_was_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(changed_weights(source).items(), source, out, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in all_weights(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("is_mixture", [True, False])
def test_a_tied_model_needs_no_output_layer(tmp_path: Path, is_mixture: bool) -> None:
    source = make_source(tmp_path / "source", is_mixture=is_mixture, tied=True)
    weights = changed_weights(source)
    weights.pop("lm_head.weight", None)
    export(weights.items(), source, tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.get_output_embeddings().weight, weights["model.embed_tokens.weight"])


def counted(items: list[tuple[str, torch.Tensor]], seen: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in items:
        seen.append(name)
        yield name, tensor


def test_ranks_that_do_not_write_drain_the_stream(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    export(counted(list(changed_weights(source).items()), seen), source, tmp_path / "out", is_writer=False)
    assert seen == list(changed_weights(source))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_given_twice_is_refused_after_the_stream_was_drained(source: Path, tmp_path: Path) -> None:
    items, seen = list(changed_weights(source).items()), list[str]()
    with pytest.raises(CheckpointError, match="exported twice"):
        export(counted([items[0], *items], seen), source, tmp_path / "out")
    assert len(seen) == len(items) + 1
    assert list(tmp_path.iterdir()) == []


def test_names_other_than_the_sources_are_refused(source: Path, tmp_path: Path) -> None:
    weights = changed_weights(source)
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"1 missing \['model.norm.weight'\], 1 unknown \['model.norm.scale'\]"):
        export(weights.items(), source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_stream_and_a_source_that_is_no_model_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensors"):
        export([], source, tmp_path / "out")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        export(changed_weights(source).items(), tmp_path, tmp_path / "out")


def test_a_full_disk_leaves_the_earlier_export(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export(changed_weights(source).items(), source, out)
    before = all_weights(out)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hf_export, "save_file", full)
    seen: list[str] = []
    items = [(name, tensor * 2) for name, tensor in changed_weights(source).items()]
    with pytest.raises(CheckpointError, match=r"not exported to .*No space left"):
        export(counted(items, seen), source, out, shard_bytes=3000)
    assert len(seen) == len(items)
    assert all(torch.equal(all_weights(out)[name], before[name]) for name in before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_export_replaces_the_earlier_one(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    weights = changed_weights(source)
    export(weights.items(), source, out, shard_bytes=3000)
    export(((name, tensor * 2) for name, tensor in weights.items()), source, out)
    assert torch.equal(all_weights(out)["model.norm.weight"], weights["model.norm.weight"] * 2)
    assert not (out / "model.safetensors.index.json").exists(), "no index of the earlier shards is left"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
