"""GiGPO: advantages of actions taken from the same observation (arXiv 2505.10978)."""

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from megatrl.algorithms.group_statistics import normalize
from megatrl.data.samples import FloatArray

STD_EPS = 1e-6


def anchor_clusters(observation_keys: Sequence[Sequence[str]], similarity: float = 1.0) -> list[list[tuple[int, int]]]:
    """Returns the (trajectory, turn) places of one prompt group, clustered by the observation acted on.

    Clusters form across and within trajectories. Below 1, `similarity` is the least
    `SequenceMatcher.ratio` to a cluster's first member; a place joins the first cluster that fits.
    A place without an observation key has no anchor and stays alone.
    """
    clusters: list[list[tuple[int, int]]] = []
    representatives: list[str] = []
    by_key: dict[str, int] = {}
    for i, keys in enumerate(observation_keys):
        for k, key in enumerate(keys):
            found = _find(key, representatives, by_key, similarity) if key else None
            if found is None:
                clusters.append([])
                representatives.append(key)
                found = len(clusters) - 1
            if key:
                by_key.setdefault(key, found)
            clusters[found].append((i, k))
    return clusters


def step_advantages(
    returns: Sequence[FloatArray],
    observation_keys: Sequence[Sequence[str]],
    *,
    mean_std_norm: bool,
    similarity: float = 1.0,
) -> list[FloatArray]:
    """Returns A_S, one [K_i] for each trajectory of a prompt group; 0 where a cluster has one member.

    A_S = (return - cluster mean) / (sample std + 1e-6), without the division if not `mean_std_norm`.
    """
    advantages = [np.zeros(len(r)) for r in returns]
    for cluster in anchor_clusters(observation_keys, similarity):
        values = normalize([returns[i][k] for i, k in cluster], std="bessel", norm_std=mean_std_norm, eps=STD_EPS)
        for (i, k), value in zip(cluster, values, strict=True):
            advantages[i][k] = value
    return advantages


def _find(key: str, representatives: Sequence[str], by_key: dict[str, int], similarity: float) -> int | None:
    if similarity >= 1 or key in by_key:
        return by_key.get(key)
    for index, representative in enumerate(representatives):
        if representative and SequenceMatcher(None, key, representative).ratio() >= similarity:
            return index
    return None
