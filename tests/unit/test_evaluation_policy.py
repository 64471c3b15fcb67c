"""Which weights an evaluation plays, and which plans are refused before anything starts."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("ray")

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron
from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.engines import TinyModel
from megatrl.config.recipe import Recipe
from megatrl.errors import CheckpointError, ConfigError
from megatrl.orchestration.eval_policy import resolve_policy
from megatrl.orchestration.eval_run import EvaluationPlan, check_plan, evaluate

ENV = {"kind": "evidence_hunt", "num_questions": 3, "num_documents": 6, "num_hops": 2, "max_turns": 3}
RECIPE = Recipe.model_validate({"name": "evaluated", "model": {"kind": "tiny"}, "env": ENV})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "policy"
    make_tiny(TinyModel(family="qwen3"), RECIPE.env, path)
    return path


def test_a_model_directory_and_a_run_with_that_policy_are_the_same_weights(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "policy").symlink_to(model)
    direct = resolve_policy(model, step=None, converted=tmp_path)
    of_run = resolve_policy(run, step=None, converted=tmp_path)
    assert (direct.path, of_run.path) == (model, run / "policy")
    assert direct.content_hash == of_run.content_hash
    make_tiny(TinyModel(family="qwen3", seed=1), RECIPE.env, tmp_path / "other")
    assert resolve_policy(tmp_path / "other", step=None, converted=tmp_path).content_hash != direct.content_hash


def test_a_converted_model_is_converted_back_once_and_holds_the_same_tensors(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    hf_to_megatron(model, out=tmp_path / "megatron", options=ConversionOptions())
    policy = resolve_policy(tmp_path / "megatron", step=None, converted=tmp_path / "converted")
    assert policy.path.parent == tmp_path / "converted"
    was, now = load_file(model / "model.safetensors"), load_file(policy.path / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(was[name].equal(now[name]) for name in was)
    marker = policy.path / "marker"
    marker.touch()
    assert resolve_policy(tmp_path / "megatron", step=None, converted=tmp_path / "converted") == policy
    assert marker.exists()


def test_what_is_no_policy_is_refused_with_what_could_be_one(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        resolve_policy(tmp_path / "absent", step=None, converted=tmp_path)
    with pytest.raises(CheckpointError, match="--step 3 means nothing"):
        resolve_policy(model, step=3, converted=tmp_path)
    for arm in ("grpo", "trace"):
        (tmp_path / "comparison" / arm).mkdir(parents=True)
        (tmp_path / "comparison" / arm / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several runs; name one of them: grpo, trace"):
        resolve_policy(tmp_path / "comparison", step=None, converted=tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"selections": ("random",), "candidates": 1}, "chooses among at least 2"),
        ({"selections": ("natural", "random"), "temperature": 0.0}, "samples 4 equal actions"),
        ({"selections": ("random", "random")}, "name each way once"),
        ({"episodes": 0}, "at least 1"),
    ],
)
def test_plans_that_mean_nothing_are_refused(changes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_plan(EvaluationPlan(policy=Path(), recipe=RECIPE, **changes))


def test_choosing_by_a_meter_without_a_meter_says_where_one_comes_from(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --meter DIR"):
        evaluate(EvaluationPlan(policy=model, recipe=RECIPE, selections=("meter",), out=tmp_path / "out"))
