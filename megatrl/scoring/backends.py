"""Which backend answers trunk queries on a colocated model."""

from megatrl.config.scoring import ScoringBackend
from megatrl.scoring.branches import BranchBackend
from megatrl.scoring.independent import IndependentBackend, QueryRunner
from megatrl.scoring.tree import TreeBackend


def branch_backend(kind: ScoringBackend, *, runner: QueryRunner, microbatch_tokens: int) -> BranchBackend:
    """The backend of a recipe's `scoring.backend`; all of them agree to rounding."""
    backend = TreeBackend if kind == "tree" else IndependentBackend
    return backend(runner=runner, microbatch_tokens=microbatch_tokens)
