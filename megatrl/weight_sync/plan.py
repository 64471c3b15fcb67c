"""PublishPlan: what is published, to what kind of server, and how. The same on every rank."""

from dataclasses import dataclass

import torch

from megatrl.config.engines import PublishConfig, ServerConfig
from megatrl.config.model_shape import ModelShape
from megatrl.weight_sync.expected import ExpectedTensors, expected_tensors
from megatrl.weight_sync.verify import ServerShape

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    config: PublishConfig
    model: ModelShape
    server: ServerShape
    expected: ExpectedTensors


def plan_publish(config: PublishConfig, model: ModelShape, servers: ServerConfig) -> PublishPlan:
    """The plan for servers of one configuration; the name table is built here, once."""
    return PublishPlan(
        config=config,
        model=model,
        server=ServerShape(tensor=servers.tensor, device=servers.device),
        expected=expected_tensors(model, _DTYPES[servers.precision]),
    )
