"""What the commands `train` and `replay` do, and how one arm of anything is trained."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatrl.config.loaded import LoadedRecipe
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError
from megatrl.observability.logs import logging_to
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster, cluster
from megatrl.orchestration.loop import train as run_loop
from megatrl.orchestration.meter_training import meter_directory
from megatrl.orchestration.run import open_replay, open_run
from megatrl.orchestration.run_directory import claimed, continued
from megatrl.orchestration.start import model_directory, start_directory

logger = logging.getLogger(__name__)

RESULT = "result.json"
"""Written at the end of a run; its presence says that the run came to its end."""


def train(loaded: LoadedRecipe, *, resume: bool = False, run_id: str | None = None) -> Path:
    """Runs one recipe; returns its run directory `<runs_dir>/<name>/<run id>`."""
    recipe = loaded.recipe
    home = Path(recipe.observe.runs_dir) / recipe.name
    with continued(home, run_id, recipe) if resume else claimed(home, run_id) as run_dir:
        write_sources(run_dir, {source.path: source.text for source in loaded.sources})
        with prepared(recipe, run_dir) as (group, start):
            train_arm(recipe, group, start, run_dir, resume=resume)
    return run_dir


def replay(run_dir: Path, *, from_step: int = 0, num_steps: int | None = None, out: Path | None = None) -> Path:
    """Feeds a run's recorded trajectories to the actor, without a server; returns the replay's directory.

    `from_step` 0 begins at the start weights, otherwise at that step's checkpoint.
    """
    recipe = recorded_recipe(run_dir)
    recipe = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"num_steps": num_steps or recipe.train.num_steps}),
            "observe": recipe.observe.model_copy(update={"wandb": "off", "tensorboard": False}),
        }
    )
    out = out or run_dir / "replays" / _new_id()
    artifacts = Artifacts(Path(recipe.observe.runs_dir) / "artifacts")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging(out / "logs"))
        model = model_directory(recipe, artifacts)
        group = stack.enter_context(cluster(recipe, model, out / "logs", serve=False))
        start = start_directory(recipe, model, artifacts, group)
        meter = meter_directory(recipe, start, artifacts, group)
        opened = open_replay(recipe, group, recorded=run_dir, from_step=from_step, out=out, start=start, meter=meter)
        run = stack.enter_context(opened)
        progress = run_loop(run)
        _write_result(out, progress.step, run.actor.parameter_hash())
    return out


def recorded_recipe(run_dir: Path) -> Recipe:
    """The recipe that a run directory was made with. Raises CheckpointError where it holds none."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{run_dir} is no run directory: config.json is missing")
    return Recipe.model_validate(json.loads(path.read_text()))


@contextlib.contextmanager
def prepared(recipe: Recipe, run_dir: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster that is up, and the start policy; the servers load while the start is trained."""
    artifacts = Artifacts(Path(recipe.observe.runs_dir) / "artifacts")
    logs = run_dir / "logs"
    with _logging(logs):
        model = model_directory(recipe, artifacts)
        with cluster(recipe, model, logs) as group:
            yield group, start_directory(recipe, model, artifacts, group)


def _logging(logs: Path) -> contextlib.AbstractContextManager[object]:
    """The driver's log in a file, and on the screen where no bar is shown."""
    return logging_to(logs / "driver.log", to_stderr=not sys.stderr.isatty())


def train_arm(recipe: Recipe, group: Cluster, start: Path, run_dir: Path, *, resume: bool) -> None:
    artifacts = Artifacts(Path(recipe.observe.runs_dir) / "artifacts")
    begin = time.monotonic()
    group.servers.wait_ready()
    meter = meter_directory(recipe, start, artifacts, group)
    with open_run(recipe, group, run_dir=run_dir, start=start, meter=meter, resume=resume) as run:
        progress = run_loop(run)
        _write_result(run_dir, progress.step, run.actor.parameter_hash())
        run.actor.save_hf(run_dir / "policy", start)
    logger.info("run finished dir=%s seconds=%.1f", run_dir, time.monotonic() - begin)


def _write_result(run_dir: Path, step: int, parameter_hash: str) -> None:
    """The end of a run in one file: its last step and the hash of every rank's parameters."""
    (run_dir / RESULT).write_text(json.dumps({"step": step, "parameter_hash": parameter_hash}) + "\n")


def write_sources(run_dir: Path, sources: Mapping[str, str]) -> None:
    directory = run_dir / "recipe"
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in sources.items():
        (directory / Path(path).name).write_text(text)


def _new_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
