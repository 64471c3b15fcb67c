"""RoutedExperts: which experts a server chose for each token, in as few bytes as their ids need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from megatrl.errors import TrajectoryError

ExpertArray = npt.NDArray[np.signedinteger]
"""[T, layers, top-k] expert ids, int8 or int16; a row of -1 was not recorded."""

UNRECORDED = -1
"""Expert id of a token whose choice nobody recorded: the actor's own router chooses there."""

_MAX_INT8_EXPERTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts chosen for consecutive tokens. Bytes rather than an array, so that records compare and hash."""

    num_tokens: int
    num_layers: int
    top_k: int
    item_bytes: int  # 1: ids below 128, 2: below 32768
    data: bytes  # little-endian signed ids, [num_tokens, num_layers, top_k]

    def __post_init__(self) -> None:
        wanted = self.num_tokens * self.num_layers * self.top_k * self.item_bytes
        if self.item_bytes not in (1, 2) or self.num_tokens < 0 or min(self.num_layers, self.top_k) < 1:
            raise TrajectoryError(
                f"routed_experts of shape [{self.num_tokens}, {self.num_layers}, {self.top_k}] in {self.item_bytes} "
                "bytes each; there is at least one layer and expert, and ids take 1 or 2 bytes"
            )
        if len(self.data) != wanted:
            raise TrajectoryError(
                f"routed_experts hold {len(self.data)} bytes, [{self.num_tokens}, {self.num_layers}, {self.top_k}] "
                f"in {self.item_bytes} bytes each need {wanted}"
            )

    @classmethod
    def of(cls, experts: npt.NDArray[np.integer], *, num_experts: int) -> Self:
        """From ids [tokens, layers, top-k], each in [-1, num_experts). Raises TrajectoryError for others."""
        if experts.ndim != 3:
            raise TrajectoryError(f"routed_experts have shape {experts.shape}, expected [tokens, layers, top-k]")
        if experts.size and (int(experts.min()) < UNRECORDED or int(experts.max()) >= num_experts):
            raise TrajectoryError(
                f"routed_experts hold ids {int(experts.min())}..{int(experts.max())}; the model has experts 0 to "
                f"{num_experts - 1}, and {UNRECORDED} means not recorded"
            )
        item_bytes = 1 if num_experts <= _MAX_INT8_EXPERTS else 2
        num_tokens, num_layers, top_k = experts.shape
        return cls(
            num_tokens=num_tokens,
            num_layers=num_layers,
            top_k=top_k,
            item_bytes=item_bytes,
            data=np.ascontiguousarray(experts.astype(f"<i{item_bytes}")).tobytes(),
        )

    @property
    def array(self) -> ExpertArray:
        """The ids [num_tokens, num_layers, top_k], read-only, without a copy."""
        flat = np.frombuffer(self.data, dtype=f"<i{self.item_bytes}")
        return flat.reshape(self.num_tokens, self.num_layers, self.top_k)

    def without_first(self) -> Self:
        """The choices of all tokens but the first."""
        return self._with(self.data[self._row_bytes :])

    def with_unrecorded_end(self) -> Self:
        """The same with one more token, whose choices are not known (yet)."""
        return self._with(self.data + b"\xff" * self._row_bytes)  # -1 in two's complement, in either width

    def with_last_of(self, later: Self) -> Self:
        """The same with the last token's choices taken from the first token of `later`."""
        return self._with(self.data[: len(self.data) - self._row_bytes] + later.data[: self._row_bytes])

    @property
    def _row_bytes(self) -> int:
        return self.num_layers * self.top_k * self.item_bytes

    def _with(self, data: bytes) -> Self:
        return replace(self, num_tokens=len(data) // self._row_bytes, data=data)


def concatenated(parts: Sequence[RoutedExperts]) -> ExpertArray:
    """The ids of all parts in order, [sum of tokens, layers, top-k]. Raises TrajectoryError where shapes differ."""
    kinds = {(part.num_layers, part.top_k, part.item_bytes) for part in parts}
    if len(kinds) != 1:
        raise TrajectoryError(f"routed_experts of one sequence differ in (layers, top-k, id bytes): {sorted(kinds)}")
    return np.concatenate([part.array for part in parts])
