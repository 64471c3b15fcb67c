"""What the commands `meter sft`, `meter refine` and `meter eval` do."""

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrl.config.engines import HFModel
from megatrl.config.environments import MeterPromptsConfig
from megatrl.config.loaded import LoadedRecipe
from megatrl.config.recipe import EvaluationConfig, ModelStart, Recipe, SFTStart
from megatrl.data.meter_labels import LabeledState, MeterLabels, Split
from megatrl.errors import ConfigError, ScoringError
from megatrl.meter.evaluation import MeterEvaluation
from megatrl.meter.freezing import EVALUATION, ORIGIN, origin_of, refuse_other_tokenizer
from megatrl.meter.frozen import MANIFEST_NAME, load_frozen_meter
from megatrl.observability.atomic_file import replace_text
from megatrl.observability.label_store import read_labels
from megatrl.observability.logs import logging_to
from megatrl.observability.meter_plots import plot_calibration, plot_signal, plot_tokens_to_go
from megatrl.orchestration import command
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import cluster
from megatrl.orchestration.meter_fitting import evaluate_meter, fit_meter, frozen_copy_meter
from megatrl.orchestration.meter_scoring import ReadoutKind, own_renderer
from megatrl.orchestration.run_directory import claimed
from megatrl.orchestration.start import model_directory
from megatrl.rendering.renderer import load_renderer
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.server import RolloutServer, ServerSpec
from megatrl.scoring.decode_meter import DecodeMeter
from megatrl.scoring.group_meter import GroupMeter

logger = logging.getLogger(__name__)


def sft(loaded: LoadedRecipe, *, run_id: str | None = None) -> Path:
    """Fine-tunes the recipe's model on its labels; returns the run directory, with `policy/` and its evaluation."""
    recipe, labels, model = _checked(loaded)
    start = recipe.start
    if not isinstance(start, SFTStart):
        raise ConfigError(
            f"{loaded.origin('start.kind')}: start.kind = {start.kind}: meter sft reads start.sft; use sft"
        )
    with claimed(Path(recipe.observe.runs_dir) / recipe.name, run_id) as run_dir:
        if (run_dir / ORIGIN).exists():
            raise ConfigError(f"run directory {run_dir} holds a trained meter; give another --run-id")
        replace_text(run_dir / "config.json", json.dumps(recipe.model_dump(mode="json"), indent=1))
        with _logging(run_dir), cluster(recipe, model, run_dir / "logs", serve=False) as group:
            actor = group.actor(recipe)
            actor.load_policy(model, start.sft.optimizer, start.sft.num_steps)
            budget = recipe.batch.microbatch_tokens
            report = fit_meter(actor, labels, start.sft, microbatch_tokens=budget, seed=recipe.seed)
            actor.save_hf(run_dir / "policy", model)
            if labels.validation:
                meter = frozen_copy_meter(actor, labels, microbatch_tokens=budget)
                evaluation = evaluate_meter(meter, labels.validation)
                about = {"meter": str(run_dir), "labels": labels.content_hash, "split": "validation"}
                about["readout"] = "candidates"
                _write_evaluation(run_dir / EVALUATION, evaluation, labels.validation, about)
        _write_json(run_dir / "sft.json", dataclasses.asdict(report))
        _write_origin(run_dir, "sft", recipe, labels, model)
    return run_dir


def refine(loaded: LoadedRecipe, *, resume: bool = False, run_id: str | None = None) -> Path:
    """GRPO of a meter on its prompts, through the loop that trains every policy; returns the run directory."""
    recipe, labels, model = _checked(loaded)
    if not isinstance(recipe.start, ModelStart):
        raise ConfigError(
            f"{loaded.origin('start.kind')}: start.kind = {recipe.start.kind}: meter refine begins from model.path, "
            "the policy of `megatrl meter sft`; set start.kind: model"
        )
    needed = labels.max_sequence_tokens
    if recipe.rollout.context_tokens < needed:
        raise ConfigError(
            f"{loaded.origin('rollout.context_tokens')}: rollout.context_tokens = {recipe.rollout.context_tokens}: the "
            f"longest prompt with its answer takes {needed} tokens; set it to {needed} or more, or "
            "label with --max-tokens"
        )
    if not labels.validation and recipe.evaluation.num_episodes:
        raise ConfigError("evaluation.num_episodes: the labels have no validation side; set it to 0, or label again")
    run_dir = command.train(loaded, resume=resume, run_id=run_id)
    _write_origin(run_dir, "refine", recipe, labels, model)
    return run_dir


def _checked(loaded: LoadedRecipe) -> tuple[Recipe, MeterLabels, Path]:
    """The recipe, its labels and its model, which have one tokenizer between them."""
    recipe = loaded.recipe
    if not isinstance(recipe.env, MeterPromptsConfig):
        raise ConfigError(
            f"{loaded.origin('env.kind')}: env.kind = {recipe.env.kind}: a meter is trained on labels; set env.kind: "
            "meter_prompts and env.labels to a directory of `megatrl meter label`"
        )
    labels = read_labels(Path(recipe.env.labels))
    model = model_directory(recipe, Artifacts(Path(recipe.observe.runs_dir) / "artifacts"))
    renderer = load_renderer(str(model), recipe.rollout.chat_format, recipe.rollout.tool_format)
    refuse_other_tokenizer(labels, renderer.fingerprint, f"model.path {model} with rollout.chat_format and tool_format")
    return recipe, labels, model


def evaluate(
    source: Path, labels_directory: Path, *, engines: Recipe, readout: ReadoutKind, split: Split, out: Path
) -> MeterEvaluation:
    """Metrics, points and plots of a meter on a labelled data set, written to `out`.

    `source` is a frozen meter, a run of `meter sft` or `meter refine`, or a model directory, which then is
    prompted as it is. `engines` gives actor, servers and microbatches. Raises ScoringError where the meter
    and the labels have not one tokenizer.
    """
    labels = read_labels(labels_directory)
    examples = labels.examples(split)
    if not examples:
        raise ScoringError(f"{labels_directory} has no {split} examples; label with a --validation-fraction above 0")
    weights, labels = meter_with_labels(source, labels)
    with _logging(out), opened_meter(weights, labels, engines, readout, out / "logs") as meter:
        evaluation = evaluate_meter(meter, examples)
    about = {"meter": str(source), "labels": labels.content_hash, "split": split, "readout": readout}
    _write_evaluation(out, evaluation, examples, about)
    return evaluation


def meter_with_labels(source: Path, labels: MeterLabels) -> tuple[Path, MeterLabels]:
    """Where a meter's weights lie, and the labels as it is asked about them: a frozen one has a prompt of its own.

    Raises ScoringError where there is no meter, or its tokenizer is not that of the labels.
    """
    if not (source / MANIFEST_NAME).is_file():
        return origin_of(source)[1], labels
    frozen = load_frozen_meter(source)
    refuse_other_tokenizer(labels, own_renderer(frozen).fingerprint, f"the meter {source}")
    return source, dataclasses.replace(
        labels,
        prompt=frozen.prompt,
        failure_cost=frozen.failure_cost,
        failure_costs=frozen.failure_costs,
        max_sequence_tokens=labels.max_history_tokens + frozen.prompt.num_extra_tokens,
    )


def evaluation_directory(source: Path) -> Path:
    """Where an evaluation goes by default: into a run, beside a frozen meter, which never changes."""
    is_run = (source / "policy").is_dir()
    return source / EVALUATION if is_run else source.with_name(f"{source.name}-{EVALUATION}")


def _write_evaluation(
    out: Path, evaluation: MeterEvaluation, examples: Sequence[LabeledState], about: Mapping[str, Any]
) -> None:
    """evaluation.json, forecasts.jsonl with one line for each example, and three plots."""
    metrics = dict(evaluation.metrics)
    rows = (
        {
            "trajectory": str(example.trajectory.id),
            "turn": example.state.turn_index,
            "cut": example.cut,
            "label": dataclasses.asdict(example.label),
            "forecast": dataclasses.asdict(forecast),
        }
        for example, forecast in zip(examples, evaluation.forecasts, strict=True)
    )
    replace_text(out / "forecasts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    plot_calibration(evaluation.completion, out / "calibration.png")
    plot_tokens_to_go(evaluation.tokens_to_go, out / "tokens_to_go.png")
    correlation = metrics.get("signal_length_correlation")
    plot_signal(evaluation.signal, out / "signal_length.png", correlation=correlation)
    _write_json(out / "evaluation.json", {**about, "metrics": metrics})


@contextlib.contextmanager
def opened_meter(
    weights: Path, labels: MeterLabels, engines: Recipe, readout: ReadoutKind, logs: Path
) -> Iterator[GroupMeter]:
    """The meter on the actor's ranks, or on one server of its own."""
    recipe = engines.model_copy(
        update={
            "model": HFModel(path=str(weights)),
            "rollout": engines.rollout.model_copy(
                update={"chat_format": labels.chat_format, "tool_format": labels.tool_format}
            ),
            "evaluation": EvaluationConfig(num_episodes=0),
        }
    )
    renderer = load_renderer(str(weights), recipe.rollout.chat_format, recipe.rollout.tool_format)
    refuse_other_tokenizer(labels, renderer.fingerprint, f"the weights at {weights}")
    if readout == "candidates":
        with cluster(recipe, weights, logs, serve=False) as group:
            actor = group.actor(recipe)
            actor.load_policy(weights, recipe.actor.optimizer, 1)
            yield frozen_copy_meter(actor, labels, microbatch_tokens=recipe.batch.microbatch_tokens)
        return
    servers = recipe.rollout.servers
    log = logs / "meter-server.log"
    server = RolloutServer(ServerSpec(model_path=str(weights), config=servers, log_path=log, constrains=True))
    server.start()
    try:
        server.wait_ready()
        yield DecodeMeter(
            prompt=labels.prompt,
            renderer=renderer,
            samplers=lambda: SGLangSampler([server.url], vocab_size=renderer.vocab_size),
            failure_cost=labels.failure_cost,
            policy_fingerprint=renderer.fingerprint,
            max_sequence_tokens=labels.max_sequence_tokens,
            request_timeout_s=servers.request_timeout_s,
        )
    finally:
        server.stop()


def _write_origin(run_dir: Path, stage: str, recipe: Recipe, labels: MeterLabels, model: Path) -> None:
    assert isinstance(recipe.env, MeterPromptsConfig)
    _write_json(
        run_dir / ORIGIN,
        {
            "stage": stage,
            "labels": str(Path(recipe.env.labels).resolve()),
            "labels_hash": labels.content_hash,
            "tokenizer_fingerprint": labels.prompt.tokenizer_fingerprint,
            "model": str(model.resolve()),
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _logging(directory: Path) -> contextlib.AbstractContextManager[object]:
    return logging_to(directory / "logs" / "driver.log", to_stderr=not sys.stderr.isatty())
