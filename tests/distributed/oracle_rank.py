"""One rank: runs layouts x cases one after the other and reports how far each is from the oracle."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from actors import actor_worker
from oracle import BETAS, CLIP, EPS, LOSS, LR, TEMPERATURE, WEIGHT_DECAY, Case, reordered
from world import agreed_port, rank_arguments, report

from megatrl.actor.update import minibatch_gradients
from megatrl.actor.worker import ActorWorker
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.credit import SequenceLoss
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig, RouterConfig
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import PackedBatch
from megatrl.mcore import layout as layouts
from megatrl.mcore.groups import expert_tensor_group
from megatrl.mcore.model import unwrap
from megatrl.mcore.queries import target_logprobs
from megatrl.mcore.schedule import num_fillers


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for index, run in enumerate(arguments["runs"]):
        case: Case = pickle.loads(Path(run["case"]).read_bytes())
        case = reordered(case) if run.get("reorder") else case
        print("run", run, flush=True)
        results.append(compare(case, run, rank, port=agreed_port(str(index))))
    report(results)


def _worker(case: Case, run: dict[str, Any], rank: int, port: int) -> ActorWorker:
    actor = ActorConfig(
        layout=LayoutConfig(**run["layout"]),
        precision="fp32",
        device="cpu",
        optimizer=OptimizerConfig(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad_norm=CLIP
        ),
        distributed_optimizer=run.get("distributed_optimizer", True),
        recompute=run.get("recompute", "none"),
        router=RouterConfig(**run.get("router", {})),
        timeout_s=60.0,
    )
    return actor_worker(case.model_path, actor, rank=rank, port=port)


def compare(case: Case, run: dict[str, Any], rank: int, *, port: int) -> dict[str, float]:
    worker = _worker(case, run, rank, port)
    batch = pack(
        case.samples,
        num_data_ranks=worker.layout.data,
        num_minibatches=case.num_minibatches,
        microbatch_tokens=run.get("microbatch_tokens", 40),
        loss=LOSS,
    )
    result: dict[str, float] = {"data_ranks": worker.layout.data}
    result["microbatches"] = sum(len(m.microbatches[0]) for m in batch.minibatches)
    result["schedule_fillers"] = sum(num_fillers(len(m.microbatches[0]), worker.layout) for m in batch.minibatches)
    result["fillers"] = sum(
        not m.action_mask.any() for b in batch.minibatches for rank_share in b.microbatches for m in rank_share
    )
    mine = worker.logprobs(batch, temperature=TEMPERATURE)
    result["num_logprobs"] = len(mine)
    result["logprobs"] = max(
        (
            _relative(p[case.samples[i].action_mask], case.expected.logprobs[i][case.samples[i].action_mask])
            for i, p in mine.items()
        ),
        default=0.0,
    )
    result |= _sequence_level(worker, attach_old_logprobs(batch, case.old_logprobs))
    updates = worker.update(attach_old_logprobs(batch, case.old_logprobs), LOSS, temperature=TEMPERATURE, step=1)
    result["loss"] = _relative(updates.metrics["loss"], float(np.mean(case.expected.losses)))
    result["grad_norm"] = _relative(updates.metrics["grad_norm"], float(np.mean(case.expected.grad_norms)))
    result["router"] = max(
        (_relative(updates.metrics[name], value) for name, value in case.expected.router.items()), default=0.0
    )
    exported = list(worker.iter_hf_weights())
    expected = case.expected.parameters
    result["names_equal"] = float([*sorted(n for n, _ in exported)] == sorted(expected))
    result["parameters"] = max(_relative(t.numpy(), expected[name].numpy()) for name, t in exported)
    result["queries"] = _query_error(worker, case)
    result["replicas_equal"] = float(_replicas_equal(worker))
    worker.close()
    return result


def _sequence_level(worker: ActorWorker, batch: PackedBatch) -> dict[str, float]:
    """Loss and gradient norm of a loss that needs whole sequences at once; compared between layouts."""
    loss = LOSS.model_copy(update={"policy": SequenceLoss(clip_low=0.2, clip_high=0.28)})
    layouts.activate("cpu")
    metrics = minibatch_gradients(
        worker.models,
        worker.optimizer,
        worker.layout,
        batch.minibatches[0],
        loss,
        temperature=TEMPERATURE,
        router=worker.spec.actor.router,
    )
    worker.optimizer.prepare_grads()
    return {"sequence_loss": metrics["loss"], "sequence_grad_norm": float(worker.optimizer.get_grad_norm())}


def _query_error(worker: ActorWorker, case: Case) -> float:
    """Several targets for each row, rows in no order, several packs, against the final oracle model."""
    rng = np.random.default_rng(worker.layout.data_rank)
    packs, expected = [], []
    for members in ((0, 1), (2,)) if len(case.samples) > 2 else ((0,),):
        tables = np.concatenate([case.expected.final_logprobs[i] for i in members])
        tokens = np.concatenate([case.samples[i].tokens for i in members])
        rows = rng.integers(0, len(tokens), 25)
        rows[:5] = len(tokens) - 1  # the last token's row predicts, too
        targets = rng.integers(0, tables.shape[1], 25)
        bounds = np.cumsum([0, *(len(case.samples[i].tokens) for i in members)])
        packs.append(PackedQueries(tokens=tokens, cu_seqlens=bounds, rows=rows, targets=targets))
        expected.append(tables[rows, targets])
    state = torch.get_rng_state()
    answers = target_logprobs(worker.models, worker.layout, packs)
    assert torch.equal(state, torch.get_rng_state()), "scoring moved the random state"
    assert all(chunk.training for chunk in worker.models), "scoring left the model in evaluation mode"
    return max(_relative(a, e) for a, e in zip(answers, expected, strict=True))


def _replicas_equal(worker: ActorWorker) -> bool:
    """Every parameter has equal bits on all ranks that hold the same part of it."""
    layout = worker.layout
    mine = {}
    for chunk in (unwrap(m) for m in worker.models):
        for name, p in chunk.named_parameters():
            is_expert = ".experts." in name
            place = [chunk.layers.start, getattr(p, "tensor_model_parallel", False)]
            if is_expert:
                place += [layout.expert_rank, expert_tensor_group().rank()]
            elif place[1]:
                place.append(layout.tensor_rank)
            mine[f"{place}{name}"] = p.detach().numpy().tobytes()
    everyone: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyone, mine)
    return all(other[name] == value for other in everyone for name, value in mine.items() if name in other)


def _relative(value: Any, expected: Any) -> float:
    value, expected = np.asarray(value, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert value.shape == expected.shape, (value.shape, expected.shape)
    if value.size == 0:
        return 0.0
    return float(np.abs(value - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
