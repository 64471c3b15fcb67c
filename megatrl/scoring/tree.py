"""The tree backend: trunks and branches share what they have in common, so K boundaries cost one forward pass.

Trunks that begin alike (a group's trajectories after their prompt) share that beginning; a branch
continues its trunk at the boundary, shares what the trunk itself goes on with there (all of it, where the
policy's own tokens are asked about), and branches of one boundary share their common lead. Cost: N tokens of
trunk and m for each branch, less what is shared, instead of the sum over boundaries of (prefix + branch).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import IntArray
from megatrl.scoring.branches import TrunkLogprobs, TrunkQuery
from megatrl.scoring.independent import QueryPlan, QueryRunner, Question, question_arrays, unpack


@dataclass(slots=True, eq=False)
class _Node:
    tokens: IntArray
    parent: "_Node | None"
    prefix: int  # tokens of the parent's path that come before `tokens`
    begin: int  # row of its first token

    @property
    def end(self) -> int:
        """Length of the path that ends with this node."""
        return self.prefix + len(self.tokens)

    def owner(self, length: int) -> "_Node | None":
        """The node of the path that holds its token number `length`, None for the empty prefix."""
        node: _Node | None = self
        while node is not None and length <= node.prefix:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class _Query:
    """A TrunkQuery's tokens as arrays: comparing and slicing tuples of 40,000 tokens would be most of the planning."""

    trunk: IntArray
    branches: tuple[tuple[int, tuple[IntArray, ...]], ...]  # (boundary, tokens of its branches)

    @classmethod
    def of(cls, query: TrunkQuery) -> "_Query":
        return cls(
            np.asarray(query.trunk[: max(query.boundaries)], dtype=np.int64),  # nobody asks behind the last boundary
            tuple(
                (boundary, tuple(np.asarray(branch.tokens, dtype=np.int64) for branch in branches))
                for boundary, branches in zip(query.boundaries, query.branches, strict=True)
            ),
        )


@dataclass(slots=True)
class _Forest:
    """One pack while it is being laid out."""

    nodes: list[_Node] = field(default_factory=list)
    num_tokens: int = 0
    trunks: dict[int, list[tuple[IntArray, _Node]]] = field(default_factory=lambda: defaultdict(list))
    """First token -> the trunks that begin with it, whole, and where they end."""
    leads: dict[tuple[int, int], list[tuple[IntArray, _Node]]] = field(default_factory=lambda: defaultdict(list))
    """(id of the node that holds the boundary, boundary) -> the branches there, and where they end."""
    questions: dict[Question, int] = field(default_factory=dict)  # -> index

    def trunk(self, tokens: IntArray) -> _Node | None:
        """The node that ends the trunk's path; None for an empty trunk."""
        if not len(tokens):
            return None
        alike = self.trunks[int(tokens[0])]
        shared, host = max(((_common(tokens, other), node) for other, node in alike), key=_length, default=(0, None))
        end = self._grow(host, shared, tokens[shared:])
        assert end is not None, "a trunk with tokens has a node"
        alike.append((tokens, end))
        return end

    def branch(self, trunk: _Node | None, rest: IntArray, boundary: int, tokens: IntArray) -> _Node | None:
        """The node that ends the path of a branch.

        It shares the longest beginning with `rest`, the trunk's own tokens from the boundary on, or with
        another branch at its boundary.
        """
        host = trunk.owner(boundary) if trunk is not None else None
        alike = self.leads[id(host), boundary]
        others = ((_common(tokens, other), node) for other, node in alike)
        shared, at = max(others, key=_length, default=(0, None))
        along = _common(tokens, rest)
        if along > shared:
            shared, at = along, trunk
        end = self._grow(at if shared else host, boundary + shared, tokens[shared:])
        if end is not None:
            alike.append((tokens, end))
        return end

    def cost(self, query: _Query) -> int:
        """Tokens that the query would add at most."""
        trunk = query.trunk
        alike = self.trunks.get(int(trunk[0]), []) if len(trunk) else []
        shared = max((_common(trunk, other) for other, _ in alike), default=0)
        distinct = {(b, tokens.tobytes()): tokens for b, here in query.branches for tokens in here}
        own = sum(len(tokens) - _common(tokens, trunk[b:]) for (b, _), tokens in distinct.items())
        return len(trunk) - shared + own

    def ask(self, end: _Node, length: int, target: int, temperature: float) -> int:
        """Index of the question for `target` after the first `length` tokens of a path."""
        owner = end.owner(length)
        assert owner is not None, "a target after an empty prefix is refused by TrunkQuery"
        row = owner.begin + length - 1 - owner.prefix
        return self.questions.setdefault((row, target, temperature), len(self.questions))

    def packed(self) -> PackedQueries:
        places = {id(node): place for place, node in enumerate(self.nodes)}
        return PackedQueries(
            tokens=np.concatenate([node.tokens for node in self.nodes]),
            cu_seqlens=np.cumsum([0, *(len(node.tokens) for node in self.nodes)]).astype(np.int64),
            **question_arrays(self.questions),
            parents=np.asarray([places[id(n.parent)] if n.parent else -1 for n in self.nodes], dtype=np.int64),
            prefix_lengths=np.asarray([node.prefix for node in self.nodes], dtype=np.int64),
        )

    def _grow(self, host: _Node | None, prefix: int, tokens: IntArray) -> _Node | None:
        """A new node with `tokens` after the first `prefix` of the host's path; the owner where there are none."""
        parent = host.owner(prefix) if host is not None else None
        if not len(tokens):
            return parent
        node = _Node(tokens=tokens, parent=parent, prefix=prefix, begin=self.num_tokens)
        self.nodes.append(node)
        self.num_tokens += len(tokens)
        return node


def plan_forest(queries: Sequence[TrunkQuery], *, microbatch_tokens: int) -> QueryPlan:
    """Lays the queries out as forests of at most `microbatch_tokens` rows, in order; one longer query gets its own.

    `num_sequences` of the plan counts nodes. Nothing is cut.
    """
    forests: list[_Forest] = []
    places: dict[tuple[int, int, int, int, int], tuple[int, int]] = {}
    for q, query in enumerate(queries):
        if not any(query.branches):
            continue
        arrays = _Query.of(query)
        if not forests or forests[-1].num_tokens + forests[-1].cost(arrays) > microbatch_tokens:
            forests.append(_Forest())
        forest = forests[-1]
        trunk = forest.trunk(arrays.trunk)
        for b, (boundary, here) in enumerate(arrays.branches):
            for n, (tokens, branch) in enumerate(zip(here, query.branches[b], strict=True)):
                end = forest.branch(trunk, arrays.trunk[boundary:], boundary, tokens)
                for j, targets in enumerate(branch.targets):
                    for i, target in enumerate(targets):
                        assert end is not None, "a target needs a row before it"
                        question = forest.ask(end, boundary + j, target, branch.temperature)
                        places[q, b, n, j, i] = (len(forests) - 1, question)
    packed = tuple(forest.packed() for forest in forests)
    return QueryPlan(
        packed=packed,
        places=places,
        num_sequences=sum(len(forest.nodes) for forest in forests),
        num_tokens=sum(forest.num_tokens for forest in forests),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBackend:
    """A BranchBackend over a QueryRunner that takes forests (`mcore.queries.target_logprobs`)."""

    runner: QueryRunner
    microbatch_tokens: int

    def score(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]:
        """One TrunkLogprobs for each query. Collective over the runner's workers; no queries, no call."""
        plan = plan_forest(queries, microbatch_tokens=self.microbatch_tokens)
        results = self.runner(plan.packed) if plan.packed else ()
        return unpack(queries, plan, results)


def _common(first: IntArray, second: IntArray) -> int:
    """Number of leading tokens that two sequences share; the work grows with that number, not with their lengths."""
    length, begin, step = min(len(first), len(second)), 0, 64
    while begin < length:
        end = min(begin + step, length)
        differs = first[begin:end] != second[begin:end]
        if differs.any():
            return begin + int(differs.argmax())
        begin, step = end, 4 * step
    return length


def _length(found: tuple[int, _Node | None]) -> int:
    return found[0]
