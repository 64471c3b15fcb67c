"""Seeds of single requests, so that a run's samples do not depend on the order in which episodes run."""

import hashlib

from megatrl.data.trajectories import TrajectoryId


def sampling_seed(run_seed: int, trajectory: TrajectoryId, turn: int) -> int:
    """A 63-bit number: a pure function of (run seed, group, index, attempt, turn)."""
    text = f"{run_seed}/{trajectory.group_id}/{trajectory.index}/{trajectory.attempt}/{turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
