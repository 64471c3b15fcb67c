"""The actor as the driver sees it: one object, whatever the layout behind it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatrl.actor.worker import UpdateResult
from megatrl.config.credit import LossConfig
from megatrl.config.engines import OptimizerConfig, PublishConfig, ServerConfig
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray, PackedBatch
from megatrl.orchestration.rank_worker import FrozenRole
from megatrl.orchestration.sharing import share_over_ranks
from megatrl.orchestration.worker_group import WorkerGroup
from megatrl.scoring.independent import QueryRunner
from megatrl.weight_sync.report import PublishReport

_ANSWER_S = 60.0  # for a rank to say that it gave up waiting


class ActorGroup:
    """Collective calls on all ranks; results are merged over data parallelism."""

    def __init__(self, workers: WorkerGroup, *, temperature: float, loss: LossConfig) -> None:
        self.workers = workers
        self._temperature, self._loss = temperature, loss
        self._data_ranks: list[int] = workers.call("initialize")
        self.num_data_ranks = max(self._data_ranks) + 1

    def load_policy(self, model_path: Path, optimizer: OptimizerConfig, num_steps: int) -> None:
        self.workers.call("load_policy", str(model_path), optimizer, num_steps)

    def logprobs(self, batch: PackedBatch) -> dict[int, FloatArray]:
        """Sample index -> [T] log-probabilities at the sampling temperature."""
        merged: dict[int, FloatArray] = {}
        for part in self.workers.call("logprobs", batch, self._temperature):
            merged.update(part)
        return merged

    def update(self, batch: PackedBatch, step: int) -> UpdateResult:
        return self.workers.call("update", batch, self._loss, self._temperature, step)[0]

    def supervise(self, batch: PackedBatch, step: int) -> UpdateResult:
        """One SFT step at temperature 1."""
        kind: Literal["supervised"] = "supervised"
        return self.workers.call("update", batch, kind, 1.0, step)[0]

    def freeze_reference(self) -> None:
        """Keeps a host copy of the present policy on every rank."""
        self.workers.call("freeze_reference")

    def load_meter(self, path: Path) -> None:
        self.workers.call("load_meter", str(path))

    def query_runner(self, role: FrozenRole) -> QueryRunner:
        """A runner of packed queries on a frozen model, spread over the data-parallel ranks."""

        def run(queries: Sequence[PackedQueries]) -> list[FloatArray]:
            return self._run_queries(role, queries)

        return run

    def _run_queries(self, role: FrozenRole, queries: Sequence[PackedQueries]) -> list[FloatArray]:
        if not queries:
            return []
        split = share_over_ranks(queries, self.num_data_ranks)
        results = self.workers.call("frozen_logprobs", role, split.shares)
        by_data_rank = dict(zip(self._data_ranks, results, strict=True))  # replicas of a rank give equal answers
        return split.merge([by_data_rank[rank] for rank in range(self.num_data_ranks)])

    def connect_servers(self, publish: PublishConfig, servers: ServerConfig, directory: Path) -> None:
        self.workers.call("connect_servers", publish, servers, str(directory))

    def publish(self, policy_version: int, urls: Sequence[str]) -> PublishReport:
        """Every rank takes part, those at `urls` receive. Failures of servers are in the report, not raised."""
        return self.workers.call("publish", policy_version, list(urls))[0]

    def begin_checkpoint(self, directory: Path, *, in_background: bool, timeout_s: float) -> None:
        self.workers.call("begin_checkpoint", str(directory), in_background, timeout_s=timeout_s)

    def finish_checkpoint(self, timeout_s: float) -> None:
        """Returns when every rank's files are complete. Raises CheckpointError where they are not after `timeout_s`."""
        self.workers.call("await_checkpoint", timeout_s, timeout_s=timeout_s + _ANSWER_S)
        self.workers.call("finish_checkpoint")

    def check_checkpoint(self, directory: Path) -> None:
        self.workers.call("check_checkpoint", str(directory))

    def load_checkpoint(self, directory: Path) -> None:
        self.workers.call("load_checkpoint", str(directory))

    def save_hf(self, directory: Path, source: Path) -> None:
        self.workers.call("save_hf", str(directory), str(source))

    def parameter_hash(self) -> str:
        return "-".join(self.workers.call("parameter_hash"))

    def release_memory(self) -> None:
        self.workers.call("release_memory")

    def resume_memory(self) -> None:
        self.workers.call("resume_memory")
