"""Per-token estimators of KL(policy || reference) from one sampled token (Schulman's k1, k2, k3)."""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0


def kl_estimate(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Returns [T] estimates with d = reference - policy clamped to [-10, 10].

    k1 = -d (its gradient has mean zero: a metric, not a useful penalty);  k2 = d^2 / 2;
    k3 = e^d - d - 1, unbiased and >= 0. Where d is clamped the gradient is 0.
    """
    d_T = (reference_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d_T
    if estimator == "k2":
        return 0.5 * d_T.square()
    return torch.expm1(d_T) - d_T
