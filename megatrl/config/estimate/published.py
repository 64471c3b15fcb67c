"""Published throughput beside what this project's formulas give for the same settings."""

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from megatrl.config.engines import ActorConfig
from megatrl.config.estimate.activations import pass_tokens, saved_bytes, working_bytes
from megatrl.config.estimate.degrees import Degrees
from megatrl.config.estimate.generation import Generation, generation_seconds
from megatrl.config.estimate.hardware import GIB, GPUS, Efficiency
from megatrl.config.estimate.memory import CUDA_PROCESS_BYTES, FRAGMENTATION, NCCL_BYTES
from megatrl.config.estimate.parameters import total_parameters
from megatrl.config.estimate.passes import Machine, Passes, optimizer_seconds, pass_seconds
from megatrl.config.estimate.shapes import KNOWN_SHAPES
from megatrl.config.estimate.states import state_bytes
from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import pipeline_chunks

MODEL = "Qwen3-30B-A3B"
PROMPT_SHARE = 0.05
"""Assumed share of a rollout of OpenMathInstruct-2 that is prompt; the pages do not give it."""
VLLM_MEMORY = 0.6
"""`gpu_memory_utilization` of NeMo RL's GRPO configuration."""
BF16_GRADIENTS = 2
"""Both sources sum gradients in bf16 and overlap that with the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One published number and ours. `deviation` is predicted / published - 1."""

    name: str
    source: str
    use: str
    settings: str
    unit: str
    published: float
    predicted: float

    @property
    def deviation(self) -> float:
        return self.predicted / self.published - 1


def published_rows() -> dict[str, Any]:
    """Returns the content of published.yaml: sources, pretraining, grpo."""
    text = resources.files("megatrl.config.estimate").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def comparisons(efficiency: Efficiency | None = None) -> tuple[Comparison, ...]:
    """Returns every published number of the model with the prediction for its settings."""
    content, shape = published_rows(), KNOWN_SHAPES[MODEL]
    machine = Machine(hardware=GPUS["h100"], efficiency=efficiency or Efficiency(), devices_per_node=8)
    found: list[Comparison] = []
    for row in content["pretraining"]:
        degrees = _degrees(row, shape)
        seconds = _pretraining_seconds(row, shape, degrees, machine)
        tokens = row["global_batch"] * row["sequence_tokens"]
        found.append(_compared(row, content, "tokens/s/GPU", row["tokens_per_s_per_gpu"],
                               tokens / seconds / row["num_gpus"]))  # fmt: skip
        if "peak_memory_below_gib" in row:
            memory = _pretraining_bytes(row, shape, degrees) / GIB
            found.append(_compared(row | {"use": "test"}, content, "GiB, below", row["peak_memory_below_gib"], memory))
    for row in content["grpo"]:
        found.append(_compared(row, content, "s/step", row["step_s"], _grpo_seconds(row, shape, machine)))
    return tuple(found)


def _compared(
    row: dict[str, Any], content: dict[str, Any], unit: str, published: float, predicted: float
) -> Comparison:
    source = content["sources"][row["source"]]
    layout = " ".join(f"{name} {degree}" for name, degree in row["layout"].items() if degree > 1)
    return Comparison(
        name=row["name"],
        source=f"{source['repository']} {source['path']}, {source['version']}",
        use=row["use"],
        settings=f"{row['num_gpus']} H100, {layout}",
        unit=unit,
        published=float(published),
        predicted=predicted,
    )


def _degrees(row: dict[str, Any], shape: ModelShape) -> Degrees:
    layout = row["layout"]
    return Degrees(
        world_size=row["num_gpus"],
        tensor=layout["tensor"],
        pipeline=layout["pipeline"],
        virtual=layout["virtual"],
        context=layout["context"],
        expert=layout["expert"],
        expert_tensor=1,
        sequence_parallel=layout["tensor"] > 1,
        chunks=pipeline_chunks(shape.num_layers, pipeline=layout["pipeline"], virtual=layout["virtual"]),
    )


def _pretraining_seconds(row: dict[str, Any], shape: ModelShape, degrees: Degrees, machine: Machine) -> float:
    tokens = row["micro_batch"] * row["sequence_tokens"]
    passes = Passes(
        num_packs=row["global_batch"] / row["micro_batch"] / degrees.data,
        tokens=tokens,
        attended=row["sequence_tokens"] / 2,
        rows=tokens,
        with_backward=True,
        recompute=row["recompute"],
        dispatcher=row["dispatcher"],
        is_balanced=row.get("is_balanced", False),
    )
    step = optimizer_seconds(shape, degrees, "bf16", machine, gradient_bytes=BF16_GRADIENTS, is_overlapped=True)
    return pass_seconds(shape, degrees, "bf16", machine, passes).total + step


def _pretraining_bytes(row: dict[str, Any], shape: ModelShape, degrees: Degrees) -> float:
    """Their settings with our counts: gradients in bf16, all logits of a microbatch in bf16 and once in fp32."""
    actor = ActorConfig(precision="bf16")
    states = state_bytes(shape, degrees, actor, stage=0, gradient_bytes=BF16_GRADIENTS)
    tokens = pass_tokens(shape, degrees, row["micro_batch"] * row["sequence_tokens"], row["sequence_tokens"])
    held = saved_bytes(shape, degrees, "bf16", tokens, kernels="fused", recompute=row["recompute"], stage=0)
    work = working_bytes(shape, degrees, "bf16", tokens, kernels="fused", recompute=row["recompute"])
    logits = tokens.whole * shape.vocab_size / degrees.tensor * (2 + 4)
    loose = held + work + logits
    return states.total + loose * (1 + FRAGMENTATION) + CUDA_PROCESS_BYTES + NCCL_BYTES


def _grpo_seconds(row: dict[str, Any], shape: ModelShape, machine: Machine) -> float:
    """Generation, two forward passes (policy and reference), training, refit and the actor's way to host and back."""
    degrees = _degrees(row, shape)
    tensor, mean = row["server_tensor"], row["mean_tokens"]
    token_bytes = 2 * shape.num_layers * max(1, shape.num_kv_heads // tensor) * shape.head_dim * 2
    weights = total_parameters(shape) * 2 / tensor
    work = Generation(
        num_servers=row["num_gpus"] // tensor,
        tensor=tensor,
        num_episodes=row["num_rollouts"],
        mean_tokens=mean,
        longest_tokens=row["longest_tokens"],
        action_share=1 - PROMPT_SHARE,
        cache_tokens=int((VLLM_MEMORY * machine.hardware.memory_bytes - weights) / token_bytes),
        cache_token_bytes=token_bytes,
        max_concurrent=row["num_rollouts"],
    )
    generation = generation_seconds(shape, "bf16", machine, work).total
    tokens = row["num_rollouts"] * mean / degrees.data
    pack = row["longest_tokens"]
    shared: dict[str, Any] = {"num_packs": tokens / pack, "tokens": pack, "attended": mean / 2, "rows": pack}
    forward = pass_seconds(shape, degrees, "bf16", machine, Passes(**shared)).total
    train = pass_seconds(shape, degrees, "bf16", machine, Passes(**shared, with_backward=True)).total
    step = optimizer_seconds(shape, degrees, "bf16", machine, gradient_bytes=BF16_GRADIENTS, is_overlapped=True)
    states = state_bytes(shape, degrees, ActorConfig(), stage=0, gradient_bytes=BF16_GRADIENTS).total
    host = 2 * states / (machine.hardware.host_bandwidth * machine.efficiency.host)
    refit = total_parameters(shape) * 2 / machine.network
    return generation + 2 * forward + train + row["num_minibatches"] * step + host + refit + machine.efficiency.step_s
