"""The real TextWorld engine: generation, play, and what it must not let a policy do."""

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("textworld")

from megatrl.config.environments import TextWorldConfig
from megatrl.data.messages import POSITIONAL, Action, ToolCall
from megatrl.data.trajectories import Prompt
from megatrl.envs.protocol import Demonstrator, Environment, StepResult
from megatrl.envs.textworld import TextWorldEnvironment, TextWorldPrompts
from megatrl.envs.textworld_games import game_file
from megatrl.errors import ConfigError, EnvironmentFault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = TextWorldConfig(challenge="coin_collector", level=3, num_games=2, max_turns=8)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


def environment(cache: Path, position: int = 0, config: TextWorldConfig = CONFIG) -> TextWorldEnvironment:
    return TextWorldEnvironment(config, TextWorldPrompts(config, seed=0, split="train").prompt(position), cache=cache)


def typed(command: object) -> Action:
    return Action(text="", tool_calls=(ToolCall(name="act", arguments={POSITIONAL: command}),))


def act_of(text: str) -> Action:
    return typed(text.removeprefix("Action: act "))


async def play(env: TextWorldEnvironment, act) -> StepResult:
    await env.start()
    try:
        for _ in range(env._config.max_turns):
            result = await env.step(act_of(act()))
            if result.done:
                return result
        raise AssertionError("the episode ran past its turn limit")
    finally:
        await env.close()


def test_oracle_wins_and_a_policy_that_only_looks_does_not(cache: Path) -> None:
    env = environment(cache)
    assert isinstance(env, Environment)
    assert isinstance(env, Demonstrator)
    won = asyncio.run(play(env, env.oracle))
    assert (won.reward, won.success, won.metrics["score_share"]) == (1.0, True, 1.0)
    idle = asyncio.run(play(environment(cache), lambda: "Action: act look"))
    assert (idle.reward, idle.success, idle.done) == (0.0, False, True)


def test_oracle_recovers_from_detours(cache: Path) -> None:
    env = environment(cache)
    rng = random.Random(3)
    turns = iter(range(100))
    result = asyncio.run(
        play(env, lambda: env.demonstration(rng, detour=1.0 if next(turns) < 2 else 0.0, premature=0.0))
    )
    assert result.success


def test_oracle_wins_a_cooking_game_and_parts_of_it_pay_nothing(cache: Path) -> None:
    config = TextWorldConfig(challenge="cooking", level=1, num_games=1, max_turns=30)
    env = environment(cache, config=config)
    assert asyncio.run(play(env, env.oracle)).reward == 1.0

    async def one_point() -> StepResult:
        partial = environment(cache, config=config)
        await partial.start()
        for _ in range(30):
            told = await partial.step(act_of(partial.oracle()))
            if "score has just gone up" in told.messages[0]["content"]:
                break
        result = partial.finish()
        await partial.close()
        return result

    outcome = asyncio.run(one_point())
    assert outcome.reward == 0.0
    assert 0.0 < outcome.metrics["score_share"] < 1.0


HOSTILE = [
    "save",
    "Restart",
    "quit",
    "undo",
    "tw-extra-infos score",
    "go west. take coin",
    "look\nquit",
    "\x00look",
    "look " * 1000,
    "look; rm -rf /",
    "",
    None,
    ["look"],
]


def test_hostile_commands_never_reach_the_interpreter_and_the_game_goes_on(cache: Path) -> None:
    config = CONFIG.model_copy(update={"max_turns": 60})

    async def episode() -> StepResult:
        env = environment(cache, config=config)
        await env.start()
        before = env.observation_key
        for command in HOSTILE:
            result = await env.step(typed(command))
            assert not result.is_valid_action, command
            assert not result.done, command
            assert result.messages[0]["content"].startswith("error: "), command
        for action in (
            Action(text="", parse_error="not JSON"),
            Action(text="hello"),
            Action(text="", answer="done"),
            Action(text="", tool_calls=(ToolCall(name="open"),)),
        ):
            assert not (await env.step(action)).is_valid_action
        assert env.observation_key == before
        while not (result := await env.step(act_of(env.oracle()))).done:
            pass
        await env.close()
        await env.close()
        return result

    assert asyncio.run(episode()).success


def test_nonsense_is_answered_by_the_game(cache: Path) -> None:
    async def answer() -> StepResult:
        env = environment(cache)
        await env.start()
        result = await env.step(typed("dance with the ceiling"))
        await env.close()
        return result

    result = asyncio.run(answer())
    assert result.is_valid_action
    assert not result.done
    assert "Commands: " in result.messages[0]["content"]


def test_episodes_play_side_by_side_without_stopping_the_event_loop(cache: Path) -> None:
    async def episodes() -> tuple[list[StepResult], float]:
        worst = 0.0
        running = True

        async def heartbeat() -> None:
            nonlocal worst
            loop = asyncio.get_running_loop()
            while running:
                asked = loop.time()
                await asyncio.sleep(0.05)
                worst = max(worst, loop.time() - asked - 0.05)

        beat = asyncio.create_task(heartbeat())
        environments = [environment(cache, position) for position in (0, 1, 0, 1)]
        results = await asyncio.gather(*(play(env, env.oracle) for env in environments))
        running = False
        await beat
        return list(results), worst

    results, worst = asyncio.run(episodes())
    assert all(result.success for result in results)
    assert worst < 5.0  # one engine call may hold the interpreter lock for a while, an episode must not


def test_a_game_is_generated_once_and_leaves_nothing_half_done(tmp_path: Path, cache: Path) -> None:
    seed = TextWorldPrompts(CONFIG, seed=0, split="train").prompt(0).task["game_seed"]
    first = game_file(CONFIG, seed, cache=cache)
    written = first.stat().st_mtime_ns
    assert game_file(CONFIG, seed, cache=cache) == first
    assert first.stat().st_mtime_ns == written
    assert not [path for path in cache.iterdir() if path.name.startswith(".building-")]


def test_levels_and_tasks_that_do_not_exist_are_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.level=9; cooking has the levels 1 to 4"):
        TextWorldPrompts(TextWorldConfig(challenge="cooking", level=9), seed=0, split="train")
    with pytest.raises(EnvironmentFault, match="game_seed"):
        TextWorldEnvironment(CONFIG, Prompt(prompt_id="p", task={}, seed=0), cache=cache)
