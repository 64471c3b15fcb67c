"""What `megatrl meter judge` and `megatrl meter bench-file` do: single steps, judged by a meter or by an oracle."""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatrl.config.engines import HFModel
from megatrl.config.environments import EnvConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.config.recipe import EvaluationConfig, Recipe
from megatrl.data.trajectories import PromptGroup
from megatrl.envs.registry import oracle_plan
from megatrl.errors import ScoringError
from megatrl.meter.frozen import FrozenMeter, load_frozen_meter
from megatrl.meter.process_bench import ProcessRecord, load_process_bench, write_process_bench
from megatrl.meter.process_judgment import Accuracy, Target, judgment_accuracy, process_signal
from megatrl.meter.process_oracle import oracle_records
from megatrl.meter.process_states import forecast_values, judged_states, record_trajectory, unknown_share
from megatrl.observability.atomic_file import replace_text
from megatrl.observability.logs import logging_to
from megatrl.observability.progress import waiting
from megatrl.observability.trajectories import read_records
from megatrl.orchestration.cluster import cluster
from megatrl.orchestration.command import recorded_recipe
from megatrl.orchestration.eval_journal import SETTINGS, TRAJECTORIES
from megatrl.orchestration.meter_scoring import ReadoutKind, open_meter, own_renderer
from megatrl.orchestration.meter_sources import open_run_sources
from megatrl.scoring.group_meter import AskedStates, StateForecasts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """How often a meter judged a step as it is labelled."""

    target: Target
    failure_cost: float | None  # C in the target's unit; None for a future score
    overall: Accuracy  # pooled over steps
    by_dataset: Mapping[str, Accuracy]
    unknown_words: float  # share of tokens that the meter's tokenizer has no word for
    shortened: float  # share of states whose history lost middle turns

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    source: Path,
    file: Path,
    *,
    engines: Recipe,
    target: Target,
    readout: ReadoutKind,
    out: Path,
    failure_cost: float | None = None,
    inverted: bool = False,
) -> Judgment:
    """Judges every step of an AgentProcessBench file with the frozen meter `source`; writes to `out`.

    `engines` gives actor, servers and microbatches; `failure_cost` replaces the meter's C. `inverted` turns
    every signal round: what a meter that has it backwards would get. Raises ScoringError where a record
    cannot be rendered, or no step is labelled 1 or -1.
    """
    records = load_process_bench(file)
    meter = load_frozen_meter(source)
    renderer = own_renderer(meter)
    cost = None if target == "future_score" else failure_cost or meter.failure_cost
    trajectories = [record_trajectory(record, renderer) for record in records]
    asked = [AskedStates(trajectory=t, states=judged_states(t)) for t in trajectories]
    with logging_to(out / "logs" / "driver.log", to_stderr=not sys.stderr.isatty()):
        answered = _forecast(meter, engines, readout, asked, out / "logs")
    values = [forecast_values(forecasts, target) for forecasts in answered.forecasts]
    sign = -1.0 if inverted else 1.0
    signals = [sign * process_signal(each, target, failure_cost=cost) for each in values]
    overall, by_dataset = judgment_accuracy(records, signals)
    judgment = Judgment(
        target=target,
        failure_cost=cost,
        overall=overall,
        by_dataset=by_dataset,
        unknown_words=unknown_share(trajectories, renderer),
        shortened=answered.num_shortened / sum(len(item.states) for item in asked),
    )
    rows = (
        {"record": record.name, "labels": record.step_labels, "values": each, "signal": signal.tolist()}
        for record, each, signal in zip(records, values, signals, strict=True)
    )
    replace_text(out / "signals.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    about = {"meter": str(source), "identity": meter.identity, "file": str(file), "readout": readout}
    replace_text(out / "judgment.json", json.dumps({**about, **judgment.as_json()}, indent=1) + "\n")
    return judgment


def _forecast(
    meter: FrozenMeter, engines: Recipe, readout: ReadoutKind, asked: list[AskedStates], logs: Path
) -> StateForecasts:
    renderer = own_renderer(meter)
    room = read_model_shape(meter.path).max_positions - meter.prompt.num_extra_tokens
    recipe = engines.model_copy(
        update={
            "model": HFModel(path=str(meter.path)),
            "rollout": engines.rollout.model_copy(update={"context_tokens": room}),
            "evaluation": EvaluationConfig(num_episodes=0),
        }
    )
    with cluster(recipe, meter.path, logs, serve=False) as group:
        opened = open_meter(
            recipe,
            meter,
            policy=renderer,
            actor=group.actor(recipe),
            readout=readout,
            with_terminal=False,
            log_dir=logs,
        )
        try:
            with waiting(f"forecasts for {sum(len(item.states) for item in asked)} states"):
                return opened.scorer.forecast_states(asked)
        finally:
            opened.close()


def write_bench_file(run: Path, out: Path, *, limit: int | None = None) -> tuple[ProcessRecord, ...]:
    """Writes the trajectories of a run, or of one way to act in an evaluation, in AgentProcessBench's form.

    Steps are labelled by the environment's own plan; returns the records, the first `limit` of them. Raises
    ConfigError for an environment without one.
    """
    env, groups = _recorded(run)
    records = oracle_records(groups, partial(oracle_plan, env), dataset=out.stem)[:limit]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_process_bench(records, out)
    return records


def _recorded(run: Path) -> tuple[EnvConfig, Iterable[PromptGroup]]:
    """The environment and the groups of a run, its evaluations included, or of `<evaluation>/<selection>`."""
    if (run / TRAJECTORIES).is_file():
        settings = json.loads((run.parent / SETTINGS).read_text(encoding="utf-8"))
        records, _ = read_records(run / TRAJECTORIES)
        latest = {record.group.group_id: record.group for record in records}  # of a task played twice the last one
        return TypeAdapter(EnvConfig).validate_python(settings["env"]), latest.values()
    (_, groups), *others = open_run_sources(run, with_evaluations=True)
    if others:
        raise ScoringError(f"{run} holds {1 + len(others)} runs; name one of them")
    return recorded_recipe(run).env, groups
