"""One process: how far a bf16 actor's log-probabilities are from those a server recorded, by router settings."""

import pickle
import sys
from pathlib import Path

import torch

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import mismatch, pack
from megatrl.config.credit import LossConfig
from megatrl.config.engines import ActorConfig, RouterConfig
from megatrl.data.samples import TrainingSample
from megatrl.rollout.ports import free_port


def measure(model_path: str, samples: list[TrainingSample], router: RouterConfig) -> tuple[float, float]:
    """Mean and maximum of |actor - server| over the action tokens."""
    worker = ActorWorker(
        WorkerSpec(
            rank=0,
            world_size=1,
            master_addr="127.0.0.1",
            master_port=free_port(),
            actor=ActorConfig(precision="bf16", device="cpu", router=router, timeout_s=60.0),
            model_path=model_path,
            seed=1,
            num_steps=1,
        )
    )
    try:
        batch = pack(samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=500, loss=LossConfig())
        return mismatch(batch, worker.logprobs(batch, temperature=1.0))
    finally:
        worker.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = pickle.loads(Path(sys.argv[1]).read_bytes())
    answers = {name: measure(path, samples, RouterConfig(**router)) for name, (path, samples, router) in asked.items()}
    Path(sys.argv[2]).write_bytes(pickle.dumps(answers))
