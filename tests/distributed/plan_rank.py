"""One rank: builds tiny models case after case and reports the bytes that `megatrl plan` counts, as measured."""

import sys
from typing import Any

import numpy as np
import torch
from world import agreed_port, rank_arguments, report

from megatrl.actor.optimizer import build_optimizer, wrap_data_parallel
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.config.model_shape import ModelShape
from megatrl.mcore import layout as layouts
from megatrl.mcore.model import build_model, unwrap
from megatrl.mcore.packing import pack_tokens
from megatrl.mcore.schedule import forward_backward

LENGTHS = (24, 40)


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for index, case in enumerate(arguments["cases"]):
        print("case", case, flush=True)
        results.append(measure(case, rank, agreed_port(str(index))))
    report(results)


def measure(case: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    shape = ModelShape(**case["shape"])
    actor = ActorConfig(
        layout=LayoutConfig(**case["layout"]),
        precision=case["precision"],
        device="cpu",
        recompute=case["recompute"],
        distributed_optimizer=case["distributed_optimizer"],
    )
    layout = layouts.initialize(
        actor.layout,
        shape=shape,
        rank=rank,
        master_addr="127.0.0.1",
        master_port=port,
        device="cpu",
        seed=1,
        timeout_s=60.0,
    )
    bare = build_model(shape, layout, precision=actor.precision, recompute=actor.recompute)
    even_routing(bare, shape)
    models = wrap_data_parallel(bare, actor)
    optimizer = build_optimizer(models, OptimizerConfig(), actor)
    bounds = np.cumsum([0, *LENGTHS])
    packs = [
        pack_tokens(np.arange(bounds[-1]) % shape.vocab_size, bounds, layout) for _ in range(case["num_microbatches"])
    ]
    saved, in_flight = run(models, layout, packs)
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    result: dict[str, Any] = sizes(models, optimizer) | {"saved": saved, "in_flight": in_flight}
    result["place"] = [layout.tensor_rank, layout.data_rank, layout.pipeline_rank, layout.expert_rank]
    layouts.destroy()
    return result


def even_routing(models: list[torch.nn.Module], shape: ModelShape) -> None:
    """Token t of a pack goes to the experts t k .. t k + k - 1: every rank receives equally many copies."""
    experts, chosen = shape.num_experts, shape.num_experts_per_token

    def route(scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(scores.shape[0])[:, None] * chosen + torch.arange(chosen)[None, :]
        return scores + torch.zeros_like(scores).scatter_(1, rows % experts, 1e4)

    routers: list[Any] = [m for model in models for name, m in model.named_modules() if name.endswith("mlp.router")]
    for router in routers:

        def evenly(x: torch.Tensor, gating: Any = router.gating) -> torch.Tensor:
            return route(gating(x).flatten(0, -2)).view(*x.shape[:-1], experts)

        router.gating = evenly


def run(models: list[Any], layout: Any, packs: list[Any]) -> tuple[int, int]:
    """Returns bytes saved for the backward pass over all packs, and the most passes that waited for theirs."""
    weights = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
    inputs = {pack.sequences.cu_seqlens_q.untyped_storage().data_ptr() for pack in packs}
    kept: dict[int, torch.Tensor] = {}
    waiting = [0, 0]  # now, most

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if is_forward[0] and place not in weights and place not in inputs:
            kept[place] = tensor  # kept alive, so that no address comes twice
        return tensor

    is_forward = [False]

    def before(*_: Any) -> None:
        is_forward[0] = True

    def after(module: Any, arguments: Any, output: torch.Tensor) -> None:
        is_forward[0] = False
        waiting[0] += 1
        waiting[1] = max(waiting)
        if output.requires_grad:
            output.register_hook(finished)

    def finished(gradient: torch.Tensor) -> None:
        waiting[0] -= 1

    for model in models:
        unwrap(model).register_forward_pre_hook(before)
        unwrap(model).register_forward_hook(after)
        model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        forward_backward(models, layout, packs, lambda model, hidden, index: (hidden.sum(), {}))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), waiting[1]


def sizes(models: list[Any], optimizer: Any) -> dict[str, int]:
    buffers = [buffer for model in models for buffer in model.buffers + model.expert_parallel_buffers]
    named = [(name, p) for model in models for name, p in unwrap(model).named_parameters()]
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, p in named}
    state = {"moments": 0, "master": 0}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for entry in part.optimizer.state.values():
            state["moments"] += sum(entry[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
        for group in part.optimizer.param_groups:
            own = [p for p in group["params"] if p.untyped_storage().data_ptr() not in held]
            state["master"] += sum(p.nbytes for p in own)
    return {
        "dense": sum(p.numel() for name, p in named if ".experts." not in name),
        "expert": sum(p.numel() for name, p in named if ".experts." in name),
        "weights": sum(held.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        **state,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
