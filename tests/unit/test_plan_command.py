"""`megatrl plan` as a person meets it: exit codes, JSON, refusals, and no torch anywhere near."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatrl.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = str(ROOT / "recipes/qwen3-30b-a3b-trace.yaml")

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "sglang", "ray", "transformers"):
            raise ImportError(f"{name} is not on a login node")

sys.meta_path.insert(0, Refuse())
from megatrl.cli.main import app
app(sys.argv[1:], prog_name="megatrl")
"""


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_ships_can_be_planned(path):
    ended = plan(str(path), "--json")
    assert ended.exit_code in (0, 1), ended.output
    content = json.loads(ended.stdout)
    for one in content.get("arms", {"": content}).values():
        assert one["fits"] == (ended.exit_code == 0)
        assert {row["phase"] for row in one["memory"]} == {"rollout", "score", "learn", "publish"}
        assert len(one["ranks"]) == one["layout"]["world_size"]
        assert one["time"]["step_s"] == pytest.approx(sum(row["seconds"] for row in one["time"]["rows"]))


def test_it_runs_where_torch_cannot_even_be_imported():
    arguments = [sys.executable, "-c", WITHOUT_TORCH, "plan", LARGE, "--published"]
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "device hours" in ended.stdout
    assert "published throughput" in ended.stdout


def test_what_does_not_fit_ends_with_code_1_and_a_change_that_fits():
    ended = plan(LARGE, "--gpu", "h100")
    assert ended.exit_code == 1
    assert "does not fit:" in ended.output
    hint = next(line for line in ended.output.splitlines() if line.startswith("  --set "))
    values = [word for word in hint.partition("   (")[0].split() if word != "--set"]
    overrides = [argument for value in values for argument in ("--set", value)]
    again = plan(LARGE, "--gpu", "h100", *overrides)
    assert again.exit_code == 0, again.output


def test_an_impossible_layout_ends_with_code_2_and_the_reasons():
    ended = plan(LARGE, "--set", "actor.layout.expert=7")
    assert ended.exit_code == 2
    assert "layout.expert=7" in ended.stderr


def test_a_model_that_nobody_knows_is_no_recipe_that_does_not_fit():
    ended = plan(LARGE, "--set", "model.path=models/other")
    assert ended.exit_code == 2
    assert "--shape Qwen3-0.6B" in ended.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([LARGE, "--gpu", "v100"], "h100"),
        ([LARGE, "--shape", "Qwen9"], "Qwen3-30B-A3B"),
        ([], "--published"),
    ],
)
def test_a_wrong_option_is_told_what_is_allowed(arguments, words):
    ended = plan(*arguments)
    assert ended.exit_code == 2
    assert words in ended.output + ended.stderr


def test_assumed_lengths_can_be_given():
    by_default, short = (
        json.loads(plan(LARGE, "--json", *more).stdout) for more in ((), ("--trajectory-tokens", "512"))
    )
    assert short["workload"]["mean_tokens"] == 512
    assert short["time"]["step_s"] < by_default["time"]["step_s"]
    assert short["memory"] == by_default["memory"]  # the longest trajectory bounds it
