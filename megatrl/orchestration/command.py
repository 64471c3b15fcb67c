"""What the commands `train`, `compare` and `replay` do."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from megatrl.config.loaded import LoadedComparison, LoadedRecipe
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError, ConfigError
from megatrl.observability.logs import logging_to
from megatrl.observability.plots import plot_success
from megatrl.observability.run_summary import load_run, markdown_table, rich_table, summarize
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster, cluster
from megatrl.orchestration.loop import train as run_loop
from megatrl.orchestration.meter_training import meter_directory
from megatrl.orchestration.run import open_replay, open_run
from megatrl.orchestration.run_directory import claimed, continued
from megatrl.orchestration.start import model_directory, start_directory

logger = logging.getLogger(__name__)


def train(loaded: LoadedRecipe, *, resume: bool = False, run_id: str | None = None) -> Path:
    """Runs one recipe; returns its run directory `<runs_dir>/<name>/<run id>`."""
    recipe = loaded.recipe
    home = Path(recipe.observe.runs_dir) / recipe.name
    with continued(home, run_id, recipe) if resume else claimed(home, run_id) as run_dir:
        _write_sources(run_dir, {source.path: source.text for source in loaded.sources})
        with _prepared(recipe, run_dir) as (group, start):
            _train_arm(recipe, group, start, run_dir, resume=resume)
    return run_dir


def compare(loaded: LoadedComparison, *, run_id: str | None = None) -> Path:
    """Runs every arm from the same start, prints and plots the curves; returns the directory."""
    arms = {name: arm.recipe for name, arm in loaded.arms.items()}
    first = next(iter(arms.values()))
    _check_arms(arms)
    home = Path(first.observe.runs_dir) / loaded.comparison.name
    with claimed(home, run_id) as out:
        _write_sources(out, {source.path: source.text for source in loaded.sources})
        with _prepared(first, out) as (group, start):
            for name, recipe in arms.items():
                Console().rule(f"[bold]{name}")
                _train_arm(recipe, group, start, out / name, resume=False)
    report([out / name for name in arms], out, title=loaded.comparison.name)
    return out


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


def report(run_dirs: list[Path], out: Path, *, title: str) -> None:
    """Prints the table of the arms, writes it as Markdown and draws success over steps."""
    runs = [load_run(path, path.name) for path in run_dirs]
    rows = [summarize(run) for run in runs]
    console = Console()
    console.print(rich_table(rows, title=title))
    (out / "table.md").write_text(markdown_table(rows))
    figure = plot_success(runs, out / "success.png", title=title)
    console.print(f"table: {out / 'table.md'}   plot: {figure}")


@contextlib.contextmanager
def _prepared(recipe: Recipe, run_dir: Path) -> Iterator[tuple[Cluster, Path]]:
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


def _train_arm(recipe: Recipe, group: Cluster, start: Path, run_dir: Path, *, resume: bool) -> None:
    artifacts = Artifacts(Path(recipe.observe.runs_dir) / "artifacts")
    begin = time.monotonic()
    group.servers.wait_ready()
    meter = meter_directory(recipe, start, artifacts, group)
    with open_run(recipe, group, run_dir=run_dir, start=start, meter=meter, resume=resume) as run:
        progress = run_loop(run)
        _write_result(run_dir, progress.step, run.actor.parameter_hash())
        run.actor.save_hf(run_dir / "policy", start)
    logger.info("run finished dir=%s seconds=%.1f", run_dir, time.monotonic() - begin)


def _check_arms(arms: Mapping[str, Recipe]) -> None:
    """Arms share processes and start, so what those depend on must be equal."""
    names = list(arms)
    shared = ("seed", "model", "start", "env", "placement", "rollout", "publish")
    for name in names[1:]:
        for section in shared:
            if getattr(arms[name], section) != getattr(arms[names[0]], section):
                raise ConfigError(
                    f"arm {name} differs from arm {names[0]} in section {section}; arms share their processes and "
                    "start. Run it as a recipe of its own with `megatrl train`"
                )
        if arms[name].actor.layout != arms[names[0]].actor.layout:
            raise ConfigError(f"arm {name} differs from arm {names[0]} in actor.layout; arms share their processes")


def _write_result(run_dir: Path, step: int, parameter_hash: str) -> None:
    """The end of a run in one file: its last step and the hash of every rank's parameters."""
    (run_dir / "result.json").write_text(json.dumps({"step": step, "parameter_hash": parameter_hash}) + "\n")


def _write_sources(run_dir: Path, sources: Mapping[str, str]) -> None:
    directory = run_dir / "recipe"
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in sources.items():
        (directory / Path(path).name).write_text(text)


def _new_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
