"""Groups, replacement of failed episodes, and the point where a step gives up."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig, ServerConfig
from megatrl.data.messages import Action, Message
from megatrl.data.trajectories import FinishReason, Prompt, Termination, TrajectoryId
from megatrl.envs.protocol import Environment, StepResult
from megatrl.envs.tools import run_blocking
from megatrl.errors import EnvironmentFault, RolloutError, ServerRejectedError
from megatrl.rendering.renderer import Renderer
from megatrl.rollout import client
from megatrl.rollout.collector import Collector, SamplerForEpisode, ScriptedSamplers, ServerSamplers
from megatrl.rollout.sampler import Sample, Sampler, SampleRequest
from tests.fakes.episodes import ScriptedEnvironment, tool_result
from tests.fakes.sglang_stub import SGLangStub
from tests.fakes.tiny_tokenizer import word_tokenizer

RENDERER = Renderer(word_tokenizer(["user", "assistant", "hello", "door", "Action:", "look"]), 512, "chatml", "react")
END = RENDERER.stop_token_ids[0]
ACTION = (*RENDERER.encode("Action: look"), END)
WON = StepResult(done=True, reward=1.0, success=True)

Act = Callable[[TrajectoryId, SampleRequest], Any]


class ActSampler:
    """Acts by a function of the trajectory and the request; sleeps or raises where the function does."""

    def __init__(self, act: Act, id: TrajectoryId, version: int) -> None:
        self._act, self._id, self._version = act, id, version

    async def sample(self, request: SampleRequest) -> Sample:
        result = self._act(self._id, request)
        if asyncio.iscoroutine(result):
            await result
        return Sample(
            output_ids=ACTION,
            logprobs=(-0.1,) * len(ACTION),
            finish_reason=FinishReason.STOP,
            policy_version=self._version,
        )


class ActSamplers:
    def __init__(self, act: Act = lambda id, request: None) -> None:
        self._act = act

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SamplerForEpisode]:
        def sampler(env: Environment, id: TrajectoryId, policy_version: int) -> Sampler:
            return ActSampler(self._act, id, policy_version)

        yield sampler


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{index}", task={}, seed=index) for index in range(count)]


def two_turns(prompt: Prompt) -> ScriptedEnvironment:
    return ScriptedEnvironment([tool_result("door"), WON])


def collector(
    make: Callable[[Prompt], Environment] = two_turns,
    samplers: Any = None,
    *,
    group_size: int = 4,
    progress: Callable[[int, int, int], None] | None = None,
    **config: Any,
) -> Collector:
    return Collector(
        config=RolloutConfig(**{"tool_format": "react", "max_action_tokens": 8, **config}),
        reward=RewardConfig(),
        renderer=RENDERER,
        make_environment=make,
        samplers=samplers or ActSamplers(),
        group_size=group_size,
        seed=0,
        progress=progress,
    )


def test_groups_come_in_order_with_explicit_identity() -> None:
    seen: list[tuple[int, int, int]] = []
    groups = collector(progress=lambda *numbers: seen.append(numbers)).collect(
        prompts(3), first_position=10, policy_version=5
    )
    assert [(group.prompt.prompt_id, group.group_id) for group in groups] == [("p0", "10"), ("p1", "11"), ("p2", "12")]
    ids = [str(trajectory.id) for group in groups for trajectory in group.trajectories]
    assert ids == [f"p{prompt}/{10 + prompt}/{index}.0" for prompt in range(3) for index in range(4)]
    assert {turn.policy_version for group in groups for t in group.trajectories for turn in t.turns} == {5}
    assert [done for done, _, _ in seen] == list(range(1, 13))
    assert seen[-1] == (12, 12, 12 * 2 * len(ACTION))


def test_report_counts_every_attempt() -> None:
    subject = collector()
    subject.collect(prompts(2), first_position=0, policy_version=0)
    report = subject.report
    assert (report.num_episodes, report.num_attempts, report.num_requests) == (8, 8, 16)
    assert report.num_sampled_tokens == 16 * len(ACTION)
    assert (report.failures, report.num_unknown, report.first_error) == ({}, 0, "")


def test_failed_episode_is_played_again_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []

    def make(prompt: Prompt) -> ScriptedEnvironment:
        made.append(prompt.prompt_id)
        return ScriptedEnvironment([OSError("lost sandbox")]) if len(made) == 3 else two_turns(prompt)

    subject = collector(make)
    groups = subject.collect(prompts(2), first_position=0, policy_version=0)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert all(trajectory.reward == 1.0 for trajectory in trajectories)
    assert sorted(trajectory.id.attempt for trajectory in trajectories) == [0] * 7 + [1]
    assert subject.report.failures == {Termination.ENV_ERROR: 1}
    assert (subject.report.num_attempts, subject.report.num_unknown) == (9, 0)
    assert "environment step raised OSError: lost sandbox" in caplog.text


@pytest.mark.parametrize("stage", ["make", "start", "step", "finish", "close"])
def test_one_bad_environment_costs_one_trajectory_and_never_a_zero_reward(stage: str) -> None:
    def make(prompt: Prompt) -> Environment:
        if prompt.prompt_id != "p1":
            return two_turns(prompt)
        error = RuntimeError("broken")
        if stage == "make":
            raise error
        return {
            "start": ScriptedEnvironment(opening=error),
            "step": ScriptedEnvironment([error]),
            "finish": ScriptedEnvironment([tool_result()] * 9, outcome=error),
            "close": ScriptedEnvironment([tool_result(), WON], close_error=error),
        }[stage]

    groups = collector(make, group_size=1, max_turns=3).collect(prompts(16), first_position=0, policy_version=0)
    rewards = [group.trajectories[0].reward for group in groups]
    bad = 1.0 if stage == "close" else None
    assert rewards == [1.0, bad] + [1.0] * 14
    if bad is None:
        trajectory = groups[1].trajectories[0]
        assert (trajectory.termination, trajectory.id.attempt) == (Termination.ENV_ERROR, 1)
        assert "broken" in trajectory.error


def test_too_many_failures_end_the_step_with_the_first_error() -> None:
    def make(prompt: Prompt) -> Environment:
        raise EnvironmentFault("the index server is down")

    subject = collector(make, max_failure_fraction=0.5)
    with pytest.raises(
        RolloutError, match=r"5 of 8 episodes failed .*max_failure_fraction=0\.5.* index server is down"
    ):
        subject.collect(prompts(2), first_position=0, policy_version=0)
    assert subject.report.num_unknown >= 5


def test_server_that_refuses_everything_fails_the_step_in_seconds_with_its_words() -> None:
    def act(id: TrajectoryId, request: SampleRequest) -> None:
        raise ServerRejectedError("HTTP 400: bad request, says the server")

    subject = collector(samplers=ActSamplers(act), max_attempts=5)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match="bad request, says the server"):
        subject.collect(prompts(4), first_position=0, policy_version=0)
    assert time.monotonic() - begin < 5
    assert subject.report.num_attempts <= 16  # a refusal is not played again


def test_refusal_of_one_prompt_leaves_the_others_alone() -> None:
    def act(id: TrajectoryId, request: SampleRequest) -> None:
        if id.prompt_id == "p3":
            raise ServerRejectedError("HTTP 400: no")

    groups = collector(samplers=ActSamplers(act)).collect(prompts(8), first_position=0, policy_version=0)
    unknown = [t.id.prompt_id for group in groups for t in group.trajectories if t.reward is None]
    assert unknown == ["p3"] * 4


def test_sleeping_sampler_and_hanging_tool_stop_nobody_else() -> None:
    """One server reply that never comes, one blocking tool that never returns: the step ends in its limits."""
    never = threading.Event()

    async def hang() -> StepResult:
        await run_blocking(never.wait, timeout_s=3600, what="simulator")
        return WON

    def make(prompt: Prompt) -> Environment:
        return ScriptedEnvironment([hang]) if prompt.prompt_id == "p2" else two_turns(prompt)

    def act(id: TrajectoryId, request: SampleRequest) -> Any:
        return asyncio.sleep(3600) if id.prompt_id == "p5" else None

    begin = time.monotonic()
    subject = collector(
        make, ActSamplers(act), group_size=1, episode_timeout_s=1.0, tool_timeout_s=0.3, max_attempts=1,
        max_failure_fraction=0.5,
    )  # fmt: skip
    groups = subject.collect(prompts(8), first_position=0, policy_version=0)
    never.set()
    assert time.monotonic() - begin < 10
    outcomes = {group.prompt.prompt_id: group.trajectories[0].termination for group in groups}
    assert {name for name, end in outcomes.items() if end is Termination.TIMEOUT} == {"p2", "p5"}
    assert subject.report.failures == {Termination.TIMEOUT: 2}


@pytest.mark.parametrize("place", ["start", "step", "finish"])
def test_blocking_code_of_an_environment_is_interrupted_and_costs_one_trajectory(place: str) -> None:
    """time.sleep holds the whole event loop, where no asyncio timeout can end it."""

    class Blocking(ScriptedEnvironment):
        async def start(self) -> tuple[Message, ...]:
            if place == "start":
                time.sleep(60)
            return await super().start()

        async def step(self, action: Action) -> StepResult:
            if place == "step":
                time.sleep(60)
            return await super().step(action)

        def finish(self) -> StepResult:
            time.sleep(60)
            return super().finish()

    def make(prompt: Prompt) -> Environment:
        return Blocking([tool_result()] * 9) if prompt.prompt_id == "p2" else two_turns(prompt)

    begin = time.monotonic()
    subject = collector(make, group_size=1, tool_timeout_s=0.4, max_attempts=1, max_failure_fraction=0.5, max_turns=3)
    groups = subject.collect(prompts(8), first_position=0, policy_version=0)
    assert time.monotonic() - begin < 15
    blocked = groups[2].trajectories[0]
    assert blocked.termination is Termination.TIMEOUT
    assert f"environment {place}: blocking code did not return within rollout.tool_timeout_s=0.4" in blocked.error
    assert all(group.trajectories[0].reward == 1.0 for group in groups if group.prompt.prompt_id != "p2")


def test_no_more_episodes_run_at_once_than_allowed() -> None:
    running = highest = 0

    async def busy() -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.01)
        running -= 1

    subject = collector(samplers=ActSamplers(lambda id, request: busy()), max_concurrent_episodes=3)
    subject.collect(prompts(4), first_position=0, policy_version=0)
    assert highest == 3


def test_scripted_samplers_need_an_environment_that_demonstrates() -> None:
    scripted = ScriptedSamplers(RENDERER, seed=0, detour=0.0, premature=0.0)
    with pytest.raises(RolloutError, match="ScriptedEnvironment has no scripted policy"):
        collector(samplers=scripted).collect(prompts(1), first_position=0, policy_version=0)


def test_two_real_stub_servers_share_the_work_and_one_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP: one server answers 500 from its third request on; every episode still ends well."""
    monkeypatch.setattr(client, "_BACKOFF_S", 0.01)
    good, bad = SGLangStub(), SGLangStub()
    bad.edits = [lambda reply: None] * 2
    bad.always = lambda reply: web.Response(status=500, text="scheduler died")
    started, finish = threading.Event(), threading.Event()

    async def serve() -> None:
        async with good.serve(), bad.serve():
            started.set()
            while not finish.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    try:
        subject = collector(
            lambda prompt: ScriptedEnvironment([tool_result("door"), WON]),
            ServerSamplers(lambda: [good.url, bad.url], vocab_size=512),
            servers=ServerConfig(request_timeout_s=10),
            max_failure_fraction=1.0,
            max_attempts=1,
        )
        groups = subject.collect(prompts(2), first_position=0, policy_version=0)
    finally:
        finish.set()
        thread.join()
    ends = [t.termination for group in groups for t in group.trajectories]
    assert ends.count(Termination.COMPLETED) >= 4
    assert set(ends) <= {Termination.COMPLETED, Termination.SERVER_ERROR}
    for t in (t for group in groups for t in group.trajectories if t.termination is Termination.SERVER_ERROR):
        assert "scheduler died" in t.error
        assert t.reward is None


def test_same_seed_asks_for_the_same_samples_in_any_order() -> None:
    def seeds(delays: Sequence[float]) -> dict[str, list[int]]:
        asked: dict[str, list[int]] = {}

        async def act(id: TrajectoryId, request: SampleRequest) -> None:
            await asyncio.sleep(delays[id.index])
            asked.setdefault(str(id), []).append(request.sampling_seed)

        collector(samplers=ActSamplers(act)).collect(prompts(2), first_position=0, policy_version=0)
        return asked

    assert seeds((0.0, 0.01, 0.02, 0.03)) == seeds((0.03, 0.02, 0.01, 0.0))


def test_messages_of_an_episode_are_kept_for_people() -> None:
    groups = collector(group_size=1).collect(prompts(1), first_position=0, policy_version=0)
    assert [dict(message) for message in groups[0].trajectories[0].messages] == [
        Message(role="user", content="hello"),
        Message(role="assistant", content="Action: look"),
        Message(role="tool", content="door"),
        Message(role="assistant", content="Action: look"),
    ]
