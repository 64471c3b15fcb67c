"""Tables of `megatrl plan` for people."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from megatrl.cli.tables import print_table
from megatrl.config.estimate.memory import COMPONENTS
from megatrl.config.estimate.plan import Plan
from megatrl.config.estimate.published import Comparison

GIB = 1024**3
MAX_RANKS = 64
"""Rows of the table of ranks; --json has all."""


def show_plan(plan: Plan, *, title: str) -> None:
    """Print ranks, memory, time, what does not fit and what would, and the assumptions."""
    degrees = plan.degrees
    print(
        f"{title}: {plan.model}, {_count(plan.num_parameters)} parameters, {_count(plan.num_active_parameters)} active"
    )
    print(
        f"layout: {degrees.world_size} ranks = tensor {degrees.tensor} x context {degrees.context} x data "
        f"{degrees.data} x pipeline {degrees.pipeline}; experts: tensor {degrees.expert_tensor} x expert "
        f"{degrees.expert} x data {degrees.expert_shards}\n"
    )
    print_table(_ranks(plan))
    print_table(_memory(plan))
    _print_serving(plan)
    print_table(_time(plan))
    time = plan.time
    print(
        f"one step {_seconds(time.step_s)}, {time.num_steps} steps {time.step_s * time.num_steps / 3600:.1f} h on "
        f"{time.num_devices} devices: {time.device_hours:.0f} device hours\n"
    )
    for assumption in plan.assumptions:
        print(f"assumed: {assumption}")
    print("fits" if plan.fits else "does not fit:")
    for problem in plan.memory.problems:
        print(f"- {problem}")
    if not plan.fits:
        _print_proposals(plan)


def show_published(rows: Sequence[Comparison]) -> None:
    """Print published numbers, ours, and the deviation."""
    table = _table(
        "published throughput of Qwen3-30B-A3B", "row", "settings", "unit", "published", "ours", "deviation", "use"
    )
    for row in rows:
        table.add_row(
            row.name,
            row.settings,
            row.unit,
            f"{row.published:.0f}",
            f"{row.predicted:.0f}",
            f"{row.deviation:+.0%}",
            row.use,
        )
    print_table(table)
    for source in dict.fromkeys(row.source for row in rows):
        print(f"source: {source}")


def _print_proposals(plan: Plan) -> None:
    if not plan.proposals:
        print("no change of up to three settings was found that would fit; use more or larger devices")
        return
    print("any one of these would fit:")
    for proposal in plan.proposals:
        fullest = max(proposal.memory.phases, key=lambda phase: phase.total / phase.limit)
        peak = f"{fullest.phase}: {fullest.total / GIB:.1f} of {fullest.limit / GIB:.1f} GiB"
        print(f"  {proposal.change.settings()}   ({peak})")


def _print_serving(plan: Plan) -> None:
    serving = plan.memory.serving
    print(
        f"key-value cache of one server: {max(0, serving.cache_tokens)} tokens; all its concurrent episodes at their "
        f"longest would take {serving.wanted_tokens}"
    )
    if serving.cache_tokens < serving.wanted_tokens:
        print("where it overflows SGLang retracts requests and prefills them again")
    if plan.memory.host_bytes_per_rank:
        print(f"host memory beside each GPU rank: {plan.memory.host_bytes_per_rank / GIB:.1f} GiB (not checked)")
    print()


def _ranks(plan: Plan) -> Table:
    names = (
        "rank",
        "node",
        "GPU",
        "tensor",
        "context",
        "data",
        "pipeline",
        "expert",
        "expert tensor",
        "expert data",
        "layers",
    )
    table = _table("ranks", *names)
    for rank in plan.ranks[:MAX_RANKS]:
        layers = ", ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in rank.layers)
        values = (
            rank.rank, rank.node, rank.device, rank.tensor, rank.context, rank.data, rank.pipeline, rank.expert,
            rank.expert_tensor, rank.expert_data,
        )  # fmt: skip
        table.add_row(*map(str, values), layers)
    if len(plan.ranks) > MAX_RANKS:
        table.caption = f"the first {MAX_RANKS} of {len(plan.ranks)} ranks"
    return table


def _memory(plan: Plan) -> Table:
    used = [name for name in COMPONENTS if any(name in phase.parts for phase in plan.memory.phases)]
    table = _table("memory in GiB (M: MiB)", "device", "phase", *used, "total", "of", "")
    for phase in plan.memory.phases:
        parts = [_gib(phase.parts[name]) if name in phase.parts else "-" for name in used]
        verdict = "fits" if phase.fits else "too much"
        table.add_row(phase.pool, phase.phase, *parts, _gib(phase.total), _gib(phase.limit), verdict)
    return table


def _time(plan: Plan) -> Table:
    table = _table("time of one step", "verb", "what", "seconds", "share", "bound by")
    for row in plan.time.rows:
        table.add_row(row.verb, row.what, _seconds(row.seconds), f"{row.seconds / plan.time.step_s:.0%}", row.bound)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB // 100 else f"{size / 2**20:.1f}M"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number:,}"
