"""Speed, packing and memory of the actor: `python -m benchmarks.actor`. See docs/performance.md.

Steps and log-probabilities are timed against a bare Megatron-Core loop (`bare_loop.py`) on the same model and packs,
in turns within one process. Memory is measured in one process for each variant.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported: these are CPU measurements

from benchmarks.measure import MIB, step_memory, step_times
from benchmarks.packing_table import packing_efficiency
from benchmarks.tables import readable
from benchmarks.workload import Workload

CHILD_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    speed = Workload(
        hidden_size=options.hidden,
        num_layers=options.layers,
        ffn_size=3 * options.hidden,
        vocab_size=options.vocab,
        num_tokens=options.tokens,
        microbatch_tokens=options.microbatch_tokens,
        longest=min(1024, options.microbatch_tokens),
    )
    memory = dataclasses.replace(
        speed,
        vocab_size=options.memory_vocab,
        num_tokens=options.memory_tokens,
        microbatch_tokens=options.memory_tokens,
        longest=min(1024, options.memory_tokens),
    )
    result = {
        "options": vars(options),
        "speed": _in_a_process(step_times, speed, repeats=options.repeats, threads=options.threads),
        "packing": packing_efficiency(num_samples=256, median=600, longest=4096, capacity=8192),
        "logit_memory": _logit_memory(memory, options),
        "recompute_memory": _recompute_memory(memory, options),
    }
    print(json.dumps(result, indent=2) if options.json else readable(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.actor", description=__doc__)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary of the timed model (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the timed batch (default %(default)s)")
    parser.add_argument("--microbatch-tokens", type=int, default=1024, help="capacity of a pack (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions of each side (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default %(default)s)")
    parser.add_argument("--memory-vocab", type=int, default=50_000, help="vocabulary where memory is measured")
    parser.add_argument("--memory-tokens", type=int, default=2048, help="tokens of the pack where memory is measured")
    parser.add_argument("--logit-mib", type=int, default=16, help="MiB of a chunk of logits (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _logit_memory(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    variants: dict[str, dict[str, Any]] = {
        "bare, all logits": {"side": "bare, all logits", "logit_bytes": None},
        "ours, one chunk": {"side": "ours", "logit_bytes": 1 << 60},
        f"ours, chunks of {options.logit_mib} MiB": {"side": "ours", "logit_bytes": options.logit_mib * MIB},
    }
    return {
        name: _in_a_process(step_memory, workload, threads=options.threads, **variant)
        for name, variant in variants.items()
    }


def _recompute_memory(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """With the small vocabulary, so that activations are what is seen."""
    small = dataclasses.replace(workload, vocab_size=options.vocab)
    return {
        recompute: _in_a_process(
            step_memory,
            dataclasses.replace(small, recompute=recompute),
            side="ours",
            logit_bytes=options.logit_mib * MIB,
            threads=options.threads,
        )
        for recompute in ("none", "selective", "full")
    }


def _in_a_process(function: Callable[..., dict[str, Any]], *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """The result of a call in a process of its own, forked from a server that has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.measure"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments, **keywords).result(timeout=CHILD_TIMEOUT_S)


if __name__ == "__main__":
    main()
