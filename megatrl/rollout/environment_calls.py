"""Calls of an environment whose answers are checked, so that a bad one costs its episode and not the run."""

import math
from collections.abc import Sequence

from megatrl.data.messages import Action, Message
from megatrl.envs.protocol import Environment, StepResult
from megatrl.errors import EnvironmentFault
from megatrl.rollout.stall import calls_environments

_ROLES = ("system", "user", "assistant", "tool")


async def start(env: Environment) -> tuple[Message, ...]:
    """The opening messages. Raises EnvironmentFault where they or the gold answers are unusable."""
    opening = await env.start()
    if not opening:
        raise EnvironmentFault("start returned no message; at least one is needed")
    _check_messages(opening)
    golds = env.gold_answers
    if not isinstance(golds, tuple) or not all(isinstance(gold, str) for gold in golds):
        raise EnvironmentFault(f"gold_answers is {golds!r:.200}; expected a tuple of strings")
    return tuple(opening)


async def step(env: Environment, action: Action) -> StepResult:
    """The answer to an action. Raises EnvironmentFault where it is unusable."""
    return _checked(await env.step(action))


def finish(env: Environment) -> StepResult:
    """The outcome where a limit ended the episode. Raises EnvironmentFault where it is unusable."""
    return _checked(env.finish())


async def close(env: Environment) -> None:
    """Frees what the episode holds."""
    await env.close()


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise EnvironmentFault(f"returned {type(result).__name__}; expected a StepResult")
    if result.reward is not None and not math.isfinite(result.reward):
        raise EnvironmentFault(f"reward is {result.reward!r}; expected a finite number, or None where it is unknown")
    _check_messages(result.messages)
    return result


def _check_messages(messages: Sequence[object]) -> None:
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise EnvironmentFault(f"message {message!r:.200} is no dict with a role of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise EnvironmentFault(f"message {message!r:.200} has no text as its content")


for _function in (start, step, finish, close):
    calls_environments(_function.__code__)
