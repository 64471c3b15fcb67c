"""All routes against a real SGLang server: outputs change to what Hugging Face computes, and checksums prove it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrl.config.engines import PublishConfig, ServerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.rollout.server import RolloutServer
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.expected import expected_tensors
from megatrl.weight_sync.plan import plan_publish
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.routes import make_publisher
from megatrl.weight_sync.tensor import TensorTransport
from tests.integration.conftest import make_tiny_qwen3_moe

pytestmark = pytest.mark.slow

PROMPT = [30, 31, 32, 33]
SERVERS = ServerConfig(device="cpu", precision="fp32")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("other") / "qwen3-moe", seed=1)


@pytest.fixture
def control(sglang_server: RolloutServer, tiny_moe_path: Path) -> Iterator[ServerControl]:
    """The server on its first weights, and put back to them whatever the test did."""
    with ServerControl(sglang_server.url) as control:
        yield control
        control.update_weights_from_disk(str(tiny_moe_path), weight_version="0")
        control.continue_generation()


def generate(control: ServerControl, *, max_new_tokens: int = 6) -> tuple[list[int], list[float]]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    reply: dict[str, Any] = httpx.post(f"{control.url}/generate", json=body, timeout=60).json()
    return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def assert_generates_like(control: ServerControl, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens, logprobs = generate(control)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1)
    assert tokens == wanted.argmax(-1).tolist()
    assert logprobs == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-4)


def weights_of(path: Path) -> Weights:
    return load_file(path / "model.safetensors")


def make(control: ServerControl, path: Path, *, bucket_bytes: int = 100_000, **more: Any) -> Publisher:
    config = PublishConfig(bucket_bytes=bucket_bytes, timeout_s=60.0, route=more.pop("route", "tensor"))
    return make_publisher(config, read_model_shape(path), SERVERS, [control.url], **more)


def test_expected_names_and_shapes_are_those_of_the_checkpoint(tiny_moe_path: Path) -> None:
    expected = expected_tensors(read_model_shape(tiny_moe_path), torch.float32)
    weights = weights_of(tiny_moe_path)
    assert {name: spec.shape for name, spec in expected.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }


@pytest.mark.parametrize("route", ["tensor", "broadcast", "disk"])
def test_a_route_makes_the_server_compute_with_the_published_weights(
    control: ServerControl, tiny_moe_path: Path, other_path: Path, tmp_path: Path, route: str
) -> None:
    assert_generates_like(control, tiny_moe_path)
    publisher = make(control, tiny_moe_path, route=route, directory=tmp_path)
    try:
        report = publisher.publish(weights_of(other_path).items(), 41)
        assert report.is_proven
        assert report.num_buckets > 3
        assert control.weight_version() == "41"
        # The same prompt as before: a prefix cache of the old weights would show here.
        assert_generates_like(control, other_path)
        again = publisher.publish(weights_of(tiny_moe_path).items(), 42)
        assert again.is_proven
        assert control.weight_version() == "42"
        assert_generates_like(control, tiny_moe_path)
    finally:
        publisher.close()
    assert list(tmp_path.iterdir()) == [], "the disk route leaves nothing behind"


class Tampering(TensorTransport):
    """Changes one element on the way, as a broken link or a wrong cast would."""

    def send(self, servers: Any, bucket: Bucket) -> dict[str, str]:
        tensors = []
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
            changed = tensor.clone()
            if name == "model.layers.1.mlp.experts.3.up_proj.weight":
                changed[0, 0] += 1e-3
            tensors.append(changed)
        return super().send(servers, Bucket(index=bucket.index, names=bucket.names, tensors=tuple(tensors)))


def test_a_tampered_expert_is_caught_and_a_second_publish_repairs_the_server(
    control: ServerControl, tiny_moe_path: Path, other_path: Path
) -> None:
    plan = plan_publish(PublishConfig(timeout_s=60.0), read_model_shape(tiny_moe_path), SERVERS)
    publisher = Publisher(plan, [control], Tampering(tensor=1, timeout_s=60.0))
    with pytest.raises(
        WeightSyncError, match=r"phase verify: 1 of \d+ tensors differ.*layers\.1\.mlp\.experts\.w13_weight"
    ):
        publisher.publish(weights_of(other_path).items(), 5)
    assert control.weight_version() == "partial-5"
    assert make(control, tiny_moe_path).publish(weights_of(other_path).items(), 5).is_proven
    assert_generates_like(control, other_path)


@pytest.mark.parametrize("how", ["unknown", "missing", "misshapen"])
def test_a_refused_export_leaves_the_server_serving_the_old_weights(
    control: ServerControl, tiny_moe_path: Path, other_path: Path, how: str
) -> None:
    weights = weights_of(other_path)
    name = list(weights)[-1]
    if how == "unknown":
        weights["model.layers.7.mlp.gate.weight"] = torch.zeros(8, 64)
    elif how == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1]
    publisher = make(control, tiny_moe_path, bucket_bytes=1 << 30)
    with pytest.raises(WeightSyncError, match="refused"):
        publisher.publish(weights.items(), 9)
    assert control.weight_version() == "0"
    assert_generates_like(control, tiny_moe_path)


def test_a_publish_that_stopped_half_way_is_made_good_by_the_next_one(
    control: ServerControl, tiny_moe_path: Path, other_path: Path
) -> None:
    publisher = make(control, tiny_moe_path, bucket_bytes=50_000)
    items = list(weights_of(other_path).items())
    with pytest.raises(WeightSyncError, match="gave it twice"):
        publisher.publish([*items[:20], items[0], *items[20:]], 6)
    assert control.weight_version() == "partial-6"
    assert publisher.publish(items, 6).is_proven
    assert_generates_like(control, other_path)


def test_a_request_in_flight_finishes_under_the_new_weights_and_says_so(
    control: ServerControl, tiny_moe_path: Path, other_path: Path
) -> None:
    import threading

    replies: list[dict[str, Any]] = []
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 600, "temperature": 1.0, "ignore_eos": True}}

    def ask() -> None:
        replies.append(httpx.post(f"{control.url}/generate", json=body, timeout=120).json())

    thread = threading.Thread(target=ask)
    thread.start()
    loads = f"{control.url}/v1/loads?include=core"
    for _ in range(200):
        if httpx.get(loads, timeout=10).json()["loads"][0]["num_running_reqs"]:
            break
    assert make(control, tiny_moe_path).publish(weights_of(other_path).items(), 8).is_proven
    thread.join(timeout=120)
    meta = replies[0]["meta_info"]
    assert meta["completion_tokens"] == 600
    assert meta["num_retractions"] == 1
    assert [span["version"] for span in meta["weight_versions"]][-1] == "8"
    assert meta["weight_version"] == "8"


def test_a_broadcast_that_a_server_refuses_fails_fast_and_the_group_is_rebuilt(
    control: ServerControl, tiny_moe_path: Path, other_path: Path
) -> None:
    import time

    publisher = make(control, tiny_moe_path, route="broadcast")
    items = list(weights_of(other_path).items())

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for place, item in enumerate(items):
            if place == 20:
                control.end_weight_update()  # the server refuses the next bucket: no session is open
            yield item

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"phase send, bucket .*must run between"):
        publisher.publish(interrupted(), 3)
    assert time.monotonic() - started < 30, "a refusal must not be waited for until the deadline"
    assert publisher.publish(items, 3).is_proven
    publisher.close()
    assert_generates_like(control, other_path)
