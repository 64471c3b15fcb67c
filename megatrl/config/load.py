"""Recipe and comparison files to checked configurations. Every problem is reported at once, with its place.

A recipe may name one `base:` recipe, relative to itself, whose values it changes. Overrides are `path=value` texts
as `--set` takes them; the last one for a path wins. docs/configuration.md has the rules.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megatrl.config.checks import CHECKS, FILE_CHECKS
from megatrl.config.loaded import LoadedComparison, LoadedRecipe, SourceText, flatten
from megatrl.config.overrides import arm_layers, arm_tables, override_layers
from megatrl.config.recipe import Comparison, ComparisonHeader, Recipe
from megatrl.config.recipe_files import read_table, recipe_layers, relative_to
from megatrl.config.resolve import Resolver, constraint_violations
from megatrl.config.section import Section
from megatrl.config.violations import Problem, Violation, raise_for
from megatrl.config.yaml_nodes import DEFAULT, Origin, Table
from megatrl.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)


def is_comparison(path: str | Path) -> bool:
    """Whether the file is a comparison (it has arms). Raises ConfigError where it cannot be read."""
    return "arms" in read_table(str(path), "file")[1].entries


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, require_files: bool = True) -> LoadedRecipe:
    """Return the recipe in a file with overrides applied, and the origin of every value.

    With `require_files=False` missing model or meter directories are warnings, so that a recipe can be read on
    another machine. Raises ConfigError with every violation.
    """
    layers, sources, violations = recipe_layers(str(path))
    if "arms" in layers[-1].entries:
        raise ConfigError(f"{path}: has arms, so it is a comparison; run `megatrl compare {path}`")
    sets = override_layers(overrides, violations)
    loaded = _build(str(path), [*layers, *sets], sources, tuple(overrides), violations, require_files)
    raise_for(violations, f"recipe {path}")
    assert loaded is not None
    return loaded


def load_comparison(path: str | Path, overrides: Sequence[str] = (), *, require_files: bool = True) -> LoadedComparison:
    """Return a comparison with one complete recipe for each arm; overrides apply to all arms.

    Raises ConfigError with every violation of every arm.
    """
    what = f"comparison {path}"
    text, table, violations = read_table(str(path), "file")
    if "arms" not in table.entries and ("model" in table.entries or "base" in table.entries):
        raise ConfigError(f"{path}: has no arms, so it is a recipe; run `megatrl train {path}`")
    header, arms = _header(table, violations), arm_tables(table, violations)
    raise_for(violations, what)

    recipe_path = relative_to(str(path), header.recipe)
    layers, recipe_sources, violations = recipe_layers(recipe_path)
    sets = override_layers(overrides, violations)
    sources = (SourceText(path=str(path), text=text), *recipe_sources)
    loaded: dict[str, LoadedRecipe] = {}
    for arm, settings in arms.items():
        arm_sets = arm_layers(settings, arm, violations)
        built = _build(recipe_path, [*layers, *arm_sets, *sets], sources, tuple(overrides), violations, require_files)
        if built is not None:
            loaded[arm] = built
    raise_for(violations, what)
    texts: dict[str, dict[str, object]] = {
        arm: {key: str(entry.node) for key, entry in settings.entries.items()} for arm, settings in arms.items()
    }
    comparison = Comparison(name=header.name, recipe=header.recipe, seeds=header.seeds, arms=texts)
    return LoadedComparison(comparison=comparison, path=str(path), arms=loaded, sources=sources)


def _header(table: Table, violations: list[Violation]) -> ComparisonHeader:
    """Everything but the arms; raises ConfigError at once where it is wrong, as nothing can be read without it."""
    resolver = Resolver(root=ComparisonHeader, named=Comparison)
    entries = {key: entry for key, entry in table.entries.items() if key != "arms"}
    values = resolver.resolve([Table(entries=entries, origin=table.origin)])
    header, refused = _validate(ComparisonHeader, values, resolver)
    violations += resolver.violations + refused
    if header is None:
        raise_for(violations, f"comparison {table.origin.file}")
    assert header is not None, "a header is refused with a reason"
    return header


def _validate(
    section: type[AnySection], values: dict[str, Any], resolver: Resolver
) -> tuple[AnySection | None, list[Violation]]:
    try:
        return section.model_validate(values), []
    except ValidationError as error:
        return None, constraint_violations(error, values, resolver.origins)


def _unset_defaults(section: Section, origins: Mapping[str, Origin], prefix: str = "") -> None:
    """Values came to the schema complete; `model_fields_set` then holds only what somebody wrote, for messages."""
    for name, value in section:
        path = prefix + name
        if origins.get(path) is DEFAULT:
            section.model_fields_set.discard(name)
        elif isinstance(value, Section):
            _unset_defaults(value, origins, f"{path}.")


def _build(
    path: str,
    layers: Sequence[Table],
    sources: tuple[SourceText, ...],
    overrides: tuple[str, ...],
    violations: list[Violation],
    require_files: bool,
) -> LoadedRecipe | None:
    """The recipe of these layers; what is wrong with it is added to `violations`."""
    resolver = Resolver(root=Recipe)
    values = resolver.resolve(layers)
    recipe, refused = _validate(Recipe, values, resolver)
    violations += resolver.violations + refused
    if recipe is None:
        return None
    _unset_defaults(recipe, resolver.origins)
    loaded = LoadedRecipe(
        recipe=recipe, path=path, origins=resolver.origins, sources=sources, overrides=overrides, warnings=()
    )
    warnings = []
    for check in (*CHECKS, *FILE_CHECKS):
        for problem in check(recipe):
            is_warning = problem.is_warning or (check in FILE_CHECKS and not require_files)
            violation = _located(problem, loaded)
            (warnings if is_warning else violations).append(violation)
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        origins=resolver.origins,
        sources=sources,
        overrides=overrides,
        warnings=tuple(str(warning) for warning in warnings),
    )


def _located(problem: Problem, loaded: LoadedRecipe) -> Violation:
    """A problem with the place and value of every path that is part of it."""
    values = flatten(loaded.recipe.model_dump(mode="json"))
    first, *others = problem.paths
    seen = [f"{other} = {_shown(values.get(other))} ({loaded.origin(other)})" for other in others if other in values]
    context = f" [{', '.join(seen)}]" if seen else ""
    return Violation(
        origin=str(loaded.origin(first)),
        path=first,
        seen=_shown(values[first]) if first in values else "",
        problem=problem.message + context,
        remedy=problem.remedy,
    )


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
