"""One rank: saves on some layouts, loads on others, continues, and compares by Hugging Face name."""

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actors import actor_worker
from oracle import LOSS, TEMPERATURE, Case
from safetensors.torch import load_file, save_file
from torch import Tensor
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.checkpoint.actor_state import load_actor_state, save_actor_state
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.mcore.model import unwrap

MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED_AT, LAST = 2, 5


def main() -> None:
    rank, _, arguments = rank_arguments()
    case: Case = pickle.loads(Path(arguments["case"]).read_bytes())
    for number, (name, layout) in enumerate(arguments["saves"].items()):
        print("save", name, flush=True)
        save(case, rank, layout, Path(arguments["home"]) / name, agreed_port(f"save{number}"))
    compared = {}
    for number, (source, target, layout) in enumerate(arguments["loads"]):
        print("load", source, target, flush=True)
        port = agreed_port(f"load{number}")
        compared[f"{source} -> {target}"] = resume(case, rank, layout, Path(arguments["home"]) / source, port)
    report(compared)


def start(case: Case, rank: int, layout: dict[str, Any], port: int) -> ActorWorker:
    actor = ActorConfig(
        layout=LayoutConfig(**layout),
        device="cpu",
        precision="fp32",
        optimizer=OptimizerConfig(lr=0.01, min_lr=0.001, decay="linear", warmup_steps=1, eps=1e-3, weight_decay=0.1),
        timeout_s=60.0,
    )
    return actor_worker(case.model_path, actor, rank=rank, port=port, num_steps=LAST)


def step(worker: ActorWorker, case: Case, number: int) -> dict[str, float]:
    batch = pack(
        case.samples,
        num_data_ranks=worker.layout.data,
        num_minibatches=case.num_minibatches,
        microbatch_tokens=40,
        loss=LOSS,
    )
    batch = attach_old_logprobs(batch, case.old_logprobs)
    metrics = worker.update(batch, LOSS, temperature=TEMPERATURE, step=number).metrics
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def save(case: Case, rank: int, layout: dict[str, Any], out: Path, port: int) -> None:
    worker = start(case, rank, layout, port)
    for number in range(1, SAVED_AT + 1):
        step(worker, case, number)
    save_actor_state(worker, out / "actor")
    state = moments_by_name(worker)
    metrics = [step(worker, case, number) for number in range(SAVED_AT + 1, LAST + 1)]
    final = by_name(worker)
    if rank == 0:
        save_file(state, out / "moments.safetensors")
        save_file(final, out / "final.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))
    worker.close()


def resume(case: Case, rank: int, layout: dict[str, Any], source: Path, port: int) -> dict[str, float]:
    """Largest relative deviations from the run that went on where it was saved."""
    worker = start(case, rank, layout, port)
    with torch.no_grad():
        for model in worker.models:
            for parameter in model.parameters():
                parameter.fill_(7.0)
    load_actor_state(worker, source / "actor")
    found = moments_by_name(worker)
    metrics = [step(worker, case, number) for number in range(SAVED_AT + 1, LAST + 1)]
    final = by_name(worker)
    worker.close()
    wanted = json.loads((source / "metrics.json").read_text())
    return {
        "moments": largest_deviation(found, load_file(source / "moments.safetensors")),
        "parameters": largest_deviation(final, load_file(source / "final.safetensors")),
        **{
            name: max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(metrics, wanted, strict=True))
            for name in ("loss", "grad_norm")
        },
    }


def largest_deviation(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    assert all(bool(tensor.any()) for tensor in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)


def by_name(worker: ActorWorker) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in worker.iter_hf_weights()}


def moments_by_name(worker: ActorWorker) -> dict[str, Tensor]:
    """Every moment under the name of its weight: put in the weights' place, so that the weights' own map names it."""
    found: dict[str, Tensor] = {}
    for moment in MOMENTS:
        with moments_in_place(worker, moment):
            found |= {f"{name}:{moment}": tensor for name, tensor in by_name(worker).items()}
    return found


@contextmanager
def moments_in_place(worker: ActorWorker, moment: str) -> Iterator[None]:
    parameters = [p for model in worker.models for p in unwrap(model).parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for part in worker.optimizer.chained_optimizers:  # type: ignore[attr-defined]
            if part.optimizer is not None:
                fill_with_moments(part, moment)
        yield
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


def fill_with_moments(part: Any, moment: str) -> None:
    """Each data rank of the distributed optimizer holds a range of every parameter; their sum is the whole."""
    for parameter in [each for buffer in part.buffers for each in buffer.params]:
        whole = torch.zeros(parameter.numel())
        if parameter in part.model_param_group_index_map:
            group, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            held = part._get_model_param_range_map(parameter)["param"]
            whole[held.start : held.end] = part.optimizer.state[main][moment].view(-1)
        dist.all_reduce(whole, group=part.data_parallel_group)
        parameter.copy_(whole.view_as(parameter))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
