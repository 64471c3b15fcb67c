"""A frozen meter put to work by a recipe: who is asked, in whose tokens, at what cost."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("megatron.core")

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.credit import DeltaTTGCredit, GroupStatisticsConfig
from megatrl.config.load import load_recipe
from megatrl.config.recipe import Recipe
from megatrl.errors import ScoringError
from megatrl.meter.frozen import FrozenMeter, freeze_meter
from megatrl.meter.prompt import build_meter_prompt, meter_text
from megatrl.orchestration.meter_scoring import meter_view, open_meter, own_renderer
from megatrl.orchestration.scorers import NullProbe, NullReference, Scorers
from megatrl.rendering.renderer import load_renderer
from megatrl.rendering.retokenize import Retokenizer
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import CandidateMeter
from tests.fakes.frozen_models import PrefixRunner, make_group, make_trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "evidence_hunt.yaml"


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides).recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    made = recipe()
    path = tmp_path_factory.mktemp("model") / "hunt"
    make_tiny(made.model, made.env, path)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def frozen(model, tmp_path_factory) -> FrozenMeter:
    renderer = load_renderer(str(model), "chatml", "react")
    return freeze_meter(
        model,
        tmp_path_factory.mktemp("meter") / "frozen",
        prompt=build_meter_prompt(renderer, (1, 5, 20), meter_text(renderer)),
        failure_cost=90.0,
        failure_costs={"evidence_hunt": 40.0},
        tool_format="react",
        training_hash="abc",
    )


class Actor:
    """Stands for the actor's processes: every token is equally likely."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.runner = PrefixRunner(lambda prefix, target: -1.0)

    def load_meter(self, path: Path) -> str:
        self.loaded.append(path)
        return "identity"

    def query_runner(self, role: str) -> PrefixRunner:
        assert role == "meter"
        return self.runner


def opened(made: Recipe, frozen: FrozenMeter, policy):
    actor = Actor()
    meter = open_meter(
        made,
        frozen,
        policy=policy,
        actor=actor,  # type: ignore[arg-type]
        readout="candidates",
        with_terminal=False,
        log_dir=Path("unused"),
    )
    return meter, actor


def test_the_candidates_readout_sits_on_the_actors_ranks_at_the_domains_cost(frozen):
    meter, actor = opened(recipe(), frozen, own_renderer(frozen))
    assert (meter.identity, actor.loaded) == (frozen.identity, [frozen.path])
    assert len(frozen.identity) == 16
    assert meter.scorer.failure_cost == 40.0
    assert meter_view(recipe(), frozen, own_renderer(frozen))[0] is None


def test_in_another_domain_the_meter_brings_its_own_cost(frozen, caplog):
    made = recipe("env.kind=switchboard", "env.max_turns=6")
    meter, _ = opened(made, frozen, own_renderer(frozen))
    assert meter.scorer.failure_cost == 90.0
    assert "trained in evidence_hunt, not in switchboard" in caplog.text


def test_another_tokenizer_or_template_gets_a_view_with_the_tools_of_the_task(frozen, model):
    made = recipe("rollout.tool_format=qwen")
    policy = load_renderer(str(model), "chatml", "qwen")
    view, longest = meter_view(made, frozen, policy)
    assert isinstance(view, Retokenizer)
    assert view.fingerprint == frozen.prompt.tokenizer_fingerprint != policy.fingerprint
    assert longest > made.rollout.context_tokens + frozen.prompt.num_extra_tokens  # its own positions are the limit
    opened(made, frozen, policy)


def test_a_directory_with_a_strange_tokenizer_is_refused(frozen, tmp_path):
    made = recipe("env.num_documents=20")
    make_tiny(made.model, made.env, tmp_path / "other")  # type: ignore[arg-type]
    strange = SimpleNamespace(path=tmp_path / "other", prompt=frozen.prompt, chat_format="chatml", tool_format="react")
    with pytest.raises(ScoringError, match="freeze it again"):
        own_renderer(strange)  # type: ignore[arg-type]


def test_the_meter_is_asked_about_groups_with_an_advantage_and_no_others(frozen):
    asked: list[tuple[int, ...]] = []

    def logprob(prefix, target):
        asked.append(prefix)
        return -1.0

    scorers = Scorers(
        answers=NullProbe(),
        meter=CandidateMeter(
            prompt=frozen.prompt,
            backend=IndependentBackend(runner=PrefixRunner(logprob), microbatch_tokens=256),
            failure_cost=40.0,
            policy_fingerprint=frozen.prompt.tokenizer_fingerprint,
            max_sequence_tokens=64,
        ),
        reference=NullReference(),
        credit=DeltaTTGCredit(),
        group_statistics=GroupStatisticsConfig(),
    )

    def group(name: str, *rewards: float | None):
        token = {"open": 7, "won": 8, "lost": 9, "alone": 10}[name]
        return make_group(
            *(
                make_trajectory([((token,), (3, 4)), ((5,), (6,))], index=i, prompt_id=name, reward=r)
                for i, r in enumerate(rewards)
            )
        )

    groups = [group("open", 1, 0, None), group("won", 1, 1), group("lost", 0, 0), group("alone", 1, None)]
    scores = scorers.score(groups)
    assert {id.prompt_id for id in scores.meter} == {"open"}
    assert {id.index for id in scores.meter} == {0, 1}
    assert {prefix[0] for prefix in asked} == {7}
    assert len({prefix[: prefix.index(frozen.prompt.question[0])] for prefix in asked}) == 2  # equal histories once
    assert np.isfinite(scores.failure_cost or np.nan)
