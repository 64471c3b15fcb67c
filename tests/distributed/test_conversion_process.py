"""A conversion that is killed leaves what was there; one that runs holds a shard in memory, not the model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversion_case import change_weights, file_bytes, write_source
from safetensors.torch import save_file

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatrl.config.model_shape import ModelShape, hf_config, read_model_shape
from megatrl.mcore.weight_map import hf_tensor_shape, weight_rules
from megatrl.mcore.weights_directory import SHARDS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("conversion_process.py")
DIRECTIONS = ("hf-to-megatron", "megatron-to-hf")
SMALL = ConversionOptions(shard_bytes=60_000)
LARGE_SHARD = 24_000_000
MAX_SHARDS_IN_MEMORY = 2.5


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        # The second: glibc gives freed blocks back at once, as it does by itself for those of more than 32 MB.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kill_in_mid_write_leaves_the_earlier_output_and_the_next_run_cleans_up(
    tmp_path: Path, direction: str
) -> None:
    source, out = write_source(tmp_path / "source", "qwen3_moe"), tmp_path / "out"
    megatron = hf_to_megatron(source, out=tmp_path / "megatron", options=SMALL).out
    first = source if direction == "hf-to-megatron" else megatron

    def convert() -> None:
        if direction == "hf-to-megatron":
            hf_to_megatron(source, out=out, options=SMALL)
        else:
            megatron_to_hf(megatron / SHARDS, source=megatron, out=out, options=SMALL)

    convert()
    before = file_bytes(out)
    change_weights(source, lambda tensors: tensors["lm_head.weight"].mul_(2.0))
    hf_to_megatron(source, out=megatron, options=SMALL)
    killed = run("killed", direction, SMALL.shard_bytes, first, out)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert file_bytes(out) == before
    leftover = tmp_path / ".writing-out"
    assert any(leftover.rglob("*")), "it was killed before it wrote anything"
    convert()
    assert file_bytes(out) != before
    assert not leftover.exists()


def large_shape() -> ModelShape:
    """200 MB in fp32, mostly experts; the embedding fills a shard of its own."""
    return ModelShape(
        family="qwen3_moe", vocab_size=11000, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=2,
        head_dim=64, ffn_size=1024, num_experts=8, num_experts_per_token=2, expert_ffn_size=512, norm_eps=1e-6,
        rope_theta=1e6, max_positions=512,
    )  # fmt: skip


def write_large(path: Path) -> Path:
    """A model in files of at most LARGE_SHARD bytes, without building one."""
    shape = large_shape()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config(shape)))
    assert read_model_shape(path) == shape
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    names = [name for rule in weight_rules(shape) for name in rule.hf_names]
    for name in names:
        pending[name] = torch.randn(hf_tensor_shape(shape, name)) * 0.02
        following = sum(t.nbytes for t in pending.values()) + 4 * 512 * 512
        if following > LARGE_SHARD or name in ("model.embed_tokens.weight", names[-1]):
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(pending, path / file)
            weight_map |= dict.fromkeys(pending, file)
            pending = {}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("memory")
    write_source(base / "tiny", "qwen3_moe")
    write_large(base / "large")
    return base


def test_memory_stays_below_two_and_a_half_shards_in_both_directions(models: Path) -> None:
    tiny, large = models / "tiny", models / "large"
    for direction, out in zip(DIRECTIONS, ("megatron", "hf"), strict=True):
        done = run("memory", direction, LARGE_SHARD, tiny, large, models / out)
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout.splitlines()[-1])
        tiny, large = models / f"{out}-tiny", models / out
        assert measured["total"] > 8 * measured["largest"], "the whole model would not pass"
        shards = measured["bytes"] / measured["largest"]
        print(f"{direction}: {shards:.2f} shards; {measured}")
        assert 0.5 < shards < MAX_SHARDS_IN_MEMORY, (direction, measured)
