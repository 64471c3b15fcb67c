"""The rules of one episode, each with a scripted environment and scripted replies."""

import asyncio
import dataclasses
import math
import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.data.messages import POSITIONAL, Message
from megatrl.data.trajectories import FinishReason, Termination, Trajectory, TrajectoryId
from megatrl.envs.protocol import StepResult
from megatrl.errors import DeadlineError, EnvironmentFault, RolloutError, ServerRejectedError
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.episode import play_episode
from megatrl.rollout.scripted import ScriptedSampler
from megatrl.rollout.seeds import sampling_seed
from tests.fakes.episodes import ScriptedEnvironment, ScriptedReplies, sleep_for_an_hour, tool_result
from tests.fakes.tiny_tokenizer import word_tokenizer

WORDS = ("system", "user", "assistant", "hello", "door", "open", "key", "look", "Action:")
MARKS = ("<answer>", "</answer>", "[cut]")
RENDERER = Renderer(word_tokenizer(WORDS + MARKS), 40, "chatml", "react")
ID = TrajectoryId(prompt_id="p", group_id="4", index=1)
END = RENDERER.stop_token_ids[0]
OPEN = (*RENDERER.encode("Action: open door"), END)  # 4 tokens
ANSWER = (*RENDERER.encode("<answer> key </answer>"), END)
PROMPT = RENDERER.initial([Message(role="user", content="hello")])  # 6 tokens
RESULT = RENDERER.continuation([Message(role="tool", content="door open")], previous_ended=True)  # 7 tokens
WON = StepResult(done=True, reward=1.0, success=True, metrics={"clues": 3.0})


def limits(**changes: Any) -> RolloutConfig:
    config = {"tool_format": "react", "max_turns": 5, "max_action_tokens": 8, "context_tokens": 200, **changes}
    return RolloutConfig(**config)


def play(
    env: ScriptedEnvironment, replies: list[Any], reward: RewardConfig | None = None, **changes: Any
) -> Trajectory:
    return play_with(env, ScriptedReplies(replies), reward, **changes)


def play_with(
    env: ScriptedEnvironment, sampler: ScriptedReplies, reward: RewardConfig | None = None, **changes: Any
) -> Trajectory:
    episode = play_episode(
        env,
        sampler,
        RENDERER,
        id=ID,
        limits=limits(**changes),
        reward=reward or RewardConfig(),
        policy_version=0,
        seed=0,
    )
    trajectory = asyncio.run(asyncio.wait_for(episode, 20))
    assert env.num_closed == 1
    return trajectory


def test_completed_episode_keeps_every_token_as_it_was_sent_and_returned() -> None:
    env = ScriptedEnvironment([tool_result(observation_key="room"), WON])
    sampler = ScriptedReplies([OPEN, ANSWER])
    trajectory = play_with(env, sampler)
    (segment,) = trajectory.segments
    first, second = segment.turns
    assert (first.observation_tokens, first.action_tokens) == (PROMPT, OPEN)
    assert (second.observation_tokens, second.action_tokens) == (RESULT, ANSWER)
    assert first.behavior_logprobs == (-0.5, -0.501, -0.502, -0.503)
    assert [request.input_ids for request in sampler.requests] == [PROMPT, PROMPT + OPEN + RESULT]
    assert (trajectory.termination, trajectory.reward, trajectory.success) == (Termination.COMPLETED, 1.0, True)
    assert [turn.observation_key for turn in segment.turns] == ["start", "room"]
    assert [turn.is_tool_call for turn in segment.turns] == [True, False]
    assert segment.trailing_observation_tokens == ()
    assert trajectory.gold_answers == ("key",)
    assert trajectory.metrics == {"clues": 3.0}
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert env.actions[0].tool_calls[0].arguments == {POSITIONAL: "door"}
    assert env.actions[1].answer == "key"


def test_text_of_the_end_state_trails_the_last_action() -> None:
    env = ScriptedEnvironment([dataclasses.replace(WON, messages=(Message(role="tool", content="door open"),))])
    trajectory = play(env, [OPEN])
    assert trajectory.segments[0].trailing_observation_tokens == RESULT


def test_non_canonical_split_of_a_word_is_stored_verbatim() -> None:
    odd = (0, 39, 5, END)  # 39 is an id the tokenizer does not even have
    trajectory = play(ScriptedEnvironment([WON]), [odd])
    assert trajectory.turns[0].action_tokens == odd


def test_turn_limit_truncates_and_keeps_the_last_observation() -> None:
    env = ScriptedEnvironment([tool_result(), tool_result()])
    trajectory = play(env, [OPEN, OPEN], max_turns=2)
    assert trajectory.termination is Termination.MAX_TURNS
    assert (trajectory.reward, trajectory.success, trajectory.metrics) == (0.25, False, {"reached": 1.0})
    assert trajectory.num_turns == 2
    assert trajectory.segments[0].trailing_observation_tokens == RESULT


def test_action_cut_at_its_limit_is_kept_and_not_carried_out() -> None:
    env = ScriptedEnvironment([tool_result(), WON])
    trajectory = play(env, [OPEN, OPEN + OPEN + OPEN], max_action_tokens=6)
    assert trajectory.termination is Termination.ACTION_LENGTH
    assert len(env.actions) == 1
    last = trajectory.turns[-1]
    assert (len(last.action_tokens), last.finish_reason, last.is_tool_call) == (6, FinishReason.LENGTH, False)
    assert trajectory.reward == 0.25


@pytest.mark.parametrize(
    "context, expected_turns, last_length, trailing",
    [
        (6, 0, 0, 0),  # the prompt alone fills the context
        (7, 1, 1, 0),  # room for one token
        (9, 1, 3, 0),  # the action is cut by the context
        (10, 1, 4, 0),  # the action fits exactly, the result no longer
        (16, 1, 4, 0),
        (17, 1, 4, 7),  # the result fits exactly and leaves no room to act
        (18, 2, 1, 0),  # room for one token of the second action
    ],
)
def test_context_limit_shortens_the_request_and_then_ends_the_episode(
    context: int, expected_turns: int, last_length: int, trailing: int
) -> None:
    env = ScriptedEnvironment([tool_result(), tool_result()])
    sampler = ScriptedReplies([OPEN, OPEN])
    trajectory = play_with(env, sampler, context_tokens=context)
    assert trajectory.termination is Termination.CONTEXT_OVERFLOW
    assert trajectory.num_turns == expected_turns
    assert trajectory.reward == 0.25
    for request in sampler.requests:
        assert len(request.input_ids) + request.max_new_tokens <= context
    if expected_turns:
        (segment,) = trajectory.segments
        assert len(segment.turns[-1].action_tokens) == last_length
        assert len(segment.trailing_observation_tokens) == trailing
        assert len(segment.tokens) + trailing <= context
    else:
        assert not trajectory.is_trainable


def test_action_without_end_token_is_closed_by_the_template() -> None:
    stopped_otherwise = (*RENDERER.encode("Action: look"), RENDERER.stop_token_ids[1])
    trajectory = play(ScriptedEnvironment([tool_result(), WON]), [stopped_otherwise, ANSWER])
    assert trajectory.turns[1].observation_tokens == (END, *RESULT)


def test_malformed_call_reaches_the_environment_as_an_error_and_the_episode_goes_on() -> None:
    env = ScriptedEnvironment([tool_result("open", is_valid_action=False), WON])
    malformed = (*RENDERER.encode("<answer> key"), END)
    trajectory = play(env, [malformed, ANSWER], RewardConfig(invalid_action_penalty=0.1))
    assert "not closed" in env.actions[0].parse_error
    assert trajectory.termination is Termination.COMPLETED
    assert [turn.penalty for turn in trajectory.turns] == [0.1, 0.0]
    assert trajectory.turns[0].action_tokens == malformed


def test_long_tool_result_is_cut_in_tokens_and_the_turn_is_closed() -> None:
    env = ScriptedEnvironment([tool_result("door " * 100_000), WON])
    trajectory = play(env, [OPEN, ANSWER], max_observation_tokens=5)
    door, cut = RENDERER.encode("door")[0], RENDERER.encode("[cut]")[0]
    header = RENDERER.encode("user")[0]
    assert trajectory.turns[1].observation_tokens == (
        2,
        header,
        *[door] * 4,
        cut,
        END,
        2,
        RENDERER.encode("assistant")[0],
    )
    assert trajectory.messages[2]["content"].endswith("[cut]")


@pytest.mark.parametrize(
    "env, text",
    [
        (ScriptedEnvironment(opening=ValueError("no world")), "environment start raised ValueError: no world"),
        (ScriptedEnvironment([ZeroDivisionError("x")]), "environment step raised ZeroDivisionError: x"),
        (ScriptedEnvironment([EnvironmentFault("lost")]), "environment step: lost"),
        (ScriptedEnvironment([tool_result()], outcome=OSError("gone")), "environment finish raised OSError: gone"),
        (ScriptedEnvironment([TimeoutError("its own")]), "environment step raised TimeoutError: its own"),
        (ScriptedEnvironment([SystemExit(3)]), "environment step raised SystemExit: 3"),
        (ScriptedEnvironment([tool_result()], outcome=SystemExit(3)), "environment finish raised SystemExit: 3"),
    ],
)
def test_fault_of_the_environment_leaves_the_outcome_unknown(env: ScriptedEnvironment, text: str) -> None:
    trajectory = play(env, [OPEN], max_turns=1)
    assert trajectory.termination is Termination.ENV_ERROR
    assert (trajectory.reward, trajectory.success) == (None, None)
    assert trajectory.error == text


def answers(result: object) -> ScriptedEnvironment:
    async def step() -> StepResult:
        return cast(StepResult, result)

    return ScriptedEnvironment([step])


@pytest.mark.parametrize(
    "env, text",
    [
        (answers(None), "environment step: returned NoneType; expected a StepResult"),
        (answers(StepResult(done=True, reward=math.nan, success=False)), "environment step: reward is nan"),
        (answers(StepResult(messages=(cast(Message, "hello"),))), "message 'hello' is no dict with a role"),
        (answers(StepResult(messages=(Message(role="tool", content=cast(str, 7)),))), "has no text as its content"),
        (ScriptedEnvironment(opening=()), "environment start: start returned no message"),
        (ScriptedEnvironment(gold_answers=cast(Any, "key")), "gold_answers is 'key'; expected a tuple of strings"),
        (
            ScriptedEnvironment([tool_result()], outcome=StepResult(done=True, reward=math.inf, success=True)),
            "environment finish: reward is inf",
        ),
    ],
)
def test_unusable_answer_of_the_environment_costs_its_episode_only(env: ScriptedEnvironment, text: str) -> None:
    trajectory = play(env, [OPEN], max_turns=1)
    assert trajectory.termination is Termination.ENV_ERROR
    assert (trajectory.reward, trajectory.success) == (None, None)
    assert text in trajectory.error


def test_failing_close_does_not_spoil_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    trajectory = play(ScriptedEnvironment([WON], close_error=OSError("busy")), [ANSWER])
    assert trajectory.reward == 1.0
    assert "environment close failed: OSError: busy" in caplog.text


def test_slow_tool_call_ends_the_episode_at_its_own_limit() -> None:
    trajectory = play(ScriptedEnvironment([tool_result(), sleep_for_an_hour]), [OPEN, OPEN], tool_timeout_s=0.05)
    assert trajectory.termination is Termination.TIMEOUT
    assert "environment step did not return within rollout.tool_timeout_s=0.05" in trajectory.error
    assert trajectory.reward is None
    assert trajectory.num_turns == 2  # kept for people to read


def test_deadline_of_a_blocking_call_counts_as_a_timeout() -> None:
    trajectory = play(ScriptedEnvironment([DeadlineError("simulator did not return within 1 s")]), [OPEN])
    assert trajectory.termination is Termination.TIMEOUT


def test_slow_episode_ends_at_the_episode_limit() -> None:
    env = ScriptedEnvironment([sleep_for_an_hour])
    trajectory = play(env, [OPEN], episode_timeout_s=0.05)
    assert trajectory.termination is Termination.TIMEOUT
    assert "rollout.episode_timeout_s=0.05" in trajectory.error


@pytest.mark.parametrize("error", [RolloutError("all servers are gone"), ServerRejectedError("HTTP 400: no")])
def test_failing_server_leaves_the_outcome_unknown(error: RolloutError) -> None:
    trajectory = play(ScriptedEnvironment([tool_result()]), [OPEN, error])
    assert trajectory.termination is Termination.SERVER_ERROR
    assert trajectory.error == f"{type(error).__name__}: {error.message}"
    assert (trajectory.num_turns, trajectory.reward) == (1, None)


def test_sample_of_another_policy_version_is_refused() -> None:
    trajectory = play_with(ScriptedEnvironment([WON]), ScriptedReplies([ANSWER], policy_version=3))
    assert trajectory.termination is Termination.SERVER_ERROR
    assert "sampled under policy version 3, wanted 0" in trajectory.error


def test_success_is_judged_by_the_configured_threshold() -> None:
    half = StepResult(done=True, reward=0.5, success=False)
    assert play(ScriptedEnvironment([half]), [ANSWER]).success is False
    assert play(ScriptedEnvironment([half]), [ANSWER], RewardConfig(success_threshold=0.5)).success is True


def test_unscorable_end_stays_unknown() -> None:
    trajectory = play(ScriptedEnvironment([StepResult(done=True)]), [ANSWER])
    assert trajectory.termination is Termination.COMPLETED
    assert (trajectory.reward, trajectory.success) == (None, None)


def test_seeds_depend_on_run_group_index_attempt_and_turn_only() -> None:
    base = TrajectoryId(prompt_id="p", group_id="4", index=1)
    seeds = {
        sampling_seed(run, id, turn)
        for run in (0, 1)
        for turn in (0, 1)
        for id in (
            base,
            dataclasses.replace(base, group_id="5"),
            dataclasses.replace(base, index=2),
            dataclasses.replace(base, attempt=1),
        )
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(0, dataclasses.replace(base, prompt_id="other"), 0) == sampling_seed(0, base, 0)
    sampler = ScriptedReplies([OPEN, ANSWER])
    play_with(ScriptedEnvironment([tool_result(), WON]), sampler)
    assert [request.sampling_seed for request in sampler.requests] == [sampling_seed(0, ID, turn) for turn in (0, 1)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    results=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    context=st.integers(6, 80),
    max_action=st.integers(1, 10),
    max_turns=st.integers(1, 6),
)
def test_any_script_gives_a_consistent_append_only_record(
    lengths: list[int], results: list[int], context: int, max_action: int, max_turns: int
) -> None:
    """Every request is the record so far; ids, mask and logprobs keep the same length; no limit is passed."""
    sampler = ScriptedReplies([(*[8] * (length - 1), END) for length in (lengths * 6)[:6]])
    env = ScriptedEnvironment([tool_result("door " * count) for count in results])
    trajectory = play_with(env, sampler, context_tokens=context, max_action_tokens=max_action, max_turns=max_turns)
    assert trajectory.termination.is_truncation
    record: tuple[int, ...] = ()
    for turn, request in zip(trajectory.turns, sampler.requests, strict=True):
        record += turn.observation_tokens
        assert request.input_ids == record
        assert len(turn.action_tokens) == len(turn.behavior_logprobs) <= min(max_action, context - len(record))
        record += turn.action_tokens
    for segment in trajectory.segments:
        assert segment.tokens == record
        assert len(record) + len(segment.trailing_observation_tokens) <= context


class _Demonstrator:
    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        assert (detour, premature) == (0.5, 0.1)
        return rng.choice(["Action: open door", "Action: look"])

    def oracle(self) -> str:
        return "Action: look"


def test_scripted_sampler_speaks_the_demonstration_and_ends_its_turn() -> None:
    def act(seed: int) -> list[str]:
        sampler = ScriptedSampler(_Demonstrator(), random.Random(seed), RENDERER, detour=0.5, premature=0.1)
        sampler_requests = ScriptedReplies([OPEN])
        play_with(ScriptedEnvironment([WON]), sampler_requests)
        samples = [asyncio.run(sampler.sample(sampler_requests.requests[0])) for _ in range(8)]
        assert all(RENDERER.ends_turn(sample.output_ids) for sample in samples)
        assert all(set(sample.logprobs) == {0.0} for sample in samples)
        cut = asyncio.run(sampler.sample(dataclasses.replace(sampler_requests.requests[0], max_new_tokens=2)))
        assert (len(cut.output_ids), cut.finish_reason) == (2, FinishReason.LENGTH)
        return [RENDERER.action_text(sample.output_ids) for sample in samples]

    assert act(1) == act(1)
    assert set(act(1)) == {"Action: open door", "Action: look"}
