"""One process: what an optimizer step holds in memory, by chunk of logits, entropy term and recomputation."""

import pickle
from pathlib import Path
from typing import Any

import torch
from oracle import LOSS, TEMPERATURE, Case
from world import agreed_port, rank_arguments, report

from benchmarks.alive_bytes import AliveBytes
from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.credit import LossConfig
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig, Precision
from megatrl.mcore import logprobs
from megatrl.mcore.model import unwrap


def main() -> None:
    rank, _, arguments = rank_arguments()
    case: Case = pickle.loads(Path(arguments["case"]).read_bytes())
    results: dict[str, Any] = {}
    for name, run in arguments["runs"].items():
        results[name] = observe(case, run, rank, port=agreed_port(name))
    report(results)


def observe(case: Case, run: dict[str, Any], rank: int, *, port: int) -> dict[str, Any]:
    precision: Precision = run.get("precision", "fp32")
    actor = ActorConfig(
        layout=LayoutConfig(), precision=precision, device="cpu", optimizer=OptimizerConfig(lr=1e-4),
        recompute=run.get("recompute", "none"), timeout_s=60.0,
    )  # fmt: skip
    worker = ActorWorker(
        WorkerSpec(
            rank=rank, world_size=1, master_addr="127.0.0.1", master_port=port, actor=actor,
            model_path=case.model_path, seed=1, num_steps=5,
        )
    )  # fmt: skip
    vocab_size = unwrap(worker.models[0]).shape.vocab_size
    logprobs.LOGIT_BYTES = 4 * vocab_size * run["chunk_rows"]
    loss: LossConfig = LOSS if run.get("entropy") else LOSS.model_copy(update={"entropy_coefficient": 0.0})
    batch = pack(case.samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=100_000, loss=loss)
    batch = attach_old_logprobs(batch, case.old_logprobs)
    (microbatch,) = batch.minibatches[0].microbatches[0]
    with AliveBytes() as alive:
        update = worker.update(batch, loss, temperature=TEMPERATURE, step=1)
    gradients = torch.cat([p.main_grad.flatten() for p in worker.models[0].parameters()])  # type: ignore[attr-defined]
    result = {
        "loss": update.metrics["loss"],
        "gradient": gradients.double().tolist(),
        "peak": alive.peak,
        "largest": alive.largest,
        "all_logits": 4 * vocab_size * len(microbatch.tokens),
        "action_logits": 4 * vocab_size * int(microbatch.action_mask.sum()),
    }
    worker.close()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
