"""Recorded trajectories of several runs in one file: the raw material of a meter.

The first line says which runs they come from and how their tokens were rendered; each further line is one
group. A group's id begins with the number of its source, so no two runs share a trajectory's id.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatrl.data.messages import ToolSpec
from megatrl.data.trajectories import PromptGroup, Trajectory
from megatrl.data.wire import decode_lines, encode_record, record_group
from megatrl.errors import ScoringError
from megatrl.observability.atomic_file import replace_file
from megatrl.rendering.renderer import Renderer
from megatrl.rendering.retokenize import rerender

_KIND = "megatrl meter collection"
_VERSION = 1
Truncated = Literal["fail", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One run: whose policy acted, in which environment, and how its tokens were rendered."""

    name: str
    domain: str  # kind of the environment
    tokenizer: str  # model directory whose tokenizer the tokens belong to
    tokenizer_fingerprint: str
    chat_format: str
    tool_format: str
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Groups of all sources; `source_of` finds the source of a group."""

    sources: tuple[Source, ...]
    groups: tuple[PromptGroup, ...]

    def source_of(self, group: PromptGroup) -> Source:
        number, _, _ = group.group_id.partition(":")
        return self.sources[int(number)]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for group in self.groups for t in group.trajectories)


@dataclass(slots=True)
class CollectionCounts:
    """What was taken from one source, and what was left out."""

    taken: Counter[str] = field(default_factory=Counter)
    """trajectories, success, failure, truncated"""
    left_out: Counter[str] = field(default_factory=Counter)
    """infrastructure, unknown, truncated, duplicate"""


def gather(
    sources: Sequence[tuple[Source, Iterable[PromptGroup]]], *, truncated: Truncated = "fail"
) -> tuple[Collection, list[CollectionCounts]]:
    """The usable trajectories of all sources, each once, and counts for each source.

    An infrastructure failure and an unknown outcome say nothing and are left out, as are truncated episodes
    with `truncated: drop`. Equal tokens of the same task with the same end are one trajectory, whichever runs
    they come from. Raises ScoringError where nothing is left.
    """
    seen: set[str] = set()
    kept: list[PromptGroup] = []
    all_counts: list[CollectionCounts] = []
    for number, (source, groups) in enumerate(sources):
        counts = CollectionCounts()
        all_counts.append(counts)
        for place, group in enumerate(groups):
            group_id = f"{number}:{place}:{group.group_id}"
            chosen = [t for t in group.trajectories if _is_taken(t, group, source, truncated, seen, counts)]
            if chosen:
                kept.append(_renamed(group, group_id, chosen))
    if not kept:
        raise ScoringError(
            f"none of {len(sources)} runs holds a usable trajectory; left out: "
            f"{[dict(counts.left_out) for counts in all_counts]}. Record episodes with known outcomes first"
        )
    return Collection(sources=tuple(source for source, _ in sources), groups=tuple(kept)), all_counts


def _is_taken(
    trajectory: Trajectory,
    group: PromptGroup,
    source: Source,
    truncated: Truncated,
    seen: set[str],
    counts: CollectionCounts,
) -> bool:
    reason = ""
    if trajectory.termination.is_infrastructure_failure:
        reason = "infrastructure"
    elif not trajectory.is_trainable:
        reason = "unknown"
    elif trajectory.termination.is_truncation and truncated == "drop":
        reason = "truncated"
    else:
        key = _content_key(trajectory, group, source)
        if key in seen:
            reason = "duplicate"
        seen.add(key)
    if reason:
        counts.left_out[reason] += 1
        return False
    counts.taken["trajectories"] += 1
    counts.taken["truncated"] += trajectory.termination.is_truncation
    counts.taken["success" if trajectory.success else "failure"] += 1
    return True


def _content_key(trajectory: Trajectory, group: PromptGroup, source: Source) -> str:
    segments = [(s.tokens, s.trailing_observation_tokens) for s in trajectory.segments]
    parts = (task_key(group, source.domain), source.tokenizer_fingerprint, segments, trajectory.reward)
    return hashlib.sha256(repr((*parts, trajectory.termination.value)).encode()).hexdigest()


def task_key(group: PromptGroup, domain: str) -> str:
    """Identity of a group's task by its content: one world met under two prompt ids is one task."""
    return f"{domain}/{json.dumps(group.prompt.task, sort_keys=True)}"


def _renamed(group: PromptGroup, group_id: str, trajectories: Sequence[Trajectory]) -> PromptGroup:
    renamed = tuple(replace(t, id=replace(t.id, group_id=group_id)) for t in trajectories)
    return replace(group, group_id=group_id, trajectories=renamed)


def write_collection(path: Path, collection: Collection) -> None:
    """One gzip file of JSON lines that appears whole."""
    header = {"kind": _KIND, "version": _VERSION, "sources": [asdict(source) for source in collection.sources]}
    with replace_file(path) as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write(f"{json.dumps(header)}\n".encode())
        for group in collection.groups:
            packed.write(f"{encode_record(record_group(group, step=0))}\n".encode())


def read_collection(path: Path) -> Collection:
    """Raises ScoringError where the file is missing or no collection, TrajectoryError for a damaged line."""
    if not path.is_file():
        raise ScoringError(f"{path} does not exist; make it with `megatrl meter collect RUN... --out {path}`")
    try:
        with gzip.open(path, "rb") as file:
            header = json.loads(file.readline())
            if header.get("kind") != _KIND or header.get("version") != _VERSION:
                raise ScoringError(f"{path} is no meter collection of version {_VERSION}; make it again")
            sources = tuple(_read_source(fields) for fields in header["sources"])
            records = tuple(decode_lines(iter(file), path=str(path)))
    except (OSError, EOFError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ScoringError(f"{path} cannot be read as a meter collection: {error!r}") from error
    return Collection(sources=sources, groups=tuple(record.group for record in records))


def _read_source(fields: Mapping[str, Any]) -> Source:
    return Source(**{**fields, "tools": tuple(ToolSpec(**tool) for tool in fields["tools"])})


def in_tokens_of(collection: Collection, renderer: Renderer) -> Collection:
    """The collection with every trajectory in the renderer's ids; those that are already so stay as they are.

    Raises ScoringError where a trajectory to render again lacks its messages.
    """
    groups: list[PromptGroup] = []
    for group in collection.groups:
        source = collection.source_of(group)
        if source.tokenizer_fingerprint != renderer.fingerprint:
            group = replace(group, trajectories=tuple(rerender(t, renderer, source.tools) for t in group.trajectories))
        groups.append(group)
    return replace(collection, groups=tuple(groups))
