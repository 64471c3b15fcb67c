"""One rank: a run of four steps against runs that were saved after two and continued in new workers."""

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import LOSS, TEMPERATURE, Case
from world import rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.checkpoint.actor_state import load_actor_state, save_actor_state
from megatrl.checkpoint.hf_export import export_hf_directory
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.errors import CheckpointError


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for run in arguments["runs"]:
        print("run", run, flush=True)
        results.append(compare(run, rank))
    report(results)


def start(run: dict[str, Any], rank: int, port: int, **changes: Any) -> ActorWorker:
    case: Case = pickle.loads(Path(run["case"]).read_bytes())
    actor = ActorConfig(
        layout=LayoutConfig(**(run["layout"] | changes.pop("layout", {}))),
        device="cpu",
        optimizer=OptimizerConfig(lr=0.01, min_lr=0.001, decay="linear", warmup_steps=1, eps=1e-6, weight_decay=0.1),
        timeout_s=60.0,
        **(
            {"precision": run.get("precision", "fp32"), "distributed_optimizer": run.get("distributed", True)} | changes
        ),
    )
    return ActorWorker(
        WorkerSpec(
            rank=rank,
            world_size=actor.layout.world_size,
            master_addr="127.0.0.1",
            master_port=port,
            actor=actor,
            model_path=case.model_path,
            seed=1,
            num_steps=4,
        )
    )


def step(worker: ActorWorker, run: dict[str, Any], number: int) -> dict[str, Any]:
    """One update on samples that are drawn by this rank's restored generators; data ranks draw alike."""
    case: Case = pickle.loads(Path(run["case"]).read_bytes())
    case.old_logprobs[0] = case.old_logprobs[0] + 0.1 * torch.rand(1).item() + 0.1 * random.random() + np.random.rand()
    batch = pack(
        case.samples,
        num_data_ranks=worker.layout.data,
        num_minibatches=case.num_minibatches,
        microbatch_tokens=40,
        loss=LOSS,
    )
    batch = attach_old_logprobs(batch, case.old_logprobs)
    metrics = worker.update(batch, LOSS, temperature=TEMPERATURE, step=number).metrics
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "hash": worker.parameter_hash()}


def seed_generators() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def compare(run: dict[str, Any], rank: int) -> dict[str, Any]:
    out, ports = Path(run["out"]), iter(run["ports"])
    worker = start(run, rank, next(ports))
    seed_generators()
    save_actor_state(worker, out / "step0")
    first = [step(worker, run, number) for number in (1, 2)]
    save_actor_state(worker, out / "step2")
    export_hf_directory(worker.iter_hf_weights(), source=Path(run["source"]), out=out / "hf", is_writer=rank == 0)
    wanted = [step(worker, run, number) for number in (3, 4)]
    worker.close()
    result: dict[str, Any] = {"uninterrupted": [*first, *wanted]}

    worker = start(run, rank, next(ports))
    scramble(worker)
    load_actor_state(worker, out / "step2")
    result["resumed_at_2"] = [step(worker, run, number) for number in (3, 4)]
    worker.close()

    worker = start(run, rank, next(ports))
    scramble(worker)
    load_actor_state(worker, out / "step0")
    result["resumed_at_0"] = [step(worker, run, number) for number in (1, 2)]
    worker.close()

    worker = start(run, rank, next(ports))
    worker.load_hf(str(out / "hf"))
    seed_generators()
    result["weights_only"] = [step(worker, run, 3)]
    worker.close()

    for name, change in run.get("refused", {}).items():
        worker = start(run, rank, next(ports), **change)
        before = worker.parameter_hash()
        try:
            load_actor_state(worker, out / "step2")
            result[name] = "was accepted"
        except CheckpointError as error:
            result[name] = error.message if worker.parameter_hash() == before else "refused after changing weights"
        worker.close()
    for name, layout in run.get("resharded", {}).items():
        worker = start(run, rank, next(ports), layout=layout)
        scramble(worker)
        load_actor_state(worker, out / "step2")
        seed_as_after_two_steps(run, rank)
        result[name] = [step(worker, run, number) for number in (3, 4)]
        worker.close()
    return result


def scramble(worker: ActorWorker) -> None:
    """Weights and generators that must not survive the load."""
    with torch.no_grad():
        for model in worker.models:
            for parameter in model.parameters():
                parameter.fill_(7.0)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)


def seed_as_after_two_steps(run: dict[str, Any], rank: int) -> None:
    """With another layout the generators are not restored; set them to where the save had them."""
    state = torch.load(Path(run["out"]) / "step2" / "rank-00000.pt", weights_only=True)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
