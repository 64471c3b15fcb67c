"""`megatrl eval`: how well a policy does on held-out tasks, and what choosing among several actions adds."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrl.cli.failures import reports_failures

if TYPE_CHECKING:
    from megatrl.orchestration.eval_run import EvaluationPlan, EvaluationReport


class Selection(StrEnum):
    """Ways to choose an action."""

    NATURAL = "natural"
    RANDOM = "random"
    METER = "meter"
    ORACLE = "oracle"


Select = Annotated[
    list[Selection] | None,
    typer.Option(
        "--select",
        help="How an action is chosen: the one sampled, one of several at random, or the one that a frozen meter, "
        "or for studies the environment's own plan, prefers. "
        "May be repeated: the same tasks for each, compared with the first.",
        show_default="natural",
    ),
]


@reports_failures
def evaluate(
    policy: Annotated[Path, typer.Argument(help="Model directory, run directory, or checkpoint.")],
    recipe: Annotated[Path, typer.Option("--recipe", help="Recipe with the environment, rollout and servers.")],
    *,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The run's checkpoint of this step, not its policy.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option("--episodes", min=1, help="Held-out tasks; by default evaluation.num_episodes.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Episodes of each task.")] = 1,
    select: Select = None,
    candidates: Annotated[int, typer.Option("--candidates", min=1, help="Actions sampled at each turn.")] = 4,
    meter: Annotated[Path | None, typer.Option("--meter", help="Frozen meter; by default the recipe's.")] = None,
    readout: Annotated[
        Literal["candidates", "decode"] | None,
        typer.Option("--readout", help="How the meter answers; by default credit.readout, or candidates."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="By default evaluation.temperature.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory; one that holds episodes of the same settings is continued."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Play held-out tasks with a policy on real servers; an interrupted evaluation goes on where it stopped."""
    from megatrl.config.load import load_recipe
    from megatrl.observability.progress import waiting

    loaded = load_recipe(recipe, overrides or (), require_files=False)
    with waiting("loading libraries"):
        from megatrl.orchestration import eval_run
    plan = eval_run.EvaluationPlan(
        policy=policy,
        recipe=loaded.recipe,
        step=step,
        episodes=episodes,
        repeats=repeats,
        selections=tuple(name.value for name in select or (Selection.NATURAL,)),
        candidates=candidates,
        meter=meter,
        readout=readout,
        temperature=temperature,
        out=out,
    )
    _tell(_evaluated(plan), as_json=as_json)


def _evaluated(plan: "EvaluationPlan") -> "EvaluationReport":
    from megatrl.orchestration.eval_run import evaluate as run

    try:
        return run(plan)
    except KeyboardInterrupt:
        print("the same command goes on with the episodes that are left", file=sys.stderr)
        raise


def _tell(report: "EvaluationReport", *, as_json: bool) -> None:
    from megatrl.cli.tables import plain_table, print_table
    from megatrl.orchestration.eval_summary import HEADER, INTERVALS, comparison_rows

    if as_json:
        print(json.dumps({"out": str(report.out), "selections": report.as_json()}, indent=1))
        return
    print_table(plain_table(HEADER, comparison_rows(report.arms)))
    print(INTERVALS)
    print(report.out)
