"""The actor's complete state on disk: weights, optimizer, and every rank's random generators.

Weights and optimizer go through Megatron's dist_checkpointing in its fully reshardable form, so every parallel
degree and the number of processes may change between save and load. The generators are one file a rank.
"""

import dataclasses
import json
import logging
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatrl.actor.worker import ActorWorker
from megatrl.checkpoint.atomic import write_text_atomically
from megatrl.checkpoint.generators import rank_file, read_generators, restore_generators, write_generators
from megatrl.checkpoint.shard_check import find_damage, raise_damage, save_id_entry
from megatrl.checkpoint.shard_writer import ShardWrite
from megatrl.errors import CheckpointError, DamagedCheckpointError
from megatrl.mcore import layout as layouts
from megatrl.mcore.model import unwrap

logger = logging.getLogger(__name__)

_FORMAT = 2
_DESCRIPTION = "actor.json"
_SHARDS = "shards"
_FIELDS = ("format", "precision", "distributed_optimizer", "layout", "has_moments", "save_id")
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_FAILURES = (CheckpointingException, CheckpointException, RuntimeError, ValueError, KeyError, OSError)


class ActorSave:
    """One rank's part of a save: captured when made, on disk when `finish` has returned.

    Making one is collective over all ranks, and so is `finish`. What is written is the state at the call, also
    where `in_background` lets training go on at once: then weights and optimizer state are copied to host memory
    first. Not atomic by itself: `CheckpointStore` gives a directory that becomes visible when all has been written.
    Raises CheckpointError on the ranks that know of a failure.
    """

    def __init__(self, actor: ActorWorker, directory: Path, *, in_background: bool = False) -> None:
        """`directory` is the same for every rank."""
        self._rank, self._directory = actor.layout.rank, directory
        layouts.activate(actor.layout.device)
        try:
            self._begin(actor, in_background)
        except _FAILURES as error:
            raise self._failed(error) from error

    def wait(self, timeout_s: float) -> bool:
        """Whether this rank's files are there, after at most `timeout_s`. Not collective."""
        return self._shards.wait(timeout_s)

    def finish(self) -> None:
        """Completes the save where all ranks' files are there; raises CheckpointError on all ranks where not."""
        try:
            self._shards.finish()
        except _FAILURES as error:
            raise self._failed(error) from error

    def _begin(self, actor: ActorWorker, in_background: bool) -> None:
        directory, shards = self._directory, self._directory / _SHARDS
        shards.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        has_moments, save_id = _has_moments(actor), _agreed_id()
        state = _sharded_state(actor, is_loading=False, with_optimizer=has_moments)
        state["save_id"] = save_id_entry(save_id, rank=self._rank, world_size=actor.layout.world_size)
        self._shards = ShardWrite(state, shards, device=actor.layout.torch_device, in_background=in_background)
        write_generators(
            rank_file(directory, self._rank),
            device=actor.layout.device,
            save_id=save_id,
            parameter_hash=actor.parameter_hash(),
        )
        if self._rank == 0:
            description = _description(actor) | {"has_moments": has_moments, "save_id": save_id}
            write_text_atomically(directory / _DESCRIPTION, json.dumps(description))

    def _failed(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"rank {self._rank} did not write the actor's state to {self._directory}: {_reason(error)}"
        )


def _reason(error: BaseException) -> str:
    """One line; torch's own text is a traceback for each rank that failed, and none on the ranks that did not."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    failed = [f"rank {rank}: {wrapped[0]}" for rank, wrapped in error.failures.items()]
    return "; ".join(failed) or "another rank failed"


def save_actor_state(actor: ActorWorker, directory: Path) -> None:
    """Writes this actor's state into `directory`, complete on return. Collective; see `ActorSave`."""
    ActorSave(actor, directory).finish()


def check_actor_state(actor: ActorWorker, directory: Path) -> None:
    """Raises where `load_actor_state` would, as far as that shows without loading. Collective over all ranks.

    DamagedCheckpointError, with every rank's findings, where files are missing, cut, or of different saves;
    CheckpointError where this run's precision or optimizer is not the saved one. Changes nothing.
    """
    saved = _read_description(directory)
    problems = find_damage(
        directory / _SHARDS,
        save_id=saved["save_id"],
        num_ranks=saved["layout"]["world_size"],
        has_moments=saved["has_moments"],
        share=(actor.layout.rank, actor.layout.world_size),
    )
    if saved["layout"] == _description(actor)["layout"]:
        problems += _generator_problems(directory, actor.layout.rank, saved["save_id"])
    every: list[list[str]] = [[]] * actor.layout.world_size
    dist.all_gather_object(every, problems)  # a rank that raised alone would leave the others in a collective
    raise_damage(directory, list(dict.fromkeys(problem for rank in every for problem in rank)))
    _check_compatible(saved, _description(actor), directory)


def load_actor_state(actor: ActorWorker, directory: Path) -> None:
    """Replaces weights, optimizer state and random generators by those in `directory`.

    Collective over all ranks. With the layout of the save the next steps are bit for bit those of the
    uninterrupted run. With another one weights and optimizer are restored and the generators are left alone, with
    a warning. Raises what `check_actor_state` raises, before anything is changed.
    """
    layouts.activate(actor.layout.device)
    check_actor_state(actor, directory)
    saved = _read_description(directory)
    if saved["has_moments"]:
        _make_room_for_moments(actor)
    rank, world_size, saved_ranks = actor.layout.rank, actor.layout.world_size, saved["layout"]["world_size"]
    wanted = _sharded_state(actor, is_loading=True, with_optimizer=saved["has_moments"])
    wanted["save_id"] = [
        save_id_entry(None, rank=each, world_size=saved_ranks) for each in range(rank, saved_ranks, world_size)
    ]
    try:
        state: dict[str, Any] = dist_checkpointing.load(  # pyright: ignore[reportAssignmentType]
            wanted, str(directory / _SHARDS), strict=StrictHandling.RAISE_ALL
        )
        for key, model in _keyed_models(actor):
            model.load_state_dict(state[key], strict=True)
        if saved["has_moments"]:
            actor.optimizer.load_state_dict(state["optimizer"])
        else:
            actor.reset_optimizer(actor.optimizer_config, num_steps=actor.scheduler.num_steps)
    except _FAILURES as error:
        raise CheckpointError(
            f"rank {rank} cannot load the actor's state in {directory}: {type(error).__name__}: {error}"
        ) from error
    was, now = saved["layout"], _description(actor)["layout"]
    if was == now:
        _restore_rank(actor, directory)
    else:
        changes = ", ".join(f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name])
        logger.warning("actor state of another layout (%s): random generators are not restored", changes)
    logger.info("actor state loaded directory=%s rank=%d", directory, rank)


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


def _agreed_id() -> str:
    """A name for this save that no other save has; rank 0 chooses."""
    choice = [uuid.uuid4().hex]
    dist.broadcast_object_list(choice, src=0)
    return choice[0]


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
    degrees = {
        name: value
        for name, value in dataclasses.asdict(actor.layout).items()
        if name != "device" and not name.endswith("rank")
    }
    return {
        "format": _FORMAT,
        "precision": actor.spec.actor.precision,
        "distributed_optimizer": actor.spec.actor.distributed_optimizer,
        "layout": json.loads(json.dumps(degrees)),  # as it reads after a way through a file
    }


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / _DESCRIPTION
    try:
        saved = json.loads(path.read_text())
        if saved["format"] == _FORMAT:
            return {name: saved[name] for name in _FIELDS}
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            f"{directory} holds no actor state ({_DESCRIPTION} is missing). Weights alone cannot be resumed: start a "
            "new run from them with model.path"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is not readable: {error!r}") from error
    raise DamagedCheckpointError(f"{path} is of format {saved['format']}, this version reads format {_FORMAT}")


def _check_compatible(saved: dict[str, Any], present: dict[str, Any], directory: Path) -> None:
    for name in ("precision", "distributed_optimizer"):
        if saved[name] != present[name]:
            raise CheckpointError(
                f"actor state in {directory} was saved with actor.{name}={saved[name]}, this run has {present[name]}; "
                f"set actor.{name} to the former"
            )


def _generator_problems(directory: Path, rank: int, save_id: str) -> list[str]:
    try:
        found = read_generators(rank_file(directory, rank))["save_id"]
    except DamagedCheckpointError as error:
        return [error.message]
    return [] if found == save_id else [f"{rank_file(directory, rank).name} belongs to another save ({found})"]


def _restore_rank(actor: ActorWorker, directory: Path) -> None:
    state = read_generators(rank_file(directory, actor.layout.rank))
    if state["parameter_hash"] != actor.parameter_hash():
        raise CheckpointError(
            f"the weights of rank {actor.layout.rank} after loading {directory} are not the saved ones; "
            "megatron-core changed how it loads them"
        )
    restore_generators(state)
