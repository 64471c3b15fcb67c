"""Tokens that ranks spend time on for each token of the batch, and how even attention is: packing methods compared."""

from collections.abc import Sequence
from typing import Any

from benchmarks.workload import lognormal_lengths
from megatrl.batching.bins import balanced_bins, computed_tokens, longest_first

Dealt = list[list[list[int]]]
"""[rank][microbatch] of indices."""

NUM_SEEDS = 8


def packing_efficiency(*, num_samples: int, median: int, longest: int, capacity: int) -> list[dict[str, Any]]:
    """Rows of data ranks x method: the mean and the worst over seeds of computed / real tokens.

    `attention` is the same ratio for the sum of squared lengths, which attention's time follows: the busiest rank
    against the mean rank. A method without balance has more microbatches where its bins do not fill.
    """
    rows = []
    for num_ranks in (2, 4, 8):
        for name, method in {"largest differencing": _balanced, "longest first": _longest, "first fit": _first}.items():
            ratios, attentions, counts = [], [], []
            for seed in range(NUM_SEEDS):
                lengths = lognormal_lengths(num_samples, median=median, longest=longest, seed=seed)
                dealt = method(lengths, num_ranks, capacity)
                ratios.append(computed_tokens(dealt, lengths) / sum(lengths))
                squares = [sum(lengths[i] ** 2 for bin in rank for i in bin) for rank in dealt]
                attentions.append(max(squares) * num_ranks / sum(squares))
                counts.append(len(dealt[0]))
            rows.append(
                {
                    "data_ranks": num_ranks,
                    "method": name,
                    "microbatches": max(counts),
                    "computed_over_real_mean": sum(ratios) / NUM_SEEDS,
                    "computed_over_real_worst": max(ratios),
                    "attention_busiest_over_mean": max(attentions),
                }
            )
    return rows


def _balanced(lengths: Sequence[int], num_ranks: int, capacity: int) -> Dealt:
    return balanced_bins(lengths, num_ranks, capacity)


def _longest(lengths: Sequence[int], num_ranks: int, capacity: int) -> Dealt:
    """Longest first alone, its bins dealt to the ranks in turn."""
    count = len(balanced_bins(lengths, num_ranks, capacity)[0])
    bins = longest_first(lengths, count * num_ranks)
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _first(lengths: Sequence[int], num_ranks: int, capacity: int) -> Dealt:
    """First fit in order of arrival, dealt in turn: packing without balance."""
    bins: list[list[int]] = []
    filled: list[int] = []
    for i, length in enumerate(lengths):
        place = next((b for b, total in enumerate(filled) if total + length <= capacity), None)
        if place is None:
            bins.append([i])
            filled.append(length)
        else:
            bins[place].append(i)
            filled[place] += length
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]
