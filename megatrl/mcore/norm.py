"""RMSNorm in plain torch with Megatron's constructor."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked for the gradient sum over tensor ranks under sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism; without the mark each tensor rank would
    keep the gradient of its own tokens only and the replicas would drift apart.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
