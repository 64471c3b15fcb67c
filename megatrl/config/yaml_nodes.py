"""YAML text as a tree of nodes that remember where they were written.

Scalars stay text here: whether `no` is a word or a truth value is decided by the field that receives it
(config/scalars.py), because YAML 1.1 loaders read `1e-6` as text and `no` as false.
"""

from dataclasses import dataclass
from typing import Literal

import yaml

from megatrl.config.violations import Violation
from megatrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from; `str(origin)` is what users read."""

    kind: Literal["default", "file", "base", "arm", "override"]
    file: str = ""
    line: int = 0
    arm: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        match self.kind:
            case "default":
                return "default"
            case "override":
                return "--set"
            case "arm":
                return f"arm {self.arm} {place}"
            case "base":
                return f"base {place}"
            case _:
                return place


DEFAULT = Origin(kind="default")
OVERRIDE = Origin(kind="override")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    text: str
    is_quoted: bool
    origin: Origin

    def __str__(self) -> str:
        return repr(self.text) if self.is_quoted else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    items: tuple["Node", ...]
    origin: Origin

    def __str__(self) -> str:
        return "[" + ", ".join(str(item) for item in self.items) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a table with the place of the key itself."""

    origin: Origin
    node: "Node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    entries: dict[str, Entry]
    origin: Origin

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {entry.node}" for key, entry in self.entries.items()) + "}"


Node = Scalar | Array | Table

PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
}


class _Converter:
    """One pass over the nodes of PyYAML. Collects violations instead of stopping at the first."""

    def __init__(self, place: Origin) -> None:
        self.place = place
        self.violations: list[Violation] = []
        self.seen: set[int] = set()

    def origin(self, node: yaml.Node) -> Origin:
        if self.place.kind == "override":
            return self.place
        line = node.start_mark.line + 1
        return Origin(kind=self.place.kind, file=self.place.file, line=line, arm=self.place.arm)

    def refuse(self, node: yaml.Node, path: str, problem: str, remedy: str) -> None:
        self.violations.append(
            Violation(origin=str(self.origin(node)), path=path, seen="", problem=problem, remedy=remedy)
        )

    def convert(self, node: yaml.Node, path: str) -> Node:
        origin = self.origin(node)
        if id(node) in self.seen:
            self.refuse(node, path, "anchors and aliases are not supported", "write the value out, or use `base:`")
            return Scalar(text="", is_quoted=True, origin=origin)
        self.seen.add(id(node))
        if node.tag not in PLAIN_TAGS:
            self.refuse(node, path, f"the tag or key {node.tag!r} is not supported", "write a plain value")
            return Scalar(text="", is_quoted=True, origin=origin)
        if isinstance(node, yaml.MappingNode):
            return self.table(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = tuple(self.convert(item, f"{path}.{index}") for index, item in enumerate(node.value))
            return Array(items=items, origin=origin)
        assert isinstance(node, yaml.ScalarNode)
        return Scalar(text=node.value, is_quoted=node.style is not None, origin=origin)

    def table(self, node: yaml.MappingNode, path: str) -> Table:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                self.refuse(key_node, path, "a key must be plain text", "write `key: value`")
                continue
            key = key_node.value
            child_path = f"{path}.{key}" if path else key
            if key in entries:
                first = entries[key].origin
                self.refuse(key_node, child_path, f"the key is written twice (first at {first})", "delete one of them")
            entries[key] = Entry(origin=self.origin(key_node), node=self.convert(value_node, child_path))
        return Table(entries=entries, origin=self.origin(node))


def parse_yaml(text: str, place: Origin) -> tuple[Node | None, list[Violation]]:
    """Return the document as nodes (None where it is empty), and what it does that is refused.

    `place` gives the kind and the file; lines are filled in. Raises ConfigError where the text is not YAML.
    """
    # The pure Python loader: its messages and marks are complete, and a recipe is small.
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place.file}:{mark.line + 1}" if mark else place.file or str(place)
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML: {problem}; correct the syntax (indent with spaces)") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{place.file or place}: not valid YAML: {error}; save the file as plain UTF-8") from error
    finally:
        loader.dispose()
    if root is None:
        return None, []
    converter = _Converter(place)
    return converter.convert(root, ""), converter.violations
