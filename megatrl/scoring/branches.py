"""Branches on a trunk: the one question that every frozen scorer asks.

A trajectory is a trunk with boundaries. At a boundary, a scorer wants log-probabilities of tokens of
a short branch that continues the trunk there; later trunk tokens must not be seen.

    log p(target | trunk[:boundary] + branch.tokens[:j])   for each target in branch.targets[j]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatrl.errors import ScoringError

BranchLogprobs = tuple[tuple[float, ...], ...]
"""Same nesting as `Branch.targets`, nats."""
TrunkLogprobs = tuple[tuple[BranchLogprobs, ...], ...]
"""[boundary][branch], same nesting as `TrunkQuery.branches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A continuation and what is wanted along it.

    `targets[j]` are the ids whose logprob is wanted after the prefix and `tokens[:j]`; () where
    nothing is. There may be one entry more than there are tokens: the last token then is read only
    as a target and never fed to the model.
    """

    tokens: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    temperature: float = 1.0
    """p = softmax(logits / temperature), at every target of the branch."""

    def __post_init__(self) -> None:
        if len(self.targets) > len(self.tokens) + 1:
            raise ScoringError(
                f"branch of {len(self.tokens)} tokens has {len(self.targets)} target positions; "
                f"at most {len(self.tokens) + 1} exist"
            )
        if not any(self.targets):
            raise ScoringError("branch has no target; nothing would be read from it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkQuery:
    """Branches of one trunk. `boundaries[b]` is a prefix length; `branches[b]` continue there."""

    trunk: tuple[int, ...]
    boundaries: tuple[int, ...]
    branches: tuple[tuple[Branch, ...], ...]

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.branches):
            raise ScoringError(f"{len(self.boundaries)} boundaries but {len(self.branches)} lists of branches")
        for boundary, branches in zip(self.boundaries, self.branches, strict=True):
            if not 0 <= boundary <= len(self.trunk):
                raise ScoringError(f"boundary {boundary} lies outside the trunk of {len(self.trunk)} tokens")
            if boundary == 0 and any(branch.targets[0] for branch in branches):
                raise ScoringError("a target at the first token of an empty prefix has no row to be read from")


class BranchBackend(Protocol):
    """Anything that answers trunk queries. Backends must agree to rounding."""

    def score(self, queries: Sequence[TrunkQuery]) -> tuple[TrunkLogprobs, ...]: ...


def answer_branch(wrapper: tuple[int, ...], answer: tuple[int, ...]) -> Branch:
    """The branch that scores each token of `answer` after `wrapper`; the wrapper itself is not scored."""
    if not answer:
        raise ScoringError("cannot score an empty answer: its mean logprob is undefined")
    return Branch(tokens=wrapper + answer[:-1], targets=((),) * len(wrapper) + tuple((token,) for token in answer))


def answer_logprobs(wrapper: tuple[int, ...], result: BranchLogprobs) -> tuple[float, ...]:
    """Logprobs of the answer's tokens from the result of `answer_branch`."""
    return tuple(position[0] for position in result[len(wrapper) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """Fewest branches from which every token of every candidate can be read.

    Candidates form a trie below a shared lead. A context (lead plus a proper prefix of a candidate)
    needs one row, whichever candidates continue it; candidates whose last token alone differs
    therefore cost one branch together.
    """

    branches: tuple[Branch, ...]
    places: tuple[tuple[tuple[int, int, int], ...], ...]
    """[candidate][token] -> (branch, position in the branch, target at that position)."""

    def read(self, results: Sequence[BranchLogprobs]) -> tuple[tuple[float, ...], ...]:
        """Logprobs [candidate][token] from the results of `branches` at one boundary."""
        return tuple(
            tuple(results[branch][position][target] for branch, position, target in candidate)
            for candidate in self.places
        )


def plan_candidates(
    lead: tuple[int, ...],
    candidates: Sequence[tuple[int, ...]],
    *,
    is_wanted: Callable[[int, int], bool] = lambda candidate, token: True,
) -> CandidatePlan:
    """Pack candidate answers after `lead` into branches by their shared prefixes.

    `is_wanted(candidate, token)` False leaves a token unread; it must then not be asked for, and its
    place is absent: only trailing tokens of a candidate may be left out. Raises ScoringError for an
    empty candidate.
    """
    wanted: list[tuple[int, ...]] = []
    for index, candidate in enumerate(candidates):
        if not candidate:
            raise ScoringError(f"candidate answer {index} has no tokens")
        length = sum(1 for token in range(len(candidate)) if is_wanted(index, token))
        if any(not is_wanted(index, token) for token in range(length)):
            raise ScoringError(f"candidate answer {index}: only trailing tokens may be left unread")
        wanted.append(candidate[:length])

    children: dict[tuple[int, ...], list[int]] = {}  # context -> the distinct tokens that continue it
    for candidate in wanted:
        for length, token in enumerate(candidate):
            continuations = children.setdefault(candidate[:length], [])
            if token not in continuations:
                continuations.append(token)

    leaves = [context for context in children if not any((*context, t) in children for t in children[context])]
    owner: dict[tuple[int, ...], int] = {}  # context -> the first branch that passes through it
    branches: list[Branch] = []
    for index, leaf in enumerate(leaves):
        targets: list[tuple[int, ...]] = [()] * len(lead)
        for length in range(len(leaf) + 1):
            context = leaf[:length]
            is_new = owner.setdefault(context, index) == index
            targets.append(tuple(children[context]) if is_new else ())
        branches.append(Branch(tokens=lead + leaf, targets=tuple(targets)))

    places = tuple(
        tuple(
            (owner[candidate[:length]], len(lead) + length, children[candidate[:length]].index(token))
            for length, token in enumerate(candidate)
        )
        for candidate in wanted
    )
    return CandidatePlan(branches=tuple(branches), places=places)
