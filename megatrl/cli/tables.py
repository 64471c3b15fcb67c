"""Tables of configuration values for people."""

import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrl.config.loaded import Difference, EffectiveValue, LoadedRecipe

WIDTH_OF_PIPES = 160
"""Columns where the output is no terminal; rich would cut at 80."""

_STYLES = {"default": "dim", "override": "bold magenta", "arm": "bold cyan", "base": "", "file": "bold"}


def effective_table(loaded: LoadedRecipe, *, title: str, is_defaults_shown: bool) -> Table:
    """One row for each leaf: path, value, origin; defaults are dim."""
    table = _table(title, "key", "value", "from")
    section = ""
    for value in loaded.effective_values():
        if value.origin.kind == "default" and not is_defaults_shown:
            continue
        if section and section != value.path.partition(".")[0]:
            table.add_section()
        section = value.path.partition(".")[0]
        style = _STYLES[value.origin.kind]
        table.add_row(value.path, Text(_text(value), style=style), Text(str(value.origin), style="dim"))
    return table


def difference_table(found: Sequence[Difference], *, left: str, right: str) -> Table:
    """One row for each path whose values differ; a dash where a side has no such key."""
    table = _table("", "key", left, right)
    for row in found:
        table.add_row(row.path, _text(row.left), _text(row.right))
    return table


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    """A table of texts."""
    table = _table(title, *header)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(table: Table) -> None:
    """Print to standard output, wide enough that pipes and logs keep whole lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(WIDTH_OF_PIPES, console.measure(table).maximum))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: EffectiveValue | None) -> str:
    return "-" if value is None else json.dumps(value.value, ensure_ascii=False).strip('"')
