"""Collector: plays the groups of a step concurrently and stands between them and infrastructure failures."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.config.model_shape import ModelShape
from megatrl.data.trajectories import Prompt, PromptGroup, Termination, Trajectory, TrajectoryId
from megatrl.envs.protocol import Demonstrator, Environment
from megatrl.errors import EnvironmentFault, MegatrlError, RolloutError, ServerRejectedError
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.episode import play_episode
from megatrl.rollout.sampler import Sample, Sampler, SampleRequest
from megatrl.rollout.scripted import ScriptedSampler
from megatrl.rollout.seeds import sampling_seed
from megatrl.rollout.stall import blocking_calls_end_after

logger = logging.getLogger(__name__)

SamplerForEpisode = Callable[[Environment, TrajectoryId, int], Sampler]
"""(environment, trajectory, policy version) -> who acts in that episode."""


class SamplerSource(Protocol):
    """Opens samplers inside the event loop of one `collect` call."""

    def open(self) -> AbstractAsyncContextManager[SamplerForEpisode]: ...


class ServerSamplers:
    """All episodes share one client of the rollout servers."""

    def __init__(
        self, urls: Callable[[], Sequence[str]], *, vocab_size: int, routed_shape: ModelShape | None = None
    ) -> None:
        """`urls` is asked at each collect: servers may have been restarted elsewhere.

        With `routed_shape`, a mixture model's, the tokens' expert choices are recorded.
        """
        self._urls = urls
        self._vocab_size = vocab_size
        self._routed_shape = routed_shape

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SamplerForEpisode]:
        client = SGLangSampler(self._urls(), vocab_size=self._vocab_size, routed_shape=self._routed_shape)
        async with client as sampler:
            yield lambda env, id, policy_version: sampler


class ScriptedSamplers:
    """Every episode is acted by its environment's scripted policy."""

    def __init__(self, renderer: Renderer, *, seed: int, detour: float, premature: float) -> None:
        self._renderer, self._seed, self._detour, self._premature = renderer, seed, detour, premature

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SamplerForEpisode]:
        yield self._sampler

    def _sampler(self, env: Environment, id: TrajectoryId, policy_version: int) -> Sampler:
        if not isinstance(env, Demonstrator):
            raise EnvironmentFault(
                f"{type(env).__name__} has no scripted policy; choose an environment that demonstrates"
            )
        return ScriptedSampler(
            env,
            random.Random(sampling_seed(self._seed, id, 0)),
            self._renderer,
            detour=self._detour,
            premature=self._premature,
            policy_version=policy_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What one `collect` did. Tokens are counted over all attempts, kept or not."""

    num_episodes: int = 0
    num_attempts: int = 0
    failures: Mapping[Termination, int] = field(default_factory=dict)
    """Infrastructure failures by kind, replaced ones included."""
    num_unknown: int = 0  # episodes whose last attempt failed too
    first_error: str = ""
    num_requests: int = 0
    num_sampled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0


class PlayedGroups(Protocol):
    """Groups by their place in the prompt stream: some were played before an interruption, others are now."""

    def played(self, position: int) -> PromptGroup | None: ...

    def add(self, group: PromptGroup) -> None: ...


class NothingPlayed:
    """For episodes that are played in full each time."""

    def played(self, position: int) -> PromptGroup | None:
        return None

    def add(self, group: PromptGroup) -> None:
        return None


NOTHING_PLAYED = NothingPlayed()

Progress = Callable[[int, int, int], None]
"""(episodes done, episodes in all, tokens sampled so far)"""


class Collector:
    """Plays `group_size` episodes for each prompt. One event loop for each `collect` call."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        reward: RewardConfig,
        renderer: Renderer,
        make_environment: Callable[[Prompt], Environment],
        samplers: SamplerSource,
        group_size: int,
        seed: int,
        temperature: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`temperature` replaces `config.sampling.temperature`: 0 is greedy (evaluation)."""
        self._config = config
        self._reward = reward
        self._renderer = renderer
        self._make_environment = make_environment
        self._samplers = samplers
        self._group_size = group_size
        self._seed = seed
        self._temperature = temperature
        self._progress = progress
        self.report = CollectReport()
        """Of the last `collect`, a failed one included."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        first_position: int,
        policy_version: int,
        journal: PlayedGroups = NOTHING_PLAYED,
    ) -> tuple[PromptGroup, ...]:
        """One group for each prompt, in order. Must not be called from inside an event loop.

        `first_position` is the place of `prompts[0]` in the prompt stream; a group's id is its place,
        so a prompt taken again later is another group. Groups that `journal` holds are taken from it, the
        others are added to it as they complete. An episode that ends in an infrastructure
        failure is played again, up to `max_attempts` in all, unless the server refused it for good.
        Raises RolloutError, with the first error, as soon as more than `max_failure_fraction` of the
        episodes have failed for good.
        """
        run = _CollectRun(num_episodes=len(prompts) * self._group_size, started=time.monotonic())
        try:
            return asyncio.run(self._groups(run, prompts, first_position, policy_version, journal))
        except* RolloutError as group:
            raise _first(group) from group
        finally:
            self.report = run.report()
            self._log(self.report)

    async def _groups(
        self,
        run: "_CollectRun",
        prompts: Sequence[Prompt],
        first_position: int,
        policy_version: int,
        journal: PlayedGroups,
    ) -> tuple[PromptGroup, ...]:
        gate = asyncio.Semaphore(self._config.max_concurrent_episodes)
        async with (
            blocking_calls_end_after(self._config.tool_timeout_s),
            self._samplers.open() as sampler_for,
            asyncio.TaskGroup() as tasks,
        ):

            async def member(prompt: Prompt, position: int, index: int) -> Trajectory:
                async with gate:
                    return await self._member(run, sampler_for, prompt, position, index, policy_version)

            async def complete(prompt: Prompt, position: int, members: list[asyncio.Task[Trajectory]]) -> PromptGroup:
                trajectories = tuple([await task for task in members])
                group = PromptGroup(prompt=prompt, group_id=str(position), trajectories=trajectories)
                journal.add(group)
                return group

            groups: list[PromptGroup | asyncio.Task[PromptGroup]] = []
            for position, prompt in enumerate(prompts, start=first_position):
                group = journal.played(position)
                if group is not None:
                    run.done += self._group_size
                    groups.append(group)
                    continue
                members = [tasks.create_task(member(prompt, position, index)) for index in range(self._group_size)]
                groups.append(tasks.create_task(complete(prompt, position, members)))
        return tuple(group if isinstance(group, PromptGroup) else group.result() for group in groups)

    async def _member(
        self,
        run: "_CollectRun",
        sampler_for: SamplerForEpisode,
        prompt: Prompt,
        position: int,
        index: int,
        policy_version: int,
    ) -> Trajectory:
        """One member of a group: played until its outcome is known or its attempts are used up."""
        attempt = 0
        while True:
            id = TrajectoryId(prompt_id=prompt.prompt_id, group_id=str(position), index=index, attempt=attempt)
            trajectory = await self._attempt(run, sampler_for, prompt, id, policy_version)
            run.attempts += 1
            attempt += 1
            if not trajectory.termination.is_infrastructure_failure:
                break
            run.failures[trajectory.termination] += 1
            run.first_error = run.first_error or f"{trajectory.id}: {trajectory.error}"
            if attempt >= self._config.max_attempts or _was_refused(trajectory):
                run.unknown += 1
                run.check(self._config.max_failure_fraction)
                break
        run.done += 1
        if self._progress is not None:
            self._progress(run.done, run.num_episodes, run.sampled_tokens)
        return trajectory

    async def _attempt(
        self, run: "_CollectRun", sampler_for: SamplerForEpisode, prompt: Prompt, id: TrajectoryId, policy_version: int
    ) -> Trajectory:
        try:
            env = self._make_environment(prompt)
            sampler = sampler_for(env, id, policy_version)
        except (Exception, SystemExit) as error:  # an environment may raise anything; it costs one trajectory
            text = error.message if isinstance(error, MegatrlError) else f"{type(error).__name__}: {error}"
            return Trajectory(
                id=id,
                segments=(),
                reward=None,
                success=None,
                termination=Termination.ENV_ERROR,
                error=f"environment could not be made: {text}",
            )
        return await play_episode(
            env,
            _Counted(sampler, run),
            self._renderer,
            id=id,
            limits=self._config,
            reward=self._reward,
            policy_version=policy_version,
            seed=self._seed,
            temperature=self._temperature,
        )

    @staticmethod
    def _log(report: CollectReport) -> None:
        logger.info(
            "collect episodes=%d attempts=%d requests=%d sampled_tokens=%d cached_share=%.2f seconds=%.1f",
            report.num_episodes,
            report.num_attempts,
            report.num_requests,
            report.num_sampled_tokens,
            report.num_cached_tokens / max(1, report.num_prompt_tokens),
            report.seconds,
        )
        if report.failures:
            kinds = " ".join(f"{kind}={count}" for kind, count in report.failures.items())
            logger.warning("collect failures %s unknown=%d first: %s", kinds, report.num_unknown, report.first_error)


@dataclass(slots=True)
class _CollectRun:
    """Counters of one collect call; touched only by its event loop."""

    num_episodes: int
    started: float
    attempts: int = 0
    done: int = 0
    unknown: int = 0
    failures: Counter[Termination] = field(default_factory=Counter)
    first_error: str = ""
    requests: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def check(self, max_failure_fraction: float) -> None:
        if self.unknown > max_failure_fraction * self.num_episodes:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.failures.items())
            raise RolloutError(
                f"{self.unknown} of {self.num_episodes} episodes failed for reasons outside the policy ({kinds}), more "
                f"than rollout.max_failure_fraction={max_failure_fraction:g} allows. First error: {self.first_error}"
            )

    def report(self) -> CollectReport:
        return CollectReport(
            num_episodes=self.num_episodes,
            num_attempts=self.attempts,
            failures=dict(self.failures),
            num_unknown=self.unknown,
            first_error=self.first_error,
            num_requests=self.requests,
            num_sampled_tokens=self.sampled_tokens,
            num_prompt_tokens=self.prompt_tokens,
            num_cached_tokens=self.cached_tokens,
            seconds=time.monotonic() - self.started,
        )


class _Counted:
    """A Sampler that counts what passes through it."""

    def __init__(self, inner: Sampler, run: _CollectRun) -> None:
        self._inner, self._run = inner, run

    async def sample(self, request: SampleRequest) -> Sample:
        sample = await self._inner.sample(request)
        self._run.requests += 1
        self._run.sampled_tokens += len(sample.output_ids)
        self._run.prompt_tokens += len(request.input_ids)
        self._run.cached_tokens += sample.cached_tokens
        return sample


def _was_refused(trajectory: Trajectory) -> bool:
    """True where the server refused the request itself: the same episode would be refused again."""
    return trajectory.error.startswith(ServerRejectedError.__name__)


def _first(group: BaseExceptionGroup[RolloutError]) -> RolloutError:
    """The first error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RolloutError)
    return error
