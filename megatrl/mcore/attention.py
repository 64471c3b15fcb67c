"""Core attention for packed sequences in plain torch: what the CPU runs in place of Transformer Engine."""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, cat


class PackedCausalAttention(MegatronModule):
    """Causal attention inside each sequence of a `thd` pack; Megatron's own local module refuses packs.

    Shapes: query [T, heads, d], key and value [T, groups, d] of this tensor rank; returns
    [T, heads * d]. Memory is the largest sequence's, never the pack's square.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        head_dim = config.kv_channels
        assert head_dim is not None, "the model's head_dim is always given"
        self.scale = softmax_scale or head_dim**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params is not None, "our models always run on packed sequences"
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        outputs = [
            self._one_sequence(q, k, v)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return cat(outputs).flatten(1)

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, length, d]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return output.squeeze(0).transpose(0, 1)
