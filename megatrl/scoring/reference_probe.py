"""The reference probe: what the frozen initial policy thinks of the gold answer at every state (TRACE).

    l_k = mean_t log pi_ref(gold_t | S_k, wrapper, gold_<t)

The gold answer never enters anything the actor is trained on or sampled from.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatrl.algorithms.trace import best_alias_logprobs, mean_answer_logprob
from megatrl.config.scoring import ScoringBackend
from megatrl.data.samples import FloatArray
from megatrl.data.scores import AnswerScore
from megatrl.data.states import segment_tokens, trajectory_states
from megatrl.data.trajectories import PromptGroup, Trajectory, TrajectoryId
from megatrl.errors import ScoringError
from megatrl.scoring.backends import branch_backend
from megatrl.scoring.branches import Branch, TrunkLogprobs, TrunkQuery, answer_branch, answer_logprobs
from megatrl.scoring.independent import QueryRunner

MAX_CACHED_STATES = 100_000
"""Scores of first states kept over the run, oldest dropped first."""


_Place = tuple[int, int, int] | float
"""Where a state's value is: (query, boundary, branch) of the results, or the cached value itself."""


class AnswerCodec(Protocol):
    """The part of a Renderer that the probe needs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def answer_wrapper(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorable:
    trajectory: Trajectory
    golds: tuple[tuple[int, ...], ...]  # token ids; the canonical answer alone, or all aliases


class ReferenceProbe:
    """Scores gold answers and policy tokens under the frozen initial policy.

    The wrapper ids are fixed when the probe is made and the same at every state; each gold is encoded
    on its own, so its number of tokens is constant over the states. Answers are scored at temperature 1,
    policy tokens at `policy_temperature`, which must be the one of the actor's logprobs.
    """

    def __init__(
        self,
        *,
        codec: AnswerCodec,
        runner: QueryRunner,
        microbatch_tokens: int,
        max_sequence_tokens: int,
        use_aliases: bool = False,
        policy_temperature: float = 1.0,
        backend: ScoringBackend = "independent",
    ) -> None:
        self._codec = codec
        self._max_sequence_tokens = max_sequence_tokens
        self._use_aliases = use_aliases
        self._backend = branch_backend(backend, runner=runner, microbatch_tokens=microbatch_tokens)
        self._policy_backend = branch_backend(
            backend, runner=runner, microbatch_tokens=microbatch_tokens, temperature=policy_temperature
        )
        self._wrapper = codec.answer_wrapper()
        self._first_state_cache: dict[bytes, float] = {}

    def score(self, groups: Sequence[PromptGroup]) -> tuple[dict[TrajectoryId, AnswerScore], dict[str, float]]:
        """l_k at every state of every trajectory with a known outcome, and shares for the metrics.

        Trajectories without a usable gold answer, or with a state that would not fit the model, get
        no values and a reason. A prefix is never cut: it would make the states incomparable.
        Collective over the runner's workers. Raises ScoringError for a value that is no log-probability.
        """
        answers: dict[TrajectoryId, AnswerScore] = {}
        scorable: list[_Scorable] = []
        for trajectory in (t for group in groups for t in group.trajectories if t.is_trainable):
            golds, skipped = self._golds(trajectory)
            if skipped:
                answers[trajectory.id] = AnswerScore(logprobs=(), skipped=skipped)
            else:
                scorable.append(_Scorable(trajectory=trajectory, golds=golds))

        values = self._score_states(scorable)
        for item, per_gold in zip(scorable, values, strict=True):
            # Max over aliases at each state on its own: the value stays a function of the state.
            logprobs = tuple(best_alias_logprobs(per_gold).tolist())
            for state, logprob in enumerate(logprobs):
                if not math.isfinite(logprob) or logprob > 1e-6:
                    raise ScoringError(
                        f"trajectory {item.trajectory.id} state {state}: mean gold logprob is {logprob!r}; it must be "
                        "finite and <= 0. Check the reference weights and numerics"
                    )
            answers[item.trajectory.id] = AnswerScore(logprobs=logprobs)
        return answers, self._metrics(answers, scorable)

    def reference_logprobs(self, groups: Sequence[PromptGroup]) -> dict[TrajectoryId, tuple[FloatArray, ...]]:
        """Reference logprobs of the policy's own tokens, for the KL term: one array [T] for each segment.

        Aligned to `segment.tokens`, 0 outside the actions, at the policy's temperature. Collective over
        the runner's workers.
        """
        trajectories = [t for group in groups for t in group.trajectories if t.is_trainable]
        places = [
            (trajectory, index)
            for trajectory in trajectories
            for index, segment in enumerate(trajectory.segments)
            if segment.num_action_tokens
        ]
        queries = [_policy_query(trajectory, index) for trajectory, index in places]
        arrays = {
            (trajectory.id, index): np.zeros(len(segment.tokens))
            for trajectory in trajectories
            for index, segment in enumerate(trajectory.segments)
        }
        results = self._policy_backend.score(queries)
        for (trajectory, index), query, result in zip(places, queries, results, strict=True):
            array = arrays[trajectory.id, index]
            for offset, position in enumerate(result[0][0]):
                if position:
                    array[query.boundaries[0] + offset] = position[0]
        return {t.id: tuple(arrays[t.id, index] for index in range(len(t.segments))) for t in trajectories}

    def _golds(self, trajectory: Trajectory) -> tuple[tuple[tuple[int, ...], ...], str]:
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

    def _score_states(self, scorable: Sequence[_Scorable]) -> list[list[list[float]]]:
        """[trajectory][gold][state] mean logprobs; first states come from the cache where known."""
        queries: list[TrunkQuery] = []
        askers: list[list[list[_Place]]] = []
        for item in scorable:
            states = trajectory_states(item.trajectory)
            places: list[list[_Place]] = [[] for _ in item.golds]
            for index, segment in enumerate(item.trajectory.segments):
                trunk = segment_tokens(segment)
                boundaries: list[int] = []
                branches: list[tuple[Branch, ...]] = []
                for state in (s for s in states if s.segment_index == index):
                    prefix = trunk[: state.length]
                    missing: list[Branch] = []
                    for number, gold in enumerate(item.golds):
                        cached = self._first_state_cache.get(_digest(prefix, gold)) if state.turn_index == 0 else None
                        if cached is not None:
                            places[number].append(cached)
                        else:
                            places[number].append((len(queries), len(boundaries), len(missing)))
                            missing.append(answer_branch(self._wrapper, gold))
                    if missing:
                        boundaries.append(state.length)
                        branches.append(tuple(missing))
                if boundaries:
                    queries.append(TrunkQuery(trunk=trunk, boundaries=tuple(boundaries), branches=tuple(branches)))
            askers.append(places)

        results = self._backend.score(queries)
        values = [[[self._value(place, results) for place in per_gold] for per_gold in places] for places in askers]
        self._remember_first_states(scorable, values)
        return values

    def _value(self, place: _Place, results: Sequence[TrunkLogprobs]) -> float:
        if not isinstance(place, tuple):
            return place
        query, boundary, branch = place
        logprobs = answer_logprobs(self._wrapper, results[query][boundary][branch])
        return mean_answer_logprob(logprobs)

    def _remember_first_states(
        self, scorable: Sequence[_Scorable], values: Sequence[Sequence[Sequence[float]]]
    ) -> None:
        for item, per_gold in zip(scorable, values, strict=True):
            prompt = item.trajectory.segments[0].turns[0].observation_tokens
            for gold, logprobs in zip(item.golds, per_gold, strict=True):
                self._first_state_cache[_digest(prompt, gold)] = logprobs[0]
        while len(self._first_state_cache) > MAX_CACHED_STATES:
            del self._first_state_cache[next(iter(self._first_state_cache))]

    def _metrics(self, answers: Mapping[TrajectoryId, AnswerScore], scorable: Sequence[_Scorable]) -> dict[str, float]:
        """Shares over the trajectories looked at: skipped by reason, and gold seen in what the policy read."""
        reasons = Counter(score.skipped for score in answers.values())
        total = max(len(answers), 1)
        in_observation = in_prompt = 0
        for item in scorable:
            gold = item.trajectory.gold_answers[0].strip().casefold()
            prompt, *later = self._observations(item.trajectory)
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


def _policy_query(trajectory: Trajectory, segment_index: int) -> TrunkQuery:
    """The segment after its first observation as one branch; targets are the action tokens themselves."""
    segment = trajectory.segments[segment_index]
    tokens = segment.tokens
    targets: list[tuple[int, ...]] = []
    for turn in segment.turns:
        targets += [()] * len(turn.observation_tokens)
        targets += [(token,) for token in turn.action_tokens]
    boundary = len(segment.turns[0].observation_tokens)
    branch = Branch(tokens=tokens[boundary:-1], targets=tuple(targets[boundary:]))
    return TrunkQuery(trunk=tokens[:boundary], boundaries=(boundary,), branches=((branch,),))
