"""A meter becomes fixed: weights, tokenizer and labels that belong together, in one directory."""

import json
from pathlib import Path
from typing import Any

from megatrl.data.meter_labels import MeterLabels
from megatrl.errors import ScoringError
from megatrl.meter.frozen import MANIFEST_NAME, FrozenMeter, freeze_meter
from megatrl.observability.label_store import read_labels
from megatrl.rendering.renderer import load_renderer

ORIGIN = "meter_source.json"
"""Beside a meter's weights until they are frozen: which labels it was trained on."""
EVALUATION = "evaluation"
"""Directory of metrics and plots in a run; the metrics are frozen along."""


def freeze(source: Path, out: Path, *, labels_directory: Path | None = None) -> FrozenMeter:
    """A frozen meter from a run of `meter sft` or `meter refine`, or from a model directory and its labels.

    Raises ScoringError where weights, tokenizer and labels do not belong together.
    """
    origin, weights = origin_of(source)
    if labels_directory is None and not origin:
        raise ScoringError(
            f"{source} does not say which labels it was trained on ({ORIGIN} is missing): it was not made by "
            "`meter sft` or `meter refine`. Name them with --labels"
        )
    labels = read_labels(labels_directory or Path(origin["labels"]))
    if origin and origin["labels_hash"] != labels.content_hash:
        raise ScoringError(
            f"{source} was trained on labels {origin['labels_hash']} at {origin['labels']}, but there lie "
            f"{labels.content_hash} now; its costs and prompt would be others. Train it again, or put the labels back"
        )
    renderer = load_renderer(str(weights), labels.chat_format, labels.tool_format)  # type: ignore[arg-type]
    refuse_other_tokenizer(labels, renderer.fingerprint, f"the weights at {weights}")
    return freeze_meter(
        weights,
        out,
        prompt=labels.prompt,
        failure_cost=labels.failure_cost,
        failure_costs=labels.failure_costs,
        chat_format=labels.chat_format,
        tool_format=labels.tool_format,
        training_hash=labels.content_hash,
        evaluation=_evaluation(source, labels),
    )


def _evaluation(source: Path, labels: MeterLabels) -> dict[str, float] | None:
    """The metrics that a run was last measured with on these labels, None where it was not."""
    path = source / EVALUATION / "evaluation.json"
    measured = json.loads(path.read_text()) if path.is_file() else {}
    return measured["metrics"] if measured.get("labels") == labels.content_hash else None


def origin_of(source: Path) -> tuple[dict[str, Any], Path]:
    """What a directory says about the labels of its weights, {} where nothing, and where the weights are."""
    path = source / ORIGIN
    weights = source / "policy" if (source / "policy").is_dir() else source
    if not (weights / "config.json").is_file() or not list(weights.glob("*.safetensors")):
        raise ScoringError(
            f"{source} holds no meter: neither {MANIFEST_NAME}, nor policy/ of a finished run, nor a model's weights"
        )
    return (json.loads(path.read_text()) if path.is_file() else {}), weights


def refuse_other_tokenizer(labels: MeterLabels, fingerprint: str, whose: str) -> None:
    wanted = labels.prompt.tokenizer_fingerprint
    if fingerprint != wanted:
        raise ScoringError(
            f"the labels are in tokens of {wanted} ({labels.chat_format}, {labels.tool_format}), {whose} gives "
            f"{fingerprint}; label the collection with this model's tokenizer (--tokenizer, --chat-format, "
            "--tool-format)"
        )
