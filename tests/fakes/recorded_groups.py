"""Prompt groups as a run records them: fixed ones, and a hypothesis strategy for any."""

import random

import numpy as np
from hypothesis import strategies as st

from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.scores import AnswerScore, Forecast, MeterScore
from megatrl.data.trajectories import (
    FinishReason,
    Prompt,
    PromptGroup,
    Segment,
    Termination,
    Trajectory,
    TrajectoryId,
    Turn,
)
from megatrl.data.wire import GroupRecord, TrajectoryNotes


def make_group(
    number: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0), *, num_turns: int = 2, seed: int = 0
) -> PromptGroup:
    """A group with one trajectory for each reward; every turn reads 3 tokens and writes 4."""
    rng = random.Random(f"{seed}-{number}")
    prompt_id, group_id = f"task-{number}", f"e0-{number}"
    trajectories = []
    for index, reward in enumerate(rewards):
        turns = tuple(
            Turn(
                observation_tokens=(1, 2, 3),
                action_tokens=(10 + turn, 11, 12, 13),
                behavior_logprobs=tuple(-rng.random() for _ in range(4)),
                policy_version=7,
                is_tool_call=turn + 1 < num_turns,
            )
            for turn in range(num_turns)
        )
        messages: list[dict[str, str]] = [{"role": "user", "content": "Where is the [bold]key[/bold]?"}]
        for turn in range(num_turns):
            messages.append({"role": "assistant", "content": f"<look>{turn}</look>"})
            messages.append({"role": "tool", "content": f"room {turn}"})
        trajectories.append(
            Trajectory(
                id=TrajectoryId(prompt_id=prompt_id, group_id=group_id, index=index),
                segments=(Segment(turns=turns, trailing_observation_tokens=(5, 6)),),
                reward=reward,
                success=None if reward is None else reward > 0.5,
                termination=Termination.ENV_ERROR if reward is None else Termination.COMPLETED,
                gold_answers=("under the mat",),
                messages=tuple(messages),
                metrics={"rooms": 2.0 + index},
                error="door jammed" if reward is None else "",
            )
        )
    prompt = Prompt(prompt_id=prompt_id, task={"size": 3, "names": ["Ämil", "花"]}, seed=number)
    return PromptGroup(prompt=prompt, group_id=group_id, trajectories=tuple(trajectories))


_floats = st.floats(allow_nan=True, allow_infinity=True)
_finite = st.floats(allow_nan=False, allow_infinity=False)
_tokens = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
_texts = st.text(st.characters(), max_size=12)  # lone surrogates included
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _finite | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    logprobs = draw(st.lists(st.floats(max_value=0.0, allow_nan=False, allow_infinity=False), max_size=5))
    observation = draw(_tokens)
    num_tokens = len(observation) + len(logprobs)
    ids = draw(st.lists(st.integers(-1, 255), min_size=2 * num_tokens, max_size=2 * num_tokens))
    experts = np.array(ids, dtype=int).reshape(-1, 1, 2)
    return Turn(
        observation_tokens=observation,
        action_tokens=tuple(range(len(logprobs))),
        behavior_logprobs=tuple(logprobs),
        policy_version=draw(st.integers(0, 10**9)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        is_tool_call=draw(st.booleans()),
        observation_key=draw(_texts),
        penalty=draw(st.floats(0, 10)),
        routed_experts=draw(st.none() | st.just(RoutedExperts.of(experts, num_experts=256))),
    )


@st.composite
def records(draw: st.DrawFn) -> GroupRecord:
    prompt_id, group_id = draw(_texts), draw(_texts)
    trajectories, notes = [], []
    for index in range(draw(st.integers(0, 3))):
        reward = draw(st.none() | _finite)
        segments = draw(
            st.lists(
                st.builds(Segment, turns=st.lists(turns(), max_size=3).map(tuple), trailing_observation_tokens=_tokens),
                max_size=2,
            )
        )
        trajectories.append(
            Trajectory(
                id=TrajectoryId(prompt_id=prompt_id, group_id=group_id, index=index, attempt=draw(st.integers(0, 9))),
                segments=tuple(segments),
                reward=reward,
                success=None if reward is None else draw(st.booleans()),
                termination=draw(st.sampled_from(Termination)),
                gold_answers=tuple(draw(st.lists(_texts, max_size=2))),
                messages=tuple(draw(st.lists(st.dictionaries(_texts, _json, max_size=2), max_size=2))),
                metrics=draw(st.dictionaries(_texts, _floats, max_size=2)),
                error=draw(_texts),
            )
        )
        per_turn = st.lists(st.lists(_floats, max_size=3).map(tuple), max_size=3).map(tuple)
        forecast = st.builds(
            Forecast,
            is_valid=st.booleans(), completion=st.booleans(), completion_prob=_floats, tokens_to_go=_floats,
        )  # fmt: skip
        answer = st.builds(AnswerScore, logprobs=st.lists(_floats, max_size=3).map(tuple), skipped=_texts)
        meter = st.builds(
            MeterScore,
            forecasts=st.lists(forecast, max_size=2).map(tuple), terminal=st.none() | forecast, skipped=_texts,
        )  # fmt: skip
        notes.append(
            TrajectoryNotes(
                advantages=draw(st.none() | per_turn),
                answer=draw(st.none() | answer),
                meter=draw(st.none() | meter),
                details=draw(st.dictionaries(_texts, st.lists(_floats, max_size=3).map(tuple), max_size=2)),
            )
        )
    return GroupRecord(
        step=draw(st.integers(0, 10**6)),
        group=PromptGroup(
            prompt=Prompt(
                prompt_id=prompt_id, task=draw(st.dictionaries(_texts, _json, max_size=3)), seed=draw(st.integers())
            ),
            group_id=group_id,
            trajectories=tuple(trajectories),
        ),
        dropped=draw(_texts),
        notes=tuple(notes),
        failure_cost=draw(st.none() | _floats),
    )
