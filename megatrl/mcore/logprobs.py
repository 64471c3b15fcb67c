"""Log-probabilities of (row, target) pairs from hidden states, over a vocabulary split across TP.

The shift by one happens here and nowhere else: row r of the hidden states predicts the token after
position r. Shape letters: N = pairs, U = distinct rows, V = this rank's vocabulary rows, H = hidden.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatrl.mcore.groups import context_group, tensor_group
from megatrl.mcore.layout import Layout
from megatrl.mcore.model import CausalModel

LOGIT_BYTES = 256 * 1024 * 1024
"""Largest block of fp32 logits alive at once; longer queries go in chunks of rows."""

PADDING_LOGIT = -1e30  # finite: its probability is exactly 0 and 0 * logit stays 0


def pair_logprobs(
    model: CausalModel,
    hidden: Tensor,
    rows_N: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns log p(target | row) as [N] fp32, and the entropy of each pair's row as [N] where asked.

    `hidden` is the last stage's output, [T' / TP, 1, H] under sequence parallelism, [T', 1, H] else.
    p = softmax(logits / temperature) over exactly the model's vocab_size; padding rows never count.
    Collective over TP, same result on every TP rank; exact fp32 gradients. More than
    `chunk_rows` rows go in chunks whose logits are made again in the backward pass.
    """
    if len(rows_N) == 0:
        nothing = hidden.float().sum() * 0.0 + hidden.new_zeros(0, dtype=torch.float32)
        return nothing, nothing if with_entropy else None
    rows_U, index_N = torch.unique(rows_N, return_inverse=True)
    order_N = torch.argsort(index_N, stable=True)
    hidden_UH = _selected_rows(model, hidden, rows_U)
    weight_VH = model.output_weight()
    chunk = chunk_rows or max(1, LOGIT_BYTES // (4 * weight_VH.shape[0]))
    sorted_index_N = index_N[order_N].contiguous()
    parts = []
    for begin in range(0, len(rows_U), chunk):
        end = min(begin + chunk, len(rows_U))
        first, last = torch.searchsorted(sorted_index_N, torch.tensor([begin, end], device=index_N.device)).tolist()
        pairs = order_N[first:last]
        arguments = (model, hidden_UH[begin:end], weight_VH, index_N[pairs] - begin, targets_N[pairs])
        if len(rows_U) <= chunk:
            parts.append(_chunk_logprobs(*arguments, temperature, with_entropy))
        else:
            parts.append(
                checkpoint(
                    _chunk_logprobs,
                    *arguments,
                    temperature,
                    with_entropy,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
    back_N = torch.argsort(order_N)
    logprobs_N = torch.cat([part[0] for part in parts])[back_N]
    return logprobs_N, torch.cat([part[1] for part in parts])[back_N] if with_entropy else None


def _selected_rows(model: CausalModel, hidden: Tensor, rows_U: Tensor) -> Tensor:
    """Returns [U, H]; its gradient is summed over TP, as each rank contributes its vocabulary's part."""
    if model.config.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return gathered[:, 0].index_select(0, rows_U)
    return copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, rows_U))


def _chunk_logprobs(
    model: CausalModel,
    hidden_UH: Tensor,
    weight_VH: Tensor,
    index_N: Tensor,
    targets_N: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits_UV = (hidden_UH @ weight_VH.t()).float()
    if temperature != 1.0:
        logits_UV = logits_UV.div_(temperature)  # in place: every pass over the block costs as much as a layer's norm
    first = tensor_group().rank() * weight_VH.shape[0]
    num_valid = min(max(model.shape.vocab_size - first, 0), weight_VH.shape[0])
    if num_valid < weight_VH.shape[0]:
        is_padding_V = torch.arange(weight_VH.shape[0], device=logits_UV.device) >= num_valid
        logits_UV = logits_UV.masked_fill(is_padding_V, PADDING_LOGIT)
    return VocabParallelLogprobs.apply(logits_UV, index_N, targets_N - first, with_entropy)  # type: ignore[no-any-return]


def sum_over_context(values: Tensor, layout: Layout) -> Tensor:
    """Returns the sum over context ranks of values that are 0 wherever another rank has them.

    Every context rank then computes the same whole loss, and the gradient of its own values alone flows back:
    the sum of gradients over ranks counts each value once. Collective over CP.
    """
    return values if layout.context == 1 else _SumOverContext.apply(values)  # type: ignore[no-any-return]


class _SumOverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=context_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class VocabParallelLogprobs(torch.autograd.Function):
    """log p of chosen (row, target) pairs and entropies H = -sum p log p, with exact fp32 gradients.

    d logp_n / d logit_uv = 1[u = u_n] (1[v = target_n] - p_uv); d H_u / d logit_uv = -p_uv (log p_uv + H_u).
    Megatron's fused cross entropy casts its gradient to bf16 and is not used. One block [U, V] is kept for the backward
    pass, unnormalised, and becomes the gradient in place; a second backward pass over it is refused by autograd.
    """

    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, index_N: Tensor, targets_N: Tensor, with_entropy: bool) -> Any:
        """`targets_N` count from this rank's first vocabulary row; those of other ranks fall outside."""
        group = tensor_group()
        peak_U = logits_UV.amax(dim=-1)
        dist.all_reduce(peak_U, op=dist.ReduceOp.MAX, group=group)
        weights_UV = (logits_UV - peak_U[:, None]).exp_()
        sums_U = weights_UV.sum(dim=-1)
        dist.all_reduce(sums_U, group=group)
        log_normalizer_U = peak_U + sums_U.log()
        is_mine_N = (targets_N >= 0) & (targets_N < logits_UV.shape[1])
        local_N = targets_N.clamp(0, logits_UV.shape[1] - 1)
        chosen_N = torch.where(is_mine_N, logits_UV[index_N, local_N], 0.0)
        dist.all_reduce(chosen_N, group=group)
        saved = [weights_UV, sums_U, index_N, local_N, is_mine_N]
        entropy_U = torch.zeros_like(log_normalizer_U)
        if with_entropy:
            mean_logit_U = torch.linalg.vecdot(weights_UV, logits_UV) / sums_U
            dist.all_reduce(mean_logit_U, group=group)
            entropy_U = log_normalizer_U - mean_logit_U
            saved += [logits_UV, mean_logit_U]
        ctx.save_for_backward(*saved)
        ctx.with_entropy = with_entropy
        return chosen_N - log_normalizer_U[index_N], entropy_U[index_N]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logprob_gradient_N, entropy_gradient_N = gradients
        saved = ctx.saved_tensors  # read once: a checkpointed chunk unpacks each tensor only once
        weights_UV, sums_U, index_N, local_N, is_mine_N = saved[:5]
        factor_U = torch.zeros_like(sums_U).index_add_(0, index_N, logprob_gradient_N)
        if ctx.with_entropy:
            logits_UV, mean_logit_U = saved[5:]
            row_gradient_U = torch.zeros_like(sums_U).index_add_(0, index_N, entropy_gradient_N)
            # log p + H = logit - mean logit; times the weight first, which is 0 where the logit is padding
            entropy_part_UV = (logits_UV - mean_logit_U[:, None]).mul_(weights_UV).mul_(row_gradient_U[:, None])
            gradient_UV = weights_UV.mul_(factor_U[:, None]).add_(entropy_part_UV).div_(-sums_U[:, None])
        else:
            gradient_UV = weights_UV.mul_((-factor_U / sums_U)[:, None])
        gradient_UV.index_put_((index_N, local_N), torch.where(is_mine_N, logprob_gradient_N, 0.0), accumulate=True)
        return gradient_UV, None, None, None
