"""Section of the frozen scorers' forward passes."""

from typing import Literal

from megatrl.config.section import Section

ScoringBackend = Literal["tree", "independent", "sglang"]


class ScoringConfig(Section):
    backend: ScoringBackend = "tree"
    """tree: what trajectories and questions share is computed once; not under context parallelism.
    independent: every question repeats its whole prefix.
    sglang: the frozen model has a server of its own, on devices of its own, whose prefix cache shares."""
