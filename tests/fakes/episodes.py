"""An environment and a sampler that follow a script, for the rules of an episode."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from megatrl.data.messages import Action, Message, ToolSpec
from megatrl.data.trajectories import FinishReason
from megatrl.envs.protocol import StepResult
from megatrl.rollout.sampler import Sample, SampleRequest

Step = StepResult | BaseException | Callable[[], Awaitable[StepResult]]


def tool_result(text: str = "door open", **fields: object) -> StepResult:
    return StepResult(messages=(Message(role="tool", content=text),), **fields)  # type: ignore[arg-type]


@dataclass
class ScriptedEnvironment:
    """Answers actions from `steps`; an exception in the script is raised, a function is awaited."""

    steps: Sequence[Step] = ()
    opening: Sequence[Message] | BaseException = (Message(role="user", content="hello"),)
    outcome: StepResult | BaseException = field(
        default_factory=lambda: StepResult(done=True, reward=0.25, success=False, metrics={"reached": 1.0})
    )
    close_error: BaseException | None = None
    actions: list[Action] = field(default_factory=list)
    num_closed: int = 0
    tools: tuple[ToolSpec, ...] = ()
    gold_answers: tuple[str, ...] = ("key",)
    observation_key: str = "start"

    async def start(self) -> tuple[Message, ...]:
        if isinstance(self.opening, BaseException):
            raise self.opening
        return tuple(self.opening)

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        step = self.steps[len(self.actions) - 1]
        if isinstance(step, BaseException):
            raise step
        return step if isinstance(step, StepResult) else await step()

    def finish(self) -> StepResult:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def close(self) -> None:
        self.num_closed += 1
        if self.close_error is not None:
            raise self.close_error


async def sleep_for_an_hour() -> StepResult:
    await asyncio.sleep(3600)
    return StepResult()


@dataclass
class ScriptedReplies:
    """A Sampler that returns `replies` in order; a reply is token ids, or an exception to raise.

    Like the server it never returns more than `max_new_tokens`: a longer reply is cut, and then its
    finish_reason is LENGTH.
    """

    replies: Sequence[Sequence[int] | BaseException]
    policy_version: int = 0
    requests: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        reply = self.replies[len(self.requests) - 1]
        if isinstance(reply, BaseException):
            raise reply
        ids = tuple(reply)[: request.max_new_tokens]
        stopped = len(ids) == len(reply) and ids[-1] in request.stop_token_ids
        return Sample(
            output_ids=ids,
            logprobs=tuple(-0.5 - 0.001 * position for position in range(len(ids))),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            policy_version=self.policy_version,
        )
