"""The command line: what it answers, how it fails, and that login-node commands stay light."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatrl.cli.main import app
from megatrl.errors import Terminated

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "megatron", "sglang", "ray", "transformers", "wandb", "matplotlib")
# Half a second is the aim; a slow or busy machine gets three times that.
MAX_CPU_SECONDS = 1.5

LIGHT_COMMANDS = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["config", "show", "recipes/evidence_hunt.yaml"],
    ["config", "check", "recipes/compare.yaml"],
    ["config", "diff", "recipes/evidence_hunt.yaml", "recipes/textworld.yaml"],
    ["show", "no-such-run", "--step", "1"],
    ["train", "no-such-recipe.yaml"],
]

REPORT_IMPORTS = """
import json, sys
from megatrl.cli.main import app
code = 0
try:
    app(sys.argv[1:], prog_name="megatrl")
except SystemExit as end:
    code = end.code
sys.stderr.write("\\n" + json.dumps(sorted(name for name in sys.modules if "." not in name)))
raise SystemExit(code)
"""


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS, ids=" ".join)
def test_a_login_node_command_is_light(arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-c", REPORT_IMPORTS, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = json.loads(ended.stderr.rsplit("\n", 1)[1])
    assert "megatrl" in modules
    assert not set(HEAVY) & set(modules)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_CPU_SECONDS


def test_help_names_every_command():
    output = invoke("--help").stdout
    for command in ("train", "compare", "replay", "make-tiny", "show", "config"):
        assert command in output


def test_a_wrong_recipe_exits_with_2_and_one_message(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: a\nmodel: {kind: tiny}\nenv: {kind: evidence_hunt}\nbatch: {group_sise: 3}\n")
    for command in ("train", "config show", "config check"):
        result = invoke(*command.split(), str(recipe))
        assert result.exit_code == 2
        assert "did you mean batch.group_size?" in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_debug_keeps_the_traceback():
    result = invoke("--debug", "config", "show", "absent.yaml")
    assert type(result.exception).__name__ == "ConfigError"


def test_other_failures_exit_with_1_and_name_their_kind(tmp_path):
    result = invoke("show", str(tmp_path), "--step", "3")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: TrajectoryError: ")


@pytest.mark.parametrize("stop, code, text", [(KeyboardInterrupt, 130, "interrupted"), (Terminated, 143, "terminated")])
def test_ctrl_c_and_sigterm_exit_with_the_shells_codes(monkeypatch, stop, code, text):
    def interrupt(*_, **__):
        raise stop

    monkeypatch.setattr("megatrl.config.load.load_recipe", interrupt)
    result = invoke("train", str(ROOT / "recipes/evidence_hunt.yaml"))
    assert result.exit_code == code
    assert result.stderr == f"{text}\n"


@pytest.mark.parametrize(
    "error, text",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device: free space there"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), "error: Permission denied (runs): allow writing"),
    ],
)
def test_a_fault_of_the_disk_is_told_with_its_remedy(monkeypatch, error, text):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("megatrl.config.load.load_recipe", fail)
    result = invoke("train", str(ROOT / "recipes/evidence_hunt.yaml"))
    assert result.exit_code == 1
    assert result.stderr.startswith(text)


def test_a_recipe_and_a_comparison_are_sent_to_their_own_command():
    comparison, recipe = str(ROOT / "recipes/compare.yaml"), str(ROOT / "recipes/textworld.yaml")
    assert "run `megatrl compare" in invoke("train", comparison).stderr
    assert "run `megatrl train" in invoke("compare", recipe).stderr


def test_config_show_gives_each_value_with_its_origin():
    result = invoke("config", "show", str(ROOT / "recipes/textworld.yaml"), "--set", "batch.group_size=4")
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    rows = {line[0]: line[1].rstrip() for line in lines if len(line) == 2}
    assert rows["batch.group_size"].split() == ["4", "--set"]
    assert rows["loss.policy.clip_high"].split() == ["0.28", "default"]
    assert rows["env.level"].endswith("recipes/textworld.yaml:8")
    assert rows["model.hidden_size"].split()[1] == "base"


def test_config_show_can_leave_out_defaults():
    result = invoke("config", "show", "--changed", str(ROOT / "recipes/evidence_hunt.yaml"))
    assert "batch.group_size" in result.stdout
    assert "default" not in result.stdout.split("from", 1)[1]


def test_config_show_as_json_reads_back_as_the_same_recipe():
    from megatrl.config.recipe import Recipe

    result = invoke("config", "show", "--json", str(ROOT / "recipes/evidence_hunt.yaml"))
    content = json.loads(result.stdout)
    recipe = Recipe.model_validate(content["recipe"])
    assert recipe.model_dump(mode="json") == content["recipe"]
    assert content["origins"]["placement.kind"] == "default"


def test_config_show_of_a_comparison_shows_its_arms():
    path = str(ROOT / "recipes/compare.yaml")
    content = json.loads(invoke("config", "show", "--json", path).stdout)
    assert list(content["arms"]) == ["grpo", "trace", "deltattg"]
    assert content["arms"]["trace"]["recipe"]["credit"]["kind"] == "trace"
    assert "arm trace" in invoke("config", "show", path, "--arm", "trace").stdout
    assert "choose from grpo, trace, deltattg" in invoke("config", "show", path, "--arm", "x").stderr


def test_config_check_tells_missing_model_files_as_the_user_wants():
    path = str(ROOT / "recipes/qwen3-30b-a3b-trace.yaml")
    relaxed = invoke("config", "check", path, "--set", "model.path=absent/model")
    assert relaxed.exit_code == 0
    assert "warning: " in relaxed.stderr
    strict = invoke("config", "check", path, "--set", "model.path=absent/model", "--require-files")
    assert strict.exit_code == 2
    assert "model.path = absent/model" in strict.stderr


def test_config_diff_shows_values_that_differ(tmp_path):
    left, right = tmp_path / "left.yaml", tmp_path / "right.yaml"
    left.write_text("name: left\nmodel: {kind: tiny}\nenv: {kind: evidence_hunt, max_turns: 5, num_hops: 3}\n")
    right.write_text("base: left.yaml\nname: right\nenv: {kind: textworld, max_turns: 12}\n")
    rows = json.loads(invoke("config", "diff", "--json", str(left), str(right)).stdout)
    assert rows["env.max_turns"] == {"left": 5, "right": 12}
    assert rows["env.num_hops"] == {"left": 3, "right": None}
    assert "model.hidden_size" not in rows
    assert invoke("config", "diff", str(left), str(left)).stdout == "no difference\n"


def test_make_tiny_writes_a_model_directory_once(tmp_path):
    arguments = ("make-tiny", str(ROOT / "recipes/evidence_hunt.yaml"), str(tmp_path / "model"))
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "qwen3_moe"
    again = invoke(*arguments)
    assert again.exit_code == 1
    assert again.stderr.startswith("error: CheckpointError: ")


def test_make_tiny_refuses_other_models():
    result = invoke("make-tiny", str(ROOT / "recipes/qwen3-30b-a3b-trace.yaml"), "out")
    assert result.exit_code == 2
    assert "model.kind = hf" in result.stderr
