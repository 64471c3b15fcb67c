"""One rank: a run of four steps against runs that were saved after two and continued in new workers."""

import json
import pickle
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from actors import actor_worker
from oracle import LOSS, TEMPERATURE, Case
from world import rank_arguments, report

from megatrl.actor.worker import ActorWorker
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.checkpoint import shard_writer
from megatrl.checkpoint.actor_state import ActorSave, load_actor_state, save_actor_state
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
    return actor_worker(case.model_path, actor, rank=rank, port=port, num_steps=4)


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
    gate = threading.Event()
    saving = begin_held(worker, out / "step2", gate) if run.get("background") else None
    if saving is None:
        save_actor_state(worker, out / "step2")
    export_hf_directory(worker.iter_hf_weights(), source=Path(run["source"]), out=out / "hf", is_writer=rank == 0)
    wanted = [step(worker, run, number) for number in (3, 4)]
    if run.get("damaged"):
        save_actor_state(worker, out / "later")
    if saving is not None:
        gate.set()
        assert saving.wait(60)
        saving.finish()
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
        result[name] = refusal(worker, out / "step2")
        worker.close()
    if run.get("background"):
        worker = start(run, rank, next(ports))
        result["late"], result["failed"] = late_save(worker, out / "late"), failed_save(worker, out / "failed")
        worker.close()
    if run.get("damaged"):
        worker = start(run, rank, next(ports))
        result["damaged"] = {name: refusal(worker, damaged(out, rank, name)) for name in DAMAGES}
        worker.close()
    for name, layout in run.get("resharded", {}).items():
        worker = start(run, rank, next(ports), layout=layout)
        scramble(worker)
        load_actor_state(worker, out / "step2")
        seed_as_after_two_steps(run, rank)
        result[name] = [step(worker, run, number) for number in (3, 4)]
        worker.close()
    return result


def refusal(worker: ActorWorker, directory: Path) -> str:
    before = worker.parameter_hash()
    try:
        load_actor_state(worker, directory)
    except CheckpointError as error:
        changed = "" if worker.parameter_hash() == before else " AFTER CHANGING WEIGHTS"
        return f"{type(error).__name__}: {error.message}{changed}"
    return "was accepted"


def begin_held(worker: ActorWorker, directory: Path, gate: threading.Event) -> ActorSave:
    """A save in the background whose files are not written before the gate opens."""
    write = shard_writer._write_buckets

    def held(*arguments: Any) -> Any:
        gate.wait(60)
        shard_writer._write_buckets = write
        return write(*arguments)

    shard_writer._write_buckets = held
    return ActorSave(worker, directory, in_background=True)


def late_save(worker: ActorWorker, directory: Path) -> str:
    gate = threading.Event()
    saving = begin_held(worker, directory, gate)
    try:
        assert not saving.wait(0.05)
        saving.finish()
    except CheckpointError as error:
        return error.message
    finally:
        gate.set()
        saving.wait(60)
    return "was in time"


def failed_save(worker: ActorWorker, directory: Path) -> str:
    """The disk fails rank 0, and it alone, while training goes on."""
    gate = threading.Event()
    saving = begin_held(worker, directory, gate)
    if worker.layout.rank == 0:
        shutil.rmtree(directory / "shards")
        (directory / "shards").touch()
    dist.barrier()
    gate.set()
    saving.wait(60)
    try:
        saving.finish()
    except CheckpointError as error:
        return error.message
    return "was written"


def damaged(out: Path, rank: int, name: str) -> Path:
    """A copy of the state after two steps with one thing wrong. Made by rank 0."""
    directory = out / name.replace(" ", "-")
    if rank == 0:
        shutil.copytree(out / "step2", directory)
        DAMAGES[name](out, directory)
    dist.barrier()
    return directory


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_moments(out: Path, directory: Path) -> None:
    description = json.loads((directory / "actor.json").read_text())
    shutil.rmtree(directory)
    shutil.copytree(out / "step0", directory)
    save_id = json.loads((directory / "actor.json").read_text())["save_id"]
    (directory / "actor.json").write_text(json.dumps(description | {"save_id": save_id}))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "no shard": lambda out, directory: (directory / "shards" / "__0_0.distcp").unlink(),
    "cut shard": lambda out, directory: cut(directory / "shards" / "__0_0.distcp"),
    "cut index": lambda out, directory: cut(directory / "shards" / ".metadata"),
    "other shards": lambda out, directory: shutil.copytree(
        out / "step0" / "shards", directory / "shards", dirs_exist_ok=True
    ),
    "other shard": lambda out, directory: shutil.copy(out / "later" / "shards" / "__0_0.distcp", directory / "shards"),
    "no generators": lambda out, directory: (directory / "rank-00000.pt").unlink(),
    "other generators": lambda out, directory: shutil.copy(out / "step0" / "rank-00000.pt", directory),
    "no description": lambda out, directory: (directory / "actor.json").unlink(),
    "no moments": without_moments,
}


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
