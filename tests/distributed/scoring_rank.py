"""One rank: a probe over swapped weights and a meter of its own, on layouts one after the other."""

import sys
from typing import Any

import numpy as np
import torch
from scoring_case import build_meter, build_probe, group
from world import rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.errors import ScoringError
from megatrl.mcore.model import unwrap
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.meter_model import MeterModel
from megatrl.scoring.weight_swap import FrozenWeights


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for run in arguments["runs"]:
        print("run", run, flush=True)
        results.append(score(run, rank))
    report(results)


def score(run: dict[str, Any], rank: int) -> dict[str, Any]:
    actor = ActorConfig(layout=LayoutConfig(**run["layout"]), precision="fp32", device="cpu", timeout_s=60.0)
    spec = WorkerSpec(
        rank=rank,
        world_size=actor.layout.world_size,
        master_addr="127.0.0.1",
        master_port=run["port"],
        actor=actor,
        model_path=run["reference"],
        seed=1,
        num_steps=5,
    )
    worker = ActorWorker(spec)
    frozen = FrozenWeights.capture(worker.models)
    worker.load_hf(run["policy"])  # what training does to the actor, only faster
    meter = MeterModel(run["meter"], layout=worker.layout, actor=actor)
    for model in worker.models:
        model.train()

    def swapped(queries: Any) -> Any:
        with frozen.swapped_into(worker.models):
            return target_logprobs(worker.models, worker.layout, queries)

    before = worker.parameter_hash()
    addresses = _addresses(worker)
    random_state = torch.get_rng_state()
    probe = build_probe(swapped)
    answers, _ = probe.score([group()])
    references = probe.reference_logprobs([group()])
    forecasts, _ = build_meter(meter.target_logprobs).score([group()])
    result: dict[str, Any] = {
        "answers": [list(score.logprobs) for score in answers.values()],
        "references": [[array.tolist() for array in arrays] for arrays in references.values()],
        "forecasts": [[[f.completion_prob, f.tokens_to_go] for f in s.forecasts] for s in forecasts.values()],
        "same_weights": worker.parameter_hash() == before,
        "same_storage": _addresses(worker) == addresses,
        "same_random_state": torch.equal(torch.get_rng_state(), random_state),
        "same_mode": all(model.training for model in worker.models),
        "identity_differs": frozen.identity != FrozenWeights.capture(worker.models).identity,
    }
    again, _ = build_probe(swapped).score([group()])
    result["twice_equal"] = again == answers
    meter.verify()
    frozen.verify()
    result["meter_change_seen"] = _change_is_seen(meter)
    result["restored_after_exception"] = _restores_after_an_exception(worker, frozen, before)
    worker.close()
    return result


def _restores_after_an_exception(worker: ActorWorker, frozen: FrozenWeights, before: str) -> bool:
    inside = ""
    try:
        with frozen.swapped_into(worker.models):
            inside = worker.parameter_hash()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return inside not in ("", before) and worker.parameter_hash() == before


def _change_is_seen(meter: MeterModel) -> bool:
    parameter = next(unwrap(meter._models[0]).parameters())
    with torch.no_grad():
        parameter.view(-1)[0] += 1e-3
    try:
        meter.verify()
    except ScoringError:
        return True
    return False


def _addresses(worker: ActorWorker) -> list[int]:
    return [p.data_ptr() for model in worker.models for p in model.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="raise", under="ignore")
    sys.exit(main())
