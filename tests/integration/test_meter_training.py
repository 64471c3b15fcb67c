"""The meter that a recipe makes: real scripted episodes and files, with a stand-in for the actor's processes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.credit import DeltaTTGCredit
from megatrl.config.load import load_recipe
from megatrl.config.recipe import Recipe, SFTConfig, TrainedMeter
from megatrl.data.samples import PackedBatch
from megatrl.errors import ScoringError
from megatrl.meter.frozen import FrozenMeter, load_frozen_meter
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.meter_training import meter_directory, refuse_partial_scores
from tests.fakes.frozen_models import PrefixRunner, make_trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "evidence_hunt.yaml"


class Actor:
    """Counts the optimizer steps it is asked for; its frozen copy finds every token equally likely."""

    num_data_ranks = 1

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.num_steps = 0

    def load_policy(self, model_path: Path, *_: object) -> None:
        self.loaded.append(model_path)

    def supervise(self, batch: PackedBatch, step: int) -> SimpleNamespace:
        self.num_steps += 1
        return SimpleNamespace(metrics={"loss": 1.0})

    def save_hf(self, directory: Path, source: Path) -> None:
        shutil.copytree(source, directory)

    def freeze_reference(self) -> str:
        return "hash"

    def query_runner(self, role: str) -> PrefixRunner:
        assert role == "reference"
        return PrefixRunner(lambda prefix, target: -1.0)


class Cluster:
    def __init__(self) -> None:
        self.only = Actor()

    def actor(self, recipe: Recipe) -> Actor:
        return self.only


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe(RECIPE).recipe
    path = tmp_path_factory.mktemp("start") / "policy"
    make_tiny(recipe.model, recipe.env, path)  # type: ignore[arg-type]
    return path


def make(start: Path, home: Path, *, credit: DeltaTTGCredit, sft: SFTConfig | None) -> tuple[FrozenMeter, Actor]:
    meter = TrainedMeter(num_policy_episodes=0, num_scripted_episodes=40, detours=(0.05, 0.6), sft=sft)
    recipe = load_recipe(RECIPE).recipe.model_copy(update={"credit": credit, "meter": meter})
    cluster = Cluster()
    path = meter_directory(recipe, start, Artifacts(home), cluster)  # type: ignore[arg-type]
    assert path is not None
    return load_frozen_meter(path), cluster.only


def test_without_sft_the_start_policy_itself_is_the_meter(start: Path, tmp_path: Path) -> None:
    trained, actor = make(start, tmp_path, credit=DeltaTTGCredit(), sft=SFTConfig(num_steps=2, sequences_per_step=4))
    assert (actor.loaded, actor.num_steps) == ([start], 2)
    prompted, actor = make(start, tmp_path, credit=DeltaTTGCredit(), sft=None)
    assert (actor.loaded, actor.num_steps) == ([start], 0)
    # Same question, same answers, same C: the two differ in weights alone.
    assert prompted.prompt == trained.prompt
    assert prompted.failure_cost == trained.failure_cost > max(trained.prompt.grid)
    assert prompted.evaluation["valid_rate"] == 1.0


def test_the_end_of_the_transcript_is_learnt_only_where_the_credit_reads_it(start: Path, tmp_path: Path) -> None:
    without, _ = make(start, tmp_path, credit=DeltaTTGCredit(), sft=None)
    with_end, _ = make(start, tmp_path, credit=DeltaTTGCredit(terminal="meter"), sft=None)
    assert 0.0 not in without.prompt.grid
    assert 0.0 in with_end.prompt.grid  # nothing is left to generate after the last action


def test_an_expected_score_is_no_completion_bit_where_scores_are_partial() -> None:
    episodes = [make_trajectory([((1,), (2,))], reward=reward) for reward in (1.0, 0.4, None)]
    refuse_partial_scores(episodes, DeltaTTGCredit())
    refuse_partial_scores(episodes[:1], DeltaTTGCredit(target="outcome"))
    with pytest.raises(ScoringError, match=r"such as 0\.4"):
        refuse_partial_scores(episodes, DeltaTTGCredit(target="outcome"))
