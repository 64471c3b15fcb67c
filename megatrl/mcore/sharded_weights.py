"""Weights of a converted model directory into Megatron models of any layout, through dist_checkpointing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatrl.errors import ModelError
from megatrl.mcore.model import unwrap
from megatrl.mcore.sharded_keys import is_weight_key
from megatrl.mcore.weights_directory import checked_shards

_FAILURES = (CheckpointingException, CheckpointException, RuntimeError, ValueError, KeyError, OSError)


def load_sharded_directory(models: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fills every parameter of this rank from the directory `path` that `megatrl convert hf-to-megatron` wrote.

    Collective over all ranks. Parameters are NaN first, so that one left out cannot pass. Raises ModelError for
    files that are not those that were written, and for names and shapes that are not the model's.
    """
    load_sharded_weights(models, checked_shards(path), is_weights_alone=True)


def load_sharded_weights(models: Sequence[torch.nn.Module], shards: Path, *, is_weights_alone: bool) -> None:
    """Fills every parameter from the distributed checkpoint in `shards`; optimizer state in it is not read.

    Collective over all ranks. `is_weights_alone`: a tensor in the checkpoint that the model does not ask for is an
    error. Values are cast to the parameters' dtype.
    """
    chunks = [unwrap(model) for model in models]
    states: dict[str, Any] = {}
    for place, chunk in enumerate(chunks):
        sharded: dict[str, Any] = chunk.sharded_state_dict()  # type: ignore[assignment]
        # Empty in fp32 and bf16, and absent from a converted directory.
        states[f"model{place}"] = {key: part for key, part in sharded.items() if not isinstance(part, ShardedObject)}
    _respell(states, _weight_keys(shards))
    strict = StrictHandling.RAISE_ALL if is_weights_alone else StrictHandling.RAISE_UNEXPECTED
    try:
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
        loaded: Any = dist_checkpointing.load(states, str(shards), strict=strict)
        for place, chunk in enumerate(chunks):
            missing, unknown = chunk.load_state_dict(loaded[f"model{place}"], strict=False)
            if wrong := [name for name in (*missing, *unknown) if "_extra_state" not in name]:
                raise ModelError(f"{shards} and the model differ in {wrong[:5]}")
    except _FAILURES as error:
        raise ModelError(f"the weights in {shards} do not fit the model: {type(error).__name__}: {error}") from error
    unwritten = sorted(n for chunk in chunks for n, p in chunk.named_parameters() if bool(p.isnan().any()))
    if unwritten:
        raise ModelError(f"NaN after loading {shards} in {unwritten[:5]}: it holds NaN or a part was not written")


def _weight_keys(shards: Path) -> set[str]:
    try:
        metadata = FileSystemReader(shards).read_metadata()
    except (OSError, ValueError, EOFError, AttributeError, ImportError) as error:
        raise ModelError(f"{shards} is no readable distributed checkpoint: {error!r}") from error
    return {key for key in metadata.state_dict_metadata if is_weight_key(key)}


def _respell(states: dict[str, Any], present: set[str]) -> None:
    """Asks for the norm before experts under the key that the checkpoint has; see `sharded_keys`."""
    ours, theirs = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    for state in states.values():
        for part in state.values():
            if not isinstance(part, ShardedTensor) or part.key in present:
                continue
            for one, other in ((ours, theirs), (theirs, ours)):
                if part.key.endswith(one) and part.key.removesuffix(one) + other in present:
                    part.key = part.key.removesuffix(one) + other
                    break
