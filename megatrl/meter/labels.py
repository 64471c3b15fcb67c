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
from typing import Literal, Protocol

import numpy as np

from megatrl.data.meter_labels import Cut, LabeledState, MeterLabel, content_hash
from megatrl.data.states import State, trajectory_states, transcript_end
from megatrl.data.trajectories import Trajectory
from megatrl.errors import ScoringError

_END_OF_THOUGHT = "</think>"


class TextCodec(Protocol):
    """The part of a Renderer that counts words."""

    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """How a trajectory is labelled and how many of its states are kept. Spec 2.2."""

    max_prefixes_per_trajectory: int = 16
    truncated: Literal["fail", "drop"] = "fail"
    cut: Literal["before_action", "after_action", "both"] = "before_action"
    with_terminal: bool = False
    """Also the state after the last action."""
    balanced: bool = True
    """As many successes as failures."""
    success_threshold: float | None = None
    """A trajectory succeeded from this score on; None takes what the run recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """Examples for training or validation, and counts of what was left out, by reason."""

    examples: tuple[LabeledState, ...]
    left_out: dict[str, int]

    @property
    def content_hash(self) -> str:
        return content_hash(self.examples)


def trajectory_labels(
    trajectory: Trajectory,
    rule: LabelRule | None = None,
    *,
    domain: str = "",
    action_lengths: Sequence[int] | None = None,
) -> tuple[LabeledState, ...]:
    """A label for each state the rule asks for, in rising order; () where the outcome is not known.

    Tokens are those of the actions only, as recorded, end tokens included where they were sampled:
    observations are not generated. `action_lengths` replaces them, one number for each turn. A truncated
    episode counts as failed, or is dropped.
    """
    rule = rule or LabelRule()
    if not trajectory.is_trainable or trajectory.termination.is_infrastructure_failure:
        return ()
    is_truncated = trajectory.termination.is_truncation
    if is_truncated and rule.truncated == "drop":
        return ()
    is_success = succeeded(trajectory, rule.success_threshold) and not is_truncated
    lengths = action_lengths or [len(turn.action_tokens) for turn in trajectory.turns]
    remaining = [0]
    for length in reversed(lengths):
        remaining.append(remaining[-1] + length)
    to_go = remaining[::-1]
    return tuple(
        LabeledState(
            trajectory=trajectory,
            state=state,
            label=MeterLabel(completion=is_success, tokens_to_go=to_go[state.turn_index] if is_success else None),
            cut=cut,
            domain=domain,
        )
        for cut, state in _cut_states(trajectory, rule)
    )


def succeeded(trajectory: Trajectory, threshold: float | None) -> bool:
    """Whether a trajectory with a known outcome counts as a success."""
    if threshold is None:
        return bool(trajectory.success)
    return trajectory.reward is not None and trajectory.reward >= threshold


def states_after_actions(trajectory: Trajectory) -> tuple[State, ...]:
    """The state after each action and before anything answered it, in order; turn_index counts the actions taken."""
    states: list[State] = []
    for segment_index, segment in enumerate(trajectory.segments):
        length = 0
        for turn in segment.turns:
            length += len(turn.observation_tokens) + len(turn.action_tokens)
            states.append(State(segment_index=segment_index, turn_index=len(states) + 1, length=length))
    return tuple(states)


def lengths_without_reasoning(trajectory: Trajectory, codec: TextCodec) -> list[int]:
    """Action tokens of each turn without what was thought: the text after the last </think>, encoded on its own.

    A turn that never stops thinking counts whole where no thought was opened, and not at all otherwise.
    """
    lengths: list[int] = []
    for turn in trajectory.turns:
        text = codec.decode(turn.action_tokens)
        _, closed, spoken = text.rpartition(_END_OF_THOUGHT)
        if closed:
            lengths.append(len(codec.encode(spoken)))
        else:
            lengths.append(0 if text.lstrip().startswith("<think>") else len(turn.action_tokens))
    return lengths


def _cut_states(trajectory: Trajectory, rule: LabelRule) -> list[tuple[Cut, State]]:
    before: list[State] = []
    after: list[State] = []
    if rule.cut != "after_action":
        before += [s for s in trajectory_states(trajectory) if s.turn_index < trajectory.num_turns]
        before += [transcript_end(trajectory)] if rule.with_terminal else []
    if rule.cut != "before_action":
        after += [
            s for s in states_after_actions(trajectory) if rule.with_terminal or s.turn_index < trajectory.num_turns
        ]
        # Where nothing followed the last action its two ends are one state.
        after = [state for state in after if state not in before]
    states: list[tuple[Cut, State]] = [*(("before_action", s) for s in before), *(("after_action", s) for s in after)]
    return sorted(states, key=lambda item: (item[1].segment_index, item[1].length))


def split_by_task(
    trajectories: Iterable[Trajectory],
    *,
    validation_fraction: float,
    seed: int,
    task_of: Callable[[Trajectory], str] = lambda trajectory: trajectory.id.prompt_id,
) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """(training, validation): all trajectories of a task fall on one side, whatever else is recorded.

    The validation tasks are the first by hash of (seed, task); with two tasks or more and a
    fraction above 0, each side gets at least one.
    """
    trajectories = tuple(trajectories)
    tasks = sorted({task_of(t) for t in trajectories}, key=lambda task: _hash(seed, task))
    count = round(validation_fraction * len(tasks))
    if validation_fraction > 0 and len(tasks) > 1:
        count = min(max(count, 1), len(tasks) - 1)
    held_out = set(tasks[:count])
    training = tuple(t for t in trajectories if task_of(t) not in held_out)
    validation = tuple(t for t in trajectories if task_of(t) in held_out)
    return training, validation


def collect_labels(
    trajectories: Iterable[Trajectory],
    rule: LabelRule | None = None,
    *,
    seed: int,
    domain_of: Callable[[Trajectory], str] = lambda trajectory: "",
    action_lengths: Callable[[Trajectory], Sequence[int]] | None = None,
) -> LabelSet:
    """Labels of all trajectories, at most so many for each, with as many successes as failures.

    Prefixes over the cap are drawn uniformly over the turns. Balancing drops from the larger class at
    random and is skipped where one class is empty (the caller sees it in the counts). The order is
    shuffled. All draws depend on `seed` and the trajectory ids only.

    Raises ScoringError when no example is left.
    """
    rule = rule or LabelRule()
    left_out: Counter[str] = Counter()
    kept: list[LabeledState] = []
    for trajectory in trajectories:
        lengths = action_lengths(trajectory) if action_lengths else None
        labels = trajectory_labels(trajectory, rule, domain=domain_of(trajectory), action_lengths=lengths)
        if not labels:
            left_out["no_outcome_trajectories"] += 1
            continue
        rng = random.Random(f"{seed}/{trajectory.id}")
        chosen = sorted(rng.sample(range(len(labels)), min(rule.max_prefixes_per_trajectory, len(labels))))
        left_out["over_cap"] += len(labels) - len(chosen)
        kept += [labels[index] for index in chosen]

    rng = random.Random(f"{seed}/balance")
    rng.shuffle(kept)
    if rule.balanced:
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


def failure_costs(examples: Sequence[LabeledState]) -> dict[str, float]:
    """C of each domain with a success in it. A domain without one has no cost of its own."""
    domains = sorted({e.domain for e in examples if e.label.tokens_to_go is not None})
    return {domain: failure_cost([e for e in examples if e.domain == domain]) for domain in domains}


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


def _hash(seed: int, task: str) -> str:
    return hashlib.sha256(f"{seed}/{task}".encode()).hexdigest()
