"""One rank: hand-overs between the calls of a run, in random order, against the same calls without them."""

import gc
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import LOSS, TEMPERATURE, Case
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.data.queries import PackedQueries
from megatrl.errors import DeviceMemoryError
from megatrl.orchestration.rank_worker import RankWorker

CALLS = ("update", "logprobs", "save", "load", "reset", "reference", "meter", "export", "hash")
FORGIVEN_BYTES = 256
"""Scalars that torch and Megatron keep outside of the model; the smallest weight here has as many."""


def is_host_data(kind: str) -> bool:
    """States of random generators, and the token counts of Megatron's dispatcher: host data on every device."""
    return kind.endswith("torch.int64") or kind == f"{tuple(torch.get_rng_state().shape)} torch.uint8"


class Rank:
    """A rank worker with everything beside the actor, and what it is called with."""

    def __init__(self, run: dict[str, Any], rank: int, out: Path, *, port: int) -> None:
        self.case: Case = pickle.loads(Path(run["case"]).read_bytes())
        actor = ActorConfig(
            layout=LayoutConfig(**run["layout"]),
            precision=run["precision"],
            device="cpu",
            optimizer=OptimizerConfig(lr=0.01),
            distributed_optimizer=run["distributed_optimizer"],
            timeout_s=60.0,
        )
        spec = WorkerSpec(
            rank=rank, world_size=actor.layout.world_size, master_addr="127.0.0.1", master_port=port, actor=actor,
            model_path=self.case.model_path, seed=1, num_steps=50,
        )  # fmt: skip
        self.earlier = set(storages_alive())
        self.worker = RankWorker(spec, str(out / f"log-{rank}"))
        self.worker.initialize()
        self.worker.freeze_reference()
        self.worker.load_meter(self.case.model_path)
        self.out, self.steps, self.num_saves = out, 0, 0
        packed = pack(
            self.case.samples, num_data_ranks=self.worker.actor.layout.data, num_minibatches=2, microbatch_tokens=60,
            loss=LOSS,
        )  # fmt: skip
        self.batch = attach_old_logprobs(packed, self.case.old_logprobs)
        tokens = self.case.samples[0].tokens
        query = PackedQueries(
            tokens=tokens, cu_seqlens=np.array([0, len(tokens)]), rows=np.arange(3), targets=np.arange(3)
        )
        self.queries = [[query]] * self.worker.actor.layout.data

    def call(self, name: str) -> Any:
        worker = self.worker
        if name == "update":
            self.steps += 1
            return dict(worker.update(self.batch, LOSS, TEMPERATURE, self.steps).metrics)
        if name == "logprobs":
            return [values.tolist() for _, values in sorted(worker.logprobs(self.batch, TEMPERATURE).items())]
        if name == "save":
            worker.begin_checkpoint(str(self.out / f"checkpoint{self.num_saves + 1}"), False)
            self.num_saves += 1
            assert worker.await_checkpoint(60.0), "the files of the checkpoint were not written in time"
            return worker.finish_checkpoint()
        if name == "load":
            return worker.load_checkpoint(str(self.out / f"checkpoint{self.num_saves}"))
        if name == "reset":
            return worker.actor.reset_optimizer()
        if name in ("reference", "meter"):
            return [values.tolist() for values in worker.frozen_logprobs(name, self.queries)]  # type: ignore[arg-type]
        if name == "export":
            return [float(tensor.double().sum()) for _, tensor in worker.actor.iter_hf_weights()]
        return worker.parameter_hash()

    def on_device(self) -> dict[str, int]:
        """Bytes by shape of tensors that Python can reach and that are neither copies in host memory nor older."""
        hosts = [self.worker.actor._memory, self.worker._meter._memory] if self.worker._meter else []
        copies = [b.host for gate in hosts if gate._handed for b in gate._handed._blocks if b.host is not None]
        copies += list(self.worker._reference._copies.values()) if self.worker._reference else []
        known = self.earlier | {copy.untyped_storage()._cdata for copy in copies}
        alive = {key: value for key, value in storages_alive().items() if key not in known}
        return {f"{kind} {key}": size for key, (kind, size) in alive.items() if not is_host_data(kind)}


def storages_alive() -> dict[int, tuple[str, int]]:
    """Storage -> (shape and type of one tensor in it, bytes), from the garbage collector: it asks no owner."""
    alive: dict[int, tuple[str, int]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            alive[storage._cdata] = (f"{tuple(thing.shape)} {thing.dtype}", storage.nbytes())
    return alive


def main() -> None:
    gc.freeze()  # what imports made is looked at no more
    rank, _, arguments = rank_arguments()
    out = Path(sys.argv[3])
    results = []
    for i, run in enumerate(arguments["runs"]):
        print("run", run, flush=True)
        results.append(compare(run, rank, out / str(i), port_name=str(i)))
    report(results)


def compare(run: dict[str, Any], rank: int, out: Path, *, port_name: str) -> dict[str, Any]:
    sequence = random_calls(run["seed"], run["num_calls"])
    answers, seen = [], {}
    for name in ("lending", "plain"):
        directory = out / name
        directory.mkdir(parents=True, exist_ok=True)
        here = Rank(run, rank, directory, port=agreed_port(f"{port_name}{name}"))
        for call in ("update", "save"):  # moments exist, and a checkpoint to load
            here.call(call)
        if name == "lending":
            seen = measured(here)
            answers.append(lending(here, sequence, seen))
        else:
            answers.append([here.call(call) for call, is_away in refused_or_not(sequence) if not is_away])
        here.worker.actor.close()
        del here
        gc.collect()
    return seen | {"equal": answers[0] == answers[1], "num_answers": len(answers[0]), "sequence": sequence}


def random_calls(seed: int, num_calls: int) -> list[str]:
    """Calls in random order; about a third of them move the memory, and every kind occurs."""
    rng = np.random.default_rng(seed)
    calls = [*CALLS, *rng.choice(CALLS, num_calls - len(CALLS))]
    rng.shuffle(calls)
    mixed: list[str] = []
    for call in calls:
        mixed += ["offload"] * int(rng.integers(0, 2)) + ["onload"] * int(rng.integers(0, 2)) + [str(call)]
    # the order of the fault: away, home, step, save, away again
    return [*mixed, "offload", "onload", "update", "save", "offload", "onload", "update", "hash"]


def refused_or_not(sequence: list[str]) -> list[tuple[str, bool]]:
    """(call, whether the memory is away when it comes), moves left out."""
    is_away, result = False, []
    for call in sequence:
        if call in ("offload", "onload"):
            is_away = call == "offload"
        else:
            result.append((call, is_away))
    return result


def measured(here: Rank) -> dict[str, Any]:
    """What one hand-over frees, beside what the parameters imply."""
    parameters = sum(p.numel() for model in here.worker.actor.models for p in model.parameters())
    here.worker.release_memory()
    gate = here.worker.actor._memory
    seen = {"parameters": parameters, "released": gate.released_bytes, "host": gate.host_bytes}
    here.worker.resume_memory()
    return seen


def lending(here: Rank, sequence: list[str], seen: dict[str, Any]) -> list[Any]:
    answers, refused, left = [], 0, 0
    is_away = False
    for call in sequence:
        if call == "offload":
            here.worker.release_memory()
            is_away = True
        elif call == "onload":
            here.worker.resume_memory()
            is_away = False
        elif is_away:
            refused += is_refused(here, call)
        else:
            answers.append(here.call(call))
        if is_away:
            stayed = here.on_device()
            if sum(stayed.values()) > FORGIVEN_BYTES:  # perhaps garbage of a call before
                gc.collect()
                stayed = here.on_device()
            left = max(left, sum(stayed.values()))
            assert left <= FORGIVEN_BYTES, f"after {call}: {dict(sorted(stayed.items(), key=lambda x: -x[1])[:8])}"
    seen |= {"left": left, "refused": refused, "expected_refusals": sum(away for _, away in refused_or_not(sequence))}
    return answers


def is_refused(here: Rank, call: str) -> bool:
    steps = here.steps
    try:
        here.call(call)
    except DeviceMemoryError as error:
        here.steps = steps
        return "while its device memory is handed over" in str(error)
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
