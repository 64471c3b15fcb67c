"""The oracle among choosers: it tries candidates on copies, and an episode under it makes no avoidable mistake."""

import asyncio
from functools import partial

import pytest

pytest.importorskip("torch")  # the tiny model

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.engines import TinyModel
from megatrl.config.environments import SwitchboardConfig
from megatrl.data.trajectories import FinishReason
from megatrl.envs.registry import make_environment, oracle_plan, prompt_source
from megatrl.orchestration.eval_oracle import OracleChooser
from megatrl.rendering.renderer import load_renderer
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.selection import Situation, turn_of

CONFIG = SwitchboardConfig(num_switches=3, num_patterns=2, max_turns=5)


def test_the_shortest_way_is_chosen_and_the_episode_s_environment_stays_as_it_was(tmp_path) -> None:
    make_tiny(TinyModel(family="qwen3"), CONFIG, tmp_path / "model")
    renderer = load_renderer(str(tmp_path / "model"), "chatml", "react")
    env = make_environment(CONFIG, prompt_source(CONFIG, seed=0, split="eval").prompt(0))
    asyncio.run(env.start())
    key = env.observation_key
    plan = oracle_plan(CONFIG, key)
    best, done = plan[0], plan[-1]
    wrong = next(t for t in ("Action: flip a", "Action: flip b", "Action: flip c") if t not in plan[:-1])
    texts = [wrong, done, best, "nonsense"]

    def sample(text: str, reason: FinishReason = FinishReason.STOP) -> Sample:
        ids = (*renderer.encode(text), renderer.stop_token_ids[0])
        return Sample(output_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=reason, policy_version=0)

    def choose(candidates: list[Sample], *, turns: int = 0) -> int:
        request = SampleRequest(input_ids=(1,), max_new_tokens=8, temperature=1.0)
        situation = Situation(
            request=request, turns=(turn_of((1,), sample(best)),) * turns, observation_tokens=(1,), env=env
        )
        chooser = OracleChooser(partial(oracle_plan, CONFIG), renderer, tool_format="react", max_turns=CONFIG.max_turns)
        return asyncio.run(chooser.choose(situation, candidates))

    assert choose([sample(text) for text in texts]) == 2
    assert env.observation_key == key
    assert (
        choose([sample(best, FinishReason.LENGTH), sample(wrong), sample("nonsense")]) == 2
    )  # nothing done, nothing undone
    assert choose([sample(text) for text in texts], turns=CONFIG.max_turns - 1) == 0  # too late: all fail alike
