"""Collectors for the three kinds of episodes: of the policy, held out, and scripted."""

from collections.abc import Sequence
from functools import partial

from megatrl.config.recipe import Recipe
from megatrl.envs.registry import make_environment
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.collector import Collector, Progress, ScriptedSamplers, ServerSamplers


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
        samplers=ServerSamplers(lambda: urls, vocab_size=renderer.vocab_size),
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
