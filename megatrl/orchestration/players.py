"""Collectors for the three kinds of episodes: of the policy, held out, and scripted."""

import logging
from collections.abc import Callable, Sequence
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

logger = logging.getLogger(__name__)


class EpisodePlayer(Protocol):
    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]: ...


class ServerCare(Protocol):
    """See `ProvenWeightSync`."""

    def tend(self) -> None: ...

    def repair(self, policy_version: int) -> bool: ...


class WatchedPlayer:
    """Plays episodes; where they fail because servers died, again on those that are left or back."""

    def __init__(self, player: EpisodePlayer, servers: ServerCare) -> None:
        self._player, self._servers = player, servers

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        first_position: int,
        policy_version: int,
        journal: PlayedGroups = NOTHING_PLAYED,
    ) -> tuple[PromptGroup, ...]:
        """What the player collects. Raises its RolloutError, with the post-mortem of a server that stays gone."""
        while True:
            try:
                groups = self._player.collect(
                    prompts, first_position=first_position, policy_version=policy_version, journal=journal
                )
            except RolloutError as error:
                try:
                    is_repaired = self._servers.repair(policy_version)
                except MegatrlError as gone:
                    raise RolloutError(f"{error.message}\n{gone.message}") from error
                if not is_repaired:
                    raise
                logger.warning("playing again after the death of a server: %s", error.message)
            else:
                self._servers.tend()
                return groups


def policy_player(
    recipe: Recipe,
    renderer: Renderer,
    urls: Callable[[], Sequence[str]],
    *,
    group_size: int,
    temperature: float | None = None,
    progress: Progress | None = None,
) -> Collector:
    """Episodes of the policy that the rollout servers hold; `urls` are asked for at each collect."""
    return Collector(
        config=recipe.rollout,
        reward=recipe.reward,
        renderer=renderer,
        make_environment=partial(make_environment, recipe.env),
        samplers=ServerSamplers(
            urls,
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
