"""The `megatrl` command. Heavy libraries load inside the commands that train; the others answer at once."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from megatrl.cli import config_commands, convert_command, eval_command, judge_command, plan_command
from megatrl.cli.failures import debugging, reports_failures, show_warnings

app = typer.Typer(
    name="megatrl",
    help="RL post-training for multi-turn LLM agents with step-level credit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_commands.app, name="config")
app.add_typer(judge_command.app, name="meter")  # that of meter_commands, with two more
app.command()(plan_command.plan)
app.command(name="eval")(eval_command.evaluate)
app.add_typer(convert_command.app, name="convert")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value, as in batch.group_size=4; may be repeated."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")]
RunId = Annotated[
    str | None,
    typer.Option("--run-id", help="Directory name under observe.runs_dir; by default made from name and time."),
]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from megatrl import __version__

        print(f"megatrl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """RL post-training for multi-turn LLM agents with step-level credit."""
    debugging.set(debug)


@app.command()
@reports_failures
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Overrides = None,
    *,
    resume: Resume = False,
    run_id: RunId = None,
) -> None:
    """Train the policy of a recipe."""
    from megatrl.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    show_warnings(loaded.warnings)
    try:
        run_dir = _orchestration().train(loaded, resume=resume, run_id=run_id)
    except KeyboardInterrupt:
        print("the same command with --resume goes on from the run's newest checkpoint", file=sys.stderr)
        raise
    print(run_dir)
    if sys.stderr.isatty():
        steps = loaded.recipe.train.num_steps
        print(f"read what was said: megatrl show {run_dir} --step {steps}", file=sys.stderr)


@app.command()
@reports_failures
def compare(
    comparison: Annotated[Path, typer.Argument(help="Comparison file: a recipe and the arms that change it.")],
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the arms that ended, run the others.")] = False,
    run_id: RunId = None,
) -> None:
    """Train every arm of a comparison from one start, once for each seed, and report them side by side."""
    from megatrl.config.load import load_comparison

    loaded = load_comparison(comparison, overrides or ())
    for arm in loaded.arms.values():
        show_warnings(arm.warnings)
    _comparison().compare(loaded, run_id=run_id, resume=resume)


@app.command()
@reports_failures
def replay(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    *,
    from_step: Annotated[
        int, typer.Option("--from-step", min=0, help="Begin at this step's checkpoint; 0 is the start.")
    ] = 0,
    num_steps: Annotated[
        int | None, typer.Option("--num-steps", min=1, help="Last step; by default the recipe's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the replay; by default in the run's.")] = None,
) -> None:
    """Train on the stored trajectories of a run again, without rollout servers."""
    print(_orchestration().replay(run, from_step=from_step, num_steps=num_steps, out=out))


@app.command(name="make-tiny")
@reports_failures
def make_tiny(
    recipe: Annotated[Path, typer.Argument(help="Recipe file with model.kind: tiny.")],
    out: Annotated[Path, typer.Argument(help="Directory to write, in Hugging Face form.")],
    overrides: Overrides = None,
) -> None:
    """Write the small random model of a recipe, with a tokenizer for its environment."""
    from megatrl.config.engines import TinyModel
    from megatrl.config.load import load_recipe
    from megatrl.errors import ConfigError

    loaded = load_recipe(recipe, overrides or (), require_files=False)
    model = loaded.recipe.model
    if not isinstance(model, TinyModel):
        place = loaded.origin("model.kind")
        raise ConfigError(f"{place}: model.kind = {model.kind}: make-tiny makes tiny models; name another recipe")
    from megatrl.checkpoint.tiny_model import make_tiny as write_tiny

    write_tiny(model, loaded.recipe.env, out)
    print(out)


@app.command()
@reports_failures
def show(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    *,
    step: Annotated[int, typer.Option("--step", min=0, help="Step to show.")],
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", help="Show this one only: its id, or a part that no other has.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Conversations to show.")] = 2,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Show the evaluation after the step.")] = False,
) -> None:
    """Show the trajectories of one step with rewards, scores and credit."""
    from megatrl.observability.show import render_step

    stream = "eval_step" if evaluation else "step"
    render_step(run, step, trajectory=trajectory, limit=limit, stream=stream)


def _comparison() -> ModuleType:
    """The module of `compare`; imports as below."""
    _orchestration()
    from megatrl.orchestration import comparison

    return comparison


def _orchestration() -> ModuleType:
    """The module of the commands that train. Its imports take seconds, on a slow file system many."""
    from megatrl.observability.progress import waiting

    with waiting("loading libraries"):
        from megatrl.orchestration import command
    return command


if __name__ == "__main__":
    app()
