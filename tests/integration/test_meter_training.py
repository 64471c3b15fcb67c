"""The meter that a recipe makes, with scripted episodes of known outcomes in the place of real ones."""

import json
from pathlib import Path

import pytest

from megatrl.config.credit import DeltaTTGCredit
from megatrl.config.load import load_recipe
from megatrl.config.recipe import SFTConfig, TrainedMeter
from megatrl.errors import ScoringError
from megatrl.meter.frozen import load_frozen_meter
from megatrl.orchestration import meter_training
from megatrl.orchestration.artifacts import Artifacts
from tests.fakes.frozen_models import PrefixRunner, WordCodec, make_group, make_trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "evidence_hunt.yaml"
LENGTHS = (2, 3, 1)
WORDS = ["forecast", '{"completion":', "0,", "1,", '"tokens_to_go":', "null}", *(f"{n}}}" for n in range(10))]


def episodes(score: float = 0.0):
    """Ten tasks; every other one is solved, the others score `score`."""
    return [
        make_group(
            make_trajectory(
                [((7,), (5,) * n) for n in LENGTHS], prompt_id=f"p{i}", reward=1.0 if i % 2 else score, trailing=(8,)
            )
        )
        for i in range(10)
    ]


class Actor:
    """Remembers what was asked of it; its reference finds every token equally likely."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load_policy(self, start: Path, *_: object) -> None:
        self.calls.append(f"load {start.name}")

    def save_hf(self, out: Path, start: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")

    def freeze_reference(self) -> str:
        self.calls.append("freeze")
        return "hash"

    def query_runner(self, role: str) -> PrefixRunner:
        return PrefixRunner(lambda prefix, target: -1.0)


class Cluster:
    def __init__(self) -> None:
        self.trained_on: list[int] = []
        self.the_actor = Actor()

    def actor(self, recipe: object) -> Actor:
        return self.the_actor


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes the meter of evidence_hunt under `credit` and `meter`; returns its directory and the cluster."""

    def run(credit: DeltaTTGCredit, meter: TrainedMeter, *, score: float = 0.0):
        cluster = Cluster()
        monkeypatch.setattr(meter_training, "load_renderer", lambda *_: WordCodec(WORDS))
        monkeypatch.setattr(meter_training, "scripted_groups", lambda *_, **__: episodes(score))
        monkeypatch.setattr(
            meter_training, "supervise", lambda actor, samples, *_, **__: cluster.trained_on.append(len(samples))
        )
        recipe = load_recipe(RECIPE).recipe.model_copy(update={"credit": credit, "meter": meter})
        path = meter_training.meter_directory(recipe, tmp_path / "start", Artifacts(tmp_path), cluster)  # type: ignore[arg-type]
        assert path is not None
        return path, cluster

    return run


def meter(**options) -> TrainedMeter:
    return TrainedMeter(num_policy_episodes=0, num_scripted_episodes=10, detours=(0.3,), **options)


def test_a_trained_meter_learns_its_labels_and_knows_its_failure_cost(make):
    path, cluster = make(DeltaTTGCredit(), meter(sft=SFTConfig(num_steps=1)))
    assert cluster.the_actor.calls == ["load start", "freeze"]
    (num_samples,) = cluster.trained_on
    assert num_samples > 0
    assert num_samples % 2 == 0  # as many successes as failures
    frozen = load_frozen_meter(path)
    assert 1.25 * 4 < frozen.failure_cost <= 1.25 * sum(LENGTHS)
    assert json.loads((path / "meter.json").read_text())["evaluation"]["valid_rate"] == 1.0


def test_without_sft_the_start_policy_itself_is_the_meter(make):
    path, cluster = make(DeltaTTGCredit(), meter(sft=None))
    assert cluster.trained_on == []
    assert cluster.the_actor.calls == ["load start", "freeze"]
    assert load_frozen_meter(path).prompt.grid


def test_the_end_of_the_transcript_is_learnt_only_where_the_credit_reads_it(make):
    without, one = make(DeltaTTGCredit(), meter())
    with_end, other = make(DeltaTTGCredit(terminal="meter"), meter())
    assert without != with_end
    assert other.trained_on[0] * len(LENGTHS) == one.trained_on[0] * (len(LENGTHS) + 1)


def test_an_expected_score_is_no_completion_bit_where_scores_are_partial(make):
    make(DeltaTTGCredit(target="outcome"), meter())
    with pytest.raises(ScoringError, match=r"such as 0\.4"):
        make(DeltaTTGCredit(target="outcome"), meter(max_prefixes_per_trajectory=2), score=0.4)
