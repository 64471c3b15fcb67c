"""Labels of the meter: what really happened after each recorded state (spec: DeltaTTG, meter data).

    successful trajectory:  (completion, tokens to go = sum of action tokens from this turn on)
    failed trajectory:      (no completion, no number)

A failed state never carries a number: not 0, and not the failure cost, which is an actor-time constant.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrl.data.states import State, trajectory_states, transcript_end
from megatrl.data.trajectories import Trajectory
from megatrl.errors import ScoringError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterLabel:
    """The recorded outcome from one state on. `tokens_to_go` is None exactly where it failed."""

    completion: bool
    tokens_to_go: int | None

    def __post_init__(self) -> None:
        if self.completion != (self.tokens_to_go is not None):
            raise ScoringError(f"label has completion={self.completion} but tokens_to_go={self.tokens_to_go}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledState:
    """One example of the meter: a state of a trajectory and what came of it."""

    trajectory: Trajectory
    state: State
    label: MeterLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """Examples for training or validation, and counts of what was left out, by reason."""

    examples: tuple[LabeledState, ...]
    left_out: dict[str, int]

    @property
    def content_hash(self) -> str:
        """Hash of everything the examples say: tokens, cut points and labels."""
        digest = hashlib.sha256()
        for example in self.examples:
            segment = example.trajectory.segments[example.state.segment_index]
            tokens = np.asarray(segment.tokens + segment.trailing_observation_tokens, dtype=np.int64)
            digest.update(repr((example.state, example.label)).encode())
            digest.update(tokens[: example.state.length].tobytes())
        return digest.hexdigest()[:16]


def trajectory_labels(
    trajectory: Trajectory, *, truncated: Literal["fail", "drop"] = "fail", with_terminal: bool = False
) -> tuple[LabeledState, ...]:
    """A label for each state s_1..s_K, and after a_K `with_terminal`; () where the outcome is not known.

    Tokens are those of the actions only, as recorded, end tokens included where they were sampled:
    observations are not generated. A truncated episode counts as failed, or is dropped.
    """
    if not trajectory.is_trainable or trajectory.termination.is_infrastructure_failure:
        return ()
    is_truncated = trajectory.termination.is_truncation
    if is_truncated and truncated == "drop":
        return ()
    is_success = bool(trajectory.success) and not is_truncated
    states = [state for state in trajectory_states(trajectory) if state.turn_index < trajectory.num_turns]
    remaining = [0]
    for turn in reversed(trajectory.turns):
        remaining.append(remaining[-1] + len(turn.action_tokens))
    to_go = remaining[::-1]
    if with_terminal:
        states.append(transcript_end(trajectory))
    return tuple(
        LabeledState(
            trajectory=trajectory,
            state=state,
            label=MeterLabel(completion=is_success, tokens_to_go=to_go[state.turn_index] if is_success else None),
        )
        for state in states
    )


def split_by_task(
    trajectories: Iterable[Trajectory], *, validation_fraction: float, seed: int
) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """(training, validation): all trajectories of a prompt fall on one side, whatever else is recorded.

    The validation prompts are the first by hash of (seed, prompt id); with two prompts or more and a
    fraction above 0, each side gets at least one.
    """
    trajectories = tuple(trajectories)
    prompts = sorted({t.id.prompt_id for t in trajectories}, key=lambda prompt: _hash(seed, prompt))
    count = round(validation_fraction * len(prompts))
    if validation_fraction > 0 and len(prompts) > 1:
        count = min(max(count, 1), len(prompts) - 1)
    held_out = set(prompts[:count])
    training = tuple(t for t in trajectories if t.id.prompt_id not in held_out)
    validation = tuple(t for t in trajectories if t.id.prompt_id in held_out)
    return training, validation


def collect_labels(
    trajectories: Iterable[Trajectory],
    *,
    max_prefixes_per_trajectory: int,
    seed: int,
    truncated: Literal["fail", "drop"] = "fail",
    balanced: bool = True,
    with_terminal: bool = False,
) -> LabelSet:
    """Labels of all trajectories, at most so many for each, with as many successes as failures.

    Prefixes over the cap are drawn uniformly over the turns. Balancing drops from the larger class at
    random and is skipped where one class is empty (the caller sees it in the counts). The order is
    shuffled. All draws depend on `seed` and the trajectory ids only.

    Raises ScoringError when no example is left.
    """
    left_out: Counter[str] = Counter()
    kept: list[LabeledState] = []
    for trajectory in trajectories:
        labels = trajectory_labels(trajectory, truncated=truncated, with_terminal=with_terminal)
        if not labels:
            left_out["no_outcome_trajectories"] += 1
            continue
        rng = random.Random(f"{seed}/{trajectory.id}")
        chosen = sorted(rng.sample(range(len(labels)), min(max_prefixes_per_trajectory, len(labels))))
        left_out["over_cap"] += len(labels) - len(chosen)
        kept += [labels[index] for index in chosen]

    rng = random.Random(f"{seed}/balance")
    rng.shuffle(kept)
    if balanced:
        counts = Counter(example.label.completion for example in kept)
        room = dict.fromkeys(counts, min(counts.values())) if len(counts) == 2 else dict(counts)
        balanced_examples: list[LabeledState] = []
        for example in kept:
            if room[example.label.completion] > 0:
                room[example.label.completion] -= 1
                balanced_examples.append(example)
        left_out["balance"] += len(kept) - len(balanced_examples)
        kept = balanced_examples
    if not kept:
        raise ScoringError(
            f"no trajectory gave the meter a label ({dict(left_out)}); record episodes with known outcomes first"
        )
    return LabelSet(examples=tuple(kept), left_out=dict(left_out))


def failure_cost(examples: Sequence[LabeledState]) -> float:
    """C = 1.25 x the 99th percentile (linear interpolation) of the training tokens to go.

    Raises ScoringError when no example succeeded: then nothing is known about the tokens of a success.
    """
    numbers = [e.label.tokens_to_go for e in examples if e.label.tokens_to_go is not None]
    if not numbers:
        raise ScoringError("no successful trajectory in the meter's training labels; its failure cost is undefined")
    return 1.25 * float(np.percentile(np.asarray(numbers, dtype=np.float64), 99))


def log_spaced_grid(
    examples: Sequence[LabeledState], *, size: int, is_spellable: Callable[[int], bool] = lambda value: True
) -> tuple[int, ...]:
    """Rising whole tokens-to-go values, evenly spaced in the logarithm over the range of the labels.

    A value that the tokenizer cannot spell gives way to the nearest that it can, the lower on a tie.
    Fewer than `size` values where some become equal. Raises ScoringError without a success or a number.
    """
    numbers = [e.label.tokens_to_go for e in examples if e.label.tokens_to_go is not None]
    if not numbers:
        raise ScoringError("no successful trajectory in the meter's training labels; there is no range for its grid")
    low, high = max(min(numbers), 1), max(*numbers, 1)
    values = {round(value) for value in np.geomspace(low, high, size)}
    if min(numbers) == 0:
        values.add(0)
    return tuple(sorted({_nearest_spellable(value, is_spellable) for value in values}))


def _nearest_spellable(value: int, is_spellable: Callable[[int], bool]) -> int:
    for distance in range(value + 1):
        for candidate in (value - distance, value + distance):
            if is_spellable(candidate):
                return candidate
    raise ScoringError(f"the tokenizer can spell no number from 0 to {2 * value}; the meter could not answer")


def _hash(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"{seed}/{prompt_id}".encode()).hexdigest()
