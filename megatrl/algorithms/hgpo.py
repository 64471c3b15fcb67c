"""HGPO: advantages from nested clusters of equal recent history (arXiv 2602.22817)."""

from collections.abc import Sequence

import numpy as np

from megatrl.algorithms.group_statistics import normalize
from megatrl.data.samples import FloatArray

STD_EPS = 1e-6
WEIGHT_EPS = 1e-6


def history_advantages(
    returns: Sequence[FloatArray],
    observation_keys: Sequence[Sequence[str]],
    *,
    history: int,
    alpha: float,
    trajectory_advantages: Sequence[float] | None = None,
) -> list[FloatArray]:
    """Returns one [K_i] for each trajectory of a prompt group.

    Level k = 1..history+1 clusters the actions whose last k observations are equal and normalises
    their returns (population std, 0 in a cluster of one). An action that has seen fewer than k
    observations has no level k. The levels with a non-zero advantage are combined:

        A = sum_k (k+1)^alpha A_k / (sum_k (k+1)^alpha + 1e-6)

    `trajectory_advantages`, where given, are level 0 (HGPO's base group).
    """
    totals = [np.zeros(len(r)) for r in returns]
    weights = [np.zeros(len(r)) for r in returns]
    if trajectory_advantages is not None:
        for i, advantage in enumerate(trajectory_advantages):
            if advantage != 0:
                totals[i] += advantage
                weights[i] += 1.0
    for level in range(1, history + 2):
        weight = float(level + 1) ** alpha
        for cluster in _clusters(observation_keys, level):
            values = normalize([returns[i][k] for i, k in cluster], std="population", norm_std=True, eps=STD_EPS)
            for (i, k), value in zip(cluster, values, strict=True):
                if value != 0:
                    totals[i][k] += weight * value
                    weights[i][k] += weight
    return [total / (weight + WEIGHT_EPS) for total, weight in zip(totals, weights, strict=True)]


def _clusters(observation_keys: Sequence[Sequence[str]], level: int) -> list[list[tuple[int, int]]]:
    clusters: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for i, keys in enumerate(observation_keys):
        for k in range(level - 1, len(keys)):
            recent = tuple(keys[k - level + 1 : k + 1])
            if all(recent):  # an observation without a key equals nothing, not even itself
                clusters.setdefault(recent, []).append((i, k))
    return list(clusters.values())
