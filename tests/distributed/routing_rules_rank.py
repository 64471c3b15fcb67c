"""One rank: what a replaying actor refuses, what its frozen scorers do, and what single routers count."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from oracle import LOSS, Case
from scoring_case import build_meter, build_probe, group
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.engines import ActorConfig, RouterConfig
from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.samples import PackedBatch
from megatrl.data.trajectories import PromptGroup, Turn
from megatrl.errors import MegatrlError
from megatrl.mcore import layout as layouts
from megatrl.mcore.model import unwrap
from megatrl.mcore.queries import target_logprobs
from megatrl.mcore.routing import PackedRouter, Routing, attach_routing
from megatrl.scoring.meter_model import MeterModel
from megatrl.scoring.weight_swap import FrozenWeights


def main() -> None:
    _, _, arguments = rank_arguments()
    case: Case = pickle.loads(Path(arguments["case"]).read_bytes())
    plain = start(case, RouterConfig(), port=agreed_port("plain"))
    result: dict[str, Any] = {"plain": kinds_of_routers(plain)}
    plain.close()
    worker = start(case, RouterConfig(replay=True), port=agreed_port("replay"))
    result["replaying"] = kinds_of_routers(worker)
    result |= refusals(worker, case) | frozen_scorers(worker, case)
    worker.close()
    report(result | near_tie() | expert_bias())


def start(case: Case, router: RouterConfig, *, port: int) -> ActorWorker:
    return ActorWorker(
        WorkerSpec(
            rank=0,
            world_size=1,
            master_addr="127.0.0.1",
            master_port=port,
            actor=ActorConfig(precision="fp32", device="cpu", router=router, timeout_s=60.0),
            model_path=case.model_path,
            seed=1,
            num_steps=5,
        )
    )


def kinds_of_routers(worker: ActorWorker) -> dict[str, Any]:
    layers: Any = unwrap(worker.models[0]).decoder.layers
    return {
        "routers": sorted({type(layer.mlp.router).__name__ for layer in layers}),
        "hooks": sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers),
        "dtypes": sorted({str(layer.mlp.router.config.moe_router_dtype) for layer in layers}),
    }


def packed(case: Case, experts: Any) -> PackedBatch:
    samples = [replace(sample, routed_experts=experts(sample)) for sample in case.samples]
    batch = pack(samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=60, loss=LOSS)
    return attach_old_logprobs(batch, case.old_logprobs)


def refusals(worker: ActorWorker, case: Case) -> dict[str, Any]:
    def message(batch: PackedBatch, *, update: bool) -> str:
        try:
            if update:
                worker.update(batch, LOSS, temperature=1.0, step=1)
            else:
                worker.logprobs(batch, temperature=1.0)
        except MegatrlError as error:
            return f"{type(error).__name__}: {error.message}"
        return "accepted"

    unrecorded = packed(case, lambda sample: None)
    other_model = packed(case, lambda sample: sample.routed_experts[:, :3])
    too_many = packed(case, lambda sample: np.where(sample.routed_experts == 7, 8, sample.routed_experts))
    before = worker.parameter_hash()
    result: dict[str, Any] = {
        "unrecorded": [message(unrecorded, update=False), message(unrecorded, update=True)],
        "other_model": message(other_model, update=False),
        "too_many": message(too_many, update=True),
    }
    result["moved"] = worker.parameter_hash() != before
    try:
        attach_routing([], ["moe"])
    except MegatrlError as error:
        result["partial_recompute"] = error.message
    layer: Any = unwrap(worker.models[0]).decoder.layers[1]
    mlp, layer.mlp.experts.forward = layer.mlp.experts.forward, None  # the layer fails in mid-call
    try:
        worker.logprobs(packed(case, lambda sample: sample.routed_experts), temperature=1.0)
    except TypeError:
        result["left_behind"] = [each.mlp.router.routing_now is not None for each in layer_list(worker)]
    layer.mlp.experts.forward = mlp
    return result


def layer_list(worker: ActorWorker) -> list[Any]:
    return list(unwrap(worker.models[0]).decoder.layers)  # type: ignore[arg-type]


def frozen_scorers(worker: ActorWorker, case: Case) -> dict[str, Any]:
    """Reference and meter score a group with recorded choices and one without."""
    frozen = FrozenWeights.capture(worker.models)
    meter = MeterModel(case.model_path, layout=worker.layout, actor=worker.spec.actor)

    def swapped(queries: Any, *, temperature: float = 1.0) -> Any:
        with frozen.swapped_into(worker.models):
            return target_logprobs(worker.models, worker.layout, queries, temperature=temperature)

    def scores(trajectories: PromptGroup) -> list[Any]:
        answers, _ = build_probe(swapped).score([trajectories])
        references = build_probe(swapped).reference_logprobs([trajectories])
        forecasts, _ = build_meter(meter.target_logprobs).score([trajectories])
        return [
            [score.logprobs for score in answers.values()],
            [[part.tolist() for part in parts] for parts in references.values()],
            [forecast.forecasts for forecast in forecasts.values()],
        ]

    batch = packed(case, lambda sample: sample.routed_experts)
    before = worker.logprobs(batch, temperature=1.0)
    is_equal = scores(with_choices(group())) == scores(group())
    again = worker.logprobs(batch, temperature=1.0)
    return {
        "frozen_equal": is_equal,
        "actor_equal": all(np.array_equal(before[i], again[i]) for i in before),
        "meter": [type(layer.mlp.router).__name__ for layer in unwrap(meter._models[0]).decoder.layers],  # type: ignore[union-attr]
    }


def with_choices(trajectories: PromptGroup) -> PromptGroup:
    rng = np.random.default_rng(0)

    def routed(turn: Turn) -> Turn:
        num_tokens = len(turn.observation_tokens) + len(turn.action_tokens)
        experts = rng.permuted(np.tile(np.arange(8), (num_tokens, 4, 1)), axis=-1)[..., :2]
        return replace(turn, routed_experts=RoutedExperts.of(experts, num_experts=8))

    return replace(
        trajectories,
        trajectories=tuple(
            replace(t, segments=tuple(replace(s, turns=tuple(map(routed, s.turns))) for s in t.segments))
            for t in trajectories.trajectories
        ),
    )


def single_router(kind: type[TopKRouter], **options: Any) -> Any:
    layouts.activate("cpu")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        add_bias_linear=False,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
        **options,
    )
    nobody: Any = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    return kind(config, nobody)


def near_tie() -> dict[str, Any]:
    """Two experts whose scores differ by less than bf16 can tell, either of them the better one."""
    chosen = {}
    for dtype in ("fp32", None):
        router = single_router(
            TopKRouter, params_dtype=torch.bfloat16, bf16=True, moe_router_dtype=dtype, pipeline_dtype=torch.bfloat16
        )
        hidden = torch.tensor([[[1.0, 2**-9, 0, 0]], [[1.0, -(2**-9), 0, 0]]], dtype=torch.bfloat16)
        router.weight.data = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4], dtype=torch.bfloat16)
        chosen[str(dtype)] = router(hidden)[1].int().argmax(dim=-1).tolist()
    return {"near_tie": chosen}


def expert_bias() -> dict[str, Any]:
    """What the counts behind an expert bias see, on a sigmoid router (Megatron has the bias for no other)."""
    router = single_router(
        PackedRouter,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.1,
    )
    router.layer_index = 0
    router.train()
    hidden = torch.randn(5, 1, 4)
    real = torch.tensor([True, True, True, False, False])
    router.routing_now = Routing(is_real_R=real)
    with torch.no_grad():
        router(hidden)
    counts = {"forward_only": float(router.local_tokens_per_expert.sum())}
    router(hidden)
    counts["training"] = float(router.local_tokens_per_expert.sum())
    router.routing_now = Routing(is_real_R=real, experts_LRK=torch.zeros(1, 5, 1, dtype=torch.int8))
    router(hidden)
    counts["replay"] = float(router.local_tokens_per_expert.sum())
    return {"bias_counts": counts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
