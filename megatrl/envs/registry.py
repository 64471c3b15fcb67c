"""From an env section to environments, prompts and words: one line for each kind of environment."""

from typing import Literal

from megatrl.config.environments import EnvConfig, EvidenceHuntConfig
from megatrl.data.prompts import PromptSource
from megatrl.data.trajectories import Prompt
from megatrl.envs import evidence_hunt, textworld
from megatrl.envs.protocol import Environment


def make_environment(config: EnvConfig, prompt: Prompt) -> Environment:
    """A fresh episode of the prompt. Nothing is started or generated before `start`."""
    if isinstance(config, EvidenceHuntConfig):
        return evidence_hunt.EvidenceHunt(config, prompt)
    return textworld.TextWorldEnvironment(config, prompt)


def prompt_source(config: EnvConfig, *, seed: int, split: Literal["train", "eval"]) -> PromptSource:
    """Prompts of a split; train and eval share no task."""
    if isinstance(config, EvidenceHuntConfig):
        return evidence_hunt.EvidenceHuntPrompts(config, seed=seed, split=split)
    return textworld.TextWorldPrompts(config, seed=seed, split=split)


def vocabulary(config: EnvConfig) -> tuple[str, ...]:
    """Words of prompts, observations and actions, without repetition, for a word-level tokenizer."""
    if isinstance(config, EvidenceHuntConfig):
        return evidence_hunt.vocabulary(config)
    return textworld.vocabulary(config)
