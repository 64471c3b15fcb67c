"""What `megatrl convert` writes is served by a real SGLang without a hand edit, and can be what a run starts from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatrl.config.engines import HFModel, PublishConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.config.recipe import Recipe
from megatrl.mcore.weights_directory import SHARDS
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.start import model_directory
from megatrl.rollout.server import RolloutServer, ServerSpec
from megatrl.weight_sync.routes import make_publisher
from tests.integration.conftest import CPU_SERVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [30, 31, 32, 33]


@pytest.fixture(scope="module")
def converted(tiny_moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "megatron"
    hf_to_megatron(tiny_moe_path, out=out, options=ConversionOptions())
    return out


@contextmanager
def served(path: Path, log: Path) -> Iterator[str]:
    server = RolloutServer(ServerSpec(model_path=str(path), config=CPU_SERVER, log_path=log))
    server.start()
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.stop()


def assert_generates_like(url: str, path: Path) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    reply: dict[str, Any] = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    tokens = reply["output_ids"]
    logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert tokens == wanted.argmax(-1).tolist()
    assert logprobs == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-4)


def test_an_exported_directory_is_served_as_it_is(converted: Path, tiny_moe_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    options = ConversionOptions(shard_bytes=300_000)
    done = megatron_to_hf(converted / SHARDS, source=converted, out=out, options=options)
    assert done.num_files > 2
    with served(out, tmp_path / "server.log") as url:
        assert_generates_like(url, tiny_moe_path)


def test_a_run_can_start_from_a_converted_directory_and_its_servers_get_the_weights_by_publishing(
    converted: Path, tiny_moe_path: Path, tmp_path: Path
) -> None:
    env: Any = {"kind": "evidence_hunt"}
    recipe = Recipe(name="x", model=HFModel(path=str(converted)), env=env)
    model = model_directory(recipe, Artifacts(tmp_path / "artifacts"))
    with served(model, tmp_path / "server.log") as url:
        publish = PublishConfig(timeout_s=60.0)
        publisher = make_publisher(publish, read_model_shape(model), CPU_SERVER, [url])
        try:
            assert publisher.publish(load_file(tiny_moe_path / "model.safetensors").items(), 0).is_proven
        finally:
            publisher.close()
        assert_generates_like(url, tiny_moe_path)
