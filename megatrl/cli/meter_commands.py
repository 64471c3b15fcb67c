"""`megatrl meter`: the life of a meter, one command for each stage. docs/meter.md has them in order."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrl.cli.failures import reports_failures, show_warnings

if TYPE_CHECKING:
    from megatrl.config.recipe import Recipe

app = typer.Typer(help="Train, judge and freeze the meter that DeltaTTG reads.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated.")
]
RunId = Annotated[str | None, typer.Option("--run-id", help="Directory name under observe.runs_dir/<name>.")]
Truncated = Annotated[
    Literal["fail", "drop"],
    typer.Option("--truncated-label", help="What an episode is that a limit ended: a failure, or left out."),
]
RecipeFile = Annotated[Path, typer.Argument(help="Recipe with env.kind: meter_prompts.")]


@app.command()
@reports_failures
def collect(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; of a comparison, all its arms.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="File to write, such as collection.jsonl.gz.")],
    truncated: Truncated = "fail",
    evaluations: Annotated[bool, typer.Option("--evaluations", help="Also the episodes of evaluations.")] = False,
) -> None:
    """Gather the recorded trajectories of runs: several source policies in one file, each trajectory once."""
    from megatrl.cli.tables import plain_table, print_table
    from megatrl.meter.collection import gather, write_collection
    from megatrl.observability.progress import waiting
    from megatrl.orchestration.meter_sources import open_run_sources

    sources = [source for run in runs for source in open_run_sources(run, with_evaluations=evaluations)]
    with waiting(f"trajectories of {len(sources)} runs"):
        collection, counts = gather(sources, truncated=truncated)
        write_collection(out, collection)
    reasons = ("infrastructure", "unknown", "truncated", "duplicate")
    rows = [
        (
            source.name,
            source.domain,
            *(str(count.taken[name]) for name in ("trajectories", "success", "failure", "truncated")),
            ", ".join(f"{count.left_out[reason]} {reason}" for reason in reasons if count.left_out[reason]) or "none",
        )
        for source, count in zip(collection.sources, counts, strict=True)
    ]
    header = ("source", "domain", "trajectories", "success", "failure", "truncated", "left out")
    print_table(plain_table(header, rows))
    print(out)


@app.command()
@reports_failures
def label(
    collection: Annotated[Path, typer.Argument(help="File of `megatrl meter collect`.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Directory to make.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="Model directory with the meter's tokenizer; by default the sources' own."),
    ] = None,
    chat_format: Annotated[
        Literal["chatml", "llama3"] | None, typer.Option(help="By default the first source's.")
    ] = None,
    tool_format: Annotated[Literal["qwen", "react"] | None, typer.Option(help="By default the first source's.")] = None,
    cap: Annotated[int, typer.Option("--cap", min=1, help="Most states of one trajectory, drawn over its turns.")] = 16,
    cut: Annotated[
        Literal["before_action", "after_action", "both"],
        typer.Option("--cut", help="Which states: before an action, after it and before its answer, or both."),
    ] = "before_action",
    with_terminal: Annotated[
        bool, typer.Option("--with-terminal", help="Also the state after the last action.")
    ] = False,
    balanced: Annotated[bool, typer.Option(help="As many successes as failures.")] = True,
    truncated: Truncated = "fail",
    success_threshold: Annotated[
        float | None, typer.Option(help="Score of a success; by default what the runs recorded.")
    ] = None,
    count_reasoning: Annotated[bool, typer.Option(help="Count thoughts among the tokens to go.")] = True,
    validation_fraction: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of tasks held out.")] = 0.1,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest sequence; longer histories lose middle turns.")
    ] = None,
    grid: Annotated[int, typer.Option("--grid", min=2, help="Numbers the meter can answer with.")] = 24,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Label recorded states with what came of them, in the tokens of one tokenizer; no task is in both splits."""
    from megatrl.meter.labelling import Labelling
    from megatrl.meter.labels import LabelRule

    how = Labelling(
        rule=LabelRule(
            max_prefixes_per_trajectory=cap,
            truncated=truncated,
            cut=cut,
            with_terminal=with_terminal,
            balanced=balanced,
            success_threshold=success_threshold,
        ),
        validation_fraction=validation_fraction,
        seed=seed,
        grid_size=grid,
        count_reasoning=count_reasoning,
        max_sequence_tokens=max_tokens,
    )
    _label(collection, out, how, tokenizer, chat_format, tool_format)


def _label(
    file: Path, out: Path, how: object, tokenizer: Path | None, chat_format: str | None, tool_format: str | None
) -> None:
    from megatrl.cli.tables import plain_table, print_table
    from megatrl.meter.collection import read_collection
    from megatrl.meter.labelling import Labelling, label_in_tokens_of
    from megatrl.observability.label_store import write_labels
    from megatrl.observability.progress import waiting

    assert isinstance(how, Labelling)
    with waiting("labels"):
        labelled = label_in_tokens_of(
            read_collection(file), how, tokenizer=tokenizer, chat_format=chat_format, tool_format=tool_format
        )
        labels = write_labels(out, labelled.labels, labelled.groups)
    rows = [
        (row.split, row.source, str(row.trajectories), str(row.successes), str(row.failures)) for row in labelled.rows
    ]
    print_table(plain_table(("split", "source", "trajectories", "success states", "failure states"), rows))
    for split, left_out in labelled.left_out.items():
        print(f"{split}: left out {', '.join(f'{n} {reason}' for reason, n in left_out.items() if n) or 'nothing'}")
    costs = ", ".join(f"{domain} {cost:.1f}" for domain, cost in labels.failure_costs.items())
    print(f"C in tokens: {costs}; grid of {len(labels.prompt.grid)} numbers up to {labels.prompt.grid[-1]:g}")
    print(f"longest sequence {labels.max_sequence_tokens} tokens; tokenizer {labels.prompt.tokenizer_fingerprint}")
    print(f"{out} {labels.content_hash}")


@app.command()
@reports_failures
def sft(recipe: RecipeFile, overrides: Overrides = None, *, run_id: RunId = None) -> None:
    """Fine-tune a model on labelled states: loss on the answers alone. The settings are start.sft."""
    from megatrl.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    show_warnings(loaded.warnings)
    run_dir = _life().sft(loaded, run_id=run_id)
    _print_metrics(run_dir / "evaluation" / "evaluation.json")
    print(run_dir)


@app.command()
@reports_failures
def refine(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    run_id: RunId = None,
) -> None:
    """Refine a meter by GRPO on its own prompts, through the loop that trains every policy."""
    from megatrl.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    show_warnings(loaded.warnings)
    print(_life().refine(loaded, resume=resume, run_id=run_id))


@app.command(name="eval")
@reports_failures
def evaluate(
    meter: Annotated[Path, typer.Argument(help="Frozen meter, run of meter sft or refine, or model directory.")],
    data: Annotated[Path, typer.Argument(help="Directory of `megatrl meter label`.")],
    *,
    readout: Annotated[
        Literal["candidates", "decode"],
        typer.Option("--readout", help="Score candidate answers in a forward pass, or decode and parse one."),
    ] = "candidates",
    split: Annotated[Literal["training", "validation"], typer.Option("--split")] = "validation",
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory; by default evaluation/ in the run, or beside the meter.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Recipe whose actor, rollout.servers and batch are used.")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Without --recipe: one process in fp32 or bf16 there.")
    ] = "cuda",
) -> None:
    """Measure a meter on held-out tasks: table, evaluation.json and three plots."""
    engines = _engines(recipe, device)
    life = _life()
    place: Path = out or life.evaluation_directory(meter)
    life.evaluate(meter, data, engines=engines, readout=readout, split=split, out=place)
    _print_metrics(place / "evaluation.json")
    print(place)


@app.command()
@reports_failures
def freeze(
    source: Annotated[Path, typer.Argument(help="Run of meter sft or refine, or a model directory with --labels.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Directory to make.")],
    labels: Annotated[Path | None, typer.Option("--labels", help="Labels of a model nobody trained on them.")] = None,
) -> None:
    """Freeze a meter: weights, tokenizer, prompt, C and the hash of its labels in one verified directory."""
    from megatrl.meter.freezing import freeze as freeze_source

    frozen = freeze_source(source, out, labels_directory=labels)
    rows = {
        "identity": frozen.identity,
        "tokenizer": frozen.prompt.tokenizer_fingerprint,
        "template": frozen.prompt.template_hash,
        "labels": frozen.training_hash,
        **{f"C in {domain}": f"{cost:.1f}" for domain, cost in frozen.failure_costs.items()},
    }
    _print_rows(("part", "value"), rows)
    print(frozen.path)


def _engines(recipe: Path | None, device: Literal["cpu", "cuda"]) -> "Recipe":
    """A recipe for its engines alone; the model and the tokens are the meter's."""
    from megatrl.config.engines_alone import engines_alone
    from megatrl.config.load import load_recipe

    return load_recipe(recipe, require_files=False).recipe if recipe else engines_alone("meter-eval", device)


def _print_metrics(path: Path) -> None:
    import json

    if path.is_file():
        metrics = json.loads(path.read_text())["metrics"]
        _print_rows(("metric", "value"), {name: f"{value:.4f}" for name, value in metrics.items()})


def _print_rows(header: tuple[str, str], rows: Mapping[str, str]) -> None:
    from megatrl.cli.tables import plain_table, print_table

    print_table(plain_table(header, list(rows.items())))


def _life() -> ModuleType:
    """The module of the commands that need engines; its imports take seconds."""
    from megatrl.observability.progress import waiting

    with waiting("loading libraries"):
        from megatrl.orchestration import meter_life
    return meter_life
