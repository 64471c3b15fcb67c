"""Core attention for packed sequences in plain torch: what the CPU runs in place of Transformer Engine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, cat

from megatrl.mcore.groups import context_group
from megatrl.mcore.packing import zigzag


class PackedCausalAttention(MegatronModule):
    """Causal attention inside each sequence of a `thd` pack; Megatron's own local module refuses packs.

    Shapes: query [T, heads, d], key and value [T, groups, d] of this tensor and context rank; returns
    [T, heads * d]. Memory is the largest sequence's, never the pack's square. Under context parallelism keys and
    values are gathered from all context ranks, and their gradients summed back.
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
        self.context = config.context_parallel_size

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
        if self.context > 1:
            return self._over_context_ranks(query, key, value, lengths)
        outputs = [
            self._attend(q, k, v, None)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return cat(outputs).flatten(1)

    def _over_context_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """This rank's queries against the whole sequences; `lengths` are those of the whole, padded sequences."""
        group, context = context_group(), self.context
        keys, values = (
            gather_from_sequence_parallel_region(x.contiguous(), group=group).view(context, *x.shape)
            for x in (key, value)
        )
        shares = [length // context for length in lengths]
        outputs = []
        parts = zip(lengths, query.split(shares), keys.split(shares, dim=1), values.split(shares, dim=1), strict=True)
        for length, q, k, v in parts:
            places = [torch.from_numpy(zigzag(length, context=context, rank=r)) for r in range(context)]
            in_order = torch.argsort(torch.cat(places)).to(k.device)  # rows come rank by rank
            k, v = (x.flatten(0, 1).index_select(0, in_order) for x in (k, v))
            positions = places[group.rank()].to(k.device)
            is_seen = positions[:, None] >= torch.arange(length, device=k.device)[None, :]
            outputs.append(self._attend(q, k, v, is_seen))
        return cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, length, d]
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_seen, is_causal=is_seen is None, scale=self.scale, enable_gqa=True
        )
        return output.squeeze(0).transpose(0, 1)
