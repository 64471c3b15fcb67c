"""Ids of one vocabulary never enter another: a scorer with another tokenizer reads the messages."""

import asyncio
import random
from typing import Literal

import pytest

from megatrl.config.credit import RewardConfig
from megatrl.config.engines import RolloutConfig
from megatrl.config.environments import EvidenceHuntConfig
from megatrl.data.meter_answer import answer_text
from megatrl.data.trajectories import PromptGroup, TrajectoryId
from megatrl.envs.evidence_hunt import EvidenceHunt, EvidenceHuntPrompts, vocabulary
from megatrl.errors import ScoringError
from megatrl.meter.prompt import COMPACT, build_meter_prompt
from megatrl.rendering.renderer import Renderer
from megatrl.rendering.retokenize import Retokenizer, rerender
from megatrl.rollout.episode import play_episode
from megatrl.rollout.scripted import ScriptedSampler
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import CandidateMeter
from tests.fakes.frozen_models import PrefixRunner
from tests.fakes.tiny_tokenizer import word_tokenizer

ENV = EvidenceHuntConfig(num_questions=2, num_documents=4, num_hops=2, max_turns=4)
GRID = (5, 10, 20)
WORDS = [
    *("system", "user", "assistant", "tool", "<answer>", "</answer>", "forecast", "a"),
    *vocabulary(ENV),
    *" ".join(answer_text(completion=True, tokens_to_go=n) for n in GRID).split(),
    *answer_text(completion=False, tokens_to_go=None).split(),
]


def renderer(words, tool_format: Literal["qwen", "react"] = "react") -> Renderer:
    return Renderer(word_tokenizer(words), len(set(words)) + 4, "chatml", tool_format)


POLICY = renderer(WORDS)
METER = renderer(WORDS[::-1])  # the same words under permuted ids


def played(by: Renderer, *, position=0, max_action_tokens=8, detour=0.5) -> PromptGroup:
    prompt = EvidenceHuntPrompts(ENV, seed=1, split="train").prompt(position)
    env = EvidenceHunt(ENV, prompt)
    sampler = ScriptedSampler(env, random.Random(position), by, detour=detour, premature=0.1)
    trajectory = asyncio.run(
        play_episode(
            env,
            sampler,
            by,
            id=TrajectoryId(prompt_id=prompt.prompt_id, group_id="0", index=0),
            limits=RolloutConfig(
                tool_format="react", max_turns=4, max_action_tokens=max_action_tokens, context_tokens=256
            ),
            reward=RewardConfig(),
            policy_version=0,
            seed=0,
        )
    )
    return PromptGroup(prompt=prompt, group_id="0", trajectories=(trajectory,))


def tokens(trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(turn.observation_tokens, turn.action_tokens) for turn in trajectory.turns]


@pytest.mark.parametrize("max_action_tokens", [8, 2], ids=["ended actions", "a cut action"])
def test_the_view_is_what_the_other_tokenizer_would_have_recorded(max_action_tokens):
    for position in range(6):
        mine = played(POLICY, position=position, max_action_tokens=max_action_tokens).trajectories[0]
        theirs = played(METER, position=position, max_action_tokens=max_action_tokens).trajectories[0]
        view = rerender(mine, METER)
        assert tokens(mine) != tokens(theirs)  # the ids differ, so the next line says something
        assert tokens(view) == tokens(theirs)
        assert view.segments[-1].trailing_observation_tokens == theirs.segments[-1].trailing_observation_tokens
        assert rerender(mine, POLICY).segments[0].tokens == mine.segments[0].tokens


def test_the_tools_of_the_task_are_part_of_the_view():
    prompt = EvidenceHuntPrompts(ENV, seed=1, split="train").prompt(0)
    tools = EvidenceHunt(ENV, prompt).tools
    words = [*WORDS, *["#", "Tools", "<tools>"]]
    with_tools = renderer(words, tool_format="qwen")
    mine = played(POLICY).trajectories[0]
    assert len(rerender(mine, with_tools, tools).segments[0].tokens) > len(
        rerender(mine, with_tools).segments[0].tokens
    )


def meter(by: Renderer, logprob, **options) -> CandidateMeter:
    return CandidateMeter(
        prompt=build_meter_prompt(by, GRID, COMPACT),
        backend=IndependentBackend(runner=PrefixRunner(logprob), microbatch_tokens=512),
        failure_cost=50.0,
        max_sequence_tokens=256,
        **options,
    )


def test_scores_through_the_view_are_those_of_the_text_itself():
    def logprob_under(by: Renderer):
        """Depends on the words alone: whoever reads other words gives other numbers."""

        def logprob(prefix, target):
            return -((hash_of(by.decode(prefix)) + hash_of(by.decode([target]))) % 97) / 7.0 - 0.01

        return logprob

    def hash_of(text):
        return sum((place + 1) * ord(letter) for place, letter in enumerate(text))

    group = played(POLICY)
    direct = meter(POLICY, logprob_under(POLICY), policy_fingerprint=POLICY.fingerprint)
    through = meter(
        METER,
        logprob_under(METER),
        policy_fingerprint=POLICY.fingerprint,
        view=Retokenizer(METER, lambda group: ()),
    )
    wanted, _ = direct.score([group])
    found, _ = through.score([group])
    assert found == wanted
    assert len(next(iter(found.values())).forecasts) == group.trajectories[0].num_turns


def test_ids_of_another_vocabulary_are_refused_before_any_forward_pass():
    def never(prefix, target):
        raise AssertionError("asked")

    with pytest.raises(ScoringError, match="would mean other words"):
        meter(METER, never, policy_fingerprint=POLICY.fingerprint)
    with pytest.raises(ScoringError, match="would mean other words"):  # a view of the wrong side
        meter(METER, never, policy_fingerprint=POLICY.fingerprint, view=Retokenizer(POLICY, lambda group: ()))


def test_a_template_of_its_own_is_another_tokenizer():
    assert renderer(WORDS, "qwen").fingerprint != renderer(WORDS, "react").fingerprint


def test_messages_that_are_missing_are_an_error():
    mine = played(POLICY).trajectories[0]
    from dataclasses import replace

    with pytest.raises(ScoringError, match="needs the messages of every turn"):
        rerender(replace(mine, messages=mine.messages[:-2]), METER)
    with pytest.raises(ScoringError, match="needs the messages of every turn"):
        rerender(replace(mine, messages=()), METER)
    with pytest.raises(ScoringError, match="without role and text"):
        rerender(replace(mine, messages=({"role": "user"}, *mine.messages[1:])), METER)
