"""The actor's complete state on disk: weights, optimizer, and every rank's random generators.

Weights and optimizer go through Megatron's dist_checkpointing in its fully reshardable form, so tensor and
pipeline degrees may change between save and load. The generators are one file a rank.
"""

import dataclasses
import json
import logging
import queue
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatrl.actor.worker import ActorWorker
from megatrl.checkpoint.atomic import write_text_atomically
from megatrl.errors import CheckpointError
from megatrl.mcore import layout as layouts
from megatrl.mcore.model import unwrap

logger = logging.getLogger(__name__)

_FORMAT = 1
_DESCRIPTION = "actor.json"
_SHARDS = "shards"
_DEGREES = ("world_size", "tensor", "pipeline", "expert", "data")
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_FAILURES = (CheckpointingException, CheckpointException, RuntimeError, ValueError, KeyError, OSError)


def save_actor_state(actor: ActorWorker, directory: Path) -> None:
    """Write this actor's state into `directory`, which every rank sees under this path.

    Collective over all ranks. Raises CheckpointError on the ranks that know of a failure. Not atomic by
    itself: `CheckpointStore.writing` gives a directory that becomes visible only when all has been written.
    """
    layouts.activate(actor.layout.device)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _SHARDS).mkdir(exist_ok=True)
        dist.barrier()
        with _written_by_this_process():
            has_moments = _has_moments(actor)
            dist_checkpointing.save(
                _sharded_state(actor, is_loading=False, with_optimizer=has_moments),
                str(directory / _SHARDS),
                get_default_save_sharded_strategy("torch_dist"),
            )
        torch.save(_rank_state(actor), _rank_file(directory, actor.layout.rank))
        if actor.layout.rank == 0:
            write_text_atomically(
                directory / _DESCRIPTION, json.dumps(_description(actor) | {"has_moments": has_moments})
            )
        dist.barrier()
    except _FAILURES as error:
        raise CheckpointError(
            f"rank {actor.layout.rank} did not write the actor's state to {directory}: {type(error).__name__}: {error}"
        ) from error


def load_actor_state(actor: ActorWorker, directory: Path) -> None:
    """Replace weights, optimizer state and random generators by those in `directory`.

    Collective over all ranks. With the layout of the save the next steps are bit for bit those of the
    uninterrupted run. With other tensor or pipeline degrees weights and optimizer are restored and the generators are
    left alone, with a warning. Raises CheckpointError, before anything is changed, for another precision or
    optimizer, for a change between one and several expert-parallel ranks, and for missing state.
    """
    layouts.activate(actor.layout.device)
    saved = _read_description(directory)
    is_same_layout = _check_compatible(saved, _description(actor), directory)
    if saved["has_moments"]:
        _make_room_for_moments(actor)
    try:
        state: dict[str, Any] = dist_checkpointing.load(  # pyright: ignore[reportAssignmentType]
            _sharded_state(actor, is_loading=True, with_optimizer=saved["has_moments"]),
            str(directory / _SHARDS),
            strict=StrictHandling.RAISE_ALL,
        )
        for key, model in _keyed_models(actor):
            model.load_state_dict(state[key], strict=True)
        if saved["has_moments"]:
            actor.optimizer.load_state_dict(state["optimizer"])
        else:
            actor.reset_optimizer(actor.optimizer_config, num_steps=actor.scheduler.num_steps)
    except _FAILURES as error:
        raise CheckpointError(
            f"rank {actor.layout.rank} cannot load the actor's state in {directory}: {type(error).__name__}: {error}"
        ) from error
    if is_same_layout:
        _restore_rank_state(actor, _rank_file(directory, actor.layout.rank))
    else:
        logger.warning("actor state was saved with %s; random generators are not restored", saved["layout"])
    logger.info("actor state loaded directory=%s rank=%d", directory, actor.layout.rank)


def _keyed_models(actor: ActorWorker) -> list[tuple[str, torch.nn.Module]]:
    # Without the data-parallel wrapper, which would prefix every name with "module.".
    models = [unwrap(model) for model in actor.models]
    return [("model" if len(models) == 1 else f"model{place}", model) for place, model in enumerate(models)]


def _has_moments(actor: ActorWorker) -> bool:
    """False before the first optimizer step, on every rank alike. Megatron cannot write a state that is not there."""
    has_state = any(bool(part.optimizer.state) for part in actor.optimizer.chained_optimizers)  # type: ignore[attr-defined]
    answer = torch.tensor([float(has_state)], device=actor.layout.torch_device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return bool(answer.item())


def _make_room_for_moments(actor: ActorWorker) -> None:
    """Zero moments where there are none yet: Megatron's distributed optimizer loads only into existing state."""
    for part in actor.optimizer.chained_optimizers:  # type: ignore[attr-defined]
        if not isinstance(part, DistributedOptimizer) or part.optimizer is None or part.optimizer.state:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(0.0)


def _sharded_state(actor: ActorWorker, *, is_loading: bool, with_optimizer: bool) -> dict[str, Any]:
    state: dict[str, Any] = {key: model.sharded_state_dict() for key, model in _keyed_models(actor)}  # type: ignore[operator]
    if with_optimizer:
        state["optimizer"] = actor.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return state


def _description(actor: ActorWorker) -> dict[str, Any]:
    layout = dataclasses.asdict(actor.layout)
    return {
        "format": _FORMAT,
        "precision": actor.spec.actor.precision,
        "distributed_optimizer": actor.spec.actor.distributed_optimizer,
        "layout": {name: layout[name] for name in _DEGREES},
    }


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / _DESCRIPTION
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} holds no actor state ({_DESCRIPTION} is missing). Weights alone cannot be resumed: start a "
            "new run from them with model.path"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable: {error}") from error
    if saved.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is of format {saved.get('format')}, this version reads format {_FORMAT}")
    return saved


def _check_compatible(saved: dict[str, Any], present: dict[str, Any], directory: Path) -> bool:
    """True where the layouts are equal; raises where the state cannot be carried over."""
    for name in ("precision", "distributed_optimizer"):
        if saved[name] != present[name]:
            raise CheckpointError(
                f"actor state in {directory} was saved with actor.{name}={saved[name]}, this run has {present[name]}; "
                f"set actor.{name} to the former"
            )
    was, now = saved["layout"], present["layout"]
    if (was["expert"] > 1) != (now["expert"] > 1):
        # Megatron chains a second optimizer for experts only with several expert ranks (0.16.1).
        raise CheckpointError(
            f"actor state in {directory} was saved with actor.layout.expert={was['expert']}, this run has "
            f"{now['expert']}; Megatron's optimizer state does not move between one and several expert ranks. Keep the "
            "former, or export the weights and start a new run from them"
        )
    return was == now


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.pt"


def _rank_state(actor: ActorWorker) -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if actor.layout.device == "cuda" else None,
        "megatron": dict(_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
        "parameter_hash": actor.parameter_hash(),
    }


def _tracker() -> Any:
    return get_cuda_rng_tracker()


def _restore_rank_state(actor: ActorWorker, path: Path) -> None:
    try:
        state = torch.load(path, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"random generators of rank {actor.layout.rank}, {path}, not readable: {error}"
        ) from error
    if state["parameter_hash"] != actor.parameter_hash():
        raise CheckpointError(
            f"the weights of rank {actor.layout.rank} after loading {path.parent} are not the saved ones; "
            "the shards belong to another save, or megatron-core changed how it loads them"
        )
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


@contextmanager
def _written_by_this_process() -> Iterator[None]:
    """Megatron's writer without its child processes, for a save that is waited for anyway.

    Upstream (0.16.1) forks writers and spawns a queue server that imports the main module again. Forking a
    process that has gloo, NCCL or Ray threads can deadlock, and the spawned import takes seconds.
    """
    writer: Any = filesystem_async.FileSystemWriterAsync
    upstream, upstream_queue = writer.write_preloaded_data_multiproc, filesystem_async._results_queue
    writer.write_preloaded_data_multiproc = staticmethod(_write_buckets)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        writer.write_preloaded_data_multiproc = staticmethod(upstream)
        filesystem_async._results_queue = upstream_queue


def _write_buckets(
    transforms: list[Any], use_msc: bool, rank: int, write_buckets: Sequence[Any], results: "queue.Queue[Any]"
) -> None:
    """Stands in for FileSystemWriterAsync.write_preloaded_data_multiproc: bucket number -> results, or the error."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(write_buckets):
        outcome: Any = queue.Queue()
        pending: Any = queue.Queue()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcome, pending, True)
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            results.put(result)
            return
        written[number] = result
    results.put(written)
