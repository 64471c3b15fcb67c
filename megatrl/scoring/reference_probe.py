"""The reference probe: what the frozen initial policy thinks of the gold answer at every state (TRACE).

    l_k = mean_t log pi_ref(gold_t | S_k, wrapper, gold_<t)

The gold answer never enters anything the actor is trained on or sampled from.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatrl.algorithms.trace import best_alias_logprobs, mean_answer_logprob
from megatrl.data.samples import FloatArray
from megatrl.data.scores import AnswerScore
from megatrl.data.states import segment_tokens, trajectory_states
from megatrl.data.trajectories import PromptGroup, Segment, Trajectory, TrajectoryId
from megatrl.errors import ScoringError
from megatrl.scoring.branches import (
    Branch,
    BranchBackend,
    TrunkLogprobs,
    TrunkQuery,
    answer_branch,
    answer_logprobs,
)

MAX_CACHED_STATES = 100_000
"""Scores of first states kept over the run, oldest dropped first."""


_Place = tuple[int, int, int] | float
"""Where a state's value is: (query, boundary, branch) of the results, or the cached value itself."""
_Golds = tuple[tuple[int, ...], ...]
"""Token ids of each gold answer: the canonical one alone, or all aliases."""


class AnswerCodec(Protocol):
    """The part of a Renderer that the probe needs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def answer_wrapper(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Questions of one pass over the trajectories, and where their answers will be."""

    queries: list[TrunkQuery] = field(default_factory=list)
    states: dict[TrajectoryId, list[list[_Place]]] = field(default_factory=dict)  # [gold][state]
    policy: dict[tuple[TrajectoryId, int], tuple[int, int]] = field(default_factory=dict)
    """(trajectory, segment) -> (query, boundary)"""


class ReferenceProbe:
    """Scores gold answers and policy tokens under the frozen initial policy.

    The wrapper ids are fixed when the probe is made and the same at every state; each gold is encoded
    on its own, so its number of tokens is constant over the states. Answers are scored at temperature 1,
    policy tokens at `policy_temperature`, which must be the one of the actor's logprobs.
    A probe belongs to one model: it remembers values of first states for as long as it lives.
    """

    def __init__(
        self,
        *,
        codec: AnswerCodec,
        backend: BranchBackend,
        max_sequence_tokens: int,
        use_aliases: bool = False,
        policy_temperature: float = 1.0,
        reads_policy: bool = False,
        max_cached_states: int = MAX_CACHED_STATES,
    ) -> None:
        """With `reads_policy`, `score` asks for the policy's own tokens in the same pass over each trajectory,
        and `reference_logprobs` of the same trajectories then costs nothing. `max_cached_states` first states
        are kept for later calls. Their last bits are those of the pack in which they were scored, so a run that has to
        be continued bit for bit keeps 0: a cache would be gone after the resume.
        """
        self._codec = codec
        self._backend = backend
        self._max_sequence_tokens = max_sequence_tokens
        self._use_aliases = use_aliases
        self._policy_temperature = policy_temperature
        self._reads_policy = reads_policy
        self._wrapper = codec.answer_wrapper()
        self._max_cached_states = max_cached_states
        self._first_state_cache: dict[bytes, float] = {}
        self._read: dict[TrajectoryId, tuple[Trajectory, tuple[FloatArray, ...]]] = {}

    def score(self, groups: Sequence[PromptGroup]) -> tuple[dict[TrajectoryId, AnswerScore], dict[str, float]]:
        """l_k at every state of every trajectory with a known outcome, and shares for the metrics.

        Trajectories without a usable gold answer, or with a state that would not fit the model, get
        no values and a reason. A prefix is never cut: it would make the states incomparable.
        Collective over the backend. Raises ScoringError for a value that is no log-probability.
        """
        trajectories = _trainable(groups)
        answers: dict[TrajectoryId, AnswerScore] = {}
        golds: dict[TrajectoryId, _Golds] = {}
        for trajectory in trajectories:
            golds[trajectory.id], skipped = self._golds(trajectory)
            answers[trajectory.id] = AnswerScore(logprobs=(), skipped=skipped)
        asked = self._ask(trajectories, golds, with_policy=self._reads_policy)
        results = self._backend.score(asked.queries)
        self._read = self._policy_logprobs(trajectories, asked, results) if self._reads_policy else {}

        scorable = [trajectory for trajectory in trajectories if golds[trajectory.id]]
        for trajectory in scorable:
            per_gold = [[self._value(place, results) for place in places] for places in asked.states[trajectory.id]]
            self._remember_first_state(trajectory, golds[trajectory.id], per_gold)
            # Max over aliases at each state on its own: the value stays a function of the state.
            logprobs = tuple(best_alias_logprobs(per_gold).tolist())
            for state, logprob in enumerate(logprobs):
                if not math.isfinite(logprob) or logprob > 1e-6:
                    raise ScoringError(
                        f"trajectory {trajectory.id} state {state}: mean gold logprob is {logprob!r}; it must be "
                        "finite and <= 0. Check the reference weights and numerics"
                    )
            answers[trajectory.id] = AnswerScore(logprobs=logprobs)
        return answers, self._metrics(answers, scorable)

    def reference_logprobs(self, groups: Sequence[PromptGroup]) -> dict[TrajectoryId, tuple[FloatArray, ...]]:
        """Reference logprobs of the policy's own tokens, for the KL term: one array [T] for each segment.

        Aligned to `segment.tokens`, 0 outside the actions, at the policy's temperature. Collective over
        the backend, unless `score` has just read these trajectories.
        """
        trajectories = _trainable(groups)
        read, self._read = self._read, {}
        if not all(t.id in read and read[t.id][0] is t for t in trajectories):
            asked = self._ask(trajectories, {}, with_policy=True)
            read = self._policy_logprobs(trajectories, asked, self._backend.score(asked.queries))
        return {t.id: read[t.id][1] for t in trajectories}

    def _golds(self, trajectory: Trajectory) -> tuple[_Golds, str]:
        """Token ids of the gold answers to score, or why there are none."""
        if not trajectory.gold_answers:
            return (), "missing_gold"
        wanted = trajectory.gold_answers if self._use_aliases else trajectory.gold_answers[:1]
        encoded = [self._codec.encode(answer) if answer.strip() else () for answer in wanted]
        stops = set(self._codec.stop_token_ids)
        golds = tuple(dict.fromkeys(ids for ids in encoded if not stops.issuperset(ids)))
        if not golds:
            return (), "empty_gold"
        longest_state = max(state.length for state in trajectory_states(trajectory))
        longest = longest_state + len(self._wrapper) + max(len(gold) for gold in golds)
        return (golds, "") if longest <= self._max_sequence_tokens else ((), "overlong")

    def _ask(
        self, trajectories: Sequence[Trajectory], golds: Mapping[TrajectoryId, _Golds], *, with_policy: bool
    ) -> _Asked:
        """One query for each segment: its gold answers at every state, then the policy's own tokens."""
        asked = _Asked()
        for trajectory in trajectories:
            answers = golds.get(trajectory.id, ())
            places = asked.states[trajectory.id] = [[] for _ in answers]
            states = trajectory_states(trajectory) if answers else ()
            for index, segment in enumerate(trajectory.segments):
                number, trunk = len(asked.queries), segment_tokens(segment)
                boundaries: list[int] = []
                branches: list[tuple[Branch, ...]] = []
                for state in (s for s in states if s.segment_index == index):
                    missing: list[Branch] = []
                    for gold, of_gold in zip(answers, places, strict=True):
                        is_first = state.turn_index == 0
                        cached = self._first_state_cache.get(_digest(trunk[: state.length], gold)) if is_first else None
                        if cached is not None:
                            of_gold.append(cached)
                        else:
                            of_gold.append((number, len(boundaries), len(missing)))
                            missing.append(answer_branch(self._wrapper, gold))
                    if missing:
                        boundaries.append(state.length)
                        branches.append(tuple(missing))
                if with_policy and segment.num_action_tokens:
                    asked.policy[trajectory.id, index] = (number, len(boundaries))
                    boundaries.append(len(segment.turns[0].observation_tokens))
                    branches.append((_policy_branch(segment, self._policy_temperature),))
                if boundaries:
                    asked.queries.append(
                        TrunkQuery(trunk=trunk, boundaries=tuple(boundaries), branches=tuple(branches))
                    )
        return asked

    @staticmethod
    def _policy_logprobs(
        trajectories: Sequence[Trajectory], asked: _Asked, results: Sequence[TrunkLogprobs]
    ) -> dict[TrajectoryId, tuple[Trajectory, tuple[FloatArray, ...]]]:
        """Each trajectory with its arrays [T], one for each segment."""
        read: dict[TrajectoryId, tuple[Trajectory, tuple[FloatArray, ...]]] = {}
        for trajectory in trajectories:
            arrays = tuple(np.zeros(len(segment.tokens)) for segment in trajectory.segments)
            for index, (segment, array) in enumerate(zip(trajectory.segments, arrays, strict=True)):
                if (trajectory.id, index) in asked.policy:
                    query, boundary = asked.policy[trajectory.id, index]
                    for offset, position in enumerate(results[query][boundary][0]):
                        if position:
                            array[len(segment.turns[0].observation_tokens) + offset] = position[0]
            read[trajectory.id] = (trajectory, arrays)
        return read

    def _value(self, place: _Place, results: Sequence[TrunkLogprobs]) -> float:
        if not isinstance(place, tuple):
            return place
        query, boundary, branch = place
        logprobs = answer_logprobs(self._wrapper, results[query][boundary][branch])
        return mean_answer_logprob(logprobs)

    def _remember_first_state(self, trajectory: Trajectory, golds: _Golds, per_gold: Sequence[Sequence[float]]) -> None:
        prompt = trajectory.segments[0].turns[0].observation_tokens
        for gold, logprobs in zip(golds, per_gold, strict=True):
            self._first_state_cache[_digest(prompt, gold)] = logprobs[0]
        while len(self._first_state_cache) > self._max_cached_states:
            del self._first_state_cache[next(iter(self._first_state_cache))]

    def _metrics(self, answers: Mapping[TrajectoryId, AnswerScore], scorable: Sequence[Trajectory]) -> dict[str, float]:
        """Shares over the trajectories looked at: skipped by reason, and gold seen in what the policy read."""
        reasons = Counter(score.skipped for score in answers.values())
        total = max(len(answers), 1)
        in_observation = in_prompt = 0
        for trajectory in scorable:
            gold = trajectory.gold_answers[0].strip().casefold()
            prompt, *later = self._observations(trajectory)
            in_prompt += gold in prompt
            in_observation += any(gold in text for text in later)
        return {
            "probe/skipped_missing_gold": reasons["missing_gold"] / total,
            "probe/skipped_empty_gold": reasons["empty_gold"] / total,
            "probe/skipped_overlong": reasons["overlong"] / total,
            "probe/gold_in_observation": in_observation / max(len(scorable), 1),
            "probe/gold_in_prompt": in_prompt / max(len(scorable), 1),
        }

    def _observations(self, trajectory: Trajectory) -> list[str]:
        """Texts of the observations, the prompt first. A rewritten history counts as one observation."""
        observations = [turn.observation_tokens for turn in trajectory.turns]
        observations += [s.trailing_observation_tokens for s in trajectory.segments if s.trailing_observation_tokens]
        return [self._codec.decode(tokens).casefold() for tokens in observations]


def _digest(prompt: tuple[int, ...], gold: tuple[int, ...]) -> bytes:
    """Key of a first state; the length keeps (prompt, gold) pairs apart that join to the same ids."""
    ids = np.asarray((len(prompt), *prompt, *gold), dtype=np.int64)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _trainable(groups: Sequence[PromptGroup]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories if t.is_trainable]


def _policy_branch(segment: Segment, temperature: float) -> Branch:
    """The segment after its first observation; targets are the action tokens themselves."""
    targets: list[tuple[int, ...]] = []
    for turn in segment.turns:
        targets += [()] * len(turn.observation_tokens)
        targets += [(token,) for token in turn.action_tokens]
    boundary = len(segment.turns[0].observation_tokens)
    return Branch(tokens=segment.tokens[boundary:-1], targets=tuple(targets[boundary:]), temperature=temperature)
