"""What the command `compare` does: the arms of a comparison, once for each seed, from starts that they share."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from megatrl.config.loaded import LoadedComparison
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError, ConfigError
from megatrl.observability.plots import plot_success
from megatrl.observability.run_summary import load_run, markdown_table, rich_table, summarize
from megatrl.orchestration.command import RESULT, prepared, train_arm, write_sources
from megatrl.orchestration.run_directory import claimed, held, identity_of

_IDENTITY = "comparison.json"


def compare(loaded: LoadedComparison, *, run_id: str | None = None, resume: bool = False) -> Path:
    """Runs every arm from the same start, once for each seed; prints and plots the curves; returns the directory.

    With `resume`, arms of the named or newest comparison that came to their end are kept. One that did not is set aside
    under another name and run again from its start.
    """
    arms = {name: arm.recipe for name, arm in loaded.arms.items()}
    first = next(iter(arms.values()))
    _check_arms(arms)
    home = Path(first.observe.runs_dir) / loaded.comparison.name
    identity = {name: identity_of(recipe) for name, recipe in arms.items()}
    with _continued(home, run_id, identity) if resume else claimed(home, run_id) as out:
        write_sources(out, {source.path: source.text for source in loaded.sources})
        (out / _IDENTITY).write_text(json.dumps(identity) + "\n")
        for seed in loaded.comparison.seeds or (first.seed,):
            place = out / f"seed-{seed}" if loaded.comparison.seeds else out
            _run_seed({name: recipe.model_copy(update={"seed": seed}) for name, recipe in arms.items()}, place)
    done = [path.parent for path in sorted(out.glob(f"**/{RESULT}")) if path.parent.name in arms]
    report(sorted(done, key=lambda path: list(arms).index(path.name)), out, title=loaded.comparison.name)
    return out


def report(run_dirs: list[Path], out: Path, *, title: str) -> None:
    """Prints the table of the runs, writes it as Markdown and draws success over steps. Equal names are repeats."""
    runs = [load_run(path, path.name) for path in run_dirs]
    rows = [summarize(run) for run in runs]
    console = Console()
    console.print(rich_table(rows, title=title))
    (out / "table.md").write_text(markdown_table(rows))
    figure = plot_success(runs, out / "success.png", title=title)
    console.print(f"table: {out / 'table.md'}   plot: {figure}")


def _run_seed(arms: Mapping[str, Recipe], place: Path) -> None:
    """All arms of one seed that have not ended yet, on one cluster."""
    missing = {name: recipe for name, recipe in arms.items() if not (place / name / RESULT).is_file()}
    if not missing:
        return
    with prepared(next(iter(arms.values())), place) as (group, start):
        for name, recipe in missing.items():
            Console().rule(f"[bold]{name}" if place.name == name else f"[bold]{place.name} {name}")
            _set_aside(place / name)
            train_arm(recipe, group, start, place / name, resume=False)


def _set_aside(run_dir: Path) -> None:
    """Renames what an interrupted arm left; nothing is deleted."""
    if not run_dir.exists():
        return
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.interrupted-{number}")).exists():
        number += 1
    run_dir.rename(aside)


@contextlib.contextmanager
def _continued(home: Path, run_id: str | None, identity: Mapping[str, object]) -> Iterator[Path]:
    """The directory of a comparison to go on with. CheckpointError where there is none, or other arms ran there."""
    known = sorted(path.parent.name for path in home.glob(f"*/{_IDENTITY}"))
    if not known or (run_id is not None and run_id not in known):
        raise CheckpointError(f"nothing to resume in {home / (run_id or '')}: no comparison was started there")
    out = home / (run_id or known[-1])
    recorded = json.loads((out / _IDENTITY).read_text())
    changed = sorted(name for name in {**recorded, **identity} if recorded.get(name) != identity.get(name))
    if changed:
        raise CheckpointError(
            f"the arms {', '.join(changed)} are not those of {out}; set them back, or start anew without --resume"
        )
    with held(out):
        yield out


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
