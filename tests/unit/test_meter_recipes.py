"""The recipes of meters and of DeltaTTG's ablations: they load, and each says exactly what it changes."""

from pathlib import Path

import pytest

from megatrl.config.load import load_recipe
from megatrl.config.loaded import differences

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
METERS = sorted((RECIPES / "meter").glob("*.yaml"))
ABLATIONS = sorted((RECIPES / "ablations").glob("*.yaml"))
NAME = {"name"}

CHANGES = {
    # the six of the paper
    "untrained-meter": {"meter.sft"},
    "no-uniform-mixing": {"credit.rho"},
    "outcome-target": {"credit.target"},
    "completion-probability": {"credit.target"},
    "binary-completion": {"credit.target"},
    "sign-unaware": {"credit.sign_aware"},
    # extras
    "per-trajectory-statistics": {"group_statistics.step_expanded"},
    "no-cap": {"credit.max_multiplier"},
    "terminal-meter": {"credit.terminal"},
    "terminal-carry": {"credit.terminal"},
    "spread-divide": {"credit.spread"},
    "softmax-shares": {"credit.softmax_temperature"},
    "net-of-spent": {"credit.net_of_spent"},
    "log-cost": {"credit.cost_transform"},
    "failure-cost-half": {"credit.failure_cost_scale"},
    "failure-cost-double": {"credit.failure_cost_scale"},
}
OTHER_METERS = {"sft-meter", "refined-meter", "decode-readout", "transfer"}


@pytest.mark.parametrize("path", [*METERS, *ABLATIONS], ids=lambda path: path.stem)
def test_a_recipe_loads(path: Path) -> None:
    loaded = load_recipe(path, require_files=False)
    assert loaded.recipe.name in (path.stem, f"meter-{path.stem}", path.stem.replace("-4b-", "-4b-meter-"))
    left = [w for w in loaded.warnings if not w.split(": ")[1].startswith(("model.path", "meter.path", "env.labels"))]
    assert left == []


def test_every_ablation_is_listed_here() -> None:
    assert {path.stem for path in ABLATIONS} == {"deltattg", *CHANGES, *OTHER_METERS}


@pytest.mark.parametrize("name, paths", CHANGES.items())
def test_an_ablation_changes_what_it_says_and_nothing_else(name: str, paths: set[str]) -> None:
    base = load_recipe(RECIPES / "ablations" / "deltattg.yaml")
    found = differences(base, load_recipe(RECIPES / "ablations" / f"{name}.yaml"))
    changed = {row.path for row in found}
    if paths == {"meter.sft"}:  # a whole section became null
        assert {path for path in changed if not path.startswith("meter.sft")} == NAME
        assert any(row.path == "meter.sft" and row.right is not None and row.right.value is None for row in found)
    else:
        assert changed == paths | NAME


def test_refinement_has_the_papers_group_and_a_small_kl_to_its_start() -> None:
    for path in METERS:
        if "refine" in path.stem:
            recipe = load_recipe(path, require_files=False).recipe
            assert recipe.batch.group_size == 8
            assert recipe.loss.kl_coefficient == 0.001
            assert recipe.reward.success_threshold <= recipe.env.completion_weight  # type: ignore[union-attr]
    paper = load_recipe(RECIPES / "meter" / "qwen3-4b-refine.yaml", require_files=False).recipe
    assert paper.actor.optimizer.lr == 3e-6
