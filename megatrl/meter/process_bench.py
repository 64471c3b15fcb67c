"""AgentProcessBench (arXiv 2603.14465): trajectories with a label for each assistant message, from local files.

The published form is one JSON object a line, one file a dataset (bfcl, gaia_dev, hotpotqa, tau2):

    {"query_index": 0, "sample_index": 3, "question": ..., "tools": [...],
     "messages": [{"role": "assistant", "content": ..., "tool_calls": [...]}, ...],
     "step_labels": {"2": 1, "4": 0, "6": -1}, "final_label": -1}

`step_labels` counts messages from 0 and names the assistant's: 1 is right, 0 neutral, -1 wrong.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrl.errors import ScoringError

LABELS = (-1, 0, 1)
ASSISTANT = "assistant"
_REQUIRED = ("messages", "step_labels", "final_label", "query_index", "sample_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One judged trajectory. Its steps are its assistant messages, in order."""

    dataset: str
    query_index: int
    sample_index: int
    messages: tuple[Mapping[str, Any], ...]
    step_labels: tuple[int, ...]  # of the assistant messages in order: 1, 0 or -1
    is_success: bool
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if len(self.step_labels) != len(self.step_indices):
            raise ScoringError(
                f"{self.name} has {len(self.step_indices)} assistant messages but {len(self.step_labels)} step labels"
            )
        if unknown := sorted(set(self.step_labels) - set(LABELS)):
            raise ScoringError(f"{self.name} has step labels {unknown}; allowed are 1, 0 and -1")

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.query_index}/{self.sample_index}"

    @property
    def step_indices(self) -> tuple[int, ...]:
        """Places of the assistant messages among all messages."""
        return tuple(i for i, message in enumerate(self.messages) if message.get("role") == ASSISTANT)

    def prefix(self, step: int) -> tuple[Mapping[str, Any], ...]:
        """Everything before assistant message `step` (from 0); all messages for the number of steps."""
        places = (*self.step_indices, len(self.messages))
        return self.messages[: places[step]]


def load_process_bench(path: Path) -> tuple[ProcessRecord, ...]:
    """Returns the records of one .jsonl file, or of every one in a directory; a file's stem names its dataset.

    Raises ScoringError with file and line for anything that is not in the published form, and for a
    query and sample that occurs twice.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ScoringError(
            f"{path} is neither a .jsonl file nor a directory with some; download AgentProcessBench and give the "
            "directory that holds bfcl.jsonl, gaia_dev.jsonl, hotpotqa.jsonl and tau2.jsonl"
        )
    records: dict[str, ProcessRecord] = {}
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = _read(line, dataset=file.stem, place=f"{file}:{number}")
                if record.name in records:
                    raise ScoringError(f"{file}:{number}: {record.name} occurs twice")
                records[record.name] = record
    if not records:
        raise ScoringError(f"{path} holds no record")
    return tuple(records.values())


def write_process_bench(records: Iterable[ProcessRecord], path: Path) -> None:
    """Writes records of one dataset in the published form; `load_process_bench` reads them back equal."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            labels = {str(i): label for i, label in zip(record.step_indices, record.step_labels, strict=True)}
            row = {
                "query_index": record.query_index,
                "sample_index": record.sample_index,
                "data_source": record.dataset,
                "messages": [dict(message) for message in record.messages],
                "tools": [dict(tool) for tool in record.tools],
                "step_labels": labels,
                "final_label": 1 if record.is_success else -1,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def split_records(
    records: Sequence[ProcessRecord], *, fractions: tuple[float, float, float] = (0.6, 0.2, 0.2), seed: int = 0
) -> tuple[tuple[ProcessRecord, ...], tuple[ProcessRecord, ...], tuple[ProcessRecord, ...]]:
    """(train, validation, test), stratified by dataset and outcome; a trajectory stays whole.

    Queries recur across the splits, as in the paper's study of seen tasks. Inside a stratum the places
    of the cuts are rounded, so the three parts are never off by more than one record each.
    """
    if any(f < 0 for f in fractions) or abs(sum(fractions) - 1.0) > 1e-9:
        raise ScoringError(f"split fractions {fractions} must be at least 0 and sum to 1")
    strata: defaultdict[tuple[str, bool], list[ProcessRecord]] = defaultdict(list)
    for record in records:
        strata[record.dataset, record.is_success].append(record)
    parts: tuple[list[ProcessRecord], ...] = ([], [], [])
    for key in sorted(strata):
        members = sorted(strata[key], key=lambda r: r.name)
        random.Random(f"{seed}/{key[0]}/{key[1]}").shuffle(members)
        first, second = round(fractions[0] * len(members)), round((fractions[0] + fractions[1]) * len(members))
        for part, chosen in zip(parts, (members[:first], members[first:second], members[second:]), strict=True):
            part += chosen
    return tuple(parts[0]), tuple(parts[1]), tuple(parts[2])


def _read(line: str, *, dataset: str, place: str) -> ProcessRecord:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ScoringError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ScoringError(f"{place}: a record is a JSON object, this is {type(row).__name__}")
    missing = [
        name for name in ("messages", "step_labels", "final_label", "query_index", "sample_index") if name not in row
    ]
    if missing:
        raise ScoringError(
            f"{place}: the record lacks {', '.join(missing)}; is this AgentProcessBench's published form?"
        )
    messages, labels = row["messages"], row["step_labels"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ScoringError(f"{place}: messages must be a list of objects with a role")
    steps = [str(i) for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not isinstance(labels, dict) or sorted(labels) != sorted(steps):
        seen = sorted(labels) if isinstance(labels, dict) else labels
        raise ScoringError(f"{place}: step_labels name the messages {seen}, the assistant's are {steps}")
    if row["final_label"] not in (-1, 1):
        raise ScoringError(f"{place}: final_label is {row['final_label']!r}; allowed are 1 and -1")
    try:
        return ProcessRecord(
            dataset=dataset,
            query_index=int(row["query_index"]),
            sample_index=int(row["sample_index"]),
            messages=tuple(messages),
            step_labels=tuple(labels[step] for step in steps),
            is_success=row["final_label"] == 1,
            tools=tuple(row.get("tools") or ()),
        )
    except (ScoringError, TypeError, ValueError) as error:
        raise ScoringError(f"{place}: {error}") from error
