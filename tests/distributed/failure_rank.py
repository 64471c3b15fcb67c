"""One rank: what must not move the weights, in each layout given; reports what was seen."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import Case
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.credit import LossConfig
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.data.samples import PackedBatch, TrainingSample
from megatrl.errors import LayoutError, NonFiniteError, ScoringError
from megatrl.mcore.model import unwrap

LOSS = LossConfig()


def main() -> None:
    rank, _, arguments = rank_arguments()
    report([observe(run, rank, port=agreed_port(str(i))) for i, run in enumerate(arguments["runs"])])


def start_worker(run: dict[str, Any], rank: int, model_path: str, port: int) -> ActorWorker:
    actor = ActorConfig(
        layout=LayoutConfig(**run["layout"]),
        precision=run.get("precision", "fp32"),
        device="cpu",
        optimizer=OptimizerConfig(lr=0.01, eps=1e-3, weight_decay=0.1, warmup_steps=4),
        timeout_s=60.0,
    )
    return ActorWorker(
        WorkerSpec(
            rank=rank,
            world_size=actor.layout.world_size,
            master_addr="127.0.0.1",
            master_port=port,
            actor=actor,
            model_path=model_path,
            seed=1,
            num_steps=5,
        )
    )


def observe(run: dict[str, Any], rank: int, *, port: int) -> dict[str, Any]:
    case: Case = pickle.loads(Path(run["case"]).read_bytes())
    worker = start_worker(run, rank, case.model_path, port)
    start = worker.parameter_hash()
    seen: dict[str, Any] = {}

    def batch_of(samples: tuple[TrainingSample, ...]) -> PackedBatch:
        packed = pack(samples, num_data_ranks=worker.layout.data, num_minibatches=2, microbatch_tokens=40, loss=LOSS)
        return attach_old_logprobs(packed, case.old_logprobs)

    good = batch_of(case.samples)
    broken = list(case.samples)
    advantages = broken[0].advantages.copy()
    advantages[np.flatnonzero(broken[0].action_mask)[0]] = np.nan
    broken[0] = replace(broken[0], advantages=advantages)

    seen["nan_loss"] = error_of(lambda: update(worker, batch_of(tuple(broken)), 1))
    seen["moved_by_nan_loss"] = worker.parameter_hash() != start

    parameter = next(p for n, p in unwrap(worker.models[0]).named_parameters() if "linear_proj" in n)
    poison = parameter.register_hook(lambda gradient: gradient * float("inf")) if rank == run["poisoned_rank"] else None
    seen["infinite_gradient"] = error_of(lambda: update(worker, good, 1))
    seen["moved_by_infinite_gradient"] = worker.parameter_hash() != start
    if poison is not None:
        poison.remove()

    silent = tuple(replace(s, advantages=np.zeros_like(s.advantages)) for s in case.samples)
    skipped = worker.update(batch_of(silent), LOSS, temperature=1.0, step=1)
    seen["skipped"] = (
        skipped.num_optimizer_steps,
        skipped.num_skipped_minibatches,
        skipped.metrics["skipped_minibatches"],
    )
    seen["moved_by_empty_minibatch"] = worker.parameter_hash() != start

    seen["bad_id"] = error_of(lambda: bad_id(worker))

    # a good update still works after all of that, and equals one that never saw any trouble
    first = worker.update(good, LOSS, temperature=1.0, step=1)
    seen["lr"] = first.metrics["lr"]
    after_trouble = worker.parameter_hash()
    seen["moved_by_good_update"] = after_trouble != start
    worker.load_hf(case.model_path)
    seen["reload_restores"] = worker.parameter_hash() == start
    worker.reset_optimizer()
    worker.update(good, LOSS, temperature=1.0, step=1)
    seen["repeats_bit_for_bit"] = worker.parameter_hash() == after_trouble
    worker.load_hf(case.model_path)
    worker.reset_optimizer(OptimizerConfig(lr=0.02, eps=1e-3, warmup_steps=2))
    seen["lr_after_reset"] = worker.update(good, LOSS, temperature=1.0, step=1).metrics["lr"]
    seen["supervised_losses"] = [
        worker.update(good, "supervised", temperature=1.0, step=step).metrics["supervised_loss"] for step in (2, 3, 4)
    ]
    worker.close()
    return seen


def update(worker: ActorWorker, batch: PackedBatch, step: int) -> None:
    worker.update(batch, LOSS, temperature=1.0, step=step)


def bad_id(worker: ActorWorker) -> None:
    from megatrl.data.queries import PackedQueries
    from megatrl.mcore.queries import target_logprobs

    one, bounds = np.zeros(1, dtype=np.int64), np.array([0, 1])
    query = PackedQueries(tokens=one + 67, cu_seqlens=bounds, rows=one, targets=one)
    target_logprobs(worker.models, worker.layout, [query])


def error_of(action: Any) -> str:
    try:
        action()
    except (NonFiniteError, LayoutError, ScoringError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
