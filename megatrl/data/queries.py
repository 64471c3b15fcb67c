"""PackedQueries: which next-token log-probabilities to read from packed token sequences, or from a forest of them."""

from dataclasses import dataclass

import numpy as np

from megatrl.data.routed_experts import ExpertArray
from megatrl.data.samples import FloatArray, IntArray
from megatrl.errors import ScoringError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueries:
    """One forward pass: T tokens of S sequences, and Q questions (row, target).

    Row r is a position in the packed tokens; it predicts the token *after* position r of the same
    sequence. Question i asks for log p(targets[i] | the sequence's tokens up to and including
    rows[i]). Several questions may share a row, and a row may be a sequence's last token.

    With `parents` the sequences are the nodes of a forest: node s continues the first `prefix_lengths[s]`
    tokens of its parent's path (the parent's own prefix and tokens) and sees nothing else of the pack.
    """

    tokens: IntArray  # [T]
    cu_seqlens: IntArray  # [S+1], starts at 0, ends at T
    rows: IntArray  # [Q], 0 <= row < T
    targets: IntArray  # [Q], token ids
    temperatures: FloatArray | None = None  # [Q], > 0, of each question's distribution; None is 1 for all
    parents: IntArray | None = None  # [S], an earlier node, or -1 where a sequence begins at position 0
    prefix_lengths: IntArray | None = None  # [S], 1 <= length <= the parent's path; 0 without a parent
    routed_experts: ExpertArray | None = None
    """[T, layers, top-k] choices to replay; None, as for every frozen model, lets the routers choose."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if len(self.cu_seqlens) < 2 or int(self.cu_seqlens[0]) != 0 or int(self.cu_seqlens[-1]) != length:
            raise ScoringError(f"cu_seqlens must run from 0 to {length} tokens, got {self.cu_seqlens.tolist()}")
        if np.any(np.diff(self.cu_seqlens) <= 0):
            raise ScoringError(f"cu_seqlens must grow, got {self.cu_seqlens.tolist()}: an empty sequence has no row")
        if self.routed_experts is not None and len(self.routed_experts) != length:
            raise ScoringError(f"routed_experts are of {len(self.routed_experts)} tokens, the pack has {length}")
        if self.rows.shape != self.targets.shape:
            raise ScoringError(f"{len(self.rows)} rows but {len(self.targets)} targets; each question needs both")
        if len(self.rows) and not (int(self.rows.min()) >= 0 and int(self.rows.max()) < length):
            raise ScoringError(f"rows must lie in [0, {length}), got {int(self.rows.min())}..{int(self.rows.max())}")
        if self.temperatures is not None and (
            self.temperatures.shape != self.rows.shape or not bool(np.all(self.temperatures > 0))
        ):
            raise ScoringError(f"{len(self.rows)} questions need that many temperatures above 0")
        if self.is_forest:
            self._check_forest()

    @property
    def num_questions(self) -> int:
        return len(self.rows)

    @property
    def is_forest(self) -> bool:
        return self.parents is not None

    def _check_forest(self) -> None:
        parents, prefixes, sizes = self.parents, self.prefix_lengths, np.diff(self.cu_seqlens)
        if parents is None or prefixes is None or parents.shape != sizes.shape or prefixes.shape != sizes.shape:
            raise ScoringError(f"a forest of {len(sizes)} nodes needs that many parents and prefix_lengths")
        for node, (parent, prefix) in enumerate(zip(parents.tolist(), prefixes.tolist(), strict=True)):
            longest = int(prefixes[parent] + sizes[parent]) if 0 <= parent < node else 0
            if not (parent == -1 and prefix == 0) and not (0 <= parent < node and 1 <= prefix <= longest):
                raise ScoringError(
                    f"node {node} continues {prefix} tokens of node {parent}; a parent comes earlier and has them, or "
                    "both say that there is none (-1 and 0)"
                )
