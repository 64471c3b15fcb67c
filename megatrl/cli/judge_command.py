"""`megatrl meter judge` and `megatrl meter bench-file`: does a meter know a right step from a wrong one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrl.cli.failures import reports_failures
from megatrl.cli.meter_commands import app

if TYPE_CHECKING:
    from megatrl.config.recipe import Recipe

TieName = Literal["negative", "positive", "half", "wrong"]


@app.command()
@reports_failures
def judge(
    meter: Annotated[Path, typer.Argument(help="Frozen meter.")],
    file: Annotated[Path, typer.Argument(help="AgentProcessBench: a .jsonl file, or a directory with some.")],
    *,
    target: Annotated[
        Literal["tokens_to_go", "steps_to_go", "future_score"],
        typer.Option("--target", help="What the meter was trained to forecast."),
    ] = "tokens_to_go",
    tie: Annotated[
        TieName | None, typer.Option("--tie", help="Show this rule for steps without a signal; by default all.")
    ] = None,
    readout: Annotated[Literal["candidates", "decode"], typer.Option("--readout")] = "candidates",
    failure_cost: Annotated[
        float | None, typer.Option("--failure-cost", min=0.0, help="C in the target's unit; by default the meter's.")
    ] = None,
    inverted: Annotated[
        bool, typer.Option("--inverted", help="Turn every signal round: the control that falls below a coin.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory; by default beside the meter, named after the file.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe whose engines are used.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Without --recipe: one process in fp32 or bf16 there.")
    ] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print the accuracies as JSON instead of a table.")] = False,
) -> None:
    """Judge every labelled step by the change of the meter's forecast across it."""
    from megatrl.cli.tables import plain_table, print_table
    from megatrl.observability.progress import waiting

    with waiting("loading libraries"):
        from megatrl.orchestration import eval_judge
    place: Path = out or meter.with_name(f"{meter.name}-judges-{file.stem}")
    judgment = eval_judge.judge(
        meter,
        file,
        engines=_engines(recipe, device),
        target=target,
        readout=readout,
        out=place,
        failure_cost=failure_cost or None,
        inverted=inverted,
    )
    if as_json:
        print(json.dumps(judgment.as_json(), indent=1))
        return
    rules = (tie,) if tie else tuple(judgment.overall.by_tie_rule)
    rows = [
        (name, str(each.num_steps), str(each.num_ties), *(f"{each.by_tie_rule[rule]:.4f}" for rule in rules))
        for name, each in (("overall", judgment.overall), *judgment.by_dataset.items())
    ]
    print_table(plain_table(("dataset", "steps", "ties", *(f"ties {rule}" for rule in rules)), rows))
    print(f"unknown words {judgment.unknown_words:.3f}, shortened histories {judgment.shortened:.3f}")
    print(place)


@app.command(name="bench-file")
@reports_failures
def bench_file(
    run: Annotated[Path, typer.Argument(help="Run directory, or DIR/natural of an evaluation.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="File to write; its stem names the dataset.")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most trajectories.")] = None,
) -> None:
    """Write a run's trajectories in AgentProcessBench's form, each step labelled by the environment's own plan."""
    from collections import Counter

    from megatrl.observability.progress import waiting

    with waiting("loading libraries"):
        from megatrl.orchestration import eval_judge
    records = eval_judge.write_bench_file(run, out, limit=limit)
    labels = Counter(label for record in records for label in record.step_labels)
    print(f"{out}: {len(records)} trajectories, steps {labels[1]} right, {labels[0]} neutral, {labels[-1]} wrong")


def _engines(recipe: Path | None, device: Literal["cpu", "cuda"]) -> "Recipe":
    """A recipe for its engines alone; the model and the tokens are the meter's."""
    from megatrl.config.engines_alone import engines_alone
    from megatrl.config.load import load_recipe

    return load_recipe(recipe, require_files=False).recipe if recipe else engines_alone("meter-judge", device)
