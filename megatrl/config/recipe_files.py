"""Recipe files as nodes: reading the text, and the one level of `base:` below it."""

import os
from pathlib import Path
from typing import Literal

from megatrl.config.loaded import SourceText
from megatrl.config.violations import Violation
from megatrl.config.yaml_nodes import Origin, Scalar, Table, parse_yaml
from megatrl.errors import ConfigError


def read_table(path: str, kind: Literal["file", "base"]) -> tuple[str, Table, list[Violation]]:
    """Return text and top-level map of a file, and the violations of its form. Raises ConfigError where it has none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; name an existing YAML file, such as recipes/quickstart.yaml"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a directory; name a YAML file in it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    node, violations = parse_yaml(text, Origin(kind=kind, file=path))
    if not isinstance(node, Table):
        seen = "empty" if node is None else "a list" if not isinstance(node, Scalar) else "a single value"
        raise ConfigError(f"{path}:1: expected a map of keys, the file is {seen}; write `key: value` lines")
    return text, node, violations


def relative_to(path: str, other: str) -> str:
    """Return the path of a file that is named in the file at `path`."""
    return os.path.normpath(os.path.join(os.path.dirname(path), other))


def recipe_layers(path: str) -> tuple[list[Table], tuple[SourceText, ...], list[Violation]]:
    """The base, where one is named, below the recipe itself."""
    text, table, violations = read_table(path, "file")
    source = SourceText(path=path, text=text)
    if "base" not in table.entries:
        return [table], (source,), violations
    own = Table(entries={key: entry for key, entry in table.entries.items() if key != "base"}, origin=table.origin)
    node = table.entries["base"].node
    if not isinstance(node, Scalar) or not node.text:
        raise ConfigError(f"{node.origin}: base = {node}: expected one file name; write base: other.yaml")
    base_path = relative_to(path, node.text)
    if not Path(base_path).is_file():
        raise ConfigError(f"{node.origin}: base = {node}: no file {base_path}; the path is relative to {path}")
    base_text, base, base_violations = read_table(base_path, "base")
    if "base" in base.entries:
        origin = base.entries["base"].origin
        raise ConfigError(f"{origin}: a base may not have a base itself; write its values into {base_path}")
    return [base, own], (source, SourceText(path=base_path, text=base_text)), [*violations, *base_violations]
