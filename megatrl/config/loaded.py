"""A recipe as it was loaded: its values, where each of them was written, and the texts it came from."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrl.config.recipe import Comparison, Recipe
from megatrl.config.yaml_nodes import DEFAULT, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A file that was read, to be kept beside the run."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One leaf of the effective configuration."""

    path: str
    value: object
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """What `megatrl train` runs. `warnings` are problems that do not stop a run, ready to be shown."""

    recipe: Recipe
    path: str
    origins: Mapping[str, Origin]
    sources: tuple[SourceText, ...]
    overrides: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def effective_values(self) -> tuple[EffectiveValue, ...]:
        """Every leaf with its origin, in the order of the schema."""
        return tuple(
            EffectiveValue(path=path, value=value, origin=self.origin(path))
            for path, value in flatten(self.recipe.model_dump(mode="json")).items()
        )

    def origin(self, path: str) -> Origin:
        """Where the value at `path` comes from; a section answers with the place of its first written key."""
        if path in self.origins:
            return self.origins[path]
        below = [origin for key, origin in self.origins.items() if key.startswith(f"{path}.")]
        return next((origin for origin in below if origin.kind != "default"), DEFAULT)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the effective values; equal exactly where two recipes say the same."""
        text = json.dumps(self.recipe.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedComparison:
    """What `megatrl compare` runs: one complete recipe for each arm, in the order of the file."""

    comparison: Comparison
    path: str
    arms: Mapping[str, LoadedRecipe]
    sources: tuple[SourceText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One path at which two recipes differ; None where a side has no such path."""

    path: str
    left: EffectiveValue | None
    right: EffectiveValue | None


def differences(left: LoadedRecipe, right: LoadedRecipe) -> tuple[Difference, ...]:
    """Paths whose effective values differ; origins alone do not count."""
    lefts = {value.path: value for value in left.effective_values()}
    rights = {value.path: value for value in right.effective_values()}
    return tuple(
        Difference(path=path, left=lefts.get(path), right=rights.get(path))
        for path in dict.fromkeys([*lefts, *rights])
        if path not in lefts or path not in rights or lefts[path].value != rights[path].value
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested maps as one map by dotted path; lists stay whole, an empty map stays a leaf."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        else:
            flat[path] = value
    return flat
