"""Test-time action selection: several candidate actions at each turn, of which one is carried out.

Source: DeltaTTG, action selection by a meter. No candidate is executed before it is chosen, so no
environment has to be rolled back. A SelectingSampler is a Sampler like any other: an episode does not
know that its action was one of several.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatrl.data.trajectories import TrajectoryId, Turn
from megatrl.envs.protocol import Environment
from megatrl.errors import RolloutError
from megatrl.rollout.collector import SamplerForEpisode, SamplerSource
from megatrl.rollout.sampler import Sample, Sampler, SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where candidates are offered: the tokens up to here, as turns and as one request."""

    request: SampleRequest
    turns: tuple[Turn, ...]  # carried out so far, since history was last rewritten
    observation_tokens: tuple[int, ...]  # since the last action; with the turns' tokens they are request.input_ids
    env: Environment | None = None  # of this episode, untouched by the candidates


class Chooser(Protocol):
    async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
        """Index of the candidate to carry out; candidates are at least two."""
        ...


class RandomChooser:
    """The control: a candidate at random, by the request's own seed. Without deduplication it samples the policy."""

    async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
        return random.Random(f"choose {situation.request.sampling_seed}").randrange(len(candidates))


@dataclass(slots=True)
class SelectionTally:
    """What selection cost so far. Tokens are action tokens, end tokens included."""

    turns: int = 0
    candidates: int = 0
    distinct_candidates: int = 0
    sampled_tokens: int = 0  # of all candidates
    chosen_tokens: int = 0
    turned_from_first: int = 0  # turns at which another than the first candidate was chosen

    def add(self, other: "SelectionTally") -> None:
        self.turns += other.turns
        self.candidates += other.candidates
        self.distinct_candidates += other.distinct_candidates
        self.sampled_tokens += other.sampled_tokens
        self.chosen_tokens += other.chosen_tokens
        self.turned_from_first += other.turned_from_first

    @property
    def metrics(self) -> dict[str, float]:
        turns = max(self.turns, 1)
        return {
            "selection/candidates": self.candidates / turns,
            "selection/distinct": self.distinct_candidates / turns,
            "selection/changed": self.turned_from_first / turns,
            "selection/sampled_tokens": float(self.sampled_tokens),
            "selection/chosen_tokens": float(self.chosen_tokens),
        }


@dataclass(slots=True)
class _History:
    """Turns of one episode since its history was last rewritten."""

    turns: list[Turn] = field(default_factory=list)
    tokens: tuple[int, ...] = ()

    def observe(self, input_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What is new since the last action: everything, where the history before it is another one now."""
        if input_ids[: len(self.tokens)] != self.tokens:
            self.turns, self.tokens = [], ()
        return input_ids[len(self.tokens) :]

    def act(self, observation: tuple[int, ...], action: Sample) -> None:
        self.turns.append(turn_of(observation, action))
        self.tokens = (*self.tokens, *observation, *action.output_ids)


def turn_of(observation_tokens: tuple[int, ...], action: Sample) -> Turn:
    """The turn that an action makes after what was observed."""
    return Turn(
        observation_tokens=observation_tokens,
        action_tokens=action.output_ids,
        behavior_logprobs=action.logprobs,
        policy_version=action.policy_version,
        finish_reason=action.finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectingSampler:
    """Samples `num_candidates` actions at once and returns the chosen one. One for each episode.

    The first candidate has the request's own seed, so it is the action that would have been taken
    without selection. With `is_deduplicated` equal actions are offered once, and one that is alone is
    taken without asking.
    """

    sampler: Sampler
    chooser: Chooser
    num_candidates: int
    tally: SelectionTally
    is_deduplicated: bool = True
    env: Environment | None = None
    history: _History = field(default_factory=_History)

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise RolloutError(f"num_candidates is {self.num_candidates}; at least one action has to be sampled")

    async def sample(self, request: SampleRequest) -> Sample:
        """Raises what the sampler raises for any candidate, and RolloutError for a choice that is not there."""
        requests = [
            replace(request, sampling_seed=candidate_seed(request.sampling_seed, i)) for i in range(self.num_candidates)
        ]
        observation = self.history.observe(request.input_ids)
        sampled = await asyncio.gather(*(self.sampler.sample(each) for each in requests))
        first_of = {s.output_ids: i for i, s in reversed(list(enumerate(sampled)))}
        offered = [sampled[i] for i in sorted(first_of.values())] if self.is_deduplicated else sampled
        situation = Situation(
            request=request, turns=tuple(self.history.turns), observation_tokens=observation, env=self.env
        )
        index = await self.chooser.choose(situation, offered) if len(offered) > 1 else 0
        if not 0 <= index < len(offered):
            raise RolloutError(f"the chooser answered {index} for {len(offered)} candidates")
        chosen = offered[index]
        tally = self.tally
        tally.turns += 1
        tally.candidates += len(sampled)
        tally.distinct_candidates += len({s.output_ids for s in sampled})
        tally.sampled_tokens += sum(len(s.output_ids) for s in sampled)
        tally.chosen_tokens += len(chosen.output_ids)
        tally.turned_from_first += chosen.output_ids != sampled[0].output_ids
        self.history.act(observation, chosen)
        return chosen


class SelectingSamplers:
    """A SamplerSource whose samplers select, around another source."""

    def __init__(
        self, source: SamplerSource, chooser: Chooser, *, num_candidates: int, is_deduplicated: bool = True
    ) -> None:
        self._source, self._chooser = source, chooser
        self._num_candidates, self._is_deduplicated = num_candidates, is_deduplicated
        self.tallies: dict[TrajectoryId, SelectionTally] = {}
        """Of every episode that was begun, failed attempts included."""

    @property
    def tally(self) -> SelectionTally:
        """All episodes together."""
        total = SelectionTally()
        for tally in self.tallies.values():
            total.add(tally)
        return total

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SamplerForEpisode]:
        async with self._source.open() as sampler_for:

            def selecting(env: Environment, id: TrajectoryId, policy_version: int) -> Sampler:
                tally = self.tallies[id] = SelectionTally()
                return SelectingSampler(
                    sampler=sampler_for(env, id, policy_version),
                    chooser=self._chooser,
                    num_candidates=self._num_candidates,
                    tally=tally,
                    env=env,
                    is_deduplicated=self._is_deduplicated,
                )

            yield selecting


def candidate_seed(seed: int, index: int) -> int:
    """The request's own seed for the first candidate, a 63-bit number made from both for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1
