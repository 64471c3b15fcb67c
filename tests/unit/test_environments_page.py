"""The environment that docs/environments.md prints: short, whole, and playable as printed."""

import asyncio
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.data.messages import Action, ToolCall
from megatrl.data.trajectories import Termination, Trajectory, TrajectoryId
from megatrl.envs.protocol import Demonstrator, Environment
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.episode import play_episode
from megatrl.rollout.scripted import ScriptedSampler
from tests.fakes.tiny_tokenizer import word_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
MAX_LINES = 60
CHAT_WORDS = ("user", "assistant", "tool", "<answer>", "</answer>")


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """Everything that the page's only Python block defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(block.splitlines()) <= MAX_LINES
    names: dict[str, object] = {"__name__": "guess_number"}
    exec(compile(block, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def played(page: SimpleNamespace, position: int, *, detour: float, premature: float) -> Trajectory:
    """An episode of the scripted policy through the real rendering, parsing and rollout."""
    config = page.GuessNumberConfig()
    renderer = Renderer(word_tokenizer((*CHAT_WORDS, *page.vocabulary(config))), 64, "chatml", "react")
    env = page.GuessNumber(config, page.GuessNumberPrompts(config, seed=1, split="train").prompt(position))
    sampler = ScriptedSampler(env, random.Random(position), renderer, detour=detour, premature=premature)
    return asyncio.run(
        play_episode(
            env,
            sampler,
            renderer,
            id=TrajectoryId(prompt_id=f"p{position}", group_id="0", index=0),
            limits=RolloutConfig(tool_format="react", max_turns=8, max_action_tokens=8, context_tokens=256),
            reward=RewardConfig(),
            policy_version=0,
            seed=0,
        )
    )


def test_the_oracle_of_the_page_always_wins_in_the_words_of_its_vocabulary(page: SimpleNamespace) -> None:
    for position in range(20):
        trajectory = played(page, position, detour=0.0, premature=0.0)
        assert trajectory.termination is Termination.COMPLETED
        assert trajectory.reward == 1.0
        said = {token for segment in trajectory.segments for turn in segment.turns for token in turn.action_tokens}
        assert 0 not in said, "id 0 is the unknown word"


def test_an_imperfect_demonstration_wins_sometimes(page: SimpleNamespace) -> None:
    rewards = [played(page, position, detour=0.3, premature=0.4).reward for position in range(40)]
    assert set(rewards) == {0.0, 1.0}


def test_a_bad_action_is_answered_and_costs_a_turn(page: SimpleNamespace) -> None:
    config = page.GuessNumberConfig(max_turns=3)
    env = page.GuessNumber(config, page.GuessNumberPrompts(config, seed=1, split="train").prompt(0))
    assert isinstance(env, Environment)
    assert isinstance(env, Demonstrator)
    before = env.observation_key
    unknown = Action(text="", tool_calls=(ToolCall(name="guess", arguments={"number": "9" * 5000}),))
    for action in (Action(text="hello"), unknown):
        result = asyncio.run(env.step(action))
        assert (result.done, result.is_valid_action, result.observation_key) == (False, False, before)
    assert asyncio.run(env.step(Action(text=""))).reward == 0.0


def test_the_splits_share_no_task_and_a_position_always_means_the_same_task(page: SimpleNamespace) -> None:
    config = page.GuessNumberConfig()
    tasks = {}
    for split in ("train", "eval"):
        source = page.GuessNumberPrompts(config, seed=1, split=split)
        assert [source.prompt(i) for i in range(50)] == [source.prompt(i) for i in range(50)]
        tasks[split] = {tuple(source.prompt(i).task.values()) for i in range(500)}
        assert {secret for _, secret, _ in tasks[split]} == set(range(2, config.largest)), "no answer is new to a split"
    assert tasks["train"].isdisjoint(tasks["eval"])
