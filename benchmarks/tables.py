"""The result of `benchmarks.actor` for people."""

from typing import Any


def readable(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    speed = result["speed"]
    lines = [
        f"One optimizer step: {speed['tokens']} tokens, {speed['action_tokens']} of them actions, "
        f"{speed['sequences']} sequences in {speed['microbatches']} packs; medians of {speed['repeats']}.",
        "",
        *_table(
            ["", "wall s", "processor s"],
            [[name, f"{clock['wall']:.3f}", f"{clock['cpu']:.3f}"] for name, clock in speed["median_s"].items()],
        ),
        "",
        f"Step, ours / bare: {speed['step_ratio']['wall']:.3f} by wall time, {speed['step_ratio']['cpu']:.3f} by "
        f"processor time. Log-probabilities, ours / bare: {speed['logprobs_ratio']['wall']:.3f}, "
        f"{speed['logprobs_ratio']['cpu']:.3f}.",
        "",
        *_table(
            ["data ranks", "packing", "microbatches", "computed / real, mean", "worst", "attention, busiest / mean"],
            [
                [
                    str(row["data_ranks"]),
                    row["method"],
                    str(row["microbatches"]),
                    f"{row['computed_over_real_mean']:.4f}",
                    f"{row['computed_over_real_worst']:.4f}",
                    f"{row['attention_busiest_over_mean']:.3f}",
                ]
                for row in result["packing"]
            ],
        ),
    ]
    for title, part in (("logits", "logit_memory"), ("recompute", "recompute_memory")):
        columns = ["resident_growth_mib", "alive_peak_mib", "largest_tensor_mib"]
        rows = [[name, *(f"{seen[column]:.1f}" for column in columns)] for name, seen in result[part].items()]
        lines += ["", *_table([title, "resident growth MiB", "tensors alive, peak MiB", "largest tensor MiB"], rows)]
    return "\n".join(lines)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
