"""What step-level credit costs: whole steps with TRACE and DeltaTTG over steps with GRPO, and where the time goes.

    python -m benchmarks.credit_step --runs-dir /tmp/credit-step --out credit_step.json

All arms are one recipe (recipes/evidence_hunt.yaml with longer chains) on one cluster of processes and take turns:
in every round each arm runs a few steps from the same start. The first step of each turn does not count. `step` is
act + score + credit + learn + publish: what a step does besides evaluating and writing. `step_ratio` is to the first
arm, which learns less where groups have no advantage; `own_ratio` is to the same steps without their scoring.
CPU seconds are of the driver and everything below it: ranks, servers, Ray.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatrl.config.load import load_recipe
from megatrl.config.recipe import Recipe
from megatrl.observability.logs import logging_to
from megatrl.observability.record import METRICS_FILE
from megatrl.observability.sinks import read_metrics
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster, cluster
from megatrl.orchestration.loop import train as run_loop
from megatrl.orchestration.meter_training import meter_directory
from megatrl.orchestration.run import open_run
from megatrl.orchestration.start import model_directory, start_directory

ROOT = Path(__file__).parents[1]
VERBS = ("act", "score", "credit", "learn", "publish")
TRACE = ("credit.kind=trace", "group_statistics.std=population", "group_statistics.eps=0")
ARMS: dict[str, tuple[str, ...]] = {
    "grpo": ("credit.kind=none",),
    "trace": TRACE,
    "deltattg": (
        "credit.kind=deltattg",
        "group_statistics.step_expanded=true",
        "meter.kind=trained",
        "meter.num_policy_episodes=64",
        "meter.num_scripted_episodes=256",
        "meter.sft.num_steps=40",
        "meter.sft.sequences_per_step=32",
        "meter.sft.optimizer.lr=3e-3",
        "meter.sft.optimizer.warmup_steps=5",
    ),
    "trace, independent": (*TRACE, "scoring.backend=independent"),
    "trace and kl": (*TRACE, "loss.kl_coefficient=0.001"),
    "kl": ("credit.kind=none", "loss.kl_coefficient=0.001"),
}


def main() -> None:
    options = _parser().parse_args()
    recipes = {arm: recipe_of(arm, options) for arm in options.arms}
    first = recipes[options.arms[0]]
    out = Path(options.runs_dir) / time.strftime("%Y%m%d-%H%M%S")
    artifacts = Artifacts(Path(options.runs_dir) / "artifacts")
    rows: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in recipes}
    cpu_s: dict[str, list[float]] = {arm: [] for arm in recipes}
    with logging_to(out / "driver.log", to_stderr=True):
        model = model_directory(first, artifacts)
        with cluster(first, model, out / "logs") as group:
            start = start_directory(first, model, artifacts, group)
            group.servers.wait_ready()
            meters = {arm: meter_directory(recipe, start, artifacts, group) for arm, recipe in recipes.items()}
            for turn in range(options.rounds):
                for arm in rotated(options.arms, turn):
                    begin = cpu_seconds()
                    steps = play(recipes[arm], group, start, meters[arm], out / f"{turn}-{arm.replace(', ', '-')}")
                    cpu_s[arm].append((cpu_seconds() - begin) / len(steps))
                    rows[arm] += steps[1:]
    report = summary(rows, cpu_s)
    print(readable(report))
    if options.out:
        Path(options.out).write_text(json.dumps({"options": vars(options), "arms": report}, indent=2) + "\n")


def recipe_of(arm: str, options: argparse.Namespace) -> Recipe:
    """The base recipe with one chain so long that an episode takes `turns` turns, and the arm's own settings."""
    overrides = (
        f"env.num_hops={options.turns - 1}",
        f"env.num_documents={options.turns}",
        "env.num_questions=1",  # learnt within seconds, so that groups hold successes and failures
        "env.num_values=2",
        f"env.max_turns={options.turns}",
        f"rollout.max_turns={options.turns}",
        f"rollout.max_action_tokens={options.turns + 11}",
        "rollout.context_tokens=512",
        f"batch.num_groups={options.groups}",
        f"train.num_steps={options.steps}",
        f"start.sft.num_steps={options.sft_steps}",
        "start.sft.optimizer.decay_steps=null",
        "start.demonstrations.num_episodes=1024",
        "start.demonstrations.premature=0",
        "start.demonstrations.detour=0.1",
        "start.sft.sequences_per_step=32",
        "checkpoint.every_steps=1000",
        "evaluation.num_episodes=0",
        f"observe.runs_dir={options.runs_dir}",
        "observe.wandb=off",
        "observe.tensorboard=false",
    )
    return load_recipe(ROOT / "recipes" / "evidence_hunt.yaml", (*overrides, *ARMS[arm])).recipe


def play(recipe: Recipe, group: Cluster, start: Path, meter: Path | None, run_dir: Path) -> list[Mapping[str, float]]:
    """Metrics of each step of one turn."""
    run_dir.mkdir(parents=True)
    with open_run(recipe, group, run_dir=run_dir, start=start, meter=meter) as run:
        run_loop(run)
    return [row for row in read_metrics(run_dir / METRICS_FILE) if row["step"] > 0]


def summary(
    rows: Mapping[str, Sequence[Mapping[str, float]]], cpu_s: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Medians for each arm, and ratios to the first."""
    report: dict[str, dict[str, Any]] = {}
    for arm, steps in rows.items():
        verbs = {verb: [step.get(f"seconds/{verb}", 0.0) for step in steps] for verb in VERBS}
        report[arm] = {
            "steps": len(steps),
            "turns": statistics.fmean(step["rollout/turns"] for step in steps),
            "success": statistics.fmean(step["rollout/success"] for step in steps),
            "step_s": statistics.median(sum(parts) for parts in zip(*verbs.values(), strict=True)),
            "cpu_s": statistics.median(cpu_s[arm]),
            # Against the same step without its scoring: no other step's load, rollouts or update enter.
            "own_ratio": statistics.median(
                sum(parts) / (sum(parts) - score)
                for score, parts in zip(verbs["score"], zip(*verbs.values(), strict=True), strict=True)
            ),
            **{f"{verb}_s": statistics.median(seconds) for verb, seconds in verbs.items()},
        }
    base = next(iter(report.values()))
    for values in report.values():
        values["step_ratio"] = values["step_s"] / base["step_s"]
        values["cpu_ratio"] = values["cpu_s"] / base["cpu_s"]
    return report


def readable(report: Mapping[str, Mapping[str, Any]]) -> str:
    columns = (
        "steps",
        "turns",
        "success",
        "step_s",
        *(f"{verb}_s" for verb in VERBS),
        "step_ratio",
        "own_ratio",
        "cpu_s",
    )
    columns = (*columns, "cpu_ratio")
    lines = ["".join([f"{'arm':20s}", *(f"{name:>12s}" for name in columns)])]
    for arm, values in report.items():
        lines.append("".join([f"{arm:20s}", *(f"{values[name]:12.3f}" for name in columns)]))
    return "\n".join(lines)


def cpu_seconds() -> float:
    """User and system time of this process and everything below it."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # ended meanwhile
            continue
        total += times.user + times.system
    return total


def rotated(arms: Sequence[str], turn: int) -> list[str]:
    """Each arm is first once, so that a load that grows or falls favours none."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["grpo", "trace", "deltattg"])
    parser.add_argument("--turns", type=int, default=8, help="turns of an episode (default %(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 trajectories a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn of an arm (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm (default %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--runs-dir", required=True, help="where runs, start and meter are kept")
    parser.add_argument("--out", default="", help="JSON to write")
    return parser


if __name__ == "__main__":
    main()
