"""Judged records in a meter's tokens, and our own trajectories as judged records."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")  # the tiny model

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.engines import TinyModel
from megatrl.config.environments import EvidenceHuntConfig, SwitchboardConfig
from megatrl.config.load import load_recipe
from megatrl.data.scores import Forecast
from megatrl.data.states import segment_tokens, trajectory_states
from megatrl.data.trajectories import Termination
from megatrl.envs.registry import oracle_plan, prompt_source
from megatrl.errors import ScoringError
from megatrl.meter.process_bench import ProcessRecord, load_process_bench, write_process_bench
from megatrl.meter.process_judgment import judgment_accuracy, process_signal
from megatrl.meter.process_oracle import oracle_labels, oracle_records
from megatrl.meter.process_states import (
    forecast_values,
    judged_states,
    plain_messages,
    record_trajectory,
    unknown_share,
)
from megatrl.orchestration.players import scripted_player
from megatrl.rendering.renderer import Renderer, load_renderer
from tests.fakes.frozen_models import make_trajectory
from tests.fakes.tiny_tokenizer import byte_tokenizer, word_tokenizer

CALL = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"q": "a b"}'}}
RECORD = ProcessRecord(
    dataset="tau2",
    query_index=1,
    sample_index=2,
    messages=(
        {"role": "system", "content": "be helpful"},
        {"role": "user", "content": [{"type": "text", "text": "where?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "search", "content": "nothing"},
        {"role": "assistant", "content": "it is Adelaide"},
    ),
    step_labels=(1, -1),
    is_success=False,
    tools=({"type": "function", "function": {"name": "search", "description": "finds", "parameters": {}}},),
)
ENVIRONMENTS = (
    EvidenceHuntConfig(num_questions=3, num_documents=6, num_hops=2, max_turns=4),
    SwitchboardConfig(num_switches=3, num_patterns=2, max_turns=5),
)


def test_tool_calls_are_text_behind_the_message_s_own() -> None:
    texts = [message["content"] for message in plain_messages(RECORD)]
    assert texts[1] == "where?"
    assert texts[2] == '<tool_call>\n{"name": "search", "arguments": {"q": "a b"}}\n</tool_call>'
    broken = {"role": "assistant", "content": "hm", "tool_calls": [{"name": "f", "arguments": "{not json"}]}
    record = ProcessRecord(
        dataset="d",
        query_index=0,
        sample_index=0,
        messages=(*RECORD.messages[:2], broken),
        step_labels=(0,),
        is_success=True,
    )
    assert (
        plain_messages(record)[2]["content"] == 'hm\n<tool_call>\n{"name": "f", "arguments": "{not json"}\n</tool_call>'
    )


def test_every_state_is_the_beginning_of_the_rendered_conversation() -> None:
    renderer = Renderer(byte_tokenizer(), 400, "chatml", "qwen")
    trajectory = record_trajectory(RECORD, renderer)
    states = judged_states(trajectory)
    assert [state.turn_index for state in states] == [0, 1, 2]
    tokens = segment_tokens(trajectory.segments[0])
    texts = [renderer.decode(tokens[: state.length]) for state in states]
    assert texts[0].endswith("where?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "search"' in texts[0]  # the tool is described before the first step
    assert "nothing" not in texts[0]
    assert texts[1].startswith(texts[0])
    assert "</tool_call><|im_end|>" in texts[1]
    assert texts[2].endswith("it is Adelaide<|im_end|>")
    assert (trajectory.reward, trajectory.success) == (None, None)


def test_words_that_a_tiny_tokenizer_does_not_know_are_counted_and_crash_nothing() -> None:
    renderer = Renderer(word_tokenizer(["user", "assistant", "tool", "where?", "nothing"]), 64, "chatml", "react")
    trajectory = record_trajectory(RECORD, renderer)
    assert len(judged_states(trajectory)) == 3
    assert 0.3 < unknown_share([trajectory], renderer) < 0.9
    knows_all = Renderer(byte_tokenizer(), 400, "chatml", "qwen")
    assert unknown_share([record_trajectory(RECORD, knows_all)], knows_all) == 0.0


def test_roles_and_beginnings_that_cannot_be_rendered_are_refused_with_the_record_s_name() -> None:
    renderer = Renderer(byte_tokenizer(), 400, "chatml", "qwen")
    settings = {"dataset": "d", "query_index": 0, "sample_index": 4, "step_labels": (1,), "is_success": True}
    said = {"role": "assistant", "content": "a"}
    with pytest.raises(ScoringError, match="d/0/4 has a message with role 'function'"):
        record_trajectory(ProcessRecord(messages=(said, {"role": "function", "content": ""}), **settings), renderer)
    with pytest.raises(ScoringError, match="d/0/4"):
        record_trajectory(ProcessRecord(messages=(said,), **settings), renderer)


def test_answers_become_values_of_each_target() -> None:
    forecasts = [
        Forecast(is_valid=True, completion=True, completion_prob=0.9, tokens_to_go=12.0),
        Forecast(is_valid=True, completion=False, completion_prob=0.2, tokens_to_go=3.0),
        Forecast(is_valid=False),
    ]
    assert forecast_values(forecasts, "tokens_to_go") == (12.0, None, None)
    assert forecast_values(forecasts, "steps_to_go") == (12.0, None, None)
    assert forecast_values(forecasts, "future_score") == (0.9, 0.2, 0.0)


@pytest.mark.parametrize("config", ENVIRONMENTS, ids=lambda c: c.kind)
def test_an_oracle_s_own_forecasts_judge_its_labels_right_and_inverted_ones_wrong(config, tmp_path: Path) -> None:
    recipe_file = tmp_path / "recipe.yaml"
    recipe = {
        "name": "bench",
        "model": {"kind": "tiny", "family": "qwen3"},
        "env": config.model_dump(mode="json"),
        "rollout": {"tool_format": "react", "max_turns": config.max_turns, "context_tokens": 2048},
    }
    recipe_file.write_text(json.dumps(recipe))
    loaded = load_recipe(recipe_file).recipe
    make_tiny(TinyModel(family="qwen3"), config, tmp_path / "model")
    renderer = load_renderer(str(tmp_path / "model"), "chatml", "react")
    source = prompt_source(config, seed=0, split="train")
    player = scripted_player(loaded, renderer, detour=0.4, premature=0.2)
    groups = player.collect([source.prompt(i) for i in range(40)], first_position=0, policy_version=0)
    plan = partial(oracle_plan, config)
    records = oracle_records(groups, plan, dataset="own")
    write_process_bench(records, tmp_path / "own.jsonl")
    assert load_process_bench(tmp_path / "own.jsonl") == records
    labels = [label for record in records for label in record.step_labels]
    assert min(labels.count(1), labels.count(-1)) >= 10

    trajectories = [t for group in groups for t in group.trajectories]
    signals = []
    for trajectory, record in zip(trajectories, records, strict=True):
        work = [float(len(plan(turn.observation_key))) for turn in trajectory.turns]
        end = 0.0 if trajectory.success else None
        signals.append(process_signal([*work, end], "steps_to_go", failure_cost=20.0))
        # The record rendered again is the trajectory that the policy played.
        again = record_trajectory(record, renderer)
        assert segment_tokens(again.segments[0]) == segment_tokens(trajectory.segments[0])
        assert len(trajectory_states(again)) >= len(record.step_labels)
    overall, _ = judgment_accuracy(records, signals)
    inverted, _ = judgment_accuracy(records, [-signal for signal in signals])
    assert overall.by_tie_rule["wrong"] == 1.0
    assert inverted.by_tie_rule["half"] == 0.0


def test_labels_by_hand_of_a_detour_a_wrong_answer_and_a_cut_last_action() -> None:
    plans = {"far": ("x", "y", "z"), "near": ("y", "z"), "farther": ("w", "x", "y", "z")}
    base = make_trajectory([((1,), (2,))] * 4)
    turns = tuple(
        replace(turn, observation_key=key)
        for turn, key in zip(base.turns, ("far", "near", "near", "farther"), strict=True)
    )
    segment = replace(base.segments[0], turns=turns)
    messages = ({"role": "user", "content": "u"}, {"role": "assistant", "content": "a"})
    failed = replace(
        base, segments=(segment,), messages=messages, reward=0.0, success=False, termination=Termination.COMPLETED
    )
    assert oracle_labels(failed, plans.__getitem__) == (1, 0, -1, -1)
    assert oracle_labels(replace(failed, termination=Termination.MAX_TURNS), plans.__getitem__) == (1, 0, -1, 0)
    answered = replace(failed, messages=(*messages, {"role": "tool", "content": "still here"}))
    assert oracle_labels(answered, plans.__getitem__) == (1, 0, -1, 0)
    assert oracle_labels(replace(failed, reward=1.0, success=True), plans.__getitem__) == (1, 0, -1, 1)
