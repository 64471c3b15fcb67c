"""Runs as sources of meter data: whose tokens they hold, in which environment, and what they recorded."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatrl.config.engines import HFModel
from megatrl.config.recipe import Recipe
from megatrl.data.messages import ToolSpec
from megatrl.data.trajectories import PromptGroup
from megatrl.envs.registry import make_environment
from megatrl.errors import CheckpointError, ScoringError
from megatrl.meter.collection import Source
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.rendering.renderer import load_renderer

_STREAMS = ("step", "eval_step")


def open_run_sources(path: Path, *, with_evaluations: bool = False) -> list[tuple[Source, Iterator[PromptGroup]]]:
    """The run in a directory, or every arm of a comparison, with its recorded groups, read as they are asked for.

    Raises CheckpointError where the directory holds no run, ScoringError where its tokenizer or its
    trajectories are gone.
    """
    runs = [path] if (path / "config.json").is_file() else sorted(p.parent for p in path.glob("*/config.json"))
    if not runs:
        raise CheckpointError(f"{path} holds no run: neither it nor a directory in it has a config.json")
    return [_open(run, with_evaluations) for run in runs]


def _open(run_dir: Path, with_evaluations: bool) -> tuple[Source, Iterator[PromptGroup]]:
    recipe = Recipe.model_validate(json.loads((run_dir / "config.json").read_text(encoding="utf-8")))
    store = TrajectoryStore(run_dir)
    streams = _STREAMS if with_evaluations else _STREAMS[:1]
    if not any(store.steps(stream) for stream in streams):
        raise ScoringError(f"{run_dir} holds no recorded trajectories; play some steps first")
    tokenizer = tokenizer_of_run(run_dir, recipe)
    renderer = load_renderer(str(tokenizer), recipe.rollout.chat_format, recipe.rollout.tool_format)
    source = Source(
        name=f"{recipe.name}/{run_dir.name}",
        domain=recipe.env.kind,
        tokenizer=str(tokenizer.resolve()),
        tokenizer_fingerprint=renderer.fingerprint,
        chat_format=recipe.rollout.chat_format,
        tool_format=recipe.rollout.tool_format,
        tools=_tools(recipe, store, streams),
    )
    return source, _groups(store, streams)


def tokenizer_of_run(run_dir: Path, recipe: Recipe) -> Path:
    """A model directory with the tokenizer that the run's policy used.

    Raises ScoringError where the run ended before it saved its policy and its model is gone.
    """
    candidates = [run_dir / "policy"]
    if isinstance(recipe.model, HFModel):
        candidates.append(Path(recipe.model.path))
    else:  # made by the recipe and kept beside its runs
        candidates += _made_for(recipe, Path(recipe.observe.runs_dir) / "artifacts")
        candidates += _made_for(recipe, run_dir.parent.parent / "artifacts")
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file() and (candidate / "config.json").is_file():
            return candidate
    raise ScoringError(
        f"no tokenizer of {run_dir} is left: neither {', '.join(str(path) for path in candidates[:2])} holds one; "
        "finish the run (--resume), or put its model back"
    )


def _made_for(recipe: Recipe, artifacts: Path) -> list[Path]:
    """Model directories in `artifacts` that were made for this recipe's model and environment."""
    wanted = {"model": recipe.model.model_dump(mode="json"), "env": recipe.env.model_dump(mode="json")}
    made: list[Path] = []
    for path in sorted(artifacts.glob("model-*/made_from.json")):
        key = json.loads(path.read_text(encoding="utf-8"))
        if all(key.get(name) == value for name, value in wanted.items()):
            made.append(path.parent)
    return made


def _tools(recipe: Recipe, store: TrajectoryStore, streams: tuple[str, ...]) -> tuple[ToolSpec, ...]:
    """What the environment offers: messages do not hold it, and a meter with another tokenizer reads it too."""
    stream = next(stream for stream in streams if store.steps(stream))
    first = store.read(store.steps(stream)[0], stream)[0]
    return tuple(make_environment(recipe.env, first.group.prompt).tools)


def _groups(store: TrajectoryStore, streams: tuple[str, ...]) -> Iterator[PromptGroup]:
    for stream in streams:
        for step in store.steps(stream):
            for record in store.read(step, stream):
                yield record.group
