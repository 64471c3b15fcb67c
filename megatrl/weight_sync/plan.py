"""PublishPlan: what is published, to what kind of server, and how. The same on every rank."""

import math
from dataclasses import dataclass

import torch

from megatrl.config.engines import PublishConfig, ServerConfig
from megatrl.config.model_shape import ModelShape
from megatrl.weight_sync.expected import ExpectedTensors, expected_tensors
from megatrl.weight_sync.verify import FusedLayout, ServerShape

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    config: PublishConfig
    model: ModelShape
    expected: ExpectedTensors
    layout: FusedLayout

    @property
    def num_bytes(self) -> int:
        """Of the whole model as a server holds it: every tensor once, without padding."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.expected.values())


def plan_publish(config: PublishConfig, model: ModelShape, servers: ServerConfig) -> PublishPlan:
    """The plan for servers of one configuration; the name map is built here and shared by all its publishes."""
    expected = expected_tensors(model, _DTYPES[servers.precision])
    server = ServerShape(tensor=servers.tensor, device=servers.device)
    return PublishPlan(config=config, model=model, expected=expected, layout=FusedLayout(model, expected, server))
