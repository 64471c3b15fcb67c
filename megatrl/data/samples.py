"""TrainingSample and PackedBatch: token-aligned arrays on their way from the driver to the actor.

Token-aligned: position t of every per-token array describes tokens[t], and a logprob at t is
log p(tokens[t] | tokens[:t]). Arrays are numpy; the actor turns them into tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatrl.data.routed_experts import ExpertArray
from megatrl.data.trajectories import TrajectoryId
from megatrl.errors import TrajectoryError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One segment as flat arrays of length T."""

    trajectory_id: TrajectoryId
    segment_index: int
    tokens: IntArray  # [T]
    action_mask: BoolArray  # [T] True where a token was sampled and is trained
    behavior_logprobs: FloatArray  # [T] 0 outside action_mask
    advantages: FloatArray  # [T] 0 outside action_mask
    reference_logprobs: FloatArray | None = None  # [T] only where a KL term needs them
    loss_weights: FloatArray | None = None  # [T] None means 1 at each action token
    routed_experts: ExpertArray | None = None  # [T, layers, top-k] as the server chose; the last row may be -1

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("action_mask", "behavior_logprobs", "advantages", "reference_logprobs", "loss_weights"):
            array = getattr(self, name)
            if array is not None and array.shape != (length,):
                raise TrajectoryError(
                    f"sample of {self.trajectory_id} segment {self.segment_index}: {name} has shape "
                    f"{array.shape}, tokens has length {length}"
                )
        _check_routed_experts(self.routed_experts, length, f"sample of {self.trajectory_id}")

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Packed sequences of one forward-backward on one data-parallel rank: [T] plus cu_seqlens.

    `advantages`, `behavior_logprobs` and friends are 0 where `action_mask` is False. A microbatch
    without any action token is a weightless filler and still takes part in every collective.
    """

    tokens: IntArray  # [T]
    cu_seqlens: IntArray  # [S+1], starts at 0, ends at T
    action_mask: BoolArray  # [T]; never True at the first token of a sequence
    per_token: Mapping[str, FloatArray] = field(default_factory=dict)
    """[T] arrays by glossary name: advantages, behavior_logprobs, old_logprobs, reference_logprobs,
    loss_weights. A name is present in every microbatch of a batch or in none."""
    sample_indices: tuple[int, ...] = ()
    """Index into the batch's samples of each sequence; -1 for padding sequences."""
    routed_experts: ExpertArray | None = None
    """[T, layers, top-k], present in every microbatch of a batch or in none. Rows of -1 route freely: the last
    token of each sequence (nothing is predicted from it that is trained) and fillers."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if int(self.cu_seqlens[0]) != 0 or int(self.cu_seqlens[-1]) != length:
            raise TrajectoryError(f"cu_seqlens must run from 0 to {length}, got {self.cu_seqlens.tolist()}")
        for name, array in {"action_mask": self.action_mask, **self.per_token}.items():
            if array.shape != (length,):
                raise TrajectoryError(f"microbatch {name} has shape {array.shape}, tokens has length {length}")
        _check_routed_experts(self.routed_experts, length, "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one optimizer step sees. `microbatches[d][m]` goes to data-parallel rank d."""

    microbatches: tuple[tuple[Microbatch, ...], ...]  # [DP][M], the same M on every rank
    loss_denominator: float  # over all ranks and microbatches: action tokens (token-mean) or as the loss says
    num_sequences: int

    @property
    def num_action_tokens(self) -> int:
        return sum(int(m.action_mask.sum()) for rank in self.microbatches for m in rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One step of the loop: the optimizer steps to take, in order."""

    minibatches: tuple[Minibatch, ...]
    samples: tuple[TrainingSample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def num_action_tokens(self) -> int:
        return sum(sample.num_action_tokens for sample in self.samples)


def _check_routed_experts(experts: ExpertArray | None, length: int, owner: str) -> None:
    if experts is not None and (experts.ndim != 3 or len(experts) != length):
        raise TrajectoryError(
            f"{owner}: routed_experts has shape {experts.shape}, tokens has length {length}; "
            "expected [tokens, layers, top-k]"
        )
