"""Overrides by dotted path, from `--set` and from the arms of a comparison, as layers above a recipe."""

from collections.abc import Sequence

from megatrl.config.violations import Violation
from megatrl.config.yaml_nodes import OVERRIDE, Array, Entry, Node, Origin, Scalar, Table, parse_yaml
from megatrl.errors import ConfigError

COMPARED_ALIKE = ("seed", "model", "start", "env", "placement", "rollout", "publish", "actor.layout")
"""What the arms of a comparison share: they begin from one policy on one task, and use the same processes."""


def override_layers(overrides: Sequence[str], violations: list[Violation]) -> list[Table]:
    """Return `path=value` texts as layers, lowest first. What is wrong with them is added to `violations`."""
    entries = []
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            violations.append(
                Violation(
                    origin="--set",
                    path=override,
                    seen="",
                    problem="expected path=value",
                    remedy="as in batch.group_size=4",
                )
            )
            continue
        entries.append((key, _override_node(text.strip())))
    return _nested(entries, OVERRIDE, violations)


def _override_node(text: str) -> Node:
    """Lists and maps are read as YAML; anything else is the bare text, typed by the field it is for."""
    if text[:1] in ("[", "{"):
        try:
            node, found = parse_yaml(text, OVERRIDE)
        except ConfigError:
            node, found = None, []
        if node is not None and not found:
            return node
    return Scalar(text=text, is_quoted=False, origin=OVERRIDE)


def arm_layers(settings: Table, arm: str, violations: list[Violation]) -> list[Table]:
    """Return the overrides of one arm as layers, with the arm in their origins."""
    entries = [(key, _as_arm(entry.node, arm)) for key, entry in settings.entries.items()]
    origin = Origin(kind="arm", file=settings.origin.file, line=settings.origin.line, arm=arm)
    return _nested(entries, origin, violations)


def _as_arm(node: Node, arm: str) -> Node:
    origin = Origin(kind="arm", file=node.origin.file, line=node.origin.line, arm=arm)
    if isinstance(node, Scalar):
        return Scalar(text=node.text, is_quoted=node.is_quoted, origin=origin)
    if isinstance(node, Table):
        entries = {key: Entry(origin=origin, node=_as_arm(entry.node, arm)) for key, entry in node.entries.items()}
        return Table(entries=entries, origin=origin)
    return Array(items=tuple(_as_arm(item, arm) for item in node.items), origin=origin)


def _nested(entries: Sequence[tuple[str, Node]], origin: Origin, violations: list[Violation]) -> list[Table]:
    """One layer for each dotted path. A `kind` comes first, so that the order of overrides does not matter."""
    layers = []
    for path, node in sorted(entries, key=lambda entry: not entry[0].endswith(".kind")):
        place = origin if origin.kind == "override" else node.origin
        if not all(path.split(".")):
            violations.append(
                Violation(
                    origin=str(place), path=path, seen="", problem="not a path", remedy="write names joined by dots"
                )
            )
            continue
        for key in reversed(path.split(".")):
            node = Table(entries={key: Entry(origin=place, node=node)}, origin=place)
        assert isinstance(node, Table)
        layers.append(node)
    return layers


def arm_tables(table: Table, violations: list[Violation]) -> dict[str, Table]:
    """Return the overrides of each arm of a comparison file, in its order."""

    def refuse(origin: Origin, path: str, problem: str, remedy: str) -> None:
        violations.append(Violation(origin=str(origin), path=path, seen="", problem=problem, remedy=remedy))

    if "arms" not in table.entries:
        refuse(table.origin, "arms", "required, but not given", "write arms: {first: {}, second: {credit.kind: trace}}")
        return {}
    node = table.entries["arms"].node
    if not isinstance(node, Table) or not node.entries:
        refuse(node.origin, "arms", "expected a map of arms", "write arms: {first: {}, second: {credit.kind: trace}}")
        return {}
    arms = {}
    for arm, entry in node.entries.items():
        settings = entry.node
        if not arm.replace("-", "").replace("_", "").replace(".", "").isalnum() or not arm[0].isalnum():
            refuse(entry.origin, f"arms.{arm}", "names a directory", "use letters, digits, '.', '_' and '-' only")
        if isinstance(settings, Scalar) and settings.text in ("", "null", "~") and not settings.is_quoted:
            settings = Table(entries={}, origin=settings.origin)
        if not isinstance(settings, Table):
            refuse(settings.origin, f"arms.{arm}", "expected a map of overrides", "write {credit.kind: trace}")
            continue
        for key, setting in settings.entries.items():
            shared = next((path for path in COMPARED_ALIKE if f"{key}.".startswith(f"{path}.")), None)
            if shared is not None:
                remedy = "change it in the recipe, or compare two runs of `megatrl train`"
                refuse(setting.origin, f"arms.{arm}.{key}", f"all arms share {shared}", remedy)
        arms[arm] = settings
    return arms
