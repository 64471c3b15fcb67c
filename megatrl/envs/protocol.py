"""What an environment is to the rollout: one episode, asynchronous, text in and text out."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from megatrl.data.messages import Action, Message, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How the environment answered one action, or what an episode came to when a limit ended it."""

    messages: tuple[Message, ...] = ()
    """Observation; may also be present where `done`, as the text of the end state."""
    done: bool = False
    reward: float | None = None
    """Outcome of the whole episode. None before the end, and at the end where it is unknown."""
    success: bool | None = None
    """None exactly where `reward` is None."""
    is_valid_action: bool = True
    """False for an unreadable call, an unknown tool or wrong arguments."""
    observation_key: str = ""
    """Identity of the state the agent is now in, as text (GiGPO, HGPO group by it)."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.success is None):
            raise ValueError(f"step result: reward={self.reward!r} but success={self.success!r}; set both or neither")


@runtime_checkable
class Environment(Protocol):
    """One episode. A fault that says nothing about the policy is raised as EnvironmentFault.

    Bad actions never raise: they are answered with an error observation and the episode goes on.
    The environment owns its turn limit as little as the sampler does: the rollout calls `finish`
    when a limit of its own ends the episode.
    """

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools offered throughout the episode."""
        ...

    @property
    def gold_answers(self) -> tuple[str, ...]:
        """Accepted answers, canonical first; () where the task has none. Known after `start`."""
        ...

    @property
    def observation_key(self) -> str:
        """Identity of the present state; valid after `start`."""
        ...

    async def start(self) -> tuple[Message, ...]:
        """The opening messages: system prompt (if any) and the task."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Carry out one action."""
        ...

    def finish(self) -> StepResult:
        """Outcome where a limit ends the episode here; pays only for what was reached."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. May be called at any time, and more than once."""
        ...


@runtime_checkable
class Pretokenized(Protocol):
    """An environment whose task is a token sequence: the policy reads these ids, and no rendering of messages."""

    @property
    def opening_tokens(self) -> tuple[int, ...]: ...

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer the ids belong to; another policy's is refused (`Renderer.fingerprint`)."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can also act: used for demonstrations, meter data and tests.

    Both methods answer for the present state, as the text of one action without the end token.
    """

    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        """Action of a policy of mixed quality: useless with probability `detour`, a hasty answer
        with probability `premature`, otherwise the oracle's."""
        ...

    def oracle(self) -> str:
        """The best action from here."""
        ...
