"""Are the shards in a directory complete, and all of one save? Read from the files alone, before anything is loaded.

The manifest of the store says whether files are as they were written. This says whether they belong together: a
directory put together by hand from two saves has readable shards, and wrong numbers in them.
"""

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatrl.errors import DamagedCheckpointError

_SAVE_ID = "save_id"
_OPTIMIZER = "optimizer."


def save_id_entry(save_id: str | None, *, rank: int, world_size: int) -> ShardedObject:
    """The entry that writes the save's identity into the shard file of `rank`; with None the place to load it into."""
    return ShardedObject(_SAVE_ID, save_id, (world_size,), (rank,))


def find_damage(shards: Path, *, save_id: str, num_ranks: int, has_moments: bool, share: tuple[int, int]) -> list[str]:
    """What is wrong with the shards of a save by `num_ranks` ranks, one text for each problem.

    `share` is (this rank, ranks that look): together they open every file once. Sizes and the index are looked
    at by all.
    """
    try:
        metadata: Any = FileSystemReader(shards).read_metadata()
        entries = dict(metadata.storage_data)
    except Exception as error:  # a cut pickle raises whatever its bytes happen to mean
        return [f"the index {shards.name}/.metadata is missing or not readable ({type(error).__name__})"]
    problems = _file_problems(shards, entries)
    if problems:
        return problems
    ids = {index.fqn: info for index, info in entries.items() if index.fqn.startswith(f"{_SAVE_ID}/")}
    if len(ids) != num_ranks:
        return [f"the index names {len(ids)} ranks, the save was made by {num_ranks}"]
    mine = sorted(ids)[share[0] :: share[1]]
    found = {ids[name].relative_path: _read(shards, ids[name]) for name in mine}
    problems = [
        f"{shards.name}/{file} belongs to another save ({other}, not {save_id})"
        for file, other in sorted(found.items())
        if other != save_id
    ]
    if has_moments and not problems and not any(index.fqn.startswith(_OPTIMIZER) for index in entries):
        return ["it has weights but no optimizer moments; start a new run from the weights with model.path"]
    return problems


def raise_damage(directory: Path, problems: list[str]) -> None:
    """Raises DamagedCheckpointError where there are problems."""
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DamagedCheckpointError(f"actor state in {directory} is damaged: {'; '.join(problems[:3])}{more}")


def _file_problems(shards: Path, entries: dict[Any, Any]) -> list[str]:
    needed: dict[str, int] = defaultdict(int)
    for info in entries.values():
        needed[info.relative_path] = max(needed[info.relative_path], info.offset + info.length)
    problems = []
    for name, num_bytes in sorted(needed.items()):
        file = shards / name
        if not file.is_file():
            problems.append(f"{shards.name}/{name} is missing")
        elif file.stat().st_size < num_bytes:
            problems.append(f"{shards.name}/{name} is cut at {file.stat().st_size} of {num_bytes} bytes")
    return problems


def _read(shards: Path, info: Any) -> str:
    try:
        with (shards / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            (found,) = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)  # a list of one
            return str(found)
    except Exception as error:  # bytes of another save at this place may mean anything
        return f"unreadable, {type(error).__name__}"
