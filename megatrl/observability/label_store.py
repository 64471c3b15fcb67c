"""A labelled data set on disk: the trajectories once, the states that point into them, and what they are.

labels.json             prompt, costs, settings, and the hash of every other file
trajectories.jsonl.gz   groups of trajectories in the meter's token ids
training.jsonl          one line for each example: which trajectory, which state, what came of it
validation.jsonl
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatrl.data.meter_labels import LabeledState, MeterLabel, MeterLabels
from megatrl.data.meter_prompt import MeterAnswer, MeterPrompt
from megatrl.data.states import State
from megatrl.data.trajectories import PromptGroup, Trajectory, TrajectoryId
from megatrl.data.wire import record_group
from megatrl.errors import ScoringError
from megatrl.observability.atomic_file import replace_text
from megatrl.observability.trajectories import read_records, write_records

MANIFEST = "labels.json"
FORMAT_VERSION = 1
_TRAJECTORIES = "trajectories.jsonl.gz"
_SPLITS = ("training", "validation")


def write_labels(directory: Path, labels: MeterLabels, groups: Iterable[PromptGroup]) -> MeterLabels:
    """Writes a data set and reads it back. `groups` hold every trajectory that an example belongs to.

    The directory appears by rename once it is whole. Raises ScoringError where it exists already.
    """
    if directory.exists():
        raise ScoringError(f"{directory} exists; a labelled data set is never overwritten. Choose another --out")
    unfinished = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        wanted = {e.trajectory.id for split in _SPLITS for e in getattr(labels, split)}
        narrowed = (replace(g, trajectories=tuple(t for t in g.trajectories if t.id in wanted)) for g in groups)
        kept = [group for group in narrowed if group.trajectories]
        places = {t.id: place for place, t in enumerate(t for group in kept for t in group.trajectories)}
        if missing := wanted - places.keys():
            raise ScoringError(f"{len(missing)} examples belong to no group, first {min(map(str, missing))}")
        write_records(unfinished / _TRAJECTORIES, (record_group(group, step=0) for group in kept))
        for split in _SPLITS:
            lines = (json.dumps(_line(example, places)) for example in getattr(labels, split))
            replace_text(unfinished / f"{split}.jsonl", "".join(f"{line}\n" for line in lines))
        replace_text(unfinished / MANIFEST, json.dumps(_manifest(labels, unfinished), indent=1, allow_nan=False))
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return read_labels(directory)


def read_labels(directory: Path) -> MeterLabels:
    """The data set in a directory, every file verified.

    Raises ScoringError where it is none, or a file is missing, altered or of another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ScoringError(f"{directory} holds no labels ({MANIFEST} is missing); make them with `megatrl meter label`")
    text = path.read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format_version"] != FORMAT_VERSION:
            raise ScoringError(
                f"{path} has format_version {manifest['format_version']}; this version reads {FORMAT_VERSION}"
            )
        changed = [n for n, digest in manifest["files"].items() if file_hash(directory / n) != digest]
        if changed:
            raise ScoringError(f"labels at {directory} are incomplete or altered: {', '.join(changed)}; label again")
        records, _ = read_records(directory / _TRAJECTORIES)
        trajectories = [t for record in records for t in record.group.trajectories]
        splits = {split: _read_split(directory / f"{split}.jsonl", trajectories) for split in _SPLITS}
        return MeterLabels(
            **splits,
            prompt=read_prompt(manifest["prompt"]),
            chat_format=manifest["chat_format"],
            tool_format=manifest["tool_format"],
            failure_costs=manifest["failure_costs"],
            failure_cost=float(manifest["failure_cost"]),
            max_sequence_tokens=int(manifest["max_sequence_tokens"]),
            settings=manifest["settings"],
            sources=tuple(manifest["sources"]),
            content_hash=hashlib.sha256(text).hexdigest()[:16],
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ScoringError(f"{path} cannot be read as meter labels: {error!r}") from error


def read_prompt(fields: Mapping[str, Any]) -> MeterPrompt:
    """The prompt that `dataclasses.asdict` and JSON have turned into lists and maps."""
    answers = tuple(MeterAnswer(**{**answer, "tokens": tuple(answer["tokens"])}) for answer in fields["answers"])
    ids = {name: tuple(fields[name]) for name in ("header", "question")}
    return MeterPrompt(**{**fields, **ids, "answers": answers})


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes; "" where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(labels: MeterLabels, directory: Path) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "prompt": asdict(labels.prompt),
        "chat_format": labels.chat_format,
        "tool_format": labels.tool_format,
        "failure_costs": dict(labels.failure_costs),
        "failure_cost": labels.failure_cost,
        "max_sequence_tokens": labels.max_sequence_tokens,
        "settings": dict(labels.settings),
        "sources": list(labels.sources),
        "files": {name: file_hash(directory / name) for name in (_TRAJECTORIES, *(f"{s}.jsonl" for s in _SPLITS))},
    }


def _line(example: LabeledState, places: Mapping[TrajectoryId, int]) -> dict[str, Any]:
    return {
        "trajectory": places[example.trajectory.id],
        "segment": example.state.segment_index,
        "turn": example.state.turn_index,
        "length": example.state.length,
        "cut": example.cut,
        "domain": example.domain,
        "completion": example.label.completion,
        "tokens_to_go": example.label.tokens_to_go,
    }


def _read_split(path: Path, trajectories: Sequence[Trajectory]) -> tuple[LabeledState, ...]:
    examples: list[LabeledState] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        examples.append(
            LabeledState(
                trajectory=trajectories[row["trajectory"]],
                state=State(segment_index=row["segment"], turn_index=row["turn"], length=row["length"]),
                label=MeterLabel(completion=row["completion"], tokens_to_go=row["tokens_to_go"]),
                cut=row["cut"],
                domain=row["domain"],
            )
        )
    return tuple(examples)
