"""The oracle meter and the plans behind it: the true remaining work, counted in tokens."""

import asyncio

import pytest

from megatrl.config.environments import EvidenceHuntConfig, SwitchboardConfig, TextWorldConfig
from megatrl.envs.evidence_hunt import EvidenceHunt
from megatrl.envs.registry import has_oracle_plan, make_environment, oracle_plan, prompt_source
from megatrl.envs.switchboard import Switchboard
from megatrl.errors import ConfigError
from megatrl.rendering.tool_calls import parse_action
from megatrl.scoring.oracle_meter import OracleMeter
from tests.fakes.frozen_models import make_group, make_trajectory

HUNT = EvidenceHuntConfig(num_hops=3, max_turns=6)
BOARD = SwitchboardConfig(num_patterns=4, num_switches=5)


class Words:
    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text.split())))


@pytest.mark.parametrize("config", [HUNT, BOARD])
@pytest.mark.parametrize("position", range(8))
def test_a_plan_is_what_the_oracle_then_does_word_for_word_in_number(config, position: int) -> None:
    env = make_environment(config, prompt_source(config, seed=0, split="train").prompt(position))
    assert isinstance(env, EvidenceHunt | Switchboard)
    asyncio.run(env.start())
    done = False
    while not done:
        plan = oracle_plan(config, env.observation_key)
        action = env.oracle()
        assert len(plan[0].split()) == len(action.split())
        if action.startswith("Action:"):
            assert plan[0] == action
        rest = plan[1:]
        done = asyncio.run(env.step(parse_action(action, "react"))).done
        assert done == (not rest)
        if not done:
            assert [len(a.split()) for a in oracle_plan(config, env.observation_key)] == [len(a.split()) for a in rest]


def test_an_environment_without_a_plan_says_which_have_one() -> None:
    assert has_oracle_plan(HUNT)
    assert not has_oracle_plan(TextWorldConfig())
    with pytest.raises(ConfigError, match=r"env\.kind=textworld does not know.*evidence_hunt, switchboard"):
        oracle_plan(TextWorldConfig(), "anywhere")


def test_forecasts_count_words_and_end_tokens_and_fail_where_too_few_turns_are_left() -> None:
    plans = {
        "far": ("Action: flip a", "Action: flip b", "<answer> done </answer>"),
        "near": ("<answer> done </answer>",),
    }
    turns = [((1,), (2,))] * 3
    trajectory = make_trajectory(turns, index=0, observation_keys=("far", "near", "far"))
    meter = OracleMeter(plan=plans.__getitem__, encoder=Words(), max_turns=4, failure_cost=50.0)
    scores, metrics = meter.score([make_group(trajectory)])
    first, second, third = scores[trajectory.id].forecasts
    assert (first.completion, first.tokens_to_go) == (True, 12.0)
    assert (second.completion, second.tokens_to_go) == (True, 4.0)
    assert (third.completion, third.completion_prob) == (False, 0.0)  # three actions, two turns left
    assert metrics["meter/forecast_failure"] == pytest.approx(1 / 3)
    assert meter.failure_cost == 50.0
