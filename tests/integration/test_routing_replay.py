"""Replay against real SGLang servers in bf16: what remains of the mismatch is what a dense model has."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrl.config.model_shape import read_model_shape
from megatrl.data.samples import TrainingSample
from megatrl.data.trajectories import TrajectoryId
from megatrl.errors import ServerRejectedError
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.server import RolloutServer, ServerSpec
from tests.integration.conftest import CPU_SERVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SERVER = CPU_SERVER.model_copy(update={"precision": "bf16", "max_total_tokens": 16_384})
NUM_SEQUENCES, PROMPT_TOKENS, ACTION_TOKENS = 12, 40, 96


def make_model(directory: Path, *, is_mixture: bool) -> Path:
    """A random bf16 model. The mixture has 32 experts with close scores, and as many active parameters as the other."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    if is_mixture:
        experts = {"moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
        config: Any = transformers.Qwen3MoeConfig(**sizes, **experts)
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, intermediate_size=128))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "gate.weight" not in name:
                parameter.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RolloutServer]]:
    base = tmp_path_factory.mktemp("replay")
    started = {
        name: RolloutServer(
            ServerSpec(
                model_path=str(make_model(base / name, is_mixture=name == "mixture")),
                config=SERVER,
                log_path=base / f"{name}.log",
                record_routing=name == "mixture",
            )
        )
        for name in ("mixture", "dense")
    }
    try:
        for server in started.values():
            server.start()
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.stop()


async def sampled(server: RolloutServer, requests: list[SampleRequest], *, record: bool) -> list[Sample]:
    shape = read_model_shape(server.spec.model_path)
    async with SGLangSampler([server.url], vocab_size=512, routed_shape=shape if record else None) as sampler:
        return list(await asyncio.gather(*(sampler.sample(request) for request in requests)))


def requests() -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    return [
        SampleRequest(
            input_ids=tuple(rng.integers(3, 512, PROMPT_TOKENS).tolist()),
            max_new_tokens=ACTION_TOKENS,
            temperature=1.0,
            sampling_seed=seed,
        )
        for seed in range(NUM_SEQUENCES)
    ]


def training_sample(index: int, request: SampleRequest, sample: Sample) -> TrainingSample:
    tokens = np.array([*request.input_ids, *sample.output_ids])
    mask = np.arange(len(tokens)) >= len(request.input_ids)
    behavior = np.zeros(len(tokens))
    behavior[mask] = sample.logprobs
    return TrainingSample(
        trajectory_id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segment_index=0,
        tokens=tokens,
        action_mask=mask,
        behavior_logprobs=behavior,
        advantages=mask.astype(float),
        routed_experts=None if sample.routed_experts is None else sample.routed_experts.with_unrecorded_end().array,
    )


def test_replay_brings_the_mismatch_of_a_mixture_down_to_that_of_a_dense_model(
    servers: dict[str, RolloutServer], tmp_path: Path
) -> None:
    samples = {
        name: [
            training_sample(i, request, sample)
            for i, (request, sample) in enumerate(
                zip(requests(), asyncio.run(sampled(server, requests(), record=name == "mixture")), strict=True)
            )
        ]
        for name, server in servers.items()
    }
    paths = {name: server.spec.model_path for name, server in servers.items()}
    asked = {
        "dense": (paths["dense"], samples["dense"], {}),
        "free": (paths["mixture"], samples["mixture"], {}),
        "replay": (paths["mixture"], samples["mixture"], {"replay": True}),
    }
    (tmp_path / "asked").write_bytes(pickle.dumps(asked))
    script = Path(__file__).with_name("mismatch_actor.py")
    subprocess.run([sys.executable, str(script), str(tmp_path / "asked"), str(tmp_path / "answers")], check=True)
    answers = pickle.loads((tmp_path / "answers").read_bytes())
    mean, largest = ({name: value[part] for name, value in answers.items()} for part in (0, 1))
    print(f"mean {mean}, largest {largest}")  # the numbers of docs/routing-replay.md
    assert sum(s.num_action_tokens for s in samples["mixture"]) > 500
    assert mean["dense"] > 1e-4, "nothing rounds, so nothing was tested"
    assert mean["replay"] <= 1.5 * mean["dense"], mean
    assert mean["free"] >= 1.5 * mean["replay"], mean
    assert largest["free"] >= 3 * largest["replay"], largest


def test_rows_are_the_same_whether_a_prefix_was_cached_or_not(servers: dict[str, RolloutServer]) -> None:
    """A later turn asks from the previous turn's last token on; its rows continue the earlier ones."""
    request = replace(requests()[0], input_ids=tuple(range(100, 140)))  # of no other test, so nothing is cached yet
    (first,) = asyncio.run(sampled(servers["mixture"], [request], record=True))
    assert first.cached_tokens == 0
    longer = replace(request, input_ids=(*request.input_ids, *first.output_ids, 7, 8, 9), max_new_tokens=5)
    start = len(longer.input_ids) - 4  # the last token of the first action
    whole, part = (
        asyncio.run(sampled(servers["mixture"], [replace(longer, first_routed=begin)], record=True))[0]
        for begin in (0, start)
    )
    assert part.cached_tokens > 0
    assert first.routed_experts is not None
    assert whole.routed_experts is not None
    assert part.routed_experts is not None
    assert (whole.routed_experts.array[: first.routed_experts.num_tokens] == first.routed_experts.array).all()
    assert part.routed_experts.num_tokens == len(longer.input_ids) + len(part.output_ids) - 1 - start
    assert (part.routed_experts.array[:4] == whole.routed_experts.array[start : start + 4]).all()


def test_a_dense_server_is_refused_at_the_first_request(servers: dict[str, RolloutServer]) -> None:
    mixture = read_model_shape(servers["mixture"].spec.model_path)

    async def ask() -> None:
        async with SGLangSampler([servers["dense"].url], vocab_size=512, routed_shape=mixture) as sampler:
            await sampler.sample(requests()[0])

    with pytest.raises(ServerRejectedError, match="did not send routed_experts"):
        asyncio.run(ask())
