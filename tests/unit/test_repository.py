"""House rules that a machine can check: sizes, names, prints, paths, docstrings, and that every option is read."""

import ast
import re
from pathlib import Path

from megatrl.config.recipe import Comparison, Recipe
from megatrl.config.schema import kind_of, leaf_fields, section_variants

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatrl"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|misc|managers?)(_|$)")
FOLDERS = ("megatrl", "tests", "tools", "benchmarks", "recipes", "docs", "slurm", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".sbatch", ".j2", ".json", ""}
# Places that exist on the machine of one developer only; a path in a home or work directory leaks where it was written.
LEAKED_PATH = re.compile(r"(?<![\w.$}/<-])/(?:work|home|root|Users|mnt|data|scratch)/[\w.-]+")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [path for path in (*ROOT.iterdir(), *inside) if path.is_file() and path.suffix in TEXT_SUFFIXES]
    return [path for path in paths if "__pycache__" not in path.parts]


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_longer_than_400_lines():
    lengths = {
        relative(p): len(p.read_text().splitlines()) for p in python_files("megatrl", "tests", "tools", "benchmarks")
    }
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines():
    lengths = {
        f"{relative(path)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in python_files("megatrl", "tests", "tools", "benchmarks")
        for node in functions(path)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_module_or_public_name_has_a_name_that_says_nothing():
    banned = [relative(path) for path in PACKAGE.rglob("*") if BANNED_NAMES.search(path.stem.lower())]
    for path in python_files("megatrl"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name.startswith("_"):
                    continue
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()
                if BANNED_NAMES.search(words):
                    banned.append(f"{relative(path)}:{node.lineno} {node.name}")
    assert banned == []


def calls(path: Path, name: str) -> list[str]:
    return [
        f"{relative(path)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_only_the_command_line_prints():
    printing = [place for path in python_files("megatrl") if "cli" not in path.parts for place in calls(path, "print")]
    assert printing == []


def test_no_except_catches_everything_without_a_name():
    bare = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files("megatrl", "tests", "tools", "benchmarks")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_formulas_use_no_collectives():
    users = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files("megatrl/algorithms")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "torch.distributed" in ast.unparse(node)
    ]
    assert users == []


def test_no_file_names_a_path_of_one_machine():
    leaks = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if LEAKED_PATH.search(line) and path != Path(__file__)
    ]
    assert leaks == []


def test_every_module_of_the_package_says_what_it_holds():
    silent = [
        relative(path)
        for path in python_files("megatrl", "tools", "benchmarks")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_a_todo_names_an_issue():
    todos = [
        f"{relative(path)}:{number}"
        for path in python_files("megatrl", "tests", "tools", "benchmarks")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"#\s*(TODO|FIXME|XXX)(?!\(#\d+\))", line)
    ]
    assert todos == []


def names_read(*, outside: Path) -> set[str]:
    """Every attribute and every keyword that the package reads, the declaring folder left out."""
    read: set[str] = set()
    for path in python_files("megatrl"):
        is_declaration = path.is_relative_to(outside) and path.stem not in READERS_IN_CONFIG
        for node in ast.walk(ast.parse(path.read_text())):
            if is_declaration:
                # The methods of a section read its fields (`is_due`).
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    read.add(node.attr)
            elif isinstance(node, ast.Attribute):
                read.add(node.attr)
    return read


READERS_IN_CONFIG = {"plan", "model_shape"}
"""Modules of config/ that use values; the checks alone do not make an option effective."""

UNREAD: set[str] = set()
"""Fields that no code reads yet, as Section.field. Empty at a release."""


def test_every_option_is_read_somewhere():
    read = names_read(outside=PACKAGE / "config")
    unread = {
        f"{leaf.section.__name__}.{leaf.name}"
        for root in (Recipe, Comparison)
        for leaf in leaf_fields(root)
        if leaf.name not in read and not (leaf.name == "kind" and kind_of(leaf.section))
    }
    assert unread == UNREAD


def test_every_section_of_the_recipe_is_read_somewhere():
    read = names_read(outside=PACKAGE / "config")
    sections = {name for name, field in Recipe.model_fields.items() if section_variants(field.annotation)}
    assert sections - read == set()
