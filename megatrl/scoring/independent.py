"""The independent backend: every branch is a sequence of its own, prefix and branch together.

It needs nothing but a plain causal forward pass, so it is the oracle of the other backends, and fine
for short trajectories. Cost: sum over boundaries of (prefix + branch) tokens.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray
from megatrl.errors import ScoringError
from megatrl.scoring.branches import TrunkLogprobs, TrunkQuery


class QueryRunner(Protocol):
    """Runs a frozen model over packed queries: one array [Q] of logprobs for each of them, in order."""

    def __call__(self, queries: Sequence[PackedQueries], /) -> Sequence[FloatArray]: ...


Question = tuple[int, int, float]
"""(row, target, temperature)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """Packed queries, and where in their results each wanted logprob will be."""

    packed: tuple[PackedQueries, ...]
    places: dict[tuple[int, int, int, int, int], tuple[int, int]]
    """(query, boundary, branch, position, target) -> (packed query, question)."""
    num_sequences: int  # after merging identical ones
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    tokens: np.ndarray
    questions: dict[Question, list[tuple[int, int, int, int, int]]]  # -> who asked


def plan_queries(queries: Sequence[TrunkQuery], *, microbatch_tokens: int) -> QueryPlan:
    """Lay out every (prefix, branch) once and pack the sequences, longest first, into microbatches.

    Identical sequences are merged, also across queries. The row of a target is the index of the token
    *before* it. A sequence longer than `microbatch_tokens` gets a microbatch of its own; nothing is cut.
    """
    sequences: dict[bytes, _Sequence] = {}
    for q, query in enumerate(queries):
        trunk = np.asarray(query.trunk, dtype=np.int64)
        for b, (boundary, branches) in enumerate(zip(query.boundaries, query.branches, strict=True)):
            for n, branch in enumerate(branches):
                tokens = np.concatenate([trunk[:boundary], np.asarray(branch.tokens, dtype=np.int64)])
                key = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
                sequence = sequences.setdefault(key, _Sequence(tokens=tokens, questions={}))
                for j, targets in enumerate(branch.targets):
                    for i, target in enumerate(targets):
                        question = (boundary + j - 1, target, branch.temperature)
                        sequence.questions.setdefault(question, []).append((q, b, n, j, i))

    packed: list[PackedQueries] = []
    places: dict[tuple[int, int, int, int, int], tuple[int, int]] = {}
    for group in _pack(sorted(sequences.values(), key=lambda s: -len(s.tokens)), microbatch_tokens):
        offset, starts, questions = 0, [0], []
        for sequence in group:
            for (row, target, temperature), askers in sequence.questions.items():
                places.update(dict.fromkeys(askers, (len(packed), len(questions))))
                questions.append((offset + row, target, temperature))
            offset += len(sequence.tokens)
            starts.append(offset)
        packed.append(
            PackedQueries(
                tokens=np.concatenate([sequence.tokens for sequence in group]),
                cu_seqlens=np.asarray(starts, dtype=np.int64),
                **question_arrays(questions),
            )
        )
    num_tokens = sum(len(p.tokens) for p in packed)
    return QueryPlan(packed=tuple(packed), places=places, num_sequences=len(sequences), num_tokens=num_tokens)


def question_arrays(questions: Collection[Question]) -> dict[str, Any]:
    """The fields of PackedQueries that hold the questions."""
    rows, targets, temperatures = zip(*questions, strict=True)
    return {
        "rows": np.asarray(rows, dtype=np.int64),
        "targets": np.asarray(targets, dtype=np.int64),
        "temperatures": np.asarray(temperatures) if set(temperatures) != {1.0} else None,
    }


def _pack(sequences: Sequence[_Sequence], microbatch_tokens: int) -> list[list[_Sequence]]:
    groups: list[list[_Sequence]] = []
    used = 0
    for sequence in sequences:
        if not groups or used + len(sequence.tokens) > microbatch_tokens:
            groups.append([])
            used = 0
        groups[-1].append(sequence)
        used += len(sequence.tokens)
    return groups


def unpack(queries: Sequence[TrunkQuery], plan: QueryPlan, results: Sequence[FloatArray]) -> tuple[TrunkLogprobs, ...]:
    """Logprobs in the nesting of `queries`. Raises ScoringError when results are short, positive or NaN."""
    if len(results) != len(plan.packed):
        raise ScoringError(f"the scorer answered {len(results)} of {len(plan.packed)} packed queries")
    for index, (packed, result) in enumerate(zip(plan.packed, results, strict=True)):
        if np.shape(result) != (packed.num_questions,):
            raise ScoringError(
                f"packed query {index} has {packed.num_questions} questions but its result has shape {np.shape(result)}"
            )
        bad = ~np.isfinite(result) | (np.asarray(result) > 1e-6)
        if bad.any():
            raise ScoringError(
                f"the scorer returned {int(bad.sum())} unusable logprobs of {len(bad)} in packed query {index}, "
                f"first {float(np.asarray(result)[bad][0])!r}; a logprob is finite and <= 0. "
                "Check the frozen weights and the numerics of the model"
            )

    def value(*place: int) -> float:
        packed, question = plan.places[place]  # type: ignore[index]
        return min(float(results[packed][question]), 0.0)

    return tuple(
        tuple(
            tuple(
                tuple(
                    tuple(value(q, b, n, j, i) for i in range(len(targets))) for j, targets in enumerate(branch.targets)
                )
                for n, branch in enumerate(branches)
            )
            for b, branches in enumerate(query.branches)
        )
        for q, query in enumerate(queries)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentBackend:
    """A BranchBackend over a QueryRunner."""

    runner: QueryRunner
    microbatch_tokens: int

    def score(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]:
        """One TrunkLogprobs for each query. Collective over the runner's workers; no queries, no call."""
        plan = plan_queries(queries, microbatch_tokens=self.microbatch_tokens)
        results = self.runner(plan.packed) if plan.packed else ()
        return unpack(queries, plan, results)
