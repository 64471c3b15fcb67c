"""What one rank does: the actor, the frozen scorers beside it, publishing and checkpoints.

A plain class: Ray starts one for each rank, torchrun can do the same, tests use it in one process.
Every method is collective: all ranks call it together and in the same order.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatrl.actor.worker import ActorWorker, UpdateResult, WorkerSpec
from megatrl.checkpoint.actor_state import ActorSave, check_actor_state, load_actor_state
from megatrl.checkpoint.hf_export import export_hf_directory
from megatrl.config.credit import LossConfig
from megatrl.config.engines import OptimizerConfig, PublishConfig, ServerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray, PackedBatch
from megatrl.errors import CheckpointError
from megatrl.mcore.model import unwrap
from megatrl.mcore.queries import target_logprobs
from megatrl.observability.logs import logging_to
from megatrl.scoring.meter_model import MeterModel
from megatrl.scoring.weight_swap import FrozenWeights
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.report import PublishReport
from megatrl.weight_sync.routes import make_publisher

FrozenRole = Literal["reference", "meter"]


class RankWorker:
    """One rank of the actor with everything that shares its process groups."""

    def __init__(self, spec: WorkerSpec, log_path: str) -> None:
        self._log = contextlib.ExitStack()  # open as long as the process lives
        self._log.enter_context(logging_to(Path(log_path), role=f"actor-{spec.rank}", to_stderr=False))
        self._spec = spec
        self._actor: ActorWorker | None = None
        self._reference: FrozenWeights | None = None
        self._meter: MeterModel | None = None
        self._publisher: Publisher | None = None
        self._saving: ActorSave | None = None

    @property
    def actor(self) -> ActorWorker:
        assert self._actor is not None, "initialize comes first"
        return self._actor

    def initialize(self) -> int:
        """Joins the process groups and builds the model; returns this rank's place in data parallelism.

        Apart from __init__, so that a LayoutError or ModelError reaches the driver as itself.
        """
        if self._actor is None:
            self._actor = ActorWorker(self._spec)
        return self._actor.layout.data_rank

    def load_policy(self, model_path: str, optimizer: OptimizerConfig, num_steps: int) -> None:
        """Replaces the policy by a Hugging Face directory and starts a fresh optimizer."""
        self.actor.load_hf(model_path)
        self.actor.reset_optimizer(optimizer, num_steps=num_steps)

    def logprobs(self, batch: PackedBatch, temperature: float) -> dict[int, FloatArray]:
        return self.actor.logprobs(batch, temperature=temperature)

    def update(
        self, batch: PackedBatch, loss: LossConfig | Literal["supervised"], temperature: float, step: int
    ) -> UpdateResult:
        return self.actor.update(batch, loss, temperature=temperature, step=step)

    def freeze_reference(self) -> None:
        """Keeps a host copy of the present policy as the reference."""
        self._reference = FrozenWeights.capture([unwrap(model) for model in self.actor.models])

    def load_meter(self, path: str) -> None:
        """Builds the meter on this rank's process groups."""
        self._meter = MeterModel(path, layout=self.actor.layout, actor=self._spec.actor)

    def frozen_logprobs(self, role: FrozenRole, queries: Sequence[Sequence[PackedQueries]]) -> list[FloatArray]:
        """Log-probabilities that a frozen model gives to this data rank's queries, [Q] for each.

        `queries[d]` belongs to data-parallel rank d; all have the same length.
        """
        mine = queries[self.actor.layout.data_rank]
        if role == "meter":
            assert self._meter is not None, "load_meter comes first"
            return self._meter.target_logprobs(mine)
        assert self._reference is not None, "freeze_reference comes first"
        with self._reference.swapped_into([unwrap(model) for model in self.actor.models]):
            return target_logprobs(self.actor.models, self.actor.layout, mine)

    def connect_servers(self, publish: PublishConfig, servers: ServerConfig, directory: str) -> None:
        """Rank 0 will talk to the servers; the others only take part in gathering. The name map is built here."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = make_publisher(
            publish,
            read_model_shape(self._spec.model_path),
            servers,
            () if self._spec.rank == 0 else None,
            directory=Path(directory),
            master_address=self._spec.master_addr,
        )

    def publish(self, policy_version: int, urls: Sequence[str]) -> PublishReport:
        """Moves the present weights into the servers at `urls` and proves it; the report of rank 0 says where."""
        assert self._publisher is not None, "connect_servers comes first"
        if self._spec.rank == 0:
            self._publisher.use_servers(urls)
        return self._publisher.publish_to_reachable(self.actor.iter_hf_weights(), policy_version)

    def begin_checkpoint(self, directory: str, in_background: bool) -> None:
        """Captures the present state for `directory`; in the background it is written while other calls are served.

        `finish_checkpoint` has to follow, before another begins.
        """
        if self._saving is not None:
            raise CheckpointError(f"a checkpoint is still being written, so none can begin in {directory}")
        self._saving = ActorSave(self.actor, Path(directory), in_background=in_background)

    def await_checkpoint(self, timeout_s: float) -> bool:
        """Whether this rank's files are there, after at most `timeout_s`. The one call here that is not collective."""
        assert self._saving is not None, "begin_checkpoint comes first"
        return self._saving.wait(timeout_s)

    def finish_checkpoint(self) -> None:
        """Completes the checkpoint; raises CheckpointError where a rank's files are not there."""
        assert self._saving is not None, "begin_checkpoint comes first"
        saving, self._saving = self._saving, None
        saving.finish()

    def check_checkpoint(self, directory: str) -> None:
        """Raises DamagedCheckpointError where the files cannot be loaded by anyone; loads nothing."""
        check_actor_state(self.actor, Path(directory))

    def load_checkpoint(self, directory: str) -> None:
        load_actor_state(self.actor, Path(directory))

    def save_hf(self, directory: str, source: str) -> None:
        """Writes the policy as a Hugging Face directory; tokenizer and templates come from `source`."""
        export_hf_directory(
            self.actor.iter_hf_weights(), source=Path(source), out=Path(directory), is_writer=self._spec.rank == 0
        )

    def parameter_hash(self) -> str:
        return self.actor.parameter_hash()

    def release_memory(self) -> None:
        """Hands device memory over to a colocated server; the frozen reference lives in host memory anyway."""
        self.actor.offload()
        if self._meter is not None:
            self._meter.offload()

    def resume_memory(self) -> None:
        self.actor.onload()
        if self._meter is not None:
            self._meter.onload()
