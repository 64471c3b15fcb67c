"""The measurements themselves. Each runs in a process of its own, so that none sees another's memory."""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.alive_bytes import AliveBytes
from benchmarks.bare_loop import (
    BareMicrobatch,
    bare_logprobs,
    bare_microbatches,
    bare_step,
    loss_at_actions,
    loss_on_all_logits,
)
from benchmarks.workload import LOSS, Workload, packed_batch, start_actor, with_old_logprobs, write_model
from megatrl.actor.worker import ActorWorker
from megatrl.batching.packing import attach_old_logprobs
from megatrl.data.samples import PackedBatch
from megatrl.mcore import logprobs

MIB = 1024 * 1024


def step_times(workload: Workload, *, repeats: int, threads: int) -> dict[str, Any]:
    """Times of one optimizer step and of one forward pass, ours and bare, taken in turns.

    Seconds of wall time and of processor time, every repetition, after one untimed round.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        actor = _actor(workload, Path(directory))
        batch = with_old_logprobs(actor, packed_batch(workload))
        bare = bare_microbatches(actor, batch)
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: actor.update(batch, LOSS, temperature=1.0, step=1),
            "bare": lambda: bare_step(actor, bare, loss_at_actions),
            "bare, all logits": lambda: bare_step(actor, bare, loss_on_all_logits),
            "ours, logprobs": lambda: actor.logprobs(batch, temperature=1.0),
            "bare, logprobs": lambda: bare_logprobs(actor, bare),
        }
        gradient_norms = _gradient_norms(actor, batch, bare)
        seconds = {name: {"wall": [], "cpu": []} for name in sides}
        for repetition in range(repeats + 1):
            for name in _rotated(list(sides), repetition):
                wall, cpu = time.perf_counter(), time.process_time()
                sides[name]()
                if repetition:
                    seconds[name]["wall"].append(time.perf_counter() - wall)
                    seconds[name]["cpu"].append(time.process_time() - cpu)
        actor.close()
    (minibatch,) = batch.minibatches
    return {
        "median_s": {name: {clock: statistics.median(x) for clock, x in s.items()} for name, s in seconds.items()},
        "step_ratio": _ratio(seconds, "ours", "bare"),
        "logprobs_ratio": _ratio(seconds, "ours, logprobs", "bare, logprobs"),
        "gradient_norms": gradient_norms,
        "repeats": repeats,
        "sequences": len(batch.samples),
        "microbatches": len(minibatch.microbatches[0]),
        "tokens": batch.num_tokens,
        "action_tokens": batch.num_action_tokens,
    }


def step_memory(workload: Workload, *, side: str, logit_bytes: int | None, threads: int) -> dict[str, Any]:
    """Peak memory of one step: growth of the resident set, and tensor bytes alive.

    `side` is "ours" or "bare, all logits"; `logit_bytes` replaces the size of a chunk of logits, None keeps it.
    """
    torch.set_num_threads(threads)
    if logit_bytes is not None:
        logprobs.LOGIT_BYTES = logit_bytes
    with tempfile.TemporaryDirectory() as directory:
        actor = _actor(workload, Path(directory))
        batch = packed_batch(workload)
        # Not the actor's own: a pass for them would already reach the peak.
        batch = attach_old_logprobs(batch, {i: s.behavior_logprobs for i, s in enumerate(batch.samples)})
        (minibatch,) = batch.minibatches
        bare = bare_microbatches(actor, batch)

        def step() -> Any:
            if side == "ours":
                return actor.update(batch, LOSS, temperature=1.0, step=1)
            return bare_step(actor, bare, loss_on_all_logits)

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        step()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        with AliveBytes() as alive:
            step()
        actor.close()
    return {
        "resident_growth_mib": resident / MIB,
        "alive_peak_mib": alive.peak / MIB,
        "largest_tensor_mib": alive.largest / MIB,
        "tokens_of_a_pack": max(len(m.tokens) for m in minibatch.microbatches[0]),
        "action_tokens_of_a_pack": max(int(m.action_mask.sum()) for m in minibatch.microbatches[0]),
    }


def _gradient_norms(actor: ActorWorker, batch: PackedBatch, bare: Sequence[BareMicrobatch]) -> dict[str, float]:
    """Of each side at the same weights: equal, as at a ratio of 1 the policy objective is the plain policy gradient."""
    for group in actor.optimizer.param_groups:
        group["lr"] = 0.0
    norms = {
        "bare": bare_step(actor, bare, loss_at_actions),
        "bare, all logits": bare_step(actor, bare, loss_on_all_logits),
    }
    return norms | {"ours": actor.update(batch, LOSS, temperature=1.0, step=1).metrics["grad_norm"]}


def _actor(workload: Workload, directory: Path) -> ActorWorker:
    write_model(workload, directory / "model")
    return start_actor(workload, directory / "model")


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _ratio(seconds: dict[str, dict[str, list[float]]], ours: str, bare: str) -> dict[str, float]:
    """Ratio of the medians, by wall and by processor time."""
    return {
        clock: statistics.median(seconds[ours][clock]) / statistics.median(seconds[bare][clock])
        for clock in ("wall", "cpu")
    }
