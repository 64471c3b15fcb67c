"""Switchboard: what pays, what undoes progress, and that nothing a policy writes ends the episode by accident."""

import asyncio
import random

import pytest

from megatrl.config.environments import SwitchboardConfig
from megatrl.data.messages import POSITIONAL, Action, ToolCall
from megatrl.data.trajectories import Prompt
from megatrl.envs import switchboard
from megatrl.envs.protocol import Demonstrator, Environment, StepResult
from megatrl.envs.registry import make_environment, prompt_source, vocabulary
from megatrl.envs.switchboard import Switchboard, target_board
from megatrl.errors import ConfigError, EnvironmentFault
from megatrl.rendering.tool_calls import parse_action

CONFIG = SwitchboardConfig(num_patterns=4, num_switches=5, max_turns=9)
ANSWER = "<answer> done </answer>"


def board_at(position: int) -> Switchboard:
    made = make_environment(CONFIG, prompt_source(CONFIG, seed=0, split="train").prompt(position))
    assert isinstance(made, Switchboard)
    return made


def act(board: Switchboard, text: str) -> StepResult:
    return asyncio.run(board.step(parse_action(text, "react")))


def wrong_switch(board: Switchboard) -> str:
    return board.oracle().split()[-1]


def test_it_is_an_environment_and_a_demonstrator() -> None:
    assert isinstance(board_at(0), Environment)
    assert isinstance(board_at(0), Demonstrator)


@pytest.mark.parametrize("position", range(20))
def test_the_oracle_wins_with_one_flip_for_each_wrong_switch_and_the_answer(position: int) -> None:
    board = board_at(position)
    flips = board.remaining_flips
    assert flips > 0
    for turn in range(flips):
        assert board.remaining_flips == flips - turn
        assert not act(board, board.oracle()).done
    result = act(board, board.oracle())
    assert (result.done, result.reward, result.success) == (True, 1.0, True)
    assert result.metrics == {"wrong_switches": 0.0, "undone": 0.0}


def test_flipping_a_right_switch_undoes_progress_and_the_board_shows_it() -> None:
    board = board_at(1)
    before = board.remaining_flips
    switch = wrong_switch(board)
    shown = act(board, f"Action: flip {switch}")
    assert board.remaining_flips == before - 1
    again = act(board, f"Action: flip {switch}")
    assert board.remaining_flips == before
    assert shown.messages[0]["content"] != again.messages[0]["content"]
    assert shown.observation_key != again.observation_key
    assert act(board, ANSWER).metrics == {"wrong_switches": float(before), "undone": 1.0}


def test_saying_done_early_or_anything_else_at_the_end_pays_nothing() -> None:
    early = act(board_at(2), ANSWER)
    assert (early.done, early.reward) == (True, 0.0)
    board = board_at(2)
    while board.remaining_flips:
        act(board, board.oracle())
    assert act(board, "<answer> finished </answer>").reward == 0.0


def test_the_turn_limit_ends_the_episode_without_reward_and_shows_the_board() -> None:
    board = board_at(3)
    results = [act(board, "Action: flip a") for _ in range(CONFIG.max_turns)]
    assert [result.done for result in results] == [False] * (CONFIG.max_turns - 1) + [True]
    assert results[-1].reward == 0.0
    assert results[-1].messages
    with pytest.raises(EnvironmentFault, match="after the episode had ended"):
        act(board, "Action: flip a")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("flip a", "no call"),
        ("Action: press a", "unknown tool"),
        ("Action: flip z", "unknown switch"),
        ("Action: flip", "wrong arguments"),
    ],
)
def test_bad_actions_are_answered_change_nothing_and_cost_a_turn(text: str, complaint: str) -> None:
    board = board_at(4)
    key = board.observation_key
    result = act(board, text)
    assert complaint in result.messages[0]["content"]
    assert (result.done, result.is_valid_action, board.observation_key) == (False, False, key)


def test_several_calls_and_arguments_of_a_wrong_type_are_refused() -> None:
    board = board_at(4)
    two = Action(text="", tool_calls=(ToolCall(name="flip", arguments={"switch": "a"}),) * 2)
    number = Action(text="", tool_calls=(ToolCall(name="flip", arguments={POSITIONAL: 3}),))
    for action in (two, number):
        assert not asyncio.run(board.step(action)).is_valid_action


def test_train_and_eval_share_no_world_and_no_world_is_solved_at_the_start() -> None:
    worlds = {
        split: {
            str(prompt_source(CONFIG, seed=seed, split=split).prompt(i).task) for seed in (0, 1) for i in range(300)
        }
        for split in ("train", "eval")
    }
    assert not worlds["train"] & worlds["eval"]
    assert len(worlds["train"]) > 60
    for prompt in (prompt_source(CONFIG, seed=0, split="eval").prompt(i) for i in range(50)):
        assert list(prompt.task["board"]) != target_board(CONFIG, prompt.task["pattern"])


def test_every_word_of_an_episode_is_in_the_vocabulary() -> None:
    words = set(vocabulary(CONFIG)) | {"<answer>", "</answer>"}
    rng = random.Random(0)
    for position in range(30):
        board = board_at(position)
        texts = [message["content"] for message in asyncio.run(board.start())]
        for _ in range(CONFIG.max_turns):
            action = board.demonstration(rng, detour=0.4, premature=0.05)
            result = act(board, action)
            texts += [action, *(message["content"] for message in result.messages)]
            if result.done:
                break
        assert set(" ".join(texts).split()) <= words


def test_a_task_of_another_shape_is_a_fault_and_impossible_sizes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in (
        {},
        {"pattern": 9, "board": [0] * 5},
        {"pattern": 0, "board": [0] * 4},
        {"pattern": 0, "board": [2] * 5},
    ):
        with pytest.raises(EnvironmentFault, match="pattern must be a number below 4"):
            make_environment(CONFIG, Prompt(prompt_id="p", task=task, seed=0))
    tiny = SwitchboardConfig(num_patterns=1, num_switches=2)
    monkeypatch.setattr(switchboard, "_is_held_out", lambda pattern, board: False)
    prompt_source(tiny, seed=0, split="train").prompt(0)
    with pytest.raises(ConfigError, match=r"no eval world found in 1000 draws with num_patterns=1.*raise one of them"):
        prompt_source(tiny, seed=0, split="eval").prompt(0)
