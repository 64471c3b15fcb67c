"""The rollout client, episodes and server processes against a real SGLang server on a CPU."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig, SamplingConfig
from megatrl.data.messages import Message
from megatrl.data.trajectories import FinishReason, Prompt, Termination
from megatrl.envs.protocol import StepResult
from megatrl.errors import RolloutError, ServerRejectedError
from megatrl.rendering.renderer import Renderer, load_renderer
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.collector import Collector, Progress, ServerSamplers
from megatrl.rollout.control import ServerControl
from megatrl.rollout.guardian import session_members
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.server import RolloutServer, ServerSpec
from tests.fakes.episodes import ScriptedEnvironment, tool_result
from tests.fakes.sglang_stub import TRAFFIC
from tests.integration.conftest import CPU_SERVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB = 512
PROMPT = (1, 30, 31, 32, 33, 34)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hf_logits(tiny_moe_path: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].double()

    return logits


def sample_all(url: str, requests: list[SampleRequest]) -> list[Sample]:
    async def run() -> list[Sample]:
        async with SGLangSampler([url], vocab_size=VOCAB) as sampler:
            return list(await asyncio.gather(*(sampler.sample(request) for request in requests)))

    return asyncio.run(run())


def request(**changes: Any) -> SampleRequest:
    fields = {"input_ids": PROMPT, "max_new_tokens": 24, "temperature": 1.0, "deadline_s": 120.0, **changes}
    return SampleRequest(**fields)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_behavior_logprobs_are_those_of_the_model_at_the_sampling_temperature(
    sglang_server: RolloutServer, hf_logits: Callable[[tuple[int, ...]], torch.Tensor], temperature: float
) -> None:
    requests = [request(temperature=temperature, sampling_seed=seed) for seed in range(8)]
    for sample in sample_all(sglang_server.url, requests):
        ids = PROMPT + sample.output_ids
        expected = (hf_logits(ids) / temperature).log_softmax(-1)[len(PROMPT) - 1 : -1]
        expected = expected.gather(1, torch.tensor(sample.output_ids)[:, None])[:, 0].numpy()
        ratio = np.exp(np.array(sample.logprobs) - expected)
        assert np.abs(ratio - 1).max() < 1e-4
        assert sample.policy_version == 0


def test_greedy_is_the_argmax(
    sglang_server: RolloutServer, hf_logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    (sample,) = sample_all(sglang_server.url, [request(temperature=0.0)])
    greedy = hf_logits(PROMPT + sample.output_ids).argmax(-1)[len(PROMPT) - 1 : -1]
    assert tuple(greedy.tolist()) == sample.output_ids


def test_seed_decides_the_sample_whatever_else_runs(sglang_server: RolloutServer) -> None:
    seeds = [0, 1, 2**63 - 1]
    alone = [sample_all(sglang_server.url, [request(sampling_seed=seed)])[0].output_ids for seed in seeds]
    crowd = [request(sampling_seed=seed) for seed in (*seeds, *range(100, 140))]
    together = [sample.output_ids for sample in sample_all(sglang_server.url, crowd)]
    assert together[:3] == alone
    assert len(set(together)) == len(together)


def test_stop_token_is_kept_and_length_is_told_apart(sglang_server: RolloutServer) -> None:
    (free,) = sample_all(sglang_server.url, [request(sampling_seed=5)])
    assert free.finish_reason is FinishReason.LENGTH
    end = free.output_ids.index(free.output_ids[3])
    (stopped,) = sample_all(sglang_server.url, [request(sampling_seed=5, stop_token_ids=(free.output_ids[3],))])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.output_ids == free.output_ids[: end + 1]


def test_prefix_of_the_previous_turn_is_cached_until_flushed(sglang_server: RolloutServer) -> None:
    prompt = tuple(range(200, 240))
    (first,) = sample_all(sglang_server.url, [request(input_ids=prompt)])
    second_prompt = prompt + first.output_ids + (50, 51)
    (second,) = sample_all(sglang_server.url, [request(input_ids=second_prompt)])
    assert second.cached_tokens >= len(prompt) + len(first.output_ids) - 1
    with ServerControl(sglang_server.url) as control:
        control.flush_cache()
    (third,) = sample_all(sglang_server.url, [request(input_ids=second_prompt)])
    assert third.cached_tokens == 0


def test_live_reply_has_the_fields_of_the_recorded_one(sglang_server: RolloutServer) -> None:
    recorded = TRAFFIC["length"]
    live = httpx.post(f"{sglang_server.url}/generate", json=recorded["request"], timeout=60, trust_env=False)
    reply = live.json()
    assert live.status_code == recorded["status"]
    assert reply.keys() == recorded["reply"].keys()
    assert reply["meta_info"].keys() == recorded["reply"]["meta_info"].keys()
    assert reply["meta_info"]["finish_reason"].keys() == recorded["reply"]["meta_info"]["finish_reason"].keys()
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])


def test_over_long_prompt_is_refused_in_the_servers_words(sglang_server: RolloutServer) -> None:
    with pytest.raises(ServerRejectedError, match="longer than the model's context length"):
        sample_all(sglang_server.url, [request(input_ids=(30,) * 5000)])


def test_control_calls_answer(sglang_server: RolloutServer, tiny_moe_path: Path) -> None:
    with ServerControl(sglang_server.url) as control:
        assert control.health()
        assert control.model_info()["model_path"] == str(tiny_moe_path)
        assert control.server_info()["version"]
        before = control.weights_checksum()
        assert any("experts" in name for name in before)
        assert control.supports_update_session()
        control.update_weight_version("17")
        assert control.weight_version() == "17"
        control.update_weights_from_disk(str(tiny_moe_path), weight_version="0")
        assert control.weight_version() == "0"
        assert control.weights_checksum() == before
        control.pause_generation("retract")
        control.continue_generation()
        with pytest.raises(ServerRejectedError, match="/update_weights_from_disk was refused with HTTP 400"):
            control.update_weights_from_disk("/nonexistent", weight_version="9")
        assert control.weight_version() == "0"


class _AnyEnvironment(ScriptedEnvironment):
    """Accepts whatever the random model says, for three turns."""


def three_turns(prompt: Prompt) -> ScriptedEnvironment:
    opening = [Message(role="user", content=f"w{prompt.seed} w2 w3")]
    return _AnyEnvironment([tool_result("w7 w8")] * 2 + [StepResult(done=True, reward=1.0, success=True)], opening)


def lively_renderer(path: Path) -> Renderer:
    """Ends an action at many ids, since a random model hardly ever says the right one."""
    renderer = load_renderer(str(path), "chatml", "react")
    renderer.stop_token_ids = (2, *range(100, 500))
    return renderer


def collector(urls: list[str], path: Path, *, progress: Progress | None = None, **changes: Any) -> Collector:
    config = RolloutConfig(
        sampling=SamplingConfig(temperature=1.3),
        servers=CPU_SERVER,
        tool_format="react",
        max_action_tokens=64,
        context_tokens=1024,
        **changes,
    )
    return Collector(
        config=config,
        reward=RewardConfig(),
        renderer=lively_renderer(path),
        make_environment=three_turns,
        samplers=ServerSamplers(lambda: urls, vocab_size=VOCAB),
        group_size=4,
        seed=0,
        progress=progress,
    )


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{index}", task={}, seed=index) for index in range(count)]


def test_collected_groups_score_the_same_under_the_model_and_repeat_with_the_seed(
    sglang_server: RolloutServer, tiny_moe_path: Path, hf_logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    subject = collector([sglang_server.url], tiny_moe_path)
    groups = subject.collect(prompts(4), first_position=0, policy_version=0)
    assert {t.termination for group in groups for t in group.trajectories} == {Termination.COMPLETED}
    for trajectory in (t for group in groups for t in group.trajectories):
        (segment,) = trajectory.segments
        logprobs = (hf_logits(segment.tokens) / 1.3).log_softmax(-1)
        position = 0
        for turn in segment.turns:
            position += len(turn.observation_tokens)
            for token, behavior in zip(turn.action_tokens, turn.behavior_logprobs, strict=True):
                assert abs(float(logprobs[position - 1, token]) - behavior) < 1e-4
                position += 1
    assert subject.report.num_cached_tokens > 0
    again = subject.collect(prompts(4), first_position=0, policy_version=0)
    assert [t.segments[0].tokens for g in again for t in g.trajectories] == [
        t.segments[0].tokens for g in groups for t in g.trajectories
    ]


def test_samples_of_unpublished_weights_are_refused(sglang_server: RolloutServer, tiny_moe_path: Path) -> None:
    with pytest.raises(RolloutError, match="sampled under policy version 0, wanted 4"):
        collector([sglang_server.url], tiny_moe_path).collect(prompts(1), first_position=0, policy_version=4)


PARENT = """
import sys, time
from pathlib import Path
from megatrl.rollout.server import RolloutServer, ServerSpec
from tests.integration.conftest import CPU_SERVER
server = RolloutServer(ServerSpec(model_path=sys.argv[1], config=CPU_SERVER, log_path=Path(sys.argv[2])))
server.start()
server.wait_ready()
print(server.url, server._process.pid, flush=True)
time.sleep(3600)
"""


@dataclasses.dataclass
class _Child:
    """A server whose parent is a process that a test may kill."""

    parent: subprocess.Popen[str]
    url: str
    guardian: int


@pytest.fixture(scope="module")
def more_servers(
    tiny_moe_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[_Child, RolloutServer]]:
    """Two further servers, started side by side, for tests that kill them."""
    logs = tmp_path_factory.mktemp("servers")
    command = [sys.executable, "-c", PARENT, str(tiny_moe_path), str(logs / "child.log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    server = RolloutServer(ServerSpec(model_path=str(tiny_moe_path), config=CPU_SERVER, log_path=logs / "crash.log"))
    server.start()
    try:
        server.wait_ready()
        assert parent.stdout is not None
        url, guardian = parent.stdout.readline().split()
        yield _Child(parent, url, int(guardian)), server
    finally:
        parent.kill()
        parent.wait()
        server.stop()


def test_killed_parent_takes_the_whole_tree_along_and_the_rollout_goes_on(
    sglang_server: RolloutServer,
    more_servers: tuple[_Child, RolloutServer],
    tiny_moe_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    child, _ = more_servers
    children = Path(f"/proc/{child.guardian}/task/{child.guardian}/children").read_text().split()
    tree = session_members(int(children[0]))
    assert len(tree) >= 2  # HTTP server, scheduler, resource tracker
    moments: list[float] = []

    under_way = threading.Event()

    def kill_under_way() -> None:
        assert under_way.wait(60)
        os.kill(child.parent.pid, signal.SIGKILL)
        killed = time.monotonic()
        while any(session_members(int(children[0]))) and time.monotonic() < killed + 30:
            time.sleep(0.05)
        moments.append(time.monotonic() - killed)

    killer = threading.Thread(target=kill_under_way)
    killer.start()
    # Once the first episodes are done, with most of the work still ahead on both servers.
    subject = collector(
        [child.url, sglang_server.url], tiny_moe_path, progress=lambda done, total, tokens: under_way.set()
    )
    groups = subject.collect(prompts(160), first_position=0, policy_version=0)
    killer.join()
    assert moments[0] < 5
    assert session_members(child.guardian) == []
    assert "server taken out" in caplog.text  # it had work when it died
    assert {t.termination for group in groups for t in group.trajectories} == {Termination.COMPLETED}
    assert subject.report.failures == {}


def test_crash_is_noticed_and_explained(more_servers: tuple[_Child, RolloutServer]) -> None:
    """An id outside the vocabulary, sent past our own check, kills a CPU server: a real crash."""
    _, server = more_servers
    server.check()
    body = {"input_ids": [30, 10_000], "sampling_params": {"max_new_tokens": 4}}
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{server.url}/generate", json=body, timeout=60, trust_env=False)
    deadline = time.monotonic() + 30
    while server.is_alive and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(RolloutError, match=r"is not running: exit code \d+\. Log: .*crash\.log[\s\S]*[Ii]ndex"):
        server.check()
    with pytest.raises(RolloutError, match="no rollout server is alive"):
        sample_all(server.url, [request()])
