"""Training samples of the meter: history, question and the recorded answer; loss on the answer only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrl.data.meter_labels import LabeledState
from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.samples import TrainingSample
from megatrl.data.states import shortened_history
from megatrl.errors import ScoringError


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSet:
    """Samples in the order of the examples, and what happened to histories that did not fit."""

    samples: tuple[TrainingSample, ...]
    num_shortened: int  # middle turns dropped
    num_dropped: int  # not even the task and the last observation fit


def build_sft_set(examples: Sequence[LabeledState], prompt: MeterPrompt, *, max_sequence_tokens: int) -> SFTSet:
    """One sample for each example. `action_mask` is True on the answer (and its end token) alone.

    Tokens to go are snapped to the prompt's grid, since scoring reads those answers only. Histories
    are shortened as in scoring. Raises ScoringError when not one token would be trained.
    """
    samples: list[TrainingSample] = []
    num_shortened = num_dropped = 0
    for example in examples:
        segment = example.trajectory.segments[example.state.segment_index]
        room = max_sequence_tokens - prompt.num_extra_tokens
        history = shortened_history(segment, example.state.length, room)
        if history is None:
            num_dropped += 1
            continue
        num_shortened += len(history) < example.state.length
        answer = prompt.answer_for(completion=example.label.completion, tokens_to_go=example.label.tokens_to_go).tokens
        if prompt.end_token is not None:
            answer = (*answer, prompt.end_token)
        context = prompt.header + history + prompt.question
        tokens = np.asarray(context + answer, dtype=np.int64)
        action_mask = np.zeros(len(tokens), dtype=np.bool_)
        action_mask[len(context) :] = True
        zeros = np.zeros(len(tokens))
        samples.append(
            TrainingSample(
                trajectory_id=example.trajectory.id,
                segment_index=example.state.segment_index,
                tokens=tokens,
                action_mask=action_mask,
                behavior_logprobs=zeros,
                advantages=zeros,
            )
        )
    if not sum(sample.num_action_tokens for sample in samples):
        raise ScoringError(
            f"the meter's training set has no trained token: {len(examples)} examples, {num_dropped} of them too long "
            f"for max_sequence_tokens={max_sequence_tokens}; record more or shorter trajectories"
        )
    return SFTSet(samples=tuple(samples), num_shortened=num_shortened, num_dropped=num_dropped)
