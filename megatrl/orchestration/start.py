"""What a run begins with: its model, its SFT start, its meter. Made once by the recipe, then reused."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from megatrl.batching.flatten import flatten_groups
from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.engines import TinyModel
from megatrl.config.recipe import Recipe, SFTStart
from megatrl.data.samples import TrainingSample
from megatrl.data.trajectories import PromptGroup
from megatrl.envs.registry import prompt_source
from megatrl.errors import ModelError
from megatrl.mcore.weights_directory import is_weights_directory
from megatrl.observability.progress import waiting
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster
from megatrl.orchestration.players import scripted_player
from megatrl.orchestration.supervision import supervise
from megatrl.rendering.renderer import load_renderer

logger = logging.getLogger(__name__)

_POSITION_STRIDE = 10_000_000  # keeps demonstrations off the tasks that training takes


def model_directory(recipe: Recipe, artifacts: Artifacts) -> Path:
    """The model in Hugging Face form or converted from it: the recipe's own directory, or a tiny one made now.

    Raises ModelError where the directory lacks config.json, weights or a tokenizer.
    """
    model = recipe.model
    if isinstance(model, TinyModel):
        key = {"model": model.model_dump(mode="json"), "env": recipe.env.model_dump(mode="json")}
        return artifacts.get_or_make(
            "model", key, lambda out: _fill(out, lambda path: make_tiny(model, recipe.env, path))
        )
    path = Path(model.path)
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not is_weights_directory(path) and not list(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(
            f"model.path {path} lacks {', '.join(missing)}; give a directory in Hugging Face form. "
            "Nothing is downloaded"
        )
    return path


def start_directory(recipe: Recipe, model: Path, artifacts: Artifacts, cluster: Cluster) -> Path:
    """The policy that the loop begins from, in Hugging Face form."""
    start = recipe.start
    if not isinstance(start, SFTStart):
        return model

    def make(out: Path) -> None:
        actor = cluster.actor(recipe)
        actor.load_policy(model, start.sft.optimizer, start.sft.num_steps)
        with waiting(f"{start.demonstrations.num_episodes} demonstrations"):
            samples = demonstration_samples(recipe, model, start)
        supervise(
            actor,
            samples,
            start.sft,
            microbatch_tokens=recipe.batch.microbatch_tokens,
            seed=recipe.seed,
            title="SFT on demonstrations",
        )
        _fill(out, lambda path: actor.save_hf(path, model))

    return artifacts.get_or_make("start", artifact_key(recipe), make)


def demonstration_samples(recipe: Recipe, model: Path, start: SFTStart) -> tuple[TrainingSample, ...]:
    """Episodes of the environment's scripted policy as SFT samples."""
    demonstrations = start.demonstrations
    groups = scripted_groups(
        recipe,
        model,
        num_episodes=demonstrations.num_episodes,
        detour=demonstrations.detour,
        premature=demonstrations.premature,
        first_position=_POSITION_STRIDE,
    )
    return supervised_samples(groups)


def scripted_groups(
    recipe: Recipe, model: Path, *, num_episodes: int, detour: float, premature: float, first_position: int
) -> tuple[PromptGroup, ...]:
    """One scripted episode for each of `num_episodes` training tasks that the loop does not reach."""
    renderer = load_renderer(str(model), recipe.rollout.chat_format, recipe.rollout.tool_format)
    player = scripted_player(recipe, renderer, detour=detour, premature=premature)
    source = prompt_source(recipe.env, seed=recipe.seed, split="train")
    prompts = [source.prompt(first_position + i) for i in range(num_episodes)]
    return player.collect(prompts, first_position=first_position, policy_version=0)


def supervised_samples(groups: tuple[PromptGroup, ...]) -> tuple[TrainingSample, ...]:
    """Flat samples of recorded episodes; the action mask says what is learned."""
    ones = {
        t.id: tuple(np.ones(len(turn.action_tokens)) for turn in t.turns)
        for group in groups
        for t in group.trajectories
    }
    return flatten_groups(groups, ones)


def artifact_key(recipe: Recipe) -> dict[str, Any]:
    """What everything a recipe trains before the loop depends on; not the layout: a run may go on with another."""
    return {
        "model": recipe.model.model_dump(mode="json"),
        "env": recipe.env.model_dump(mode="json"),
        "rollout": recipe.rollout.model_dump(mode="json", exclude={"servers"}),
        "start": recipe.start.model_dump(mode="json"),
        "precision": recipe.actor.precision,
        "seed": recipe.seed,
    }


def _fill(out: Path, write: Any) -> None:
    """Lets `write` make a directory of its own and moves its files into `out`."""
    inner = out / "content"
    write(inner)
    for path in inner.iterdir():
        shutil.move(str(path), out / path.name)
    inner.rmdir()
