"""play_episode: one environment from its first message to the end, token by token."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.data.messages import Action, Message
from megatrl.data.trajectories import FinishReason, Segment, Termination, Trajectory, TrajectoryId, Turn
from megatrl.envs.protocol import Environment, Pretokenized, StepResult
from megatrl.envs.tools import cut_to_tokens
from megatrl.errors import DeadlineError, EnvironmentFault, MegatrlError, RolloutError
from megatrl.rendering.renderer import Renderer
from megatrl.rendering.tool_calls import parse_action
from megatrl.rollout import environment_calls
from megatrl.rollout.sampler import Sample, Sampler, SampleRequest
from megatrl.rollout.seeds import sampling_seed

logger = logging.getLogger(__name__)

Returned = TypeVar("Returned")

_CLOSE_TIMEOUT_S = 10.0


class _Failure(Exception):
    """Ends an episode for a reason that says nothing about the policy."""

    def __init__(self, termination: Termination, error: str) -> None:
        super().__init__(error)
        self.termination = termination
        self.error = error


@dataclass(slots=True)
class _Draft:
    """What is known of a trajectory so far. Mutable while its episode runs, and nowhere else."""

    turns: list[Turn] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the turns
    observation: tuple[int, ...] = ()  # rendered, not acted on yet
    messages: list[Mapping[str, Any]] = field(default_factory=list)


async def play_episode(
    env: Environment,
    sampler: Sampler,
    renderer: Renderer,
    *,
    id: TrajectoryId,
    limits: RolloutConfig,
    reward: RewardConfig,
    policy_version: int,
    seed: int,
    temperature: float | None = None,
) -> Trajectory:
    """The trajectory of one episode; never raises for a fault of the environment or the server.

    A limit (turns, context, an action cut at its length) ends the episode as truncated, with its
    tokens kept and the environment's outcome so far. A cut action is not carried out. A fault ends it
    with reward None. Only cancellation passes through. The environment is closed in any case.

    `temperature` replaces `limits.sampling.temperature` (evaluation; 0 is greedy).
    """
    episode = _Episode(
        env=env,
        sampler=sampler,
        renderer=renderer,
        id=id,
        limits=limits,
        reward=reward,
        policy_version=policy_version,
        seed=seed,
        temperature=limits.sampling.temperature if temperature is None else temperature,
        deadline=time.monotonic() + limits.episode_timeout_s,
    )
    draft = _Draft()
    try:
        async with asyncio.timeout(limits.episode_timeout_s):
            termination, outcome = await episode.play(draft)
        return episode.trajectory(draft, termination, outcome)
    except _Failure as failure:
        return episode.trajectory(draft, failure.termination, StepResult(), error=failure.error)
    except TimeoutError:
        error = f"episode did not end within rollout.episode_timeout_s={limits.episode_timeout_s:g}"
        return episode.trajectory(draft, Termination.TIMEOUT, StepResult(), error=error)
    finally:
        await _close(env)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    """The parties of one episode and its rules."""

    env: Environment
    sampler: Sampler
    renderer: Renderer
    id: TrajectoryId
    limits: RolloutConfig
    reward: RewardConfig
    policy_version: int
    seed: int
    temperature: float
    deadline: float  # time.monotonic()

    async def play(self, draft: _Draft) -> tuple[Termination, StepResult]:
        """Fill the draft turn by turn; why it ended, and the outcome."""
        observation_key = await self._call(self._open(draft), "start")
        while len(draft.turns) < self.limits.max_turns:
            room = self.limits.context_tokens - len(draft.tokens) - len(draft.observation)
            if room < 1:
                return Termination.CONTEXT_OVERFLOW, self._finish()
            sample = await self._sample(draft, room)
            action = parse_action(self.renderer.action_text(sample.output_ids), self.limits.tool_format)
            draft.messages.append(Message(role="assistant", content=action.text))
            if sample.finish_reason is FinishReason.LENGTH:
                self._add_turn(draft, sample, Action(text=action.text), observation_key)
                cut_by_context = len(sample.output_ids) < self.limits.max_action_tokens
                reason = Termination.CONTEXT_OVERFLOW if cut_by_context else Termination.ACTION_LENGTH
                return reason, self._finish()
            self._add_turn(draft, sample, action, observation_key)
            result = await self._call(environment_calls.step(self.env, action), "step")
            if not result.is_valid_action and self.reward.invalid_action_penalty:
                draft.turns[-1] = replace(draft.turns[-1], penalty=self.reward.invalid_action_penalty)
            self._observe(draft, result, sample)
            if result.done:
                return Termination.COMPLETED, result
            observation_key = result.observation_key
        return Termination.MAX_TURNS, self._finish()

    def trajectory(
        self, draft: _Draft, termination: Termination, outcome: StepResult, *, error: str = ""
    ) -> Trajectory:
        """The finished record. An unknown outcome stays None."""
        segments: tuple[Segment, ...] = ()
        if draft.turns:
            fits = len(draft.tokens) + len(draft.observation) <= self.limits.context_tokens
            trailing = draft.observation if fits else ()
            segments = (Segment(turns=tuple(draft.turns), trailing_observation_tokens=trailing),)
        reward = outcome.reward
        return Trajectory(
            id=self.id,
            segments=segments,
            reward=reward,
            success=None if reward is None else reward >= self.reward.success_threshold,
            termination=termination,
            gold_answers=() if termination.is_infrastructure_failure else tuple(self.env.gold_answers),
            messages=tuple(draft.messages),
            metrics=dict(outcome.metrics),
            error=error,
        )

    async def _open(self, draft: _Draft) -> str:
        opening = await environment_calls.start(self.env)
        draft.messages += opening
        draft.observation = self._opening_tokens(opening)
        return self.env.observation_key

    def _opening_tokens(self, opening: Sequence[Message]) -> tuple[int, ...]:
        """The first prompt: rendered, or the environment's own ids where they are of the policy's tokenizer."""
        env = self.env
        if not isinstance(env, Pretokenized):
            return self.renderer.initial(opening, env.tools)
        if env.tokenizer_fingerprint != self.renderer.fingerprint:
            raise EnvironmentFault(
                f"the task's token ids are of tokenizer {env.tokenizer_fingerprint}, the policy's is "
                f"{self.renderer.fingerprint}; they would mean other words"
            )
        return env.opening_tokens

    async def _sample(self, draft: _Draft, room: int) -> Sample:
        sampling = self.limits.sampling
        request = SampleRequest(
            input_ids=(*draft.tokens, *draft.observation),
            max_new_tokens=min(self.limits.max_action_tokens, room),
            temperature=self.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
            sampling_seed=sampling_seed(self.seed, self.id, len(draft.turns)),
            deadline_s=min(self.limits.servers.request_timeout_s, max(0.001, self.deadline - time.monotonic())),
            routing_key=str(self.id),
            first_routed=max(0, len(draft.tokens) - 1),
        )
        try:
            sample = await self.sampler.sample(request)
        except RolloutError as error:
            raise _Failure(Termination.SERVER_ERROR, f"{type(error).__name__}: {error.message}") from error
        if sample.policy_version != self.policy_version:
            raise _Failure(
                Termination.SERVER_ERROR,
                f"turn {len(draft.turns)} was sampled under policy version {sample.policy_version}, "
                f"wanted {self.policy_version}; publish the weights before collecting",
            )
        return sample

    def _add_turn(self, draft: _Draft, sample: Sample, action: Action, observation_key: str) -> None:
        experts = sample.routed_experts
        if experts is not None and draft.turns:
            # The last token of the previous action was processed only now: the reply begins with its choices.
            previous = draft.turns[-1]
            if previous.routed_experts is not None:
                draft.turns[-1] = replace(previous, routed_experts=previous.routed_experts.with_last_of(experts))
            experts = experts.without_first()
        turn = Turn(
            observation_tokens=draft.observation,
            action_tokens=sample.output_ids,
            behavior_logprobs=sample.logprobs,
            policy_version=sample.policy_version,
            finish_reason=sample.finish_reason,
            is_tool_call=bool(action.tool_calls),
            observation_key=observation_key,
            routed_experts=None if experts is None else experts.with_unrecorded_end(),
        )
        draft.turns.append(turn)
        draft.tokens += turn.observation_tokens + turn.action_tokens
        draft.observation = ()

    def _observe(self, draft: _Draft, result: StepResult, sample: Sample) -> None:
        """Render what the environment said. An end without words leaves no state to score."""
        messages = [self._cut(message) for message in result.messages]
        draft.messages += messages
        if messages or not result.done:
            ended = self.renderer.ends_turn(sample.output_ids)
            draft.observation = self.renderer.continuation(messages, previous_ended=ended)

    def _cut(self, message: Message) -> Message:
        limit = self.limits.max_observation_tokens
        text, was_cut = cut_to_tokens(
            message["content"], max_tokens=limit, count_tokens=lambda text: len(self.renderer.encode(text))
        )
        return Message(role=message["role"], content=text) if was_cut else message

    def _finish(self) -> StepResult:
        try:
            return environment_calls.finish(self.env)
        except DeadlineError as error:
            raise _Failure(Termination.TIMEOUT, _describe("finish", error)) from error
        except (Exception, SystemExit) as error:  # an environment may raise anything; it costs one trajectory
            raise _Failure(Termination.ENV_ERROR, _describe("finish", error)) from error

    async def _call(self, step: Awaitable[Returned], name: str) -> Returned:
        """One call of the environment, within its own time limit."""
        limit = asyncio.timeout(self.limits.tool_timeout_s)
        try:
            async with limit:
                return await step
        except (Exception, SystemExit) as error:  # an environment may raise anything; it costs one trajectory
            if limit.expired():
                text = f"environment {name} did not return within rollout.tool_timeout_s={self.limits.tool_timeout_s:g}"
                raise _Failure(Termination.TIMEOUT, text) from error
            timed_out = isinstance(error, DeadlineError)  # of a blocking call in a thread of its own
            termination = Termination.TIMEOUT if timed_out else Termination.ENV_ERROR
            raise _Failure(termination, _describe(name, error)) from error


def _describe(call: str, error: BaseException) -> str:
    if isinstance(error, MegatrlError):
        return f"environment {call}: {error.message}"
    return f"environment {call} raised {type(error).__name__}: {error}"


async def _close(env: Environment) -> None:
    """Close the environment without letting it spoil a finished trajectory."""
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await environment_calls.close(env)
    except (Exception, SystemExit) as error:  # logged: the outcome is known, only resources may leak
        logger.warning("environment close failed: %s: %s", type(error).__name__, error)
