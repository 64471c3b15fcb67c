"""Scoring K boundaries of a trajectory, tree against independent: `python -m benchmarks.scoring --plot scoring.png`.

One trajectory of each length (turns) on one actor, both backends in turns within one process: tokens passed through the
model, wall time, largest tensors alive. The ideal of a tree is N + K m: every trunk token and every branch token once.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported: these are CPU measurements

import numpy as np

from benchmarks.alive_bytes import AliveBytes
from benchmarks.workload import Workload, start_actor, write_model
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.branches import TrunkQuery, answer_branch
from megatrl.scoring.independent import IndependentBackend, plan_queries
from megatrl.scoring.tree import TreeBackend, plan_forest

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What scoring one trajectory cost."""

    turns: int
    trunk_tokens: int  # N
    ideal_tokens: int  # N + K m
    tree_tokens: int
    independent_tokens: int
    tree_s: float  # wall time, medians
    independent_s: float
    tree_cpu_s: float  # processor time, medians: the one to trust where other processes want the cores
    independent_cpu_s: float
    tree_mib: float  # peak of what the pass itself holds
    independent_mib: float

    @property
    def token_overhead(self) -> float:
        return self.tree_tokens / self.ideal_tokens

    @property
    def speedup(self) -> float:
        return self.independent_s / self.tree_s

    @property
    def cpu_speedup(self) -> float:
        return self.independent_cpu_s / self.tree_cpu_s


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    workload = Workload(
        hidden_size=options.hidden, num_layers=options.layers, ffn_size=3 * options.hidden, vocab_size=options.vocab
    )
    points = measure(workload, options)
    derived = ("token_overhead", "speedup", "cpu_speedup")
    rows = [asdict(point) | {name: getattr(point, name) for name in derived} for point in points]
    print(json.dumps({"options": vars(options), "points": rows}, indent=2) if options.json else readable(points))
    if options.plot:
        plot(points, Path(options.plot))


def measure(workload: Workload, options: argparse.Namespace) -> list[Point]:
    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        write_model(workload, Path(directory))
        actor = start_actor(workload, Path(directory))

        def runner(packs: Any) -> Any:
            return target_logprobs(actor.models, actor.layout, packs)

        try:
            return [
                _point(trajectory(turns, options, workload.vocab_size), runner, turns, options)
                for turns in options.turns
            ]
        finally:
            actor.close()


def trajectory(turns: int, options: argparse.Namespace, vocab_size: int) -> TrunkQuery:
    """A prompt and `turns` turns of random ids; one answer of `branch` fed tokens at each of turns + 1 states."""
    rng = np.random.default_rng(turns)
    boundaries = tuple(options.prompt + options.turn_tokens * k for k in range(turns + 1))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, count).tolist())

    wrapper, gold = ids(2), ids(options.branch - 1)
    branch = answer_branch(wrapper, gold)
    return TrunkQuery(trunk=ids(boundaries[-1]), boundaries=boundaries, branches=((branch,),) * len(boundaries))


def _point(query: TrunkQuery, runner: Any, turns: int, options: argparse.Namespace) -> Point:
    budget = options.microbatch_tokens
    backends = {
        "tree": TreeBackend(runner=runner, microbatch_tokens=budget),
        "independent": IndependentBackend(runner=runner, microbatch_tokens=budget),
    }
    wall: dict[str, list[float]] = {name: [] for name in backends}
    cpu: dict[str, list[float]] = {name: [] for name in backends}
    answers = {name: backend.score([query]) for name, backend in backends.items()}  # warm
    for _ in range(options.repeats):
        for name, backend in backends.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            backend.score([query])
            wall[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - begin_cpu)
    _check_equal(answers)
    peaks: dict[str, float] = {}
    for name, backend in backends.items():
        with AliveBytes() as alive:
            backend.score([query])
        peaks[name] = alive.peak / MIB
    fed = len(query.branches[0][0].tokens)
    return Point(
        turns=turns,
        trunk_tokens=len(query.trunk),
        ideal_tokens=len(query.trunk) + fed * len(query.boundaries),
        tree_tokens=plan_forest([query], microbatch_tokens=budget).num_tokens,
        independent_tokens=plan_queries([query], microbatch_tokens=budget).num_tokens,
        tree_s=statistics.median(wall["tree"]),
        independent_s=statistics.median(wall["independent"]),
        tree_cpu_s=statistics.median(cpu["tree"]),
        independent_cpu_s=statistics.median(cpu["independent"]),
        tree_mib=peaks["tree"],
        independent_mib=peaks["independent"],
    )


def _check_equal(answers: dict[str, Any]) -> None:
    """A fast wrong answer is no answer."""
    flat = {
        name: np.array([p[0] for at in result[0] for branch in at for p in branch if p])
        for name, result in answers.items()
    }
    worst = float(np.abs(flat["tree"] - flat["independent"]).max())
    if not worst < 1e-4:
        raise SystemExit(f"the backends differ by {worst:.1e} nats; nothing was measured")


def readable(points: Sequence[Point]) -> str:
    head = (
        "turns  trunk  tree tokens  /ideal  independent tokens  tree s  independent s  speed-up  in cpu s"
        "  tree MiB  indep. MiB"
    )
    lines = [
        f"{p.turns:5d} {p.trunk_tokens:6d} {p.tree_tokens:12d} {p.token_overhead:7.3f} {p.independent_tokens:19d} "
        f"{p.tree_s:7.3f} {p.independent_s:14.3f} {p.speedup:9.1f} {p.cpu_speedup:9.1f} "
        f"{p.tree_mib:9.1f} {p.independent_mib:11.1f}"
        for p in points
    ]
    return "\n".join([head, *lines])


def plot(points: Sequence[Point], path: Path) -> None:
    """Processor time and memory over turns, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2)
    turns = [p.turns for p in points]
    for name, marker, color in (("independent", "s", "#D55E00"), ("tree", "o", "#0072B2")):
        time_axes.plot(turns, [getattr(p, f"{name}_cpu_s") for p in points], marker=marker, color=color, label=name)
        memory_axes.plot(turns, [getattr(p, f"{name}_mib") for p in points], marker=marker, color=color, label=name)
    for axes, label in ((time_axes, "processor seconds"), (memory_axes, "peak MiB of the pass")):
        axes.set(xscale="log", yscale="log", xlabel="turns", ylabel=label, xticks=turns)
        axes.set_xticklabels([str(t) for t in turns])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle("scoring every state of one trajectory")
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 30, 60, 120])
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--turn-tokens", type=int, default=60, help="tokens of a turn (default %(default)s)")
    parser.add_argument("--branch", type=int, default=8, help="tokens of wrapper and answer (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", default="", help="PNG to draw")
    return parser


if __name__ == "__main__":
    main()
