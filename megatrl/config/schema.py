"""What the sections declare: their fields, variants and names, read from the pydantic models."""

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from megatrl.config.scalars import members
from megatrl.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPath:
    """One leaf field of the schema. `path` is where it sits in a recipe; variants share a path prefix."""

    path: str
    section: type[Section]
    name: str


def section_variants(annotation: Any) -> tuple[type[Section], ...]:
    """Section classes that a field of this annotation accepts; () for a leaf field."""
    return tuple(m for m in members(annotation) if isinstance(m, type) and issubclass(m, Section))


def accepts_null(annotation: Any) -> bool:
    return types.NoneType in members(annotation)


def is_array(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def is_pass_through(annotation: Any) -> bool:
    """A map whose keys belong to another program."""
    return get_origin(annotation) is dict


def item_annotation(annotation: Any) -> Any:
    """Type of an array's items or of a pass-through map's values."""
    arguments = get_args(annotation)
    return arguments[0] if is_array(annotation) else arguments[1]


def kind_of(section: type[Section]) -> str | None:
    """The value of `kind` that selects this variant; None for a section without one."""
    field = section.model_fields.get("kind")
    return str(field.default) if field is not None and len(get_args(field.annotation)) == 1 else None


def leaf_fields(section: type[Section], prefix: str = "") -> Iterator[FieldPath]:
    """Every leaf field below a section, all variants included."""
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        variants = section_variants(field.annotation)
        for variant in variants:
            yield from leaf_fields(variant, path)
        if not variants:
            yield FieldPath(path=path, section=section, name=name)


def all_paths(root: type[Section]) -> tuple[str, ...]:
    """Every dotted path, of sections and leaves, once each and in the order of the schema."""
    paths: dict[str, None] = {}
    for leaf in leaf_fields(root):
        parts = leaf.path.split(".")
        for depth in range(1, len(parts) + 1):
            paths[".".join(parts[:depth])] = None
    return tuple(paths)


def suggest(root: type[Section], section: type[Section], path: str) -> str:
    """The remedy for a key that `section` does not know: the nearest valid key, or where the name belongs."""
    parent, _, key = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    known = list(section.model_fields)
    everywhere = all_paths(root)
    same_name = [candidate for candidate in everywhere if candidate.rpartition(".")[2] == key]
    same_name.sort(key=lambda candidate: -difflib.SequenceMatcher(None, path, candidate).ratio())
    if path in everywhere:  # right place, but of another variant of this section
        return f"{path} exists only for another kind of {parent}; this kind has: {', '.join(known)}"
    if same_name:
        return f"did you mean {' or '.join(same_name[:3])}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    if "." in key and key in everywhere:
        return "write it nested, one key for each part"
    anywhere = difflib.get_close_matches(path, everywhere, n=1, cutoff=0.75)
    return f"did you mean {anywhere[0]}?" if anywhere else f"valid keys here: {', '.join(known)}"
