"""`megatrl config`: what a recipe says in the end, whether it is sound, and how two recipes differ."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrl.cli.failures import reports_failures, show_warnings

if TYPE_CHECKING:
    from megatrl.config.loaded import LoadedRecipe

app = typer.Typer(help="Show, check and compare recipes.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="Recipe or comparison file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
@reports_failures
def show(
    file: File,
    overrides: Overrides = None,
    *,
    arm: Annotated[str | None, typer.Option("--arm", help="Of a comparison: show this arm only.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out defaults.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the effective value of every key and where it comes from."""
    from megatrl.cli.tables import effective_table, print_table

    recipes = _chosen_arms(_load(file, overrides), arm)
    if as_json:
        content = {name: _as_json(loaded) for name, loaded in recipes.items()}
        print(json.dumps(content[""] if list(content) == [""] else {"arms": content}, indent=2))
        return
    for name, loaded in recipes.items():
        title = f"{file}, arm {name}" if name else str(file)
        print_table(effective_table(loaded, title=title, is_defaults_shown=not changed))
        show_warnings(loaded.warnings)


@app.command()
@reports_failures
def check(
    file: File,
    overrides: Overrides = None,
    *,
    require_files: Annotated[
        bool, typer.Option("--require-files", help="Missing model directories are errors, as for train.")
    ] = False,
) -> None:
    """Check a recipe or a comparison; list every problem."""
    for name, loaded in _load(file, overrides, require_files=require_files).items():
        show_warnings(loaded.warnings)
        label = f"{file}, arm {name}" if name else str(file)
        print(f"{label}: ok, {loaded.fingerprint[:12]}")


@app.command()
@reports_failures
def diff(
    left: Annotated[Path, typer.Argument(help="Recipe file.")],
    right: Annotated[Path, typer.Argument(help="Recipe file.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the keys whose effective values differ between two recipes."""
    from megatrl.cli.tables import difference_table, print_table
    from megatrl.config.load import load_recipe
    from megatrl.config.loaded import differences

    found = differences(load_recipe(left, require_files=False), load_recipe(right, require_files=False))
    if as_json:
        rows = {
            row.path: {
                "left": None if row.left is None else row.left.value,
                "right": None if row.right is None else row.right.value,
            }
            for row in found
        }
        print(json.dumps(rows, indent=2))
    elif found:
        print_table(difference_table(found, left=str(left), right=str(right)))
    else:
        print("no difference")


def _load(file: Path, overrides: list[str] | None, *, require_files: bool = False) -> "dict[str, LoadedRecipe]":
    """The recipe under the name "", or the recipe of every arm under the arm's name."""
    from megatrl.config.load import is_comparison, load_comparison, load_recipe

    if is_comparison(file):
        return dict(load_comparison(file, overrides or (), require_files=require_files).arms)
    return {"": load_recipe(file, overrides or (), require_files=require_files)}


def _chosen_arms(recipes: "dict[str, LoadedRecipe]", arm: str | None) -> "dict[str, LoadedRecipe]":
    from megatrl.errors import ConfigError

    if arm is None:
        return recipes
    if arm not in recipes:
        arms = ", ".join(name for name in recipes if name)
        raise ConfigError(f"--arm = {arm}: no such arm; " + (f"choose from {arms}" if arms else "this is one recipe"))
    return {arm: recipes[arm]}


def _as_json(loaded: "LoadedRecipe") -> dict[str, object]:
    return {
        "recipe": loaded.recipe.model_dump(mode="json"),
        "origins": {value.path: str(value.origin) for value in loaded.effective_values()},
        "warnings": list(loaded.warnings),
        "fingerprint": loaded.fingerprint,
    }
