"""What `megatrl plan` counts against what real Megatron models allocate and save: equal, byte for byte."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from plan_rank import LENGTHS
from world import run_world

from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.config.estimate.activations import chunks_in_flight, pass_tokens, saved_bytes
from megatrl.config.estimate.degrees import degrees_of, rank_places
from megatrl.config.estimate.parameters import rank_parameters
from megatrl.config.estimate.states import state_bytes
from megatrl.config.model_shape import ModelShape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TP2 = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
TP2_PLAIN = {"world_size": 2, "tensor": 2}
PP2 = {"world_size": 2, "pipeline": 2}
PP2_VPP2 = {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}
EP2 = {"world_size": 2, "expert": 2}
DP2 = {"world_size": 2}


def shape(family: str, **sizes: Any) -> ModelShape:
    common: dict[str, Any] = {
        "family": family,
        "vocab_size": 67,  # odd: tensor parallelism pads it
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,  # not hidden / heads
        "ffn_size": 48,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_positions": 4096,
    }
    if family == "qwen3_moe":
        common |= {"num_experts": 8, "num_experts_per_token": 2, "expert_ffn_size": 24}
    return ModelShape(**(common | sizes))


DENSE, TIED, LLAMA, MIXTURE = (
    shape("qwen3"),
    shape("qwen3", tie_word_embeddings=True),
    shape("llama3"),
    shape("qwen3_moe"),
)


def case(model: ModelShape, layout: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    defaults = {"precision": "fp32", "recompute": "none", "distributed_optimizer": True, "num_microbatches": 1}
    return {"shape": asdict(model), "layout": layout or {}} | defaults | options


ONE_PROCESS = [
    case(DENSE),
    case(shape("qwen3", num_kv_heads=1)),
    case(TIED, recompute="selective"),
    case(LLAMA, precision="bf16"),
    case(DENSE, precision="bf16", recompute="full"),
    case(MIXTURE),
    case(MIXTURE, precision="bf16", recompute="selective"),
    case(MIXTURE, recompute="full"),
    case(MIXTURE, precision="bf16", distributed_optimizer=False),
    case(DENSE, distributed_optimizer=False),
]
TWO_PROCESSES = [
    case(DENSE, TP2),
    case(DENSE, TP2_PLAIN, precision="bf16"),
    case(shape("qwen3", num_kv_heads=1), TP2),
    case(MIXTURE, TP2, precision="bf16"),
    case(MIXTURE, TP2 | {"expert": 2}),
    case(MIXTURE, EP2, precision="bf16"),
    case(MIXTURE, EP2, recompute="full"),
    case(LLAMA, DP2, precision="bf16"),
    case(DENSE, PP2),
    case(TIED, PP2, precision="bf16"),
    case(MIXTURE, PP2, num_microbatches=4),
    case(DENSE, PP2_VPP2, num_microbatches=4),
]


def check(cases: list[dict[str, Any]], world_size: int, out: Path) -> None:
    ranks = run_world("plan_rank.py", world_size, {"cases": cases}, out, timeout_s=200)
    wrong = []
    for rank, results in enumerate(ranks):
        for wanted, measured in zip(cases, results, strict=True):
            counted = count(wanted, rank)
            differing = {k: (v, measured[k]) for k, v in counted.items() if v != measured[k]}
            if differing:
                name = {k: v for k, v in wanted.items() if k != "shape"} | {"family": wanted["shape"]["family"]}
                wrong.append(f"rank {rank} {name}: (counted, measured) {differing}")
    assert not wrong, "\n".join(wrong)


def count(case: dict[str, Any], rank: int) -> dict[str, Any]:
    model = ModelShape(**case["shape"])
    actor = ActorConfig(
        layout=LayoutConfig(**case["layout"]),
        precision=case["precision"],
        distributed_optimizer=case["distributed_optimizer"],
    )
    degrees = degrees_of(actor.layout, model)
    place = rank_places(degrees, 8)[rank]
    states = state_bytes(model, degrees, actor, stage=place.pipeline, shard=place.data, expert_shard=place.expert_data)
    dense, expert = rank_parameters(model, degrees, place.pipeline)
    counted: dict[str, Any] = {
        "place": [place.tensor, place.data, place.pipeline, place.expert],
        "dense": dense,
        "expert": expert,
        "weights": states.weights,
        "gradients": states.gradients,
        "moments": states.moments,
        "master": states.master,
        "in_flight": chunks_in_flight(degrees, place.pipeline, case["num_microbatches"]),
    }
    if case["num_microbatches"] == 1:
        tokens = pass_tokens(model, degrees, sum(LENGTHS), max(LENGTHS))
        counted["saved"] = saved_bytes(
            model, degrees, actor.precision, tokens, kernels="local", recompute=case["recompute"], stage=place.pipeline
        )
    return counted


def test_one_process_holds_and_saves_exactly_what_is_counted(tmp_path: Path) -> None:
    check(ONE_PROCESS, 1, tmp_path)


def test_two_processes_hold_and_save_exactly_what_is_counted(tmp_path: Path) -> None:
    check(TWO_PROCESSES, 2, tmp_path)
