"""The decision states of a trajectory, as token prefixes of its segments."""

from dataclasses import dataclass

from megatrl.data.trajectories import Segment, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the policy had seen before one action: the first `length` tokens of its segment.

    The tokens end with the generation prompt of the next action. `turn_index` counts over the whole
    trajectory; it is `num_turns` for the state after the last action.
    """

    segment_index: int
    turn_index: int
    length: int  # tokens; over segment_tokens(segment)


def segment_tokens(segment: Segment) -> tuple[int, ...]:
    """All tokens of a segment, its trailing observation included."""
    return segment.tokens + segment.trailing_observation_tokens


def trajectory_states(trajectory: Trajectory) -> tuple[State, ...]:
    """s_1..s_K before each action and, where an observation follows the last action, s_{K+1}.

    A new segment holds the whole rewritten history, so prefixes restart there. A trailing
    observation counts at the last segment only.
    """
    states: list[State] = []
    turn_index = 0
    for segment_index, segment in enumerate(trajectory.segments):
        length = 0
        for turn in segment.turns:
            length += len(turn.observation_tokens)
            states.append(State(segment_index=segment_index, turn_index=turn_index, length=length))
            length += len(turn.action_tokens)
            turn_index += 1
        if segment.trailing_observation_tokens and segment_index == len(trajectory.segments) - 1:
            length += len(segment.trailing_observation_tokens)
            states.append(State(segment_index=segment_index, turn_index=turn_index, length=length))
    return tuple(states)


def transcript_end(trajectory: Trajectory) -> State:
    """The state after everything that happened, trailing observation included where there is one."""
    last = len(trajectory.segments) - 1
    return State(
        segment_index=last, turn_index=trajectory.num_turns, length=len(segment_tokens(trajectory.segments[last]))
    )


def shortened_history(segment: Segment, length: int, max_tokens: int) -> tuple[int, ...] | None:
    """The first `length` tokens of a segment with its middle turns dropped until they fit, or None.

    Kept: the first observation (the task) and the longest run of last turns that fits. None where not
    even the task and the last observation fit; nothing inside a turn is ever cut.
    """
    tokens = segment_tokens(segment)[:length]
    if length <= max_tokens:
        return tokens
    task_length = len(segment.turns[0].observation_tokens)
    cut = 0
    for turn in segment.turns:
        cut += len(turn.observation_tokens) + len(turn.action_tokens)
        # A kept tail starts with an observation, so it follows the end of an action.
        if task_length <= cut < length and task_length + length - cut <= max_tokens:
            return tokens[:task_length] + tokens[cut:]
    return None
