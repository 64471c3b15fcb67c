"""Prompt groups and their per-turn advantages -> flat training samples, one for each segment."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatrl.data.samples import FloatArray, TrainingSample
from megatrl.data.trajectories import PromptGroup, Segment, Trajectory, TrajectoryId
from megatrl.errors import TrajectoryError

PerTurn = Mapping[TrajectoryId, tuple[FloatArray, ...]]
PerSegment = Mapping[TrajectoryId, tuple[FloatArray, ...]]


def flatten_groups(
    groups: Sequence[PromptGroup], advantages: PerTurn, reference_logprobs: PerSegment | None = None
) -> tuple[TrainingSample, ...]:
    """Returns one sample for each segment that holds an action token, in the order of the groups.

    `advantages` has one array [n_k] for each turn of a trainable trajectory; trajectories without a
    known outcome are left out. `reference_logprobs` has one array [T] for each segment.

    Raises TrajectoryError where an array does not fit its turn.
    """
    samples: list[TrainingSample] = []
    for group in groups:
        for trajectory in group.trajectories:
            if not trajectory.is_trainable:
                continue
            per_turn = advantages[trajectory.id]
            if len(per_turn) != trajectory.num_turns:
                raise TrajectoryError(
                    f"trajectory {trajectory.id} has {trajectory.num_turns} turns but {len(per_turn)} advantage arrays"
                )
            references = reference_logprobs[trajectory.id] if reference_logprobs is not None else None
            first_turn = 0
            for index, segment in enumerate(trajectory.segments):
                turns = per_turn[first_turn : first_turn + len(segment.turns)]
                first_turn += len(segment.turns)
                if segment.num_action_tokens:
                    reference = references[index] if references is not None else None
                    samples.append(_flatten_segment(trajectory, index, segment, turns, reference))
    return tuple(samples)


def _flatten_segment(
    trajectory: Trajectory,
    index: int,
    segment: Segment,
    advantages: Sequence[FloatArray],
    reference_logprobs: FloatArray | None,
) -> TrainingSample:
    tokens = np.asarray(segment.tokens, dtype=np.int64)
    action_mask = np.zeros(len(tokens), dtype=np.bool_)
    behavior = np.zeros(len(tokens))
    advantage = np.zeros(len(tokens))
    position = 0
    for number, (turn, turn_advantages) in enumerate(zip(segment.turns, advantages, strict=True)):
        if turn_advantages.shape != (len(turn.action_tokens),):
            raise TrajectoryError(
                f"trajectory {trajectory.id} segment {index} turn {number}: {len(turn.action_tokens)} action tokens "
                f"but advantages of shape {turn_advantages.shape}"
            )
        position += len(turn.observation_tokens)
        span = slice(position, position + len(turn.action_tokens))
        action_mask[span] = True
        behavior[span] = turn.behavior_logprobs
        advantage[span] = turn_advantages
        position = span.stop
    experts = segment.routed_experts
    if experts is not None and (experts[:-1] < 0).any():
        raise TrajectoryError(
            f"trajectory {trajectory.id} segment {index}: the expert choices of token "
            f"{int((experts[:-1] < 0).any(axis=(1, 2)).argmax())} of {len(tokens)} were not recorded"
        )
    if action_mask[0]:
        raise TrajectoryError(
            f"trajectory {trajectory.id} segment {index} begins with an action; it needs an observation"
        )
    return TrainingSample(
        trajectory_id=trajectory.id,
        segment_index=index,
        tokens=tokens,
        action_mask=action_mask,
        behavior_logprobs=behavior,
        advantages=advantage,
        reference_logprobs=reference_logprobs,
        routed_experts=experts,
    )
