"""Routers that replay recorded expert choices and carry their own balancing losses, row by row of a pack.

What a router has to know of its rows travels with the pack (`RoutedSequences`), and each layer call reads
it from its own arguments. So a recomputed layer sees its own microbatch again, whatever else is in
flight in the pipeline, and a pass whose packs carry nothing (a frozen scorer's) routes freely.

Shape letters: R = rows that this rank's layers see, L = layers of the whole model, K = experts for each
token, E = experts, S = sequences of the pack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatrl.config.engines import RouterConfig
from megatrl.config.model_shape import ModelShape
from megatrl.data.routed_experts import ExpertArray
from megatrl.data.samples import IntArray, Microbatch, Minibatch
from megatrl.errors import ModelError, TrajectoryError
from megatrl.mcore.layout import Layout
from megatrl.mcore.packing import PADDING, PackedTokens, local_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceTerms:
    """Denominators of the auxiliary losses, of the whole minibatch, so that no layout can change a gradient.

    `sums` collects what the layers of this rank computed: [balance, z] without coefficients.
    """

    router: RouterConfig
    num_tokens: int  # N: real tokens that the minibatch passes through the model
    num_sequences: int
    load_LE: Tensor | None  # E / K x share of the recorded choices, 1 where even; for `global`
    sums: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the routers of one pack have to know about this rank's rows."""

    is_real_R: Tensor  # False for padding
    experts_LRK: Tensor | None = None  # recorded choices in host memory, int8 or int16; -1 routes freely
    sequence_R: Tensor | None = None  # int64 index of each row's sequence; S for padding
    length_S: Tensor | None = None  # float tokens of each sequence
    balance: BalanceTerms | None = None


@dataclass
class RoutedSequences(PackedSeqParams):
    """Megatron's bounds of packed sequences, which every layer gets, and with them the rows' routing."""

    routing: Routing | None = None


def with_routing(pack: PackedTokens, routing: Routing | None) -> PackedTokens:
    """Returns the pack with its routing; None leaves the choice to the routers."""
    if routing is None:
        return pack
    bounds = {each.name: getattr(pack.sequences, each.name) for each in fields(PackedSeqParams)}
    return replace(pack, sequences=RoutedSequences(**bounds, routing=routing))


def replayed(experts: ExpertArray | None, cu_seqlens: IntArray, layout: Layout, shape: ModelShape) -> Routing | None:
    """Returns the routing that replays [T, layers, top-k] choices; None for None.

    Raises TrajectoryError for choices of another model.
    """
    if experts is None:
        return None
    rows_R = local_rows(cu_seqlens, layout)
    return Routing(
        is_real_R=torch.from_numpy(rows_R != PADDING).to(layout.torch_device),
        experts_LRK=_local_experts(experts, rows_R, shape),
    )


def training_routing(
    minibatch: Minibatch, layout: Layout, shape: ModelShape, router: RouterConfig
) -> tuple[list[Routing | None], BalanceTerms | None]:
    """Returns the routing of each of this data rank's microbatches, and the losses' terms where there are any.

    Raises TrajectoryError where choices are to be replayed that the batch does not have.
    """
    microbatches = minibatch.microbatches[layout.data_rank]
    if not needs_rows(router):
        return [None] * len(microbatches), None
    has_losses = router.load_balancing != "none" or router.z_loss_coefficient > 0
    terms = _balance_terms(minibatch, layout, shape, router) if has_losses else None
    return [_microbatch_routing(m, terms, layout, shape, router) for m in microbatches], terms


def needs_rows(router: RouterConfig) -> bool:
    """Whether the routers of a model have to know which rows are which."""
    return bool(
        router.replay or router.load_balancing != "none" or router.z_loss_coefficient or router.expert_bias_update_rate
    )


def recorded_experts(microbatch: Microbatch) -> ExpertArray:
    """Returns the microbatch's choices. Raises TrajectoryError where it has none."""
    if microbatch.routed_experts is None:
        raise TrajectoryError(
            "actor.router.replay is on but the batch has no routed_experts: its trajectories were recorded without "
            "them. Record them again, or set actor.router.replay: false"
        )
    return microbatch.routed_experts


def balance_metrics(terms: BalanceTerms | None, layout: Layout, num_layers: int) -> dict[str, float]:
    """Returns the losses without coefficients, means over layers: 1 is perfect balance. Collective over all ranks."""
    if terms is None:
        return {}
    total = torch.zeros(2, dtype=torch.float64, device=layout.torch_device)
    for part in terms.sums:
        total += part
    dist.all_reduce(total)  # rows are cut over tensor, context and data ranks, layers over stages
    balance, z = (total / num_layers).tolist()
    metrics = {"router_load_balance": balance} if terms.router.load_balancing != "none" else {}
    return metrics | ({"router_z": z} if terms.router.z_loss_coefficient else {})


def _microbatch_routing(
    microbatch: Microbatch, terms: BalanceTerms | None, layout: Layout, shape: ModelShape, router: RouterConfig
) -> Routing:
    rows_R = local_rows(microbatch.cu_seqlens, layout)
    lengths_S = np.diff(microbatch.cu_seqlens)
    is_real_R = (rows_R != PADDING) & (microbatch.sample_indices != (-1,))  # a filler's token is padding, too
    sequences = np.append(np.repeat(np.arange(len(lengths_S)), lengths_S), len(lengths_S))
    experts = _local_experts(recorded_experts(microbatch), rows_R, shape) if router.replay else None
    device = layout.torch_device
    return Routing(
        is_real_R=torch.from_numpy(is_real_R).to(device),
        experts_LRK=experts,
        sequence_R=torch.from_numpy(np.where(is_real_R, sequences[rows_R], len(lengths_S))).to(device),
        length_S=torch.from_numpy(lengths_S).float().to(device),
        balance=terms,
    )


def _balance_terms(minibatch: Minibatch, layout: Layout, shape: ModelShape, router: RouterConfig) -> BalanceTerms:
    real = [m for rank in minibatch.microbatches for m in rank if m.sample_indices != (-1,)]
    load_LE = None
    if router.load_balancing == "global":
        count_LE = np.zeros((shape.num_layers, shape.num_experts))
        for microbatch in real:
            experts = recorded_experts(microbatch)
            chosen = experts[(experts >= 0).all(axis=(1, 2))]
            for layer in range(shape.num_layers):
                count_LE[layer] += np.bincount(chosen[:, layer].ravel(), minlength=shape.num_experts)
        shares = count_LE / np.maximum(count_LE.sum(axis=1, keepdims=True), 1)
        load_LE = torch.from_numpy(shares * shape.num_experts).float().to(layout.torch_device)
    return BalanceTerms(
        router=router,
        num_tokens=sum(len(m.tokens) for m in real),
        num_sequences=sum(len(m.sample_indices) for m in real),
        load_LE=load_LE,
    )


def _local_experts(experts: ExpertArray, rows_R: IntArray, shape: ModelShape) -> Tensor:
    """Returns this rank's rows, layer by layer; a layer's share moves to the device when the layer runs."""
    if experts.shape[1:] != (shape.num_layers, shape.num_experts_per_token):
        raise TrajectoryError(
            f"recorded choices are of {experts.shape[1]} layers x {experts.shape[2]} experts, the model has "
            f"{shape.num_layers} x {shape.num_experts_per_token}; they were recorded with another model"
        )
    if experts.size and int(experts.max()) >= shape.num_experts:
        raise TrajectoryError(
            f"recorded choices hold the expert {int(experts.max())}, the model has 0 to {shape.num_experts - 1}"
        )
    local = np.full((len(rows_R), *experts.shape[1:]), PADDING, dtype=experts.dtype)
    local[rows_R != PADDING] = experts[rows_R[rows_R != PADDING]]
    return torch.from_numpy(local).transpose(0, 1).contiguous()


class PackedRouter(TopKRouter):
    """Megatron's top-k router that takes choices and losses from the routing of the layer call in progress."""

    routing_now: Routing | None = None
    layer_index: int  # from 0, in the whole model

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router_replay: Any = _Replay(self)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns probabilities and choices, [R, E] each; losses are attached to the probabilities' gradient."""
        probs_RE, chosen_RE = super().routing(logits, padding_mask)
        now = self.routing_now
        if now is None or now.balance is None or not (self.training and torch.is_grad_enabled()):
            return probs_RE, chosen_RE
        return MoEAuxLossAutoScaler.apply(probs_RE, self._losses(logits, chosen_RE, now, now.balance)), chosen_RE

    def _losses(self, logits: Tensor, chosen_RE: Tensor, now: Routing, terms: BalanceTerms) -> Tensor:
        """This rank's part of the layer's auxiliary losses, already over their global denominators."""
        logits_RE = logits.reshape(-1, logits.shape[-1]).float()
        real_R = now.is_real_R.float()
        balance = z = logits_RE.new_zeros(())
        if terms.router.load_balancing != "none":
            load_RE, weight_R = self._load(chosen_RE, now, terms)
            balance = ((logits_RE.softmax(dim=-1) * load_RE).sum(dim=-1) * weight_R * real_R).sum()
        if terms.router.z_loss_coefficient:
            z = (logits_RE.logsumexp(dim=-1).square() * real_R).sum() / terms.num_tokens
        terms.sums.append(torch.stack([balance.detach(), z.detach()]).double())
        return terms.router.load_balancing_coefficient * balance + terms.router.z_loss_coefficient * z

    def _load(self, chosen_RE: Tensor, now: Routing, terms: BalanceTerms) -> tuple[Tensor, Tensor]:
        """Returns for each row how much more than evenly each expert is loaded, and the row's weight."""
        if terms.load_LE is not None:
            return terms.load_LE[self.layer_index].expand(len(chosen_RE), -1), chosen_RE.new_full(
                (len(chosen_RE),), 1.0 / terms.num_tokens, dtype=torch.float32
            )
        assert now.sequence_R is not None, "training_routing gives the rows' sequences"
        assert now.length_S is not None, "training_routing gives the sequences' lengths"
        length_S = torch.cat([now.length_S, now.length_S.new_ones(1)])  # the last one is padding
        counts_SE = length_S.new_zeros(len(length_S), chosen_RE.shape[1])
        counts_SE.index_add_(0, now.sequence_R, chosen_RE.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts_SE, group=self.tp_cp_group)
        load_SE = counts_SE * chosen_RE.shape[1] / (self.topk * length_S[:, None])
        weight_S = 1.0 / (length_S * terms.num_sequences)
        return load_SE[now.sequence_R], weight_S[now.sequence_R]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts real rows for the bias, in passes with gradients that choose for themselves."""
        now = self.routing_now
        if not self.enable_expert_bias or not torch.is_grad_enabled() or (now and now.experts_LRK is not None):
            return
        with torch.no_grad():
            chosen = routing_map if now is None else routing_map & now.is_real_R[:, None]
            self.local_tokens_per_expert += chosen.sum(dim=0)  # type: ignore[operator]  # a buffer with a bias


class _Replay:
    """What Megatron's top-k asks instead of choosing (`router_replay` of a TopKRouter)."""

    def __init__(self, router: PackedRouter) -> None:
        self._router = router

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and ids [R, K] of the recorded experts; gradients reach the scores through both."""
        now = self._router.routing_now
        if now is None or now.experts_LRK is None:
            return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded_RK = now.experts_LRK[self._router.layer_index].to(scores.device).long()
        free_RK = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids_RK = torch.where(recorded_RK >= 0, recorded_RK, free_RK)
        return scores.gather(1, ids_RK), ids_RK


def attach_routing(layers: Sequence[torch.nn.Module], recompute_modules: Sequence[str]) -> None:
    """Lets each layer's router see the routing in the layer's own arguments, for that call only.

    Raises ModelError where the mixture alone would be recomputed, outside of its layer's call.
    """
    if inside := {"moe", "mlp"} & set(recompute_modules):
        raise ModelError(f"recomputing {sorted(inside)} alone loses the rows' routing; recompute whole layers or none")
    for layer in layers:
        router: Any = layer.mlp.router  # type: ignore[union-attr]
        router.layer_index = layer.layer_number - 1  # type: ignore[operator]
        layer.register_forward_pre_hook(_enter, with_kwargs=True)
        layer.register_forward_hook(_leave, always_call=True)


def _enter(layer: Any, args: Any, options: dict[str, Any]) -> None:
    layer.mlp.router.routing_now = getattr(options.get("packed_seq_params"), "routing", None)


def _leave(layer: Any, args: Any, output: Any) -> None:
    layer.mlp.router.routing_now = None
