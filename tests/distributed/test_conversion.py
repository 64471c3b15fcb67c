"""Models go from Hugging Face files into distributed checkpoints and back, or nothing is published."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_case import (
    all_tensors,
    change_config,
    change_weights,
    file_bytes,
    pack_experts,
    same_tensors,
    write_source,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatrl.checkpoint.conversion_source import find_megatron_source
from megatrl.cli.main import app
from megatrl.errors import CheckpointError, ModelError
from megatrl.mcore.weights_directory import DESCRIPTION, SHARDS, checked_shards

SMALL = ConversionOptions(shard_bytes=60_000)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("moe") / "source", "qwen3_moe")


@pytest.fixture(scope="module")
def converted(moe: Path) -> Path:
    hf_to_megatron(moe, out=moe.with_name("converted"), options=SMALL)
    return moe.with_name("converted")


def back(converted: Path, out: Path, options: ConversionOptions = SMALL) -> Path:
    megatron_to_hf(converted / SHARDS, source=converted, out=out, options=options)
    return out


def copy_of(path: Path, out: Path) -> Path:
    return Path(shutil.copytree(path, out))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama3"])
def test_a_round_trip_is_bitwise_for_every_family(tmp_path: Path, kind: Any, tied: bool) -> None:
    source = write_source(tmp_path / "source", kind, tie_word_embeddings=tied, head_dim=12)
    done = hf_to_megatron(source, out=tmp_path / "converted", options=SMALL)
    again = megatron_to_hf(done.out / SHARDS, source=done.out, out=tmp_path / "back", options=SMALL)
    assert same_tensors(source, again.out)
    assert done.num_tensors == again.num_tensors == len(all_tensors(source))
    assert min(done.num_files, again.num_files) > 2
    assert again.largest_file_bytes < 65_000
    ids = torch.arange(60)[None] % 67
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (source, again.out)]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_progress_ends_at_the_number_of_tensors_in_both_directions(moe: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = ConversionOptions(on_progress=lambda done, total: seen.append((done, total)))
    hf_to_megatron(moe, out=tmp_path / "converted", options=options)
    assert seen[-1] == (135, 135)
    assert seen == sorted(seen)
    seen.clear()
    back(tmp_path / "converted", tmp_path / "back", options)
    assert seen == [(n, 135) for n in range(1, 136)]


def test_all_that_is_not_weights_travels_both_ways(moe: Path, converted: Path, tmp_path: Path) -> None:
    out = back(converted, tmp_path / "back")
    messages = [{"role": "user", "content": "w1 w2"}]
    for path in (converted, out):
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert tokenizer.apply_chat_template(messages, return_dict=False) == [1, 4, 5, 2]
        assert GenerationConfig.from_pretrained(path).eos_token_id == [2, 1]
    carried = {name for name in file_bytes(moe) if not name.endswith(".safetensors")}
    assert carried | {DESCRIPTION} == {name for name in file_bytes(converted) if not name.startswith(SHARDS)}
    assert "chat_template.jinja" in carried
    extra = {"model.safetensors.index.json", "megatrl_export.json"}
    assert carried | extra == {name for name in file_bytes(out) if not name.endswith(".safetensors")}


def test_packed_experts_give_the_checkpoint_that_single_ones_give(moe: Path, converted: Path, tmp_path: Path) -> None:
    packed = copy_of(moe, tmp_path / "packed")
    change_weights(packed, pack_experts)
    assert len(all_tensors(packed)) == 47
    hf_to_megatron(packed, out=tmp_path / "converted", options=SMALL)
    shards = {name: content for name, content in file_bytes(converted).items() if name.endswith(".distcp")}
    assert shards.items() <= file_bytes(tmp_path / "converted").items()
    assert same_tensors(back(tmp_path / "converted", tmp_path / "back"), moe)


DAMAGES = {
    "1 missing": (lambda t: t.pop(EXPERT), rf"1 missing \['{EXPERT}'\], 0 unknown"),
    "1 unknown": (lambda t: t.update({"model.layers.9.x.weight": torch.ones(2)}), r"1 unknown \['model.layers.9.x"),
    "shape": (lambda t: t.update({EXPERT: t[EXPERT][:-1]}), rf"{EXPERT} has shape \(23, 32\), .* implies \(24, 32\)"),
    "NaN": (lambda t: t[EXPERT].view(-1)[3].fill_(float("nan")), f"{EXPERT} holds NaN"),
    "dtype": (lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}), f"{EXPERT} is torch.bfloat16, .* give --dtype"),
    "quantized": (lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}), f"{EXPERT} is"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_the_model_are_named_and_nothing_is_published(
    moe: Path, tmp_path: Path, damage: str
) -> None:
    change, message = DAMAGES[damage]
    source = copy_of(moe, tmp_path / "source")
    change_weights(source, change)
    with pytest.raises((CheckpointError, ModelError), match=message):
        hf_to_megatron(source, out=tmp_path / "converted", options=SMALL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


CONFIGS = {
    "more layers": ({"num_hidden_layers": 5}, r"missing .*decoder.layers.4|stacked \(4,\), config.json has \(5,\)"),
    "fewer layers": ({"num_hidden_layers": 3}, r"stacked \(4,\), config.json has \(3,\)"),
    "more experts": ({"num_local_experts": 9}, r"stacked \(4, 8\), config.json has \(4, 9\)|has shape \(8, 32\)"),
    "larger vocabulary": ({"vocab_size": 68}, r"has shape \(67, 32\), config.json implies \(68, 32\)"),
    "tied": ({"tie_word_embeddings": True}, r"0 missing \[\], 1 unknown \['output_layer.weight'\]"),
    "dense": ({"model_type": "qwen3"}, r"8 missing .*, 3 unknown .*experts.linear_fc1"),
    "other heads": ({"num_attention_heads": 2}, r"linear_qkv.weight in .* has shape \(64, 32\)"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_checkpoint_that_is_not_the_model_of_the_config_is_refused(
    converted: Path, tmp_path: Path, config: str
) -> None:
    change, message = CONFIGS[config]
    source = copy_of(converted, tmp_path / "source")
    change_config(source, lambda content: content.update(change))
    with pytest.raises(CheckpointError, match=message):
        megatron_to_hf(converted / SHARDS, source=source, out=tmp_path / "out", options=SMALL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_changed_byte_is_found_where_contents_are_compared(converted: Path, tmp_path: Path) -> None:
    changed = copy_of(converted, tmp_path / "changed")
    victim = changed / SHARDS / "__2_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert checked_shards(changed) == changed / SHARDS
    with pytest.raises(ModelError, match=r"__2_0\.distcp has other content than was written"):
        checked_shards(changed, contents=True)
    with pytest.raises(ModelError, match="other content"):
        find_megatron_source(changed)
    assert find_megatron_source(converted).shards == converted / SHARDS


def test_torn_shards_are_named(converted: Path, tmp_path: Path) -> None:
    torn = copy_of(converted, tmp_path / "torn")
    victim = torn / SHARDS / "__2_0.distcp"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1000])
    with pytest.raises(ModelError, match=rf"__2_0.distcp has {len(content) - 1000} bytes, {len(content)} were written"):
        checked_shards(torn)
    with pytest.raises(CheckpointError, match="is not readable"):
        back(torn, tmp_path / "out")
    victim.unlink()
    with pytest.raises(ModelError, match=r"__2_0\.distcp is missing"):
        checked_shards(torn)
    with pytest.raises(CheckpointError, match=r"1 of 7 files are missing \['__2_0.distcp'\]"):
        back(torn, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["torn"]


def test_tensors_and_config_agree_on_the_dtype_in_both_directions(moe: Path, converted: Path, tmp_path: Path) -> None:
    rounded = ConversionOptions(dtype=torch.bfloat16)
    hf_to_megatron(moe, out=tmp_path / "converted", options=rounded)
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["dtype"] == "bfloat16"
    of_rounded = back(tmp_path / "converted", tmp_path / "of-rounded")
    rounded_last = back(converted, tmp_path / "rounded-last", rounded)
    assert {tensor.dtype for tensor in all_tensors(of_rounded).values()} == {torch.bfloat16}
    assert same_tensors(of_rounded, rounded_last)
    assert AutoModelForCausalLM.from_pretrained(of_rounded).dtype == torch.bfloat16
    assert torch.equal(all_tensors(of_rounded)[EXPERT], all_tensors(moe)[EXPERT].bfloat16())


def test_a_parameter_with_a_dtype_of_its_own_keeps_it(moe: Path, tmp_path: Path) -> None:
    source = copy_of(moe, tmp_path / "source")
    change_weights(source, lambda t: t.update({n: x.bfloat16() for n, x in t.items() if not n.endswith("gate.weight")}))
    assert hf_to_megatron(source, out=tmp_path / "converted", options=SMALL).dtypes == ("bfloat16", "float32")
    done = megatron_to_hf(tmp_path / "converted" / SHARDS, source=source, out=tmp_path / "back", options=SMALL)
    assert done.dtypes == ("bfloat16", "float32")
    assert same_tensors(done.out, source)


def test_the_rope_forms_of_transformers_4_and_5_give_one_model(tmp_path: Path) -> None:
    new = write_source(tmp_path / "new", "llama3")
    old = copy_of(new, tmp_path / "old")

    def as_transformers_4(config: dict[str, Any]) -> None:
        scaling = config.pop("rope_parameters")
        config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": config.pop("dtype")}
        config.pop("architectures")

    change_config(old, as_transformers_4)
    ids = torch.arange(150)[None] % 67
    logits = []
    for source in (new, old):
        hf_to_megatron(source, out=tmp_path / "converted", options=SMALL)
        out = back(tmp_path / "converted", tmp_path / "out")
        assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        logits.append(AutoModelForCausalLM.from_pretrained(out)(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], AutoModelForCausalLM.from_pretrained(new)(ids).logits)


def test_only_what_a_conversion_wrote_is_replaced_without_force(moe: Path, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        back(converted, out)
    mine = copy_of(moe, tmp_path / "mine")
    before = file_bytes(mine)
    for convert in (lambda o: back(converted, mine, o), lambda o: hf_to_megatron(moe, out=mine, options=o)):
        with pytest.raises(CheckpointError, match=r"was not written by `megatrl convert`.*--force"):
            convert(SMALL)
        assert file_bytes(mine) == before
    back(converted, mine, ConversionOptions(force=True))
    assert (mine / "megatrl_export.json").is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        back(converted, tmp_path / "file", ConversionOptions(force=True))


def test_no_conversion_takes_the_place_of_what_it_reads(moe: Path, converted: Path, tmp_path: Path) -> None:
    megatron, run = copy_of(converted, tmp_path / "megatron"), tmp_path / "run"
    mine = copy_of(moe, run / "policy")
    before = file_bytes(megatron), file_bytes(run)
    force = ConversionOptions(force=True, dtype=torch.bfloat16)
    for convert in (
        lambda: megatron_to_hf(megatron / "shards", source=megatron, out=megatron, options=force),
        lambda: megatron_to_hf(megatron / "shards", source=mine, out=run, options=force),
        lambda: hf_to_megatron(mine, out=run / ".." / "run" / "policy", options=force),
        lambda: hf_to_megatron(mine, out=run, options=force),
    ):
        with pytest.raises(CheckpointError, match="would be gone; name another directory"):
            convert()
        assert (file_bytes(megatron), file_bytes(run)) == before


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond the limit fail as on a full disk, with another errno (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_the_earlier_output_and_nothing_else(moe: Path, converted: Path, tmp_path: Path) -> None:
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    back(converted, hf)
    hf_to_megatron(moe, out=megatron, options=SMALL)
    before = file_bytes(hf), file_bytes(megatron)
    whole = ConversionOptions()
    with files_of_at_most(300_000):
        with pytest.raises(CheckpointError, match=r"not exported .*File too large"):
            back(converted, hf, whole)
        with pytest.raises(CheckpointError, match=r"not converted .*File too large"):
            hf_to_megatron(moe, out=megatron, options=whole)
    assert (file_bytes(hf), file_bytes(megatron)) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "megatron"]


def test_too_little_space_is_told_before_anything_is_written(
    moe: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"needs 0.00 GB beside what is there, .* has 0.00 GB free"):
        back(converted, tmp_path / "out")
    with pytest.raises(CheckpointError, match="free space, or choose another disk"):
        hf_to_megatron(moe, out=tmp_path / "out", options=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_command_converts_both_ways_and_fails_with_names_and_exit_code(moe: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    there = run(app, ["convert", "hf-to-megatron", str(moe), str(tmp_path / "there"), "--shard-gb", "0.001"])
    assert there.exit_code == 0, there.output
    assert "135 tensors, float32" in there.output
    again = run(app, ["convert", "megatron-to-hf", str(tmp_path / "there"), str(tmp_path / "back"), "--dtype", "bf16"])
    assert again.exit_code == 0, again.output
    assert "135 tensors, bfloat16" in again.output
    source = copy_of(moe, tmp_path / "source")
    change_weights(source, lambda tensors: tensors.pop(EXPERT))
    failed = run(app, ["convert", "hf-to-megatron", str(source), str(tmp_path / "failed")])
    assert failed.exit_code == 1
    assert f"1 missing ['{EXPERT}']" in failed.output
    assert not (tmp_path / "failed").exists()
