"""`megatrl plan`: what a recipe needs, before anything is submitted. Runs on a login node."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrl.cli.failures import reports_failures, show_warnings

if TYPE_CHECKING:
    from megatrl.config.estimate.plan import Plan

GIB = 1024**3

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated.")
]


@reports_failures
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe or comparison file.")] = None,
    overrides: Overrides = None,
    *,
    gpu: Annotated[
        str, typer.Option("--gpu", help="a100, b200, h100 or h200; unused where actor.device is cpu.")
    ] = "h200",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of one node.")] = 8,
    host_memory_gib: Annotated[
        float | None, typer.Option("--host-memory-gib", min=0.1, help="For CPU recipes; by default this machine's.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="A known model's shape, such as Qwen3-30B-A3B, in place of model.path."),
    ] = None,
    trajectory_tokens: Annotated[
        int | None, typer.Option("--trajectory-tokens", min=2, help="Mean tokens of a trajectory; by default assumed.")
    ] = None,
    action_share: Annotated[
        float | None, typer.Option("--action-share", min=0.001, max=1.0, help="Share of them that the policy samples.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Compare the formulas with published throughput; no recipe needed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a recipe needs: memory by phase, time by verb, ranks, and what would make it fit.

    Exit code 1 where it does not fit, 2 where the recipe or its layout cannot be.
    """
    if recipe is None:
        if not published:
            raise typer.BadParameter("name a recipe, or ask for --published")
        _show_published(as_json)
        return
    host_memory = int(host_memory_gib * GIB) if host_memory_gib else _host_memory()
    plans = _plans(
        recipe, overrides or [], gpu=gpu, gpus_per_node=gpus_per_node, host_memory=host_memory, shape_name=shape,
        mean_tokens=trajectory_tokens, action_share=action_share,
    )  # fmt: skip
    if as_json:
        content = {name: made.to_json() for name, made in plans.items()}
        print(json.dumps(content[""] if list(content) == [""] else {"arms": content}, indent=2))
    else:
        from megatrl.cli.plan_tables import show_plan

        for name, made in plans.items():
            show_plan(made, title=f"{recipe}, arm {name}" if name else str(recipe))
        if published:
            _show_published(as_json)
    if not all(made.fits for made in plans.values()):
        raise typer.Exit(1)


def _plans(file: Path, overrides: list[str], **settings: object) -> "dict[str, Plan]":
    """The plan under the name "", or the plan of every arm of a comparison."""
    from megatrl.config.estimate.plan import make_plan
    from megatrl.config.load import is_comparison, load_comparison, load_recipe

    if is_comparison(file):
        loaded = dict(load_comparison(file, overrides, require_files=False).arms)
    else:
        loaded = {"": load_recipe(file, overrides, require_files=False)}
    show_warnings(tuple(dict.fromkeys(warning for one in loaded.values() for warning in one.warnings)))
    return {name: make_plan(one.recipe, **settings) for name, one in loaded.items()}  # type: ignore[arg-type]


def _show_published(as_json: bool) -> None:
    import dataclasses

    from megatrl.config.estimate.published import comparisons

    rows = comparisons()
    if as_json:
        print(json.dumps([dataclasses.asdict(row) | {"deviation": row.deviation} for row in rows], indent=2))
        return
    from megatrl.cli.plan_tables import show_published

    show_published(rows)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
