"""What is compared with the oracle: layouts x model kinds, and how each world of processes runs its rows.

`python layout_rows.py` prints the table of docs/layouts.md.
"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import make_case
from world import run_world

COMPARED = ("logprobs", "loss", "grad_norm", "parameters", "queries")

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "moe": ("qwen3_moe", {}),
    "moe raw weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "moe one sample": ("qwen3_moe", {"num_samples": 1, "num_minibatches": 1}),
    "qwen3": ("qwen3", {"head_dim": 12}),  # 4 heads of 12 on a hidden size of 32
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 six layers": ("qwen3", {"num_hidden_layers": 6}),
    "qwen3 one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "llama3": ("llama3", {}),
    "llama3 tied": ("llama3", {"tie_word_embeddings": True}),
}

ONE: dict[str, Any] = {}
TP2 = {"tensor": 2, "sequence_parallel": True}
TP4 = {"tensor": 4, "sequence_parallel": True}
PP2, PP4, VPP2 = {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "virtual_pipeline": 2}
CP2, CP4, EP2, EP4 = {"context": 2}, {"context": 4}, {"expert": 2}, {"expert": 4}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout on one model; `options` are those of `oracle_rank.compare`."""

    world: int
    label: str
    layout: dict[str, Any]
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ", ".join([self.label, self.model, *(f"{key}={value}" for key, value in self.options.items())])


def _row(world: int, label: str, layout: dict[str, Any], model: str, **options: Any) -> Row:
    return Row(world=world, label=label, layout={"world_size": world, **layout}, model=model, options=options)


ROWS = [
    *(_row(1, "one process", ONE, model) for model in MODELS),
    _row(1, "one process", ONE, "moe", microbatch_tokens=1),
    _row(1, "one process", ONE, "moe", microbatch_tokens=100_000),
    _row(1, "one process", ONE, "moe", reorder=True),
    _row(1, "one process", ONE, "moe", distributed_optimizer=False),
    _row(1, "one process", ONE, "moe", recompute="full"),
    _row(1, "one process", ONE, "qwen3", recompute="selective"),
    *(_row(2, "TP2+SP", TP2, model) for model in ("moe", "moe tied", "qwen3", "llama3", "qwen3 one KV head")),
    _row(2, "TP2+SP", TP2, "moe", recompute="full"),
    _row(2, "TP2", {"tensor": 2}, "qwen3", distributed_optimizer=False),
    _row(2, "TP2", {"tensor": 2}, "qwen3 one KV head"),
    _row(2, "TP2+SP, ETP1", TP2 | {"expert_tensor": 1}, "moe"),
    _row(2, "TP2+SP, ETP1", TP2 | {"expert_tensor": 1}, "moe", distributed_optimizer=False),
    _row(2, "TP2+SP x EP2, ETP1", TP2 | EP2, "moe"),
    _row(2, "ETP2", {"expert_tensor": 2}, "moe"),
    _row(2, "PP2", PP2, "moe"),
    _row(2, "PP2", PP2, "llama3"),
    _row(2, "PP2", PP2, "qwen3 tied"),
    _row(2, "PP2, 1 + 3 layers", PP2 | {"first_stage_layers": 1}, "moe"),
    _row(2, "PP2, 3 + 1 layers", PP2 | {"last_stage_layers": 1}, "llama3 tied"),
    _row(2, "PP2 x VPP2", VPP2, "moe"),
    _row(2, "PP2 x VPP2", VPP2, "qwen3 tied", microbatch_tokens=1),
    _row(2, "PP2 x VPP2", VPP2, "moe", recompute="full"),
    _row(2, "PP2 x VPP2", VPP2, "moe one sample"),
    _row(2, "PP2 x VPP2, 4 + 2 layers", VPP2 | {"first_stage_layers": 4}, "qwen3 six layers"),
    *(_row(2, "CP2", CP2, model) for model in ("moe", "qwen3", "llama3 tied", "moe one sample")),
    _row(2, "CP2", CP2, "moe", microbatch_tokens=1),
    _row(2, "CP2", CP2, "moe", reorder=True, distributed_optimizer=False),
    _row(2, "CP2", CP2, "qwen3", recompute="full"),
    _row(2, "CP2", CP2, "qwen3", recompute="selective"),
    _row(2, "CP2 x EP2", CP2 | EP2, "moe"),
    _row(2, "EP2", EP2, "moe"),
    _row(2, "EP2", EP2, "moe", distributed_optimizer=False),
    _row(2, "EP2", EP2, "moe one sample"),
    _row(2, "DP2", ONE, "moe"),
    _row(2, "DP2", ONE, "moe one sample"),
    _row(4, "TP2+SP x PP2", TP2 | PP2, "moe"),
    _row(4, "TP2+SP x PP2", TP2 | PP2, "moe tied"),
    _row(4, "TP2+SP x PP2 x VPP2", TP2 | VPP2, "moe"),
    _row(4, "TP2+SP x PP2 x VPP2", TP2 | VPP2, "llama3 tied"),
    _row(4, "TP4+SP, 2 KV heads", TP4, "qwen3"),
    _row(4, "TP4, 2 KV heads", {"tensor": 4}, "llama3"),
    _row(4, "TP4+SP, 2 KV heads", TP4, "moe"),
    _row(4, "TP2+SP x EP2, ETP2", TP2 | EP2 | {"expert_tensor": 2}, "moe"),
    _row(4, "TP2+SP x EP4, ETP1", TP2 | EP4, "moe"),
    _row(4, "PP2 x EP2", PP2 | EP2, "moe"),
    _row(4, "PP4, 1 + 2 + 2 + 1 layers", PP4 | {"first_stage_layers": 1, "last_stage_layers": 1}, "qwen3 six layers"),
    _row(4, "CP2 x TP2+SP", CP2 | TP2, "moe"),
    _row(4, "CP2 x TP2+SP", CP2 | TP2, "llama3"),
    _row(4, "CP2 x PP2", CP2 | PP2, "qwen3 tied"),
    _row(4, "CP2 x PP2 x VPP2", CP2 | VPP2, "moe"),
    _row(4, "CP2 x DP2", CP2, "moe"),
    _row(4, "CP4", CP4, "qwen3"),
    _row(4, "EP4", EP4, "moe"),
    _row(4, "DP4", ONE, "moe"),
]


def write_cases(base: Path) -> dict[str, str]:
    """Returns model -> the file of its case, written by the oracle."""
    return {
        name: str(make_case(base / name.replace(" ", "-"), kind, **options)) for name, (kind, options) in MODELS.items()
    }


def measure(world: int, cases: dict[str, str], out: Path, *, timeout_s: float) -> dict[str, list[dict[str, float]]]:
    """Returns row name -> what each rank found, of all rows of a world; its processes start once."""
    rows = [row for row in ROWS if row.world == world]
    runs = [{"case": cases[row.model], "layout": row.layout, **row.options} for row in rows]
    ranks = run_world("oracle_rank.py", world, {"runs": runs}, out, timeout_s=timeout_s)
    return {row.name: [rank[index] for rank in ranks] for index, row in enumerate(rows)}


def table(measured: dict[str, list[dict[str, float]]]) -> str:
    """Returns the largest deviations over ranks, for each layout over its models and options, in Markdown."""
    lines = [
        "| processes | layout | models | logprobs | loss | gradient norm | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for world, label in dict.fromkeys((row.world, row.label) for row in ROWS if row.name in measured):
        rows = [row for row in ROWS if (row.world, row.label) == (world, label)]
        models = ", ".join(dict.fromkeys(row.model for row in rows))
        worst = {name: max(rank[name] for row in rows for rank in measured[row.name]) for name in COMPARED}
        worst["logprobs"] = max(worst["logprobs"], worst["queries"])
        cells = [f"{worst[name]:.1e}" for name in COMPARED[:4]]
        lines.append(f"| {world} | {label} | {models} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        cases = write_cases(base / "cases")
        measured: dict[str, list[dict[str, float]]] = {}
        for world in sorted({row.world for row in ROWS}):
            measured |= measure(world, cases, base / f"world{world}", timeout_s=900.0)
        sys.stdout.write(table(measured) + "\n")


if __name__ == "__main__":
    main()
