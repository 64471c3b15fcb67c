"""A recipe for its engines alone, for commands whose model and tokens come from elsewhere."""

from typing import Literal

from megatrl.config.engines import ActorConfig, HFModel, RolloutConfig, ServerConfig
from megatrl.config.environments import MeterPromptsConfig
from megatrl.config.recipe import Recipe


def engines_alone(name: str, device: Literal["cpu", "cuda"]) -> Recipe:
    """One process for each engine on `device`: fp32 on a CPU, bf16 on a GPU. Model and labels are left empty."""
    precision: Literal["fp32", "bf16"] = "fp32" if device == "cpu" else "bf16"
    return Recipe(
        name=name,
        model=HFModel(path=""),
        env=MeterPromptsConfig(labels=""),
        actor=ActorConfig(device=device, precision=precision),
        rollout=RolloutConfig(servers=ServerConfig(device=device, precision=precision)),
    )
