"""The environment that trains a meter: exact tokens in, a forecast out, the reward of the spec."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.config.environments import MeterPromptsConfig
from megatrl.data.messages import Action
from megatrl.data.meter_answer import answer_text
from megatrl.data.meter_labels import MeterLabels
from megatrl.data.trajectories import Termination, TrajectoryId
from megatrl.envs import meter_prompts
from megatrl.envs.meter_prompts import MeterPrompts, MeterPromptSource
from megatrl.envs.protocol import Demonstrator, Environment, Pretokenized
from megatrl.errors import ConfigError, EnvironmentFault, ScoringError
from megatrl.meter.labels import LabelRule, collect_labels
from megatrl.meter.prompt import COMPACT, build_meter_prompt
from megatrl.meter.sft_set import build_sft_set
from megatrl.observability.label_store import MANIFEST, read_labels, write_labels
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.episode import play_episode
from tests.fakes.episodes import ScriptedReplies
from tests.fakes.frozen_models import make_group, make_trajectory
from tests.fakes.tiny_tokenizer import word_tokenizer

NUMBERS = (1, 3, 450)
WORDS = [
    *("user", "assistant", "forecast", "a", "b"),
    *" ".join(answer_text(completion=True, tokens_to_go=n) for n in NUMBERS).split(),
    *answer_text(completion=False, tokens_to_go=None).split(),
]
RENDERER = Renderer(word_tokenizer(WORDS), 64, "chatml", "react")
A, B = RENDERER.encode("a b")
WON = make_trajectory([((A, B), (A, A)), ((B,), (A,))], index=0)
LOST = make_trajectory([((A, B), (B,)), ((B,), (B,))], index=1, reward=0.0)


@pytest.fixture
def data(tmp_path):
    made = collect_labels([WON, LOST], LabelRule(), seed=0).examples
    labels = MeterLabels(
        training=made,
        validation=made[:1],
        prompt=build_meter_prompt(RENDERER, NUMBERS, COMPACT),
        chat_format="chatml",
        tool_format="react",
        failure_costs={"hunt": 3.75},
        failure_cost=3.75,
        max_sequence_tokens=64,
        settings={"cap": 16},
        sources=("run",),
    )
    return write_labels(tmp_path / "labels", labels, [make_group(WON, LOST)]), tmp_path / "labels"


def config(path, **options) -> MeterPromptsConfig:
    return MeterPromptsConfig(labels=str(path), **options)


def test_labels_come_back_from_disk_and_every_file_is_verified(data, tmp_path):
    labels, path = data
    assert read_labels(path) == labels
    assert [(e.state, e.label) for e in labels.training] == [
        (e.state, e.label) for e in collect_labels([WON, LOST], LabelRule(), seed=0).examples
    ]
    assert len(labels.content_hash) == 16
    with pytest.raises(ScoringError, match="never overwritten"):
        write_labels(path, labels, [make_group(WON, LOST)])
    with pytest.raises(ScoringError, match="belong to no group"):
        write_labels(tmp_path / "half", labels, [make_group(WON)])
    assert not (tmp_path / "half").exists()
    lines = (path / "training.jsonl").read_text().splitlines()
    (path / "training.jsonl").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(ScoringError, match=r"altered: training\.jsonl"):
        read_labels(path)
    (path / MANIFEST).write_text("{}")
    with pytest.raises(ScoringError, match="cannot be read"):
        read_labels(path)
    with pytest.raises(ScoringError, match="megatrl meter label"):
        read_labels(tmp_path)


def test_the_prompt_is_the_one_that_sft_and_scoring_use(data):
    labels, path = data
    source = MeterPromptSource(config(path), seed=0, split="train")
    samples = build_sft_set(labels.training, labels.prompt, max_sequence_tokens=64).samples
    sft = {tuple(sample.tokens.tolist()) for sample in samples}
    played = set()
    for position in range(len(labels.training)):
        env = MeterPrompts(config(path), source.prompt(position))
        assert isinstance(env, Environment)
        assert isinstance(env, Pretokenized)
        assert isinstance(env, Demonstrator)
        answer = (*RENDERER.encode(env.oracle()), RENDERER.stop_token_ids[0])
        played.add((*env.opening_tokens, *answer))
    assert played == sft


def test_every_epoch_shows_each_example_once_in_another_order(data):
    _, path = data
    source = MeterPromptSource(config(path), seed=0, split="train")
    ids = [source.prompt(position).prompt_id for position in range(12)]
    epochs = [ids[:4], ids[4:8], ids[8:]]
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(ids)}
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = MeterPromptSource(config(path), seed=0, split="train")
    assert [again.prompt(position) for position in (11, 3)] == [source.prompt(position) for position in (11, 3)]
    held_out = MeterPromptSource(config(path), seed=0, split="eval")
    assert {held_out.prompt(position).prompt_id for position in range(5)} == {"meter-validation-0"}


def outcome(text: str, label: tuple[bool, int | None], **options):
    task = {
        "tokens": [A], "tokenizer_fingerprint": RENDERER.fingerprint, "text": "a state", "completion": label[0],
        "tokens_to_go": label[1], "answer": label[1],
    }  # fmt: skip
    env = MeterPrompts(MeterPromptsConfig(labels="unused", **options), _prompt(task))
    return asyncio.run(env.step(Action(text=text)))


def _prompt(task):
    return replace(make_group(WON).prompt, task=json.loads(json.dumps(task)))


FAIL = '{"completion": 0, "tokens_to_go": null}'


@pytest.mark.parametrize(  # (D7)
    "text, reward",
    [
        ('{"completion": 1, "tokens_to_go": 450}', 1.0),
        ('{"completion": 1, "tokens_to_go": 225}', 0.750554),
        (FAIL, 0.0),
        ('{"completion": 1, "tokens_to_go": -4}', 0.0),
        ("about 450 tokens", 0.0),
        ('{"completion": 1, "tokens_to_go": 0}', 0.501109),
        ('{"completion": 1, "tokens_to_go": 900}', 0.750277),
    ],
)
def test_the_reward_is_that_of_the_worked_example(text, reward):
    result = outcome(text, (True, 450))
    assert result.done
    assert result.reward == pytest.approx(reward, abs=1e-6)
    assert outcome(text, (False, None)).reward == (1.0 if text == FAIL else 0.0)


def test_the_switches_of_the_reward_reach_the_formula():
    over = '{"completion": 1, "tokens_to_go": 900}'
    assert outcome(over, (True, 450), accuracy="relative").reward == 0.5
    assert outcome(over, (True, 450), completion_weight=0.2).reward == pytest.approx(0.2 + 0.8 * 451 / 901)
    assert outcome(over, (True, 450), tau=2.0).reward == pytest.approx(0.5 + 0.5 * (451 / 901) ** 0.5)
    assert outcome(FAIL, (False, None), failure_earns_ttg_weight=False).reward == 0.5


def test_the_metrics_count_each_class_by_itself():
    right = outcome('{"completion": 1, "tokens_to_go": 900}', (True, 450)).metrics
    error = math.log(901 / 451)
    assert right == pytest.approx(
        {"valid_rate": 1, "bit_accuracy_success": 1, "failure_forecast_rate": 0, "abs_log_error": error}
    )
    assert outcome(FAIL, (True, 450)).metrics == {
        "valid_rate": 1, "bit_accuracy_success": 0, "failure_forecast_rate": 1
    }  # fmt: skip
    assert outcome("nothing", (False, None)).metrics == {"valid_rate": 0, "bit_accuracy_failure": 0}
    assert not outcome("nothing", (False, None)).is_valid_action


def episode(env, replies, renderer=RENDERER):
    return asyncio.run(
        play_episode(
            env,
            ScriptedReplies(replies),
            renderer,
            id=TrajectoryId(prompt_id="p", group_id="0", index=0),
            limits=RolloutConfig(tool_format="react", max_turns=1, max_action_tokens=6, context_tokens=32),
            reward=RewardConfig(success_threshold=0.5),
            policy_version=0,
            seed=0,
        )
    )


def test_an_episode_feeds_the_exact_ids_and_pays_the_answer(data):
    _, path = data
    env = MeterPrompts(config(path), MeterPromptSource(config(path), seed=0, split="train").prompt(0))
    reply = (*RENDERER.encode(env.oracle()), RENDERER.stop_token_ids[0])
    trajectory = episode(env, [reply])
    assert trajectory.termination is Termination.COMPLETED
    assert trajectory.turns[0].observation_tokens == env.opening_tokens
    assert (trajectory.reward, trajectory.success, trajectory.num_turns) == (1.0, True, 1)
    assert trajectory.gold_answers == ()


def test_an_answer_that_is_cut_earns_nothing_even_where_it_can_be_read(data):
    _, path = data
    env = MeterPrompts(config(path), MeterPromptSource(config(path), seed=0, split="train").prompt(0))
    trajectory = episode(env, [(*RENDERER.encode(env.oracle()), A, A, A)])
    assert trajectory.termination is Termination.ACTION_LENGTH
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    assert trajectory.metrics["valid_rate"] == 0


def test_token_ids_of_another_vocabulary_never_reach_the_policy(data):
    _, path = data
    other = Renderer(word_tokenizer(WORDS[::-1]), 64, "chatml", "react")
    env = MeterPrompts(config(path), MeterPromptSource(config(path), seed=0, split="train").prompt(0))
    trajectory = episode(env, [], renderer=other)
    assert trajectory.termination is Termination.ENV_ERROR
    assert "would mean other words" in trajectory.error
    assert trajectory.reward is None


def test_a_side_without_examples_and_a_task_of_something_else_are_errors(data, tmp_path):
    labels, _ = data
    write_labels(tmp_path / "open", replace(labels, validation=()), [make_group(WON, LOST)])
    nothing_held_out = MeterPromptSource(config(tmp_path / "open"), seed=0, split="eval")
    with pytest.raises(ConfigError, match="no validation example"):
        nothing_held_out.prompt(0)
    write_labels(tmp_path / "long", replace(labels, max_sequence_tokens=6), [make_group(WON, LOST)])
    with pytest.raises(ConfigError, match="no training example of at most"):
        MeterPromptSource(config(tmp_path / "long"), seed=0, split="train")
    with pytest.raises(EnvironmentFault, match="no such task"):
        MeterPrompts(config(tmp_path), make_group(WON).prompt)
    with pytest.raises(ConfigError, match="whose tokenizer exists already"):
        meter_prompts.vocabulary(config(tmp_path))
