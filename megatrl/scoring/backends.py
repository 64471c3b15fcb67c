"""Which backend answers trunk queries."""

from collections.abc import Sequence

from megatrl.config.scoring import ScoringBackend
from megatrl.rollout.client import SGLangSampler
from megatrl.scoring.branches import BranchBackend
from megatrl.scoring.independent import IndependentBackend, QueryRunner
from megatrl.scoring.server_backend import ServerBackend
from megatrl.scoring.tree import TreeBackend


def branch_backend(kind: ScoringBackend, *, runner: QueryRunner, microbatch_tokens: int) -> BranchBackend:
    """The backend of a model on the actor's ranks, `tree` or `independent`; all of them agree to rounding."""
    assert kind != "sglang", "a model on a server has a server_backend"
    backend = IndependentBackend if kind == "independent" else TreeBackend
    return backend(runner=runner, microbatch_tokens=microbatch_tokens)


def server_backend(urls: Sequence[str], vocab_size: int, *, request_timeout_s: float) -> ServerBackend:
    """The backend of a model on servers of its own; each request waits at most `request_timeout_s` in all."""
    return ServerBackend(
        readers=lambda: SGLangSampler(urls, vocab_size=vocab_size), request_timeout_s=request_timeout_s
    )
