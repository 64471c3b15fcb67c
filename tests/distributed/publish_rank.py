"""One rank: publishes a sharded actor to a stub server that first refuses a bucket, then accepts all."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig, LayoutConfig, PublishConfig, ServerConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import WeightSyncError
from megatrl.weight_sync.buckets import into_buckets
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.routes import make_publisher

sys.path.insert(0, str(Path(__file__).parent.parent))
from fakes.weight_server import WeightServer, fused_parameters

BUCKET_BYTES = 20_000


def main() -> None:
    rank, _, arguments = rank_arguments()
    report([publish(run, rank, f"actor-{place}") for place, run in enumerate(arguments["runs"])])


def publish(run: dict[str, Any], rank: int, name: str) -> dict[str, Any]:
    actor = ActorConfig(layout=LayoutConfig(**run["layout"]), precision="fp32", device="cpu", timeout_s=60.0)
    worker = ActorWorker(
        WorkerSpec(
            rank=rank,
            world_size=actor.layout.world_size,
            master_addr="127.0.0.1",
            master_port=agreed_port(name),
            actor=actor,
            model_path=run["model"],
            seed=1,
            num_steps=1,
        )
    )
    source = load_file(Path(run["model"]) / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    shape = read_model_shape(run["model"])
    with WeightServer(zeros, num_experts=shape.num_experts) as stub:
        publisher = make_publisher(
            PublishConfig(bucket_bytes=BUCKET_BYTES, timeout_s=20.0),
            shape,
            ServerConfig(device="cpu", precision="fp32"),
            [stub.url] if rank == 0 else None,
        )
        stub.reject_update = 2
        result: dict[str, Any] = {"refused": attempt(publisher, worker.iter_hf_weights(), 1)}
        dist.barrier()  # passes only where no rank is left in a gather
        seen: dict[str, str] = {}
        result["accepted"] = attempt(publisher, recorded(worker.iter_hf_weights(), seen), 1)
        result["tensors"] = seen
        result["buckets"] = [bucket.names for bucket in into_buckets(worker.iter_hf_weights(), BUCKET_BYTES)]
        if rank == 0:
            result["wrong"] = [name for name in source if not torch.equal(stub.weights[name], source[name])]
            result["names_equal"] = stub.weights.keys() == source.keys()
            result["wrong_digests"] = wrong_digests(stub, source, shape.num_experts)
            result["version"] = stub.version
    worker.close()
    return result


def attempt(publisher: Publisher, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> Any:
    try:
        outcome = publisher.publish(weights, policy_version)
    except WeightSyncError as error:
        return error.message
    if not outcome.is_proven:
        return "drained"
    return {"ratio": outcome.bytes_ratio, "largest": outcome.largest_bucket_bytes, "buckets": outcome.num_buckets}


def recorded(weights: Iterable[tuple[str, torch.Tensor]], seen: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        seen[name] = digest(tensor)
        yield name, tensor


def wrong_digests(stub: WeightServer, source: dict[str, torch.Tensor], num_experts: int) -> list[str]:
    """Fused server tensors whose digest is not that of the checkpoint's."""
    held, wanted = fused_parameters(stub.weights, num_experts), fused_parameters(source, num_experts)
    return [name for name in wanted if name not in held or digest(held[name]) != digest(wanted[name])]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
