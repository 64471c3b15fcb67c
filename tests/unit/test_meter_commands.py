"""`megatrl meter collect` and `label` on recorded runs, as a person uses them."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.cli.main import app
from megatrl.config.load import load_recipe
from megatrl.data.wire import record_group
from megatrl.envs.registry import make_environment, prompt_source
from megatrl.meter.collection import read_collection
from megatrl.meter.frozen import load_frozen_meter
from megatrl.observability.label_store import read_labels
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.rendering.renderer import load_renderer
from megatrl.rollout.collector import Collector, ScriptedSamplers

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "evidence_hunt.yaml"


def write_run(home: Path, name: str, *overrides: str, detour: float, where: str = "policy") -> Path:
    """A run directory with 24 scripted episodes of step 1, and the tokenizer in `where`."""
    recipe = load_recipe(RECIPE, overrides).recipe
    run_dir = home / "runs" / "evidence_hunt" / name
    make_tiny(recipe.model, recipe.env, run_dir / where)  # type: ignore[arg-type]
    renderer = load_renderer(str(run_dir / where), recipe.rollout.chat_format, recipe.rollout.tool_format)
    prompts = [prompt_source(recipe.env, seed=recipe.seed, split="train").prompt(n) for n in range(24)]
    groups = Collector(
        config=recipe.rollout,
        reward=recipe.reward,
        renderer=renderer,
        make_environment=lambda prompt: make_environment(recipe.env, prompt),
        samplers=ScriptedSamplers(renderer, seed=0, detour=detour, premature=0.2),
        group_size=1,
        seed=0,
    ).collect(prompts, first_position=0, policy_version=0)
    TrajectoryStore(run_dir).write(1, [record_group(group, step=1) for group in groups])
    (run_dir / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Two runs of one tokenizer and one whose tokenizer knows more documents."""
    home = tmp_path_factory.mktemp("home")
    return (
        write_run(home, "weak", "seed=1", detour=0.6),
        write_run(home, "strong", "seed=2", detour=0.1),
        write_run(home, "other", "seed=3", "env.num_documents=14", detour=0.1),
    )


def megatrl(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_several_runs_are_collected_labelled_and_counted(runs, tmp_path):
    weak, strong, _ = runs
    out = tmp_path / "c.jsonl.gz"
    table = megatrl("meter", "collect", weak, strong, "--out", out)
    collection = read_collection(out)
    assert [source.name for source in collection.sources] == ["evidence_hunt/weak", "evidence_hunt/strong"]
    assert [source.domain for source in collection.sources] == ["evidence_hunt"] * 2
    assert collection.sources[0].tools[0].name == "open"
    for source in collection.sources:
        mine = [g for g in collection.groups if collection.source_of(g) == source]
        (line,) = (line for line in table.splitlines() if line.strip().startswith(source.name))
        assert line.split()[2:4] == [str(len(mine)), str(sum(bool(t.success) for g in mine for t in g.trajectories))]

    said = megatrl("meter", "label", out, "--out", tmp_path / "labels", "--cap", 3, "--validation-fraction", 0.25)
    labels = read_labels(tmp_path / "labels")
    assert labels.content_hash in said
    assert "C in tokens: evidence_hunt" in said
    assert labels.settings["rule"]["max_prefixes_per_trajectory"] == 3
    assert labels.training
    assert labels.validation
    assert megatrl("meter", "label", out, "--out", tmp_path / "labels", code=1).count("never overwritten") == 1


def test_sources_of_two_tokenizers_need_one_chosen_and_are_then_counted_with_it(runs, tmp_path):
    weak, _, other = runs
    out = tmp_path / "c.jsonl.gz"
    megatrl("meter", "collect", weak, other, "--out", out)
    assert "the sources have 2 tokenizers" in megatrl("meter", "label", out, "--out", tmp_path / "l", code=1)
    megatrl("meter", "label", out, "--out", tmp_path / "l", "--tokenizer", other / "policy", "--no-balanced")
    labels = read_labels(tmp_path / "l")
    renderer = load_renderer(str(other / "policy"), "chatml", "react")
    assert labels.prompt.tokenizer_fingerprint == renderer.fingerprint
    for example in labels.training:
        text = renderer.decode(example.trajectory.segments[0].tokens)
        assert "<unk>" not in text
        for message in example.trajectory.messages:
            assert str(message["content"]) in text


def test_a_directory_without_a_run_and_a_run_without_a_tokenizer_are_refused(tmp_path):
    assert "holds no run" in megatrl("meter", "collect", tmp_path, "--out", tmp_path / "c", code=1)
    run = write_run(tmp_path, "lost", detour=0.1, where="elsewhere")
    assert "no tokenizer of" in megatrl("meter", "collect", run, "--out", tmp_path / "c", code=1)


def test_a_meter_is_frozen_with_its_labels_and_with_no_others(runs, tmp_path):
    weak, strong, other = runs
    megatrl("meter", "collect", weak, strong, "--out", tmp_path / "c")
    megatrl("meter", "label", tmp_path / "c", "--out", tmp_path / "labels")
    labels = read_labels(tmp_path / "labels")
    run = tmp_path / "run"
    shutil.copytree(weak / "policy", run / "policy")
    (run / "evaluation").mkdir()

    def freeze(
        *more: object, origin_hash: str = labels.content_hash, measured: str = labels.content_hash, code: int = 0
    ):
        origin = {"labels": str(tmp_path / "labels"), "labels_hash": origin_hash}
        (run / "meter_source.json").write_text(json.dumps(origin))
        measurement = {"labels": measured, "metrics": {"bit_auc": 0.75}}
        (run / "evaluation" / "evaluation.json").write_text(json.dumps(measurement))
        return megatrl("meter", "freeze", run, "--out", tmp_path / "meter", *more, code=code)

    assert "its costs and prompt would be others" in freeze(origin_hash="0" * 16, code=1)
    said = freeze()
    frozen = load_frozen_meter(tmp_path / "meter")
    assert frozen.identity in said
    assert (frozen.training_hash, frozen.prompt) == (labels.content_hash, labels.prompt)
    assert frozen.failure_costs == labels.failure_costs
    assert frozen.evaluation == {"bit_auc": 0.75}
    assert "never overwritten" in freeze(code=1)
    shutil.rmtree(tmp_path / "meter")
    freeze(measured="of other labels")
    assert load_frozen_meter(tmp_path / "meter").evaluation == {}

    def bare(source: Path, *more: object, code: int) -> str:
        return megatrl("meter", "freeze", source, "--out", tmp_path / "bare", *more, code=code)

    assert "Name them with --labels" in bare(weak, code=1)
    assert "label the collection with this model's tokenizer" in bare(other, "--labels", tmp_path / "labels", code=1)
    assert "holds no meter" in bare(tmp_path / "labels", "--labels", tmp_path / "labels", code=1)
    bare(weak, "--labels", tmp_path / "labels", code=0)  # a prompted model as the meter


@pytest.mark.parametrize("command", ["collect", "label", "sft", "refine", "eval", "freeze"])
def test_every_stage_explains_itself(command):
    assert "--help" in megatrl("meter", command, "--help")
