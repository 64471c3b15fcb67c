"""Layers of nodes (base, recipe, overrides) to one complete tree of typed values, guided by the schema.

Rules of a merge, lowest layer first: maps merge key by key; a scalar or a list replaces; a map that names
another `kind` starts that kind from its defaults; `a.1=x` from `--set` replaces one element of a list.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined, ValidationError

from megatrl.config.scalars import ScalarError, read_scalar
from megatrl.config.schema import (
    accepts_null,
    is_array,
    is_pass_through,
    item_annotation,
    kind_of,
    section_variants,
    suggest,
)
from megatrl.config.section import Section
from megatrl.config.violations import Violation
from megatrl.config.yaml_nodes import DEFAULT, Array, Entry, Node, Origin, Scalar, Table

MISSING = PydanticUndefined
FAILED = object()
"""Stands where a value was refused, so that the other values can still be validated."""


@dataclasses.dataclass(slots=True)
class Resolver:
    """Accumulates origins and violations while it walks the schema. One use each."""

    root: type[Section]
    named: type[Section] | None = None
    """Schema to suggest names from; None means that of `root`."""
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)
    violations: list[Violation] = dataclasses.field(default_factory=list)

    def resolve(self, layers: Sequence[Table]) -> dict[str, Any]:
        """Return the values of the root section; refused ones are FAILED and listed in `violations`."""
        return self._fields(self.root, layers, None, "")

    def refuse(self, origin: Origin | str, path: str, seen: object, problem: str, remedy: str) -> Any:
        text = "" if seen is None else str(seen)
        self.violations.append(Violation(origin=str(origin), path=path, seen=text, problem=problem, remedy=remedy))
        return FAILED

    def _fields(
        self, section: type[Section], layers: Sequence[Table], defaults: Section | None, path: str
    ) -> dict[str, Any]:
        for layer in layers:
            for key, entry in layer.entries.items():
                if key not in section.model_fields:
                    child = f"{path}.{key}" if path else key
                    self.refuse(entry.origin, child, entry.node, "unknown key", self._nearest(section, child))
        values = {}
        for name, field in section.model_fields.items():
            child_layers = [layer.entries[name].node for layer in layers if name in layer.entries]
            default = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
            child = f"{path}.{name}" if path else name
            values[name] = self._value(field.annotation, child_layers, default, child)
        return values

    def _nearest(self, section: type[Section], path: str) -> str:
        if self.named is not None and section is self.root:
            return suggest(self.named, self.named, path)
        return suggest(self.root, section, path)

    def _value(self, annotation: Any, layers: Sequence[Node], default: Any, path: str) -> Any:
        if not layers and default is MISSING:
            kinds = [kind for variant in section_variants(annotation) if (kind := kind_of(variant))]
            choice = f"set {path}.kind to one of {', '.join(kinds)}" if kinds else f"set {path}"
            return self.refuse("", path, None, "required, but not given", choice)
        if section_variants(annotation):
            return self._section(annotation, layers, default, path)
        if is_pass_through(annotation):
            return self._pass_through(annotation, layers, default, path)
        if is_array(annotation):
            return self._array(annotation, layers, default, path)
        if not layers:
            self.origins[path] = DEFAULT
            return default
        return self._scalar(annotation, layers[-1], path)

    def _scalar(self, annotation: Any, node: Node, path: str) -> Any:
        self.origins[path] = node.origin
        if not isinstance(node, Scalar):
            shape = "a list" if isinstance(node, Array) else "a map"
            return self.refuse(node.origin, path, node, f"expected one value, got {shape}", "write one value")
        try:
            return read_scalar(node, annotation)
        except ScalarError as error:
            return self.refuse(node.origin, path, node, error.problem, error.remedy)

    def _section(self, annotation: Any, layers: Sequence[Node], default: Any, path: str) -> Any:
        variants = section_variants(annotation)
        defaults = default if isinstance(default, Section) else None
        section: type[Section] | None = type(defaults) if defaults else variants[0] if len(variants) == 1 else None
        is_null, active = defaults is None and default is None, []
        for node in layers:
            if isinstance(node, Scalar) and accepts_null(annotation) and self._is_null(node):
                is_null, active, defaults = True, [], None
                self.origins[path] = node.origin
                continue
            if not isinstance(node, Table):
                return self.refuse(node.origin, path, node, "expected a map of keys", f"write {path}: {{key: value}}")
            is_null = False
            if len(variants) > 1 and "kind" in node.entries:
                chosen = self._variant(variants, node.entries["kind"].node, f"{path}.kind")
                if chosen is None:
                    return FAILED
                if chosen is not section:
                    section, active, defaults = chosen, [], None
            active.append(node)
        if is_null:
            self.origins.setdefault(path, DEFAULT)
            return None
        if section is None:
            return self._refuse_without_kind(variants, layers, path)
        self.origins.pop(path, None)
        return self._fields(section, active, defaults, path)

    def _refuse_without_kind(self, variants: Sequence[type[Section]], layers: Sequence[Node], path: str) -> Any:
        known = {name for variant in variants for name in variant.model_fields}
        for node in layers:
            for key, entry in node.entries.items() if isinstance(node, Table) else ():
                if key not in known:
                    remedy = suggest(self.root, variants[0], f"{path}.{key}")
                    self.refuse(entry.origin, f"{path}.{key}", entry.node, "unknown key", remedy)
        kinds = ", ".join(str(kind_of(variant)) for variant in variants)
        return self.refuse(layers[-1].origin, f"{path}.kind", None, "required, but not given", f"one of {kinds}")

    @staticmethod
    def _is_null(node: Scalar) -> bool:
        try:
            return read_scalar(node, None.__class__) is None
        except ScalarError:
            return False

    def _variant(self, variants: Sequence[type[Section]], node: Node, path: str) -> type[Section] | None:
        kinds = {str(kind_of(variant)): variant for variant in variants}
        if isinstance(node, Scalar) and node.text in kinds:
            return kinds[node.text]
        close = difflib.get_close_matches(str(node), kinds, n=1)
        remedy = f"did you mean {close[0]}?" if close else "choose one of them"
        self.refuse(node.origin, path, node, f"expected {' | '.join(kinds)}", remedy)
        return None

    def _pass_through(self, annotation: Any, layers: Sequence[Node], default: Any, path: str) -> Any:
        entries: dict[str, Entry] = {}
        values = dict(default) if isinstance(default, Mapping) else {}
        self.origins.update({f"{path}.{key}": DEFAULT for key in values} or {path: DEFAULT})
        for node in layers:
            if not isinstance(node, Table):
                return self.refuse(node.origin, path, node, "expected a map of keys", f"write {path}: {{key: value}}")
            self.origins.pop(path, None)
            entries |= node.entries
        for key, entry in entries.items():
            values[key] = self._scalar(item_annotation(annotation), entry.node, f"{path}.{key}")
        return FAILED if any(value is FAILED for value in values.values()) else values

    def _array(self, annotation: Any, layers: Sequence[Node], default: Any, path: str) -> Any:
        items: list[Any] = list(default) if default is not MISSING else []
        self.origins[path] = DEFAULT
        for node in layers:
            self.origins[path] = node.origin
            if isinstance(node, Array):
                items = list(node.items)
            elif isinstance(node, Table) and node.origin.kind in ("override", "arm"):
                self._replace_items(items, node, path)
            else:
                return self.refuse(node.origin, path, node, "expected a list", "write [first, second]")
        item_type = item_annotation(annotation)
        values = tuple(
            self._scalar(item_type, item, f"{path}.{index}") if isinstance(item, (Scalar, Array, Table)) else item
            for index, item in enumerate(items)
        )
        return FAILED if any(value is FAILED for value in values) else values

    def _replace_items(self, items: list[Any], node: Table, path: str) -> None:
        for key, entry in node.entries.items():
            if key.isdecimal() and int(key) < len(items):
                items[int(key)] = entry.node
            else:
                allowed = f"indices 0 to {len(items) - 1}" if items else "no index: the list is empty"
                problem = f"no such element; the list has {allowed}"
                self.refuse(entry.origin, f"{path}.{key}", entry.node, problem, f"or set the whole list: {path}=[...]")


def constraint_violations(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> list[Violation]:
    """What pydantic refuses, one violation for each path; values that were refused before are left out."""
    found: dict[str, Violation] = {}
    for detail in error.errors(include_url=False):
        node: Any = values
        parts: list[str] = []
        for key in detail["loc"]:  # skips what pydantic adds to say which variant it tried
            child = _child(node, key)
            if child is not MISSING:
                node = child
                parts.append(str(key))
        path = ".".join(parts)
        if _has_failed(node):
            continue
        problem = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
        if path in found:
            problem = f"{found[path].problem}, or {problem}"
        origin = next((origins[p] for p in (path, path.rpartition(".")[0]) if p in origins), "")
        found[path] = Violation(
            origin=str(origin), path=path, seen=str(node), problem=problem, remedy="give an allowed value"
        )
    return list(found.values())


def _child(node: Any, key: int | str) -> Any:
    if isinstance(node, Mapping):
        return node.get(key, MISSING)
    if isinstance(node, tuple) and isinstance(key, int) and key < len(node):
        return node[key]
    return MISSING


def _has_failed(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_has_failed(child) for child in node.values())
    return node is FAILED
