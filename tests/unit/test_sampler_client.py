"""The HTTP client against a stub server: what it sends, what it refuses, what it retries, whom it trusts."""

import asyncio
import dataclasses
import json
import math
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from megatrl.data.trajectories import FinishReason
from megatrl.errors import RolloutError, ServerRejectedError
from megatrl.rollout import client
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.replies import AbortedError, read_reply, request_body
from megatrl.rollout.sampler import Sample, SampleRequest
from tests.fakes.sglang_stub import TRAFFIC, SGLangStub, good_reply

REQUEST = SampleRequest(
    input_ids=(1, 5, 6, 7, 8, 9),
    max_new_tokens=6,
    temperature=1.0,
    stop_token_ids=(2,),
    sampling_seed=5,
    deadline_s=10.0,
)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BACKOFF_S", 0.01)


async def sample_from(*stubs: SGLangStub, request: SampleRequest = REQUEST) -> Sample:
    async with SGLangSampler([stub.url for stub in stubs], vocab_size=512) as sampler:
        return await sampler.sample(request)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_request_is_the_recorded_one() -> None:
    assert json.loads(request_body(REQUEST, "rid-length")) == TRAFFIC["length"]["request"]


@pytest.mark.parametrize("case, finish", [("length", FinishReason.LENGTH), ("stop", FinishReason.STOP)])
def test_recorded_reply_is_read_exactly(case: str, finish: FinishReason) -> None:
    recorded = TRAFFIC[case]
    body = json.dumps(recorded["reply"]).encode()
    sample = read_reply(body, REQUEST, recorded["request"]["rid"], 512)
    assert list(sample.output_ids) == recorded["reply"]["output_ids"]
    assert list(sample.logprobs) == [e[0] for e in recorded["reply"]["meta_info"]["output_token_logprobs"]]
    assert (sample.finish_reason, sample.policy_version) == (finish, 7)
    assert sample.cached_tokens == recorded["reply"]["meta_info"]["cached_tokens"]


def test_recorded_abort_is_not_taken_for_an_action() -> None:
    recorded = TRAFFIC["abort"]
    request = dataclasses.replace(REQUEST, max_new_tokens=3000)
    with pytest.raises(AbortedError, match=f"after {len(recorded['reply']['output_ids'])} tokens"):
        read_reply(json.dumps(recorded["reply"]).encode(), request, "rid-abort", 512)


def test_stub_replies_like_the_recorded_server() -> None:
    reply = good_reply(TRAFFIC["length"]["request"], "7")
    assert reply.keys() == TRAFFIC["length"]["reply"].keys()
    assert reply["meta_info"].keys() == TRAFFIC["length"]["reply"]["meta_info"].keys()


async def test_good_reply_becomes_a_sample() -> None:
    async with SGLangStub(weight_version="41").serve() as stub:
        sample = await sample_from(stub)
    assert sample.output_ids == (10, 11, 12)
    assert sample.logprobs == (-0.5, -0.5, -0.5)
    assert (sample.finish_reason, sample.policy_version) == (FinishReason.STOP, 41)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(reply: dict[str, Any]) -> None:
        target: Any = reply
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            target = target[part]
        target[last] = value

    return edit


def unnamed_weights(reply: dict[str, Any]) -> None:
    version = {"version": "default", "start": 0, "end": 3}
    reply["meta_info"] |= {"weight_version": "default", "weight_versions": [version]}


LOGPROBS = "meta_info.output_token_logprobs"


@pytest.mark.parametrize(
    "edit, message",
    [
        (change(f"{LOGPROBS}.1.0", math.nan), "unusable reply"),
        (change(f"{LOGPROBS}.1.0", -math.inf), "unusable reply"),
        (change(f"{LOGPROBS}.1.0", None), "logprob 1 of token 11 is None"),
        (change(f"{LOGPROBS}.1.0", 0.3), "logprob 1 of token 11 is 0.3"),
        (change(f"{LOGPROBS}.1.1", 99), "logprob 1 is of token 99, the token sampled there is 11"),
        (change(LOGPROBS, [[-0.5, 10, None]]), "3 tokens but 1 logprobs"),
        (change(LOGPROBS, None), "3 tokens but None logprobs"),
        (change("output_ids", []), "no sampled token"),
        (change("output_ids", [10] * 7), "7 tokens, max_new_tokens is 6"),
        (change("output_ids.0", 512), "the token 512; the model has ids 0 to 511"),
        (change("output_ids.0", None), "the token None"),
        (change("meta_info.id", "other"), "belongs to request other"),
        (unnamed_weights, "weight_version is 'default'"),
        (change("meta_info.weight_versions", [{"version": "0"}, {"version": "1"}]), "several weight versions"),
        (change("meta_info.finish_reason", {"type": "banana"}), "finish_reason is 'banana'"),
        (lambda reply: b"<html>proxy</html>", "unusable reply"),
        (lambda reply: reply.pop("meta_info") and None, "unusable reply .KeyError"),
    ],
)
async def test_unusable_reply_is_refused_with_its_reason_after_bounded_attempts(edit: Any, message: str) -> None:
    async with SGLangStub(always=edit).serve() as stub:
        with pytest.raises(RolloutError, match=message):
            await sample_from(stub)
    assert len(stub.bodies) == client.MAX_ATTEMPTS


async def test_refusal_is_never_retried_and_carries_the_servers_words() -> None:
    async with SGLangStub(context_length=6).serve() as stub:
        with pytest.raises(ServerRejectedError, match="is longer than the model's context length"):
            await sample_from(stub)
    assert len(stub.bodies) == 1


async def test_transient_failure_is_retried_under_a_fresh_id() -> None:
    failures = [
        lambda reply: web.json_response({"error": {"message": "out of memory"}}, status=500),
        lambda reply: web.Response(status=503),
        lambda reply: reply["meta_info"].update(finish_reason={"type": "abort", "message": "Aborted"}),
    ]
    async with SGLangStub(edits=list(failures)).serve() as stub:
        sample = await sample_from(stub)
    assert sample.output_ids == (10, 11, 12)
    assert len({body["rid"] for body in stub.bodies}) == 4  # the stub refuses a repeated id, as SGLang does


async def test_repeated_500_ends_with_the_servers_text() -> None:
    async with SGLangStub(always=lambda reply: web.Response(status=500, text="JSON cannot hold -inf")).serve() as stub:
        with pytest.raises(RolloutError, match=r"HTTP 500: JSON cannot hold -inf \(4 attempts\); servers: .* alive"):
            await sample_from(stub)


async def test_slow_server_is_given_up_at_the_deadline_and_told_so() -> None:
    request = dataclasses.replace(REQUEST, deadline_s=0.2)
    async with SGLangStub(delay_s=3600).serve() as stub:
        with pytest.raises(RolloutError, match=r"no answer to /generate within 0\.2 s"):
            await sample_from(stub, request=request)
        assert stub.aborted == [stub.bodies[0]["rid"]]


async def test_cancelled_episode_releases_its_request_at_the_server() -> None:
    async with SGLangStub(delay_s=3600).serve() as stub, SGLangSampler([stub.url], vocab_size=512) as sampler:
        task = asyncio.create_task(sampler.sample(REQUEST))
        while not stub.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if stub.aborted:
                break
            await asyncio.sleep(0.01)
        assert stub.aborted == [stub.bodies[0]["rid"]]


@pytest.mark.parametrize(
    "ids, limit, message",
    [
        ((1, 512), 6, r"input_ids\[1\] is 512, the model has ids 0 to 511"),
        ((1, -1), 6, r"input_ids\[1\] is -1"),
        ((), 6, "without input ids"),
        ((1,), 0, "max_new_tokens is 0"),
    ],
)
async def test_request_that_would_hurt_the_server_is_not_sent(ids: tuple[int, ...], limit: int, message: str) -> None:
    async with SGLangStub().serve() as stub:
        with pytest.raises(ServerRejectedError, match=message):
            await sample_from(stub, request=dataclasses.replace(REQUEST, input_ids=ids, max_new_tokens=limit))
    assert stub.bodies == []


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with SGLangStub().serve() as stub:
        assert (await sample_from(stub)).output_ids == (10, 11, 12)


async def test_dead_server_is_taken_out_and_its_work_moves_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with SGLangStub().serve() as stub, SGLangSampler([dead, stub.url], vocab_size=512) as sampler:
        samples = await asyncio.gather(
            *(sampler.sample(dataclasses.replace(REQUEST, routing_key=f"t{index}")) for index in range(8))
        )
    assert len(samples) == 8
    assert caplog.text.count("server taken out") == 1


async def test_all_servers_dead_is_an_error_that_names_them() -> None:
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    async with SGLangSampler(dead, vocab_size=512) as sampler:
        with pytest.raises(RolloutError, match=f"no rollout server is alive: {dead[0]} dead, last answer 0 s ago"):
            await sampler.sample(REQUEST)


async def test_server_that_dies_in_the_middle_of_a_request_is_survived() -> None:
    def cut_connection(reply: dict[str, Any]) -> Any:
        raise asyncio.CancelledError  # aiohttp drops the connection without an answer

    async with SGLangStub(edits=[cut_connection]).serve() as stub:
        assert (await sample_from(stub)).output_ids == (10, 11, 12)
    assert len(stub.bodies) == 2


async def test_a_trajectory_stays_on_its_server_and_trajectories_spread() -> None:
    async with SGLangStub(delay_s=0.02).serve() as one, SGLangStub(delay_s=0.02).serve() as two:
        async with SGLangSampler([one.url, two.url], vocab_size=512) as sampler:

            async def episode(key: str, first_id: int) -> None:
                for _ in range(3):
                    await sampler.sample(dataclasses.replace(REQUEST, routing_key=key, input_ids=(first_id,)))

            await asyncio.gather(*(episode(f"t{index}", index) for index in range(10)))
        homes = [{body["input_ids"][0] for body in stub.bodies} for stub in (one, two)]
    assert homes[0] | homes[1] == set(range(10))
    assert not homes[0] & homes[1]
    assert [len(home) for home in homes] == [5, 5]
