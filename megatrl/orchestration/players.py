"""Collectors for the three kinds of episodes: of the policy, held out, and scripted."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from megatrl.config.engine_checks import shape_of_recipe
from megatrl.config.recipe import Recipe
from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.envs.registry import make_environment
from megatrl.errors import MegatrlError, RolloutError
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.collector import (
    NOTHING_PLAYED,
    Collector,
    PlayedGroups,
    Progress,
    ScriptedSamplers,
    ServerSamplers,
)

_DEATH_NOTICE_S = 2.0
"""A request fails at once when its server dies; the process that watches the server needs a moment to say why."""


class EpisodePlayer(Protocol):
    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]: ...


class ServerHealth(Protocol):
    def check(self) -> None:
        """Raises MegatrlError, with exit code and log, where a server is gone."""
        ...


class WatchedPlayer:
    """Plays episodes; where they fail because a server is gone, the error says which one, why, and where its log is."""

    def __init__(self, player: EpisodePlayer, servers: ServerHealth) -> None:
        self._player, self._servers = player, servers

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        first_position: int,
        policy_version: int,
        journal: PlayedGroups = NOTHING_PLAYED,
    ) -> tuple[PromptGroup, ...]:
        """What the player collects. Raises its RolloutError, with the post-mortem of a server that is gone."""
        try:
            return self._player.collect(
                prompts, first_position=first_position, policy_version=policy_version, journal=journal
            )
        except RolloutError as error:
            deadline = time.monotonic() + _DEATH_NOTICE_S
            while True:
                try:
                    self._servers.check()
                except MegatrlError as gone:
                    raise RolloutError(f"{error.message}\n{gone.message}") from error
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def policy_player(
    recipe: Recipe,
    renderer: Renderer,
    urls: Sequence[str],
    *,
    group_size: int,
    temperature: float | None = None,
    progress: Progress | None = None,
) -> Collector:
    """Episodes of the policy that the rollout servers hold."""
    return Collector(
        config=recipe.rollout,
        reward=recipe.reward,
        renderer=renderer,
        make_environment=partial(make_environment, recipe.env),
        samplers=ServerSamplers(
            lambda: urls,
            vocab_size=renderer.vocab_size,
            routed_shape=shape_of_recipe(recipe) if recipe.actor.router.replay else None,
        ),
        group_size=group_size,
        seed=recipe.seed,
        temperature=temperature,
        progress=progress,
    )


def scripted_player(recipe: Recipe, renderer: Renderer, *, detour: float, premature: float) -> Collector:
    """Episodes of the environment's scripted policy of mixed quality: no server is asked."""
    return Collector(
        config=recipe.rollout,
        reward=recipe.reward,
        renderer=renderer,
        make_environment=partial(make_environment, recipe.env),
        samplers=ScriptedSamplers(renderer, seed=recipe.seed, detour=detour, premature=premature),
        group_size=1,
        seed=recipe.seed,
    )
