"""The tree backend: trunks and branches share what they have in common, so K boundaries cost one forward pass.

Trunks that begin alike (a group's trajectories after their prompt) share that beginning; a branch
continues its trunk at the boundary, and branches of one boundary share their common lead. Cost: N tokens of
trunk and m for each branch, less what is shared, instead of the sum over boundaries of (prefix + branch).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import IntArray
from megatrl.scoring.branches import TrunkLogprobs, TrunkQuery
from megatrl.scoring.independent import QueryPlan, QueryRunner, unpack


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


@dataclass(slots=True)
class _Forest:
    """One pack while it is being laid out."""

    nodes: list[_Node] = field(default_factory=list)
    num_tokens: int = 0
    trunks: dict[int, list[tuple[IntArray, _Node]]] = field(default_factory=lambda: defaultdict(list))
    """First token -> the trunks that begin with it, whole, and where they end."""
    leads: dict[tuple[int, int], list[tuple[IntArray, _Node]]] = field(default_factory=lambda: defaultdict(list))
    """(id of the node that holds the boundary, boundary) -> the branches there, and where they end."""
    questions: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, target) -> index

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

    def branch(self, trunk: _Node | None, boundary: int, tokens: IntArray) -> _Node | None:
        """The node that ends the path of a branch; shares the longest beginning with the others at its boundary."""
        host = trunk.owner(boundary) if trunk is not None else None
        alike = self.leads[id(host), boundary]
        shared, at = max(((_common(tokens, other), node) for other, node in alike), key=_length, default=(0, None))
        end = self._grow(at if shared else host, boundary + shared, tokens[shared:])
        if end is not None:
            alike.append((tokens, end))
        return end

    def cost(self, query: TrunkQuery) -> int:
        """Tokens that the query would add at most."""
        tokens = np.asarray(query.trunk, dtype=np.int64)
        alike = self.trunks.get(int(tokens[0]), []) if len(tokens) else []
        shared = max((_common(tokens, other) for other, _ in alike), default=0)
        distinct = {(b, branch.tokens) for b, at in zip(query.boundaries, query.branches, strict=True) for branch in at}
        return len(tokens) - shared + sum(len(branch) for _, branch in distinct)

    def ask(self, end: _Node, length: int, target: int) -> int:
        """Index of the question for `target` after the first `length` tokens of a path."""
        owner = end.owner(length)
        assert owner is not None, "a target after an empty prefix is refused by TrunkQuery"
        row = owner.begin + length - 1 - owner.prefix
        return self.questions.setdefault((row, target), len(self.questions))

    def packed(self) -> PackedQueries:
        places = {id(node): place for place, node in enumerate(self.nodes)}
        rows, targets = zip(*self.questions, strict=True)
        return PackedQueries(
            tokens=np.concatenate([node.tokens for node in self.nodes]),
            cu_seqlens=np.cumsum([0, *(len(node.tokens) for node in self.nodes)]).astype(np.int64),
            rows=np.asarray(rows, dtype=np.int64),
            targets=np.asarray(targets, dtype=np.int64),
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
        if not forests or forests[-1].num_tokens + forests[-1].cost(query) > microbatch_tokens:
            forests.append(_Forest())
        forest = forests[-1]
        trunk = forest.trunk(np.asarray(query.trunk, dtype=np.int64))
        for b, (boundary, branches) in enumerate(zip(query.boundaries, query.branches, strict=True)):
            for n, branch in enumerate(branches):
                end = forest.branch(trunk, boundary, np.asarray(branch.tokens, dtype=np.int64))
                for j, targets in enumerate(branch.targets):
                    for i, target in enumerate(targets):
                        assert end is not None, "a target needs a row before it"
                        places[q, b, n, j, i] = (len(forests) - 1, forest.ask(end, boundary + j, target))
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
    temperature: float = 1.0

    def score(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]:
        """One TrunkLogprobs for each query. Collective over the runner's workers; no queries, no call."""
        plan = plan_forest(queries, microbatch_tokens=self.microbatch_tokens)
        results = self.runner(plan.packed, temperature=self.temperature) if plan.packed else ()
        return unpack(queries, plan, results)


def _common(first: IntArray, second: IntArray) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _length(found: tuple[int, _Node | None]) -> int:
    return found[0]
