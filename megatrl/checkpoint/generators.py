"""The random generators of one rank, and which save they belong to: one small file for each rank."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatrl.errors import DamagedCheckpointError

_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, KeyError)


def rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.pt"


def write_generators(path: Path, *, device: str, save_id: str, parameter_hash: str) -> None:
    """Stores the state of torch's, CUDA's, Megatron's, Python's and numpy's generators of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device == "cuda" else None,
        "megatron": dict(_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
        "parameter_hash": parameter_hash,
        "save_id": save_id,
    }
    torch.save(state, path)


def read_generators(path: Path) -> dict[str, Any]:
    """What `write_generators` stored. Raises DamagedCheckpointError where it is missing or not readable."""
    try:
        state = torch.load(path, weights_only=True)
        return {name: state[name] for name in (*_GENERATORS, "parameter_hash", "save_id")}
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path.name} (random generators) is missing") from error
    except _UNREADABLE as error:
        raise DamagedCheckpointError(f"{path.name} (random generators) is not readable: {error!r:.200}") from error


def restore_generators(state: dict[str, Any]) -> None:
    """Sets this process's generators to a state that `read_generators` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


_GENERATORS = ("torch", "cuda", "megatron", "python", "numpy")


def _tracker() -> Any:
    return get_cuda_rng_tracker()
