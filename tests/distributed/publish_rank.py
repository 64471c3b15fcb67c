"""One rank: publishes a sharded actor to a stub server that first refuses a bucket, then accepts all."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from world import rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig, LayoutConfig, PublishConfig, ServerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import WeightSyncError
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.routes import make_publisher

sys.path.insert(0, str(Path(__file__).parent.parent))
from fakes.weight_server import WeightServer


def main() -> None:
    rank, _, arguments = rank_arguments()
    report([publish(run, rank) for run in arguments["runs"]])


def publish(run: dict[str, Any], rank: int) -> dict[str, Any]:
    actor = ActorConfig(layout=LayoutConfig(**run["layout"]), precision="fp32", device="cpu", timeout_s=30.0)
    worker = ActorWorker(
        WorkerSpec(
            rank=rank,
            world_size=actor.layout.world_size,
            master_addr="127.0.0.1",
            master_port=run["port"],
            actor=actor,
            model_path=run["model"],
            seed=1,
            num_steps=1,
        )
    )
    source = load_file(Path(run["model"]) / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with WeightServer(zeros, num_experts=8) as stub:
        publisher = make_publisher(
            PublishConfig(bucket_bytes=20_000, timeout_s=20.0),
            read_model_shape(run["model"]),
            ServerConfig(device="cpu", precision="fp32"),
            [stub.url] if rank == 0 else None,
        )
        stub.reject_update = 2
        result: dict[str, Any] = {"refused": attempt(publisher, worker, 1)}
        dist.barrier()  # passes only where no rank is left in a gather
        result["accepted"] = attempt(publisher, worker, 1)
        if rank == 0:
            result["is_equal"] = all(torch.equal(stub.weights[name], source[name]) for name in source)
            result["names_equal"] = stub.weights.keys() == source.keys()
            result["version"] = stub.version
    worker.close()
    return result


def attempt(publisher: Publisher, worker: ActorWorker, policy_version: int) -> str:
    try:
        outcome = publisher.publish(worker.iter_hf_weights(), policy_version)
    except WeightSyncError as error:
        return error.message
    return "proven" if outcome.is_proven else "drained"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
