"""A meter that chooses: which tokens it is asked about, what it prefers, and who waits for whom."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.data.scores import Forecast
from megatrl.data.states import segment_tokens
from megatrl.data.trajectories import FinishReason, TrajectoryId
from megatrl.errors import DeadlineError, ScoringError
from megatrl.meter.labels import LabelRule, trajectory_labels
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.episode import play_episode
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.selection import SelectingSampler, SelectionTally, Situation
from megatrl.scoring.group_meter import AskedStates, StateForecasts
from megatrl.scoring.meter_choice import MeterChooser
from tests.fakes.episodes import ScriptedEnvironment, tool_result
from tests.fakes.tiny_tokenizer import word_tokenizer

RENDERER = Renderer(
    word_tokenizer(["user", "tool", "assistant", "hello", "door", "open", "a", "b", "c"]), 32, "chatml", "react"
)
A, B, C = RENDERER.encode("a b c")
END = RENDERER.stop_token_ids[0]
REQUEST = SampleRequest(input_ids=(1, 2), max_new_tokens=4, temperature=1.0)


def tokens_of(asked: AskedStates) -> tuple[int, ...]:
    """The history that the meter's question follows."""
    (state,) = asked.states
    return segment_tokens(asked.trajectory.segments[state.segment_index])[: state.length]


class Meter:
    """Forecasts by a rule on the tokens; remembers what it was asked, call by call."""

    def __init__(self, rule: Callable[[tuple[int, ...]], Forecast], *, seconds: float = 0.0) -> None:
        self._rule, self._seconds = rule, seconds
        self.calls: list[list[tuple[int, ...]]] = []
        self.running = self.most_running = 0
        self.threads: set[int] = set()

    def forecast_states(self, asked: Sequence[AskedStates]) -> StateForecasts:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.threads.add(threading.get_ident())
        time.sleep(self._seconds)
        self.calls.append([tokens_of(item) for item in asked])
        self.running -= 1
        return StateForecasts(forecasts=tuple((self._rule(tokens),) for tokens in self.calls[-1]), num_shortened=0)


def to_go(tokens: float) -> Forecast:
    return Forecast(is_valid=True, completion=True, completion_prob=0.9, tokens_to_go=tokens)


FAILURE, UNREADABLE = Forecast(is_valid=True), Forecast(is_valid=False)


def sample(*ids: int) -> Sample:
    return Sample(output_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=FinishReason.STOP, policy_version=0)


def chosen(*forecasts: Forecast, failure_cost: float = 100.0) -> tuple[int, MeterChooser]:
    """The choice among candidates (10,), (11,), ... with these forecasts."""
    meter = Meter(lambda tokens: forecasts[tokens[-1] - 10])
    chooser = MeterChooser(meter, failure_cost=failure_cost, timeout_s=10)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=REQUEST.input_ids)
    candidates = [sample(10 + i) for i in range(len(forecasts))]
    return asyncio.run(chooser.choose(situation, candidates)), chooser


def test_the_least_remaining_work_is_chosen_and_the_first_of_equals() -> None:
    assert chosen(to_go(610), to_go(480), FAILURE, to_go(480), failure_cost=2000)[0] == 1
    assert chosen(to_go(3), to_go(3))[0] == 0
    assert chosen(FAILURE, UNREADABLE, to_go(99))[0] == 2


def test_where_all_cost_c_the_first_is_taken_and_counted() -> None:
    index, chooser = chosen(FAILURE, to_go(500), UNREADABLE)
    assert index == 0
    assert chooser.tally.metrics == {
        "choice/calls": 1.0,
        "choice/choices_per_call": 1.0,
        "choice/invalid": 1 / 3,
        "choice/all_at_failure_cost": 1.0,
    }


def test_what_is_scored_is_token_by_token_what_meter_data_after_an_action_holds() -> None:
    class Actions:
        """Two turns; the first candidate of each is what the episode carries out."""

        turns = iter([(A, END), (B, END), (C, A, END), (B, C, END)])

        async def sample(self, request: SampleRequest) -> Sample:
            return sample(*next(self.turns))

    meter = Meter(lambda tokens: to_go(1))
    chooser = MeterChooser(meter, failure_cost=100, timeout_s=10)
    sampler = SelectingSampler(sampler=Actions(), chooser=chooser, num_candidates=2, tally=SelectionTally())
    env = ScriptedEnvironment(steps=[tool_result(), tool_result(done=True, reward=1.0, success=True)])
    trajectory = asyncio.run(
        play_episode(
            env,
            sampler,
            RENDERER,
            id=TrajectoryId(prompt_id="p", group_id="0", index=0),
            limits=RolloutConfig(tool_format="react", max_turns=2, context_tokens=100),
            reward=RewardConfig(),
            policy_version=0,
            seed=0,
        )
    )
    labels = trajectory_labels(trajectory, LabelRule(cut="after_action", with_terminal=True))
    assert len(labels) == 2
    histories = [segment_tokens(trajectory.segments[0])[: label.state.length] for label in labels]
    assert [call[0] for call in meter.calls] == histories
    assert [call[1] for call in meter.calls] == [(*histories[0][:-2], B, END), (*histories[1][:-3], B, C, END)]


def test_episodes_that_ask_together_are_scored_together_one_call_at_a_time_off_the_event_loop() -> None:
    meter = Meter(lambda tokens: to_go(tokens[-1]), seconds=0.05)
    chooser = MeterChooser(meter, failure_cost=1000, timeout_s=30)

    async def episode(number: int) -> list[int]:
        rng, choices = random.Random(number), []
        for _ in range(4):
            situation = Situation(request=REQUEST, turns=(), observation_tokens=(number,))
            picks = rng.sample(range(10, 20), 3)
            best = picks.index(min(picks))
            choices.append(await chooser.choose(situation, [sample(p) for p in picks]) - best)
            await asyncio.sleep(rng.random() / 50)
        return choices

    async def all_episodes() -> list[list[int]]:
        return await asyncio.gather(*(episode(number) for number in range(20)))

    assert asyncio.run(all_episodes()) == [[0] * 4] * 20
    assert meter.most_running == 1
    assert threading.get_ident() not in meter.threads
    assert sum(len(call) for call in meter.calls) == 20 * 4 * 3
    assert len(meter.calls) <= 20  # not one for each of the 80 choices
    assert asyncio.run(all_episodes()) == [[0] * 4] * 20  # another event loop, as after the death of a server


def test_more_choices_than_one_call_takes_are_answered_in_turn() -> None:
    meter = Meter(lambda tokens: to_go(tokens[-1]))
    chooser = MeterChooser(meter, failure_cost=1000, timeout_s=30, max_choices_per_call=3)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())

    async def all_choices() -> list[int]:
        return await asyncio.gather(*(chooser.choose(situation, [sample(9), sample(8)]) for _ in range(7)))

    assert asyncio.run(all_choices()) == [1] * 7
    assert [len(call) for call in meter.calls] == [6, 6, 2]


def test_an_error_of_the_meter_reaches_every_episode_that_waits_and_the_next_choice_is_served() -> None:
    is_broken = [True]

    def rule(tokens: tuple[int, ...]) -> Forecast:
        if is_broken[0]:
            raise ScoringError("weights changed")
        return to_go(tokens[-1])

    chooser = MeterChooser(Meter(rule), failure_cost=1000, timeout_s=30)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())

    async def choices() -> list[int | BaseException]:
        both = [chooser.choose(situation, [sample(9), sample(8)]) for _ in range(2)]
        return await asyncio.gather(*both, return_exceptions=True)

    async def story() -> None:
        assert [str(error) for error in await choices()] == ["weights changed"] * 2
        is_broken[0] = False
        assert await choices() == [1, 1]

    asyncio.run(story())


def test_a_meter_that_does_not_answer_ends_the_wait_and_says_so() -> None:
    chooser = MeterChooser(Meter(lambda tokens: to_go(1), seconds=0.6), failure_cost=1000, timeout_s=0.1)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())
    with pytest.raises(DeadlineError, match=r"did not score 2 candidate actions within 0.1 s"):
        asyncio.run(chooser.choose(situation, [sample(9), sample(8)]))


def test_an_episode_that_is_given_up_leaves_the_others_their_answers() -> None:
    meter = Meter(lambda tokens: to_go(tokens[-1]), seconds=0.1)
    chooser = MeterChooser(meter, failure_cost=1000, timeout_s=30)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())

    async def story() -> int:
        given_up, kept = (asyncio.create_task(chooser.choose(situation, [sample(9), sample(8)])) for _ in range(2))
        await asyncio.sleep(0.05)
        given_up.cancel()
        return await kept

    assert asyncio.run(story()) == 1


def test_an_idle_meter_waits_a_moment_for_episodes_that_come_a_little_later() -> None:
    meter = Meter(lambda tokens: to_go(tokens[-1]))
    chooser = MeterChooser(meter, failure_cost=1000, timeout_s=30, gather_s=0.5)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())

    async def story() -> None:
        first = asyncio.create_task(chooser.choose(situation, [sample(9), sample(8)]))
        await asyncio.sleep(0.01)
        assert await chooser.choose(situation, [sample(7), sample(8)]) == 0
        assert await first == 1

    asyncio.run(story())
    assert [len(call) for call in meter.calls] == [4]


def test_a_call_that_was_given_up_ends_before_the_next_one_begins() -> None:
    meter = Meter(lambda tokens: to_go(tokens[-1]), seconds=0.4)
    situation = Situation(request=REQUEST, turns=(), observation_tokens=())
    chooser = MeterChooser(meter, failure_cost=1000, timeout_s=30, gather_s=0)

    async def given_up() -> None:
        waiting = asyncio.create_task(chooser.choose(situation, [sample(9), sample(8)]))
        await asyncio.sleep(0.1)
        waiting.cancel()

    asyncio.run(given_up())
    assert asyncio.run(chooser.choose(situation, [sample(9), sample(8)])) == 1
    assert meter.most_running == 1
