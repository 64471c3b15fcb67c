"""The server backend: a frozen model on a server of its own answers over HTTP, and its prefix cache shares the trunk.

For each trajectory in order: the trunk as a warm-up, which fills the cache, then one short request for each branch:

    input_ids = trunk[:boundary] + branch,   logprob_start_len = one before the first scored token

Everything is read at positions of the prompt; a target behind the last fed token is fed, too, so that nothing depends
on how a server samples. Trajectories go side by side; those that begin alike wait until the first has brought their
common beginning into the cache, since requests in flight share nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from megatrl.errors import RolloutError, ScoringError
from megatrl.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from megatrl.scoring.branches import Branch, BranchLogprobs, TrunkLogprobs, TrunkQuery

logger = logging.getLogger(__name__)

FROZEN_VERSION = -1
"""Weight version that a frozen model's server names. Policies count from 0, so theirs is never taken for it."""
CONCURRENT_TRAJECTORIES = 64
MIN_REUSE = 0.5
"""Smallest share of the expected prefix tokens that the cache must give; below, scoring costs what it should save."""
GOOD_REUSE = 0.95
"""Below this share a warning says what is lost: a page size above 1, or a cache that is too small."""


class PromptReader(Protocol):
    async def prompt_logprobs(self, request: PromptRequest) -> PromptLogprobs: ...


@dataclass(slots=True)
class PrefixReuse:
    """Tokens of prompts over all requests of one `score`."""

    num_requests: int = 0
    prompt_tokens: int = 0
    expected: int = 0  # of them in the cache, if it keeps what earlier requests of the same trajectory brought
    cached: int = 0  # of those expected, what the server says that it found

    @property
    def share(self) -> float:
        return self.cached / self.expected if self.expected else 1.0

    def add(self, reply: PromptLogprobs, request: PromptRequest, *, expected: int) -> None:
        self.num_requests += 1
        self.prompt_tokens += len(request.input_ids)
        self.expected += expected
        self.cached += min(reply.cached_tokens, expected)

    def check(self) -> None:
        """Raises ScoringError where the cache does not work, warns where it works badly."""
        if self.share >= GOOD_REUSE:
            return
        text = f"the scoring server found {self.cached} of {self.expected} prefix tokens in its cache"
        if self.share < MIN_REUSE:
            raise ScoringError(
                f"{text}, so every boundary repeats its prefix. Do not disable its radix cache "
                "(rollout.servers.sglang), raise rollout.servers.max_total_tokens or mem_fraction_static, or set "
                "scoring.backend: tree"
            )
        logger.warning("%s; a larger cache (rollout.servers.max_total_tokens) would make scoring faster", text)


@dataclass(slots=True, kw_only=True)
class ServerBackend:
    """A BranchBackend over one or several servers with the same frozen weights.

    Temperature 1 only: servers differ in whether the temperature counts for given tokens, and SGLang (0.5.23) ignores
    it without a word. `reuse` is of the last `score`.
    """

    readers: Callable[[], AbstractAsyncContextManager[PromptReader]]
    """Opens a client of the servers inside an event loop."""
    request_timeout_s: float
    reuse: PrefixReuse = field(default_factory=PrefixReuse)

    def score(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]:
        """One TrunkLogprobs for each query. Must not be called from inside an event loop.

        Raises RolloutError where a server does not answer, ScoringError where it does not hold the frozen weights,
        did not reuse its cache, or another temperature than 1 is asked for.
        """
        for branch in (branch for query in queries for here in query.branches for branch in here):
            if branch.temperature != 1.0:
                raise ScoringError(
                    f"scoring.backend: sglang reads given tokens at temperature 1, {branch.temperature:g} was asked; "
                    "set rollout.sampling.temperature: 1, loss.kl_coefficient: 0, or scoring.backend: tree"
                )
        self.reuse = PrefixReuse()
        if not any(here for query in queries for here in query.branches):
            return tuple(tuple(() for _ in query.branches) for query in queries)
        try:
            results = asyncio.run(self._score_all(queries))
        except* (RolloutError, ScoringError) as group:
            raise _first(group) from group
        self.reuse.check()
        return results

    async def _score_all(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]:
        gate = asyncio.Semaphore(CONCURRENT_TRAJECTORIES)
        beginnings: dict[tuple[int, ...], asyncio.Lock] = {}
        async with self.readers() as reader, asyncio.TaskGroup() as tasks:

            async def one(query: TrunkQuery) -> TrunkLogprobs:
                async with gate:
                    return await self._score_one(reader, query, beginnings)

            running = [tasks.create_task(one(query)) for query in queries]
        return tuple(task.result() for task in running)

    async def _score_one(
        self, reader: PromptReader, query: TrunkQuery, beginnings: dict[tuple[int, ...], asyncio.Lock]
    ) -> TrunkLogprobs:
        asked = [boundary for boundary, here in zip(query.boundaries, query.branches, strict=True) if here]
        if not asked:
            return tuple(() for _ in query.branches)
        trunk, beginning = query.trunk[: max(asked)], query.trunk[: min(asked)]
        key = str(hash(beginning))  # one group goes to one server, where its prompt is cached
        if trunk:
            first = PromptRequest(input_ids=trunk, first=len(trunk), deadline_s=self.request_timeout_s, routing_key=key)
            lock = beginnings.get(beginning)
            if lock is None:
                async with beginnings.setdefault(beginning, asyncio.Lock()):
                    await self._read(reader, first, expected=0)
            else:
                async with lock:
                    pass
                await self._read(reader, first, expected=min(len(beginning), len(trunk) - 1))
        answers: list[tuple[BranchLogprobs, ...]] = []
        for boundary, here in zip(query.boundaries, query.branches, strict=True):
            answers.append(tuple([await self._branch(reader, trunk, boundary, branch, key) for branch in here]))
        return tuple(answers)

    async def _branch(
        self, reader: PromptReader, trunk: tuple[int, ...], boundary: int, branch: Branch, key: str
    ) -> BranchLogprobs:
        wanted = [place for place, targets in enumerate(branch.targets) if targets]
        fed = branch.tokens[: wanted[-1] + 1]
        if len(fed) == wanted[-1]:  # the last target is behind the last token: it becomes a token of the prompt
            fed = (*fed, branch.targets[wanted[-1]][0])
        others = sorted({t for place in wanted for t in branch.targets[place] if t != fed[place]})
        request = PromptRequest(
            input_ids=trunk[:boundary] + fed,
            first=boundary + wanted[0],
            others=tuple(others),
            deadline_s=self.request_timeout_s,
            routing_key=key,
        )
        # The cache gives no more than what stands before the place of the first None.
        reply = await self._read(reader, request, expected=min(boundary, request.first - 1))

        def value(place: int, target: int) -> float:
            at = place - wanted[0]
            return reply.tokens[at] if target == fed[place] else reply.others[at][others.index(target)]

        return tuple(tuple(value(place, t) for t in targets) for place, targets in enumerate(branch.targets))

    async def _read(self, reader: PromptReader, request: PromptRequest, *, expected: int) -> PromptLogprobs:
        reply = await reader.prompt_logprobs(request)
        if reply.policy_version != FROZEN_VERSION:
            raise ScoringError(
                f"the scoring server holds weights of version {reply.policy_version}; a frozen model's server names "
                f"{FROZEN_VERSION}. Rollout servers, whose weights move, cannot score"
            )
        self.reuse.add(reply, request, expected=expected)
        return reply


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
