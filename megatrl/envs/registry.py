"""From an env section to environments, prompts and words: one line for each kind of environment."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from megatrl.config.environments import (
    EnvConfig,
    EvidenceHuntConfig,
    MeterPromptsConfig,
    SwitchboardConfig,
    TextWorldConfig,
)
from megatrl.data.prompts import PromptSource
from megatrl.data.trajectories import Prompt
from megatrl.envs import evidence_hunt, meter_prompts, switchboard, textworld
from megatrl.envs.protocol import Environment
from megatrl.errors import ConfigError


class _MakesPrompts(Protocol):
    def __call__(self, config: Any, /, *, seed: int, split: Literal["train", "eval"]) -> PromptSource: ...


class _Kind(NamedTuple):
    environment: Callable[[Any, Prompt], Environment]
    prompts: _MakesPrompts
    vocabulary: Callable[[Any], tuple[str, ...]]
    oracle_plan: Callable[[Any, str], tuple[str, ...]] | None = None


_KINDS: Mapping[type, _Kind] = {
    EvidenceHuntConfig: _Kind(
        evidence_hunt.EvidenceHunt,
        evidence_hunt.EvidenceHuntPrompts,
        evidence_hunt.vocabulary,
        evidence_hunt.oracle_plan,
    ),
    SwitchboardConfig: _Kind(
        switchboard.Switchboard, switchboard.SwitchboardPrompts, switchboard.vocabulary, switchboard.oracle_plan
    ),
    MeterPromptsConfig: _Kind(meter_prompts.MeterPrompts, meter_prompts.MeterPromptSource, meter_prompts.vocabulary),
    TextWorldConfig: _Kind(textworld.TextWorldEnvironment, textworld.TextWorldPrompts, textworld.vocabulary),
}


def make_environment(config: EnvConfig, prompt: Prompt) -> Environment:
    """A fresh episode of the prompt. Nothing is started or generated before `start`."""
    return _KINDS[type(config)].environment(config, prompt)


def prompt_source(config: EnvConfig, *, seed: int, split: Literal["train", "eval"]) -> PromptSource:
    """Prompts of a split; train and eval share no task."""
    return _KINDS[type(config)].prompts(config, seed=seed, split=split)


def vocabulary(config: EnvConfig) -> tuple[str, ...]:
    """Words of prompts, observations and actions, without repetition, for a word-level tokenizer."""
    return _KINDS[type(config)].vocabulary(config)


def has_oracle_plan(config: EnvConfig) -> bool:
    """True where the remaining work of every state is known: what an oracle meter needs."""
    return _KINDS[type(config)].oracle_plan is not None


def oracle_plan(config: EnvConfig, observation_key: str) -> tuple[str, ...]:
    """Texts of the best actions from the state of an observation key to the end of the episode.

    Raises ConfigError for an environment that does not know them.
    """
    plan = _KINDS[type(config)].oracle_plan
    if plan is None:
        kinds = ", ".join(kind.model_fields["kind"].default for kind, entry in _KINDS.items() if entry.oracle_plan)
        raise ConfigError(f"env.kind={config.kind} does not know the remaining work of a state; those that do: {kinds}")
    return plan(config, observation_key)
