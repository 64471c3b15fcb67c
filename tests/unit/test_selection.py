"""Action selection: what is sampled, what is offered, what is chosen, and what it costs."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from megatrl.data.trajectories import FinishReason
from megatrl.errors import RolloutError
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.selection import (
    RandomChooser,
    SelectingSampler,
    SelectingSamplers,
    SelectionTally,
    Situation,
    candidate_seed,
)

REQUEST = SampleRequest(input_ids=(7, 8), max_new_tokens=4, temperature=1.0, sampling_seed=5)


@dataclass
class SeededSampler:
    """Answers each seed with the next of its actions and remembers what it was asked."""

    actions: Sequence[tuple[int, ...]]
    requests: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        ids = self.actions[(len(self.requests) - 1) % len(self.actions)]
        return Sample(output_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=FinishReason.STOP, policy_version=3)


@dataclass
class Picks:
    index: int
    offered: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
        self.offered.append(tuple(c.output_ids for c in candidates))
        return self.index


def select(actions: Sequence[tuple[int, ...]], chooser, **options) -> tuple[Sample, SelectionTally, SeededSampler]:
    sampler, tally = SeededSampler(actions), SelectionTally()
    selecting = SelectingSampler(sampler=sampler, chooser=chooser, num_candidates=len(actions), tally=tally, **options)
    return asyncio.run(selecting.sample(REQUEST)), tally, sampler


def test_equal_actions_are_offered_once_in_the_order_sampled_and_the_choice_is_carried_out() -> None:
    chooser = Picks(1)
    chosen, tally, sampler = select([(1, 2), (3,), (1, 2), (4, 4, 4)], chooser)
    assert chooser.offered == [((1, 2), (3,), (4, 4, 4))]
    assert chosen.output_ids == (3,)
    assert (tally.turns, tally.candidates, tally.distinct_candidates) == (1, 4, 3)
    assert (tally.sampled_tokens, tally.chosen_tokens, tally.turned_from_first) == (8, 1, 1)
    assert [r.input_ids for r in sampler.requests] == [(7, 8)] * 4


def test_the_first_candidate_is_the_action_without_selection_and_all_seeds_differ() -> None:
    _, tally, sampler = select([(1,), (2,), (3,), (4,)], Picks(0))
    seeds = [request.sampling_seed for request in sampler.requests]
    assert seeds[0] == REQUEST.sampling_seed
    assert len(set(seeds)) == 4
    assert seeds == [candidate_seed(5, index) for index in range(4)]
    assert tally.turned_from_first == 0


def test_an_action_that_is_alone_is_taken_without_asking() -> None:
    chooser = Picks(0)
    chosen, tally, _ = select([(1,), (1,)], chooser)
    assert chosen.output_ids == (1,)
    assert chooser.offered == []
    assert tally.metrics["selection/distinct"] == 1.0
    single, _, sampler = select([(9,)], chooser)
    assert (single.output_ids, len(sampler.requests), chooser.offered) == ((9,), 1, [])


def test_the_random_control_samples_the_policy_and_repeats_itself() -> None:
    actions = [(1,), (1,), (1,), (2,)]

    def chosen(seed: int) -> tuple[int, ...]:
        selecting = SelectingSampler(
            sampler=SeededSampler(actions),
            chooser=RandomChooser(),
            num_candidates=4,
            tally=SelectionTally(),
            is_deduplicated=False,
        )
        request = SampleRequest(input_ids=(), max_new_tokens=4, temperature=1.0, sampling_seed=seed)
        return asyncio.run(selecting.sample(request)).output_ids

    picks = [chosen(seed) for seed in range(400)]
    assert picks == [chosen(seed) for seed in range(400)]
    assert picks.count((2,)) / 400 == pytest.approx(0.25, abs=0.07)


def test_a_choice_that_is_not_there_and_no_candidates_are_refused() -> None:
    with pytest.raises(RolloutError, match="answered 2 for 2 candidates"):
        select([(1,), (2,)], Picks(2))
    with pytest.raises(RolloutError, match="num_candidates is 0"):
        SelectingSampler(sampler=SeededSampler([(1,)]), chooser=Picks(0), num_candidates=0, tally=SelectionTally())


def test_a_source_wraps_the_sampler_of_every_episode_and_counts_them_together() -> None:
    class Source:
        @asynccontextmanager
        async def open(self):
            yield lambda env, id, policy_version: SeededSampler([(1,), (2, 2)])

    samplers = SelectingSamplers(Source(), Picks(1), num_candidates=2)

    async def two_episodes() -> list[Sample]:
        async with samplers.open() as sampler_for:
            return [await sampler_for(None, id, 0).sample(REQUEST) for id in ("a", "b")]  # type: ignore[arg-type]

    assert [s.output_ids for s in asyncio.run(two_episodes())] == [(2, 2), (2, 2)]
    assert samplers.tally.metrics == {
        "selection/candidates": 2.0,
        "selection/distinct": 2.0,
        "selection/changed": 1.0,
        "selection/sampled_tokens": 6.0,
        "selection/chosen_tokens": 4.0,
    }


def test_a_chooser_sees_the_turns_carried_out_and_none_from_before_history_was_rewritten() -> None:
    class Notes:
        def __init__(self) -> None:
            self.seen: list[tuple[list[tuple[int, ...]], tuple[int, ...]]] = []

        async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
            self.seen.append(([turn.action_tokens for turn in situation.turns], situation.observation_tokens))
            return 1

    notes = Notes()
    sampler = SelectingSampler(
        sampler=SeededSampler([(1,), (2, 2)]), chooser=notes, num_candidates=2, tally=SelectionTally()
    )

    async def episode() -> None:
        for ids in ((7, 8), (7, 8, 2, 2, 9), (7, 8, 2, 2, 9, 2, 2, 6), (5, 4)):
            await sampler.sample(SampleRequest(input_ids=ids, max_new_tokens=4, temperature=1.0))

    asyncio.run(episode())
    assert notes.seen == [([], (7, 8)), ([(2, 2)], (9,)), ([(2, 2)] * 2, (6,)), ([], (5, 4))]
