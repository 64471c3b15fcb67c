"""ActorWorker: one rank of the trainable policy. A plain class; Ray, torchrun or a test may start it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatrl.actor import memory
from megatrl.actor.learning_rate import LearningRateSchedule
from megatrl.actor.optimizer import build_optimizer, wrap_data_parallel
from megatrl.actor.update import LossChoice, UpdateResult, take_minibatches
from megatrl.config.engines import ActorConfig, OptimizerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray, Microbatch, PackedBatch
from megatrl.errors import LayoutError
from megatrl.mcore import layout as layouts
from megatrl.mcore.bridge import iter_hf_weights, load_hf_weights
from megatrl.mcore.layout import Layout
from megatrl.mcore.model import build_model, unwrap
from megatrl.mcore.queries import target_logprobs
from megatrl.mcore.routing import recorded_experts

__all__ = ["ActorWorker", "UpdateResult", "WorkerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything one rank needs to join its peers; picklable and free of torch objects."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    actor: ActorConfig
    model_path: str
    seed: int
    num_steps: int  # of the loop; the learning rate's horizon where decay_steps is null


class ActorWorker:
    """One rank of the policy. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Joins the process groups, builds the model and loads `spec.model_path`.

        Raises LayoutError or ModelError before any rank waits for another where it can.
        """
        if spec.world_size != spec.actor.layout.world_size:
            raise LayoutError(
                f"{spec.world_size} processes were started but actor.layout.world_size={spec.actor.layout.world_size}"
            )
        self.spec = spec
        shape = read_model_shape(spec.model_path)
        self.layout: Layout = layouts.initialize(
            spec.actor.layout,
            shape=shape,
            rank=spec.rank,
            master_addr=spec.master_addr,
            master_port=spec.master_port,
            device=spec.actor.device,
            seed=spec.seed,
            timeout_s=spec.actor.timeout_s,
        )
        self._memory = memory.DeviceMemory("the actor", self.layout.torch_device)
        models = build_model(
            shape,
            self.layout,
            precision=spec.actor.precision,
            recompute=spec.actor.recompute,
            router=spec.actor.router,
        )
        load_hf_weights(models, spec.model_path)
        self._models = wrap_data_parallel(models, spec.actor)
        self.reset_optimizer()

    @property
    def models(self) -> list[torch.nn.Module]:
        """The wrapped chunks. Raises DeviceMemoryError while their memory is handed over."""
        self._memory.require()
        return self._models

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Raises DeviceMemoryError while its memory is handed over."""
        self._memory.require()
        return self._optimizer

    def reset_optimizer(self, config: OptimizerConfig | None = None, *, num_steps: int | None = None) -> None:
        """Starts a fresh optimizer (no moments) on the present weights; None keeps the recipe's settings."""
        layouts.activate(self.layout.device)
        self.optimizer_config = config or self.spec.actor.optimizer
        self.scheduler = LearningRateSchedule(config=self.optimizer_config, num_steps=num_steps or self.spec.num_steps)
        self._optimizer = build_optimizer(self.models, self.optimizer_config, self.spec.actor)

    def logprobs(self, batch: PackedBatch, *, temperature: float) -> dict[int, FloatArray]:
        """Returns sample index -> [T] log-probabilities for this data rank's samples, 0 outside the mask.

        Valid on every tensor and pipeline rank. Samples that were left out of the microbatches are absent.
        """
        mine = [m for minibatch in batch.minibatches for m in minibatch.microbatches[self.layout.data_rank]]
        queries = [_action_queries(m, replay=self.spec.actor.router.replay) for m in mine]
        answers = target_logprobs(self.models, self.layout, queries, temperature=temperature)
        by_sample: dict[int, FloatArray] = {}
        for microbatch, answer in zip(mine, answers, strict=True):
            column = np.zeros(len(microbatch.tokens))
            column[microbatch.action_mask] = answer
            parts = np.split(column, microbatch.cu_seqlens[1:-1])
            by_sample |= {i: part for i, part in zip(microbatch.sample_indices, parts, strict=True) if i >= 0}
        return by_sample

    def update(self, batch: PackedBatch, loss: LossChoice, *, temperature: float, step: int) -> UpdateResult:
        """Takes the batch's optimizer steps; `step` counts loop steps from 1 and sets the learning rate.

        Minibatches without an action token are skipped and counted. Raises NonFiniteError on all ranks
        before the optimizer moves when a loss or gradient norm is NaN or infinite.
        """
        layouts.activate(self.layout.device)
        for model in self.models:
            model.train()
        return take_minibatches(
            self.models,
            self.optimizer,
            self.layout,
            batch.minibatches,
            loss,
            temperature=temperature,
            lr=self.scheduler.lr(step),
            config=self.optimizer_config,
            router=self.spec.actor.router,
        )

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every (Hugging Face name, full tensor) on every rank; see `mcore.bridge.iter_hf_weights`."""
        layouts.activate(self.layout.device)
        return iter_hf_weights(self.models)

    def load_hf(self, path: str) -> None:
        """Replaces the weights, and the optimizer's master copy of them, by a Hugging Face directory."""
        layouts.activate(self.layout.device)
        load_hf_weights(self.models, path)
        self.optimizer.reload_model_params()

    def parameter_hash(self) -> str:
        """Returns the SHA-256 of this rank's parameters, names included."""
        digest = hashlib.sha256()
        for model in self.models:
            for name, parameter in sorted(unwrap(model).named_parameters()):
                digest.update(name.encode())
                copy = parameter.detach().to("cpu", copy=True)  # numpy would keep torch from ever freeing the original
                digest.update(copy.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def offload(self) -> None:
        """Hands this rank's device memory over; see `actor/memory.py`. Calling it twice is harmless.

        Until `onload`, every method that needs the weights raises DeviceMemoryError.
        """
        layouts.activate(self.layout.device)
        self._memory.hand_over({"models": self._models, "optimizer": self._optimizer})

    def onload(self) -> None:
        """Takes the memory back. Raises DeviceMemoryError naming the tensors that did not come back as they were."""
        layouts.activate(self.layout.device)
        self._memory.take_back()

    def close(self) -> None:
        """Leaves the process groups."""
        layouts.destroy()


def _action_queries(microbatch: Microbatch, *, replay: bool) -> PackedQueries:
    positions = np.flatnonzero(microbatch.action_mask)
    return PackedQueries(
        tokens=microbatch.tokens,
        cu_seqlens=microbatch.cu_seqlens,
        rows=positions - 1,
        targets=microbatch.tokens[positions],
        routed_experts=recorded_experts(microbatch) if replay else None,
    )
