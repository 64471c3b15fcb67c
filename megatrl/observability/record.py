"""Everything one run writes down: `Observation` for the run, `StepRecord` for each step of it."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from megatrl.config.recipe import ObserveConfig
from megatrl.data.samples import FloatArray
from megatrl.data.scores import Scores
from megatrl.data.trajectories import PromptGroup, TrajectoryId
from megatrl.data.wire import GroupRecord, record_group
from megatrl.observability.atomic_file import unused_path
from megatrl.observability.manifest import write_manifest
from megatrl.observability.memory import MemoryMeter
from megatrl.observability.metrics import Max, Mean, Metric, MetricValue, flatten, merge
from megatrl.observability.progress import ProgressDisplay
from megatrl.observability.rollout_metrics import (
    EVALUATION_SUCCESS,
    REWARD,
    SUCCESS,
    TOKENS_PER_S,
    advantage_metrics,
    drop_metrics,
    rollout_metrics,
)
from megatrl.observability.sinks import BackgroundTracker, MetricsFile
from megatrl.observability.spans import SpanRecorder
from megatrl.observability.trackers import TensorBoardTracker, WandbTracker
from megatrl.observability.trajectories import TrajectoryStore

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

NOT_TRAINING = ("evaluate", "checkpoint")
"""Spans that throughput leaves out."""


class Dropped(Protocol):
    """A group the step does not train on, and why."""

    @property
    def group(self) -> PromptGroup: ...

    @property
    def reason(self) -> str: ...


class StepRecord:
    """What one step hands over to be written. Made by `Observation.step`."""

    def __init__(self, step: int, spans: SpanRecorder, store: TrajectoryStore) -> None:
        self.step = step
        self._spans, self._store = spans, store
        self._metrics: dict[str, Metric] = {}
        self._trajectory_metrics: dict[str, Metric] = {}

    def span(self, name: str, **arguments: float | int | str) -> AbstractContextManager[None]:
        """Time a phase: act, score, credit, learn, publish, record, checkpoint, evaluate. Spans nest."""
        return self._spans.span(name, **arguments)

    def add(self, metrics: Mapping[str, MetricValue]) -> None:
        """Add metrics; a name given before is merged by its reduction, a plain float replaces."""
        self._metrics = merge(self._metrics, metrics)

    def trajectories(
        self,
        groups: Sequence[PromptGroup],
        dropped: Iterable[Dropped] = (),
        advantages: Mapping[TrajectoryId, Sequence[FloatArray]] | None = None,
        scores: Scores | None = None,
        details: Mapping[TrajectoryId, Mapping[str, tuple[float, ...]]] | None = None,
    ) -> None:
        """Store the step's groups at once, and derive the `rollout/` and `credit/` metrics.

        `groups` may or may not contain the dropped ones. `details` are parts of the credit by turn.
        A second call replaces the first, so a step can store what it played before it scores, and
        again with its credit.
        """
        with self._spans.span("record"):
            records = _records(self.step, groups, dropped, advantages=advantages, scores=scores, details=details)
            self._store.write(self.step, records)
            self._trajectory_metrics = (
                rollout_metrics([record.group for record in records])
                | drop_metrics(records)
                | advantage_metrics(records)
            )

    def evaluation(self, metrics: Mapping[str, MetricValue], groups: Sequence[PromptGroup] = ()) -> None:
        """Add an evaluation's metrics under `eval/`, and store the episodes it played."""
        self.add({f"eval/{name}": value for name, value in metrics.items()})
        if groups:
            with self._spans.span("record"):
                self._store.write(self.step, _records(self.step, groups), "eval_step")

    def collected(self) -> dict[str, Metric]:
        """All metrics so far."""
        return merge(self._trajectory_metrics, self._metrics)


class Observation:
    """The run directory's writer: metrics, trajectories, trace, trackers and the progress display.

    One process of a run opens it. A run directory then holds `metrics.jsonl`, `trajectories/`,
    `traces/`, `manifest.json`, `config.json` and the trackers' own directories.
    """

    def __init__(
        self,
        *,
        metrics_file: MetricsFile,
        store: TrajectoryStore,
        spans: SpanRecorder,
        trackers: Sequence[BackgroundTracker],
        display: ProgressDisplay,
        memory: MemoryMeter,
    ) -> None:
        self.store, self.spans, self.display = store, spans, display
        self._metrics_file, self._trackers, self._memory = metrics_file, tuple(trackers), memory

    @classmethod
    def open(
        cls,
        run_dir: Path | str,
        config: ObserveConfig,
        *,
        num_steps: int,
        resume_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open a run directory: a beginning where `resume_step` is 0, else a resumed run after that step.

        What an earlier start wrote for steps that come again is moved aside, never deleted.
        `run_config` is the resolved recipe as JSON values.
        """
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        run_config = run_config or {}
        write_manifest(run_dir, run_config, resume_step=resume_step)
        store = TrajectoryStore(run_dir)
        # A beginning repeats step 0 too, the evaluation before training.
        last_kept = resume_step or -1
        store.set_aside_after(last_kept)
        return cls(
            metrics_file=MetricsFile(run_dir / METRICS_FILE, last_kept=last_kept),
            store=store,
            spans=SpanRecorder(unused_path(run_dir / "traces" / f"from_step_{resume_step + 1:06d}.json")),
            trackers=_trackers(run_dir, config, resume_step, run_config),
            display=ProgressDisplay(num_steps, done=resume_step, title=run_dir.name),
            memory=MemoryMeter(),
        )

    @contextmanager
    def step(self, step: int) -> Iterator[StepRecord]:
        """One step of the loop. When the body ends its numbers are written; when it raises, its trace only."""
        record = StepRecord(step, self.spans, self.store)
        self.spans.take_seconds()
        began = time.perf_counter()
        try:
            with self.spans.frame("step", step=step):
                yield record
        finally:
            self.spans.flush()
        self._write(record, time.perf_counter() - began)

    def baseline(self, metrics: Mapping[str, MetricValue], groups: Sequence[PromptGroup] = ()) -> None:
        """Write an evaluation made before the first step, as step 0."""
        with self.step(0) as record:
            record.evaluation(metrics, groups)

    def _write(self, record: StepRecord, step_s: float) -> None:
        metrics = record.collected()
        seconds = self.spans.take_seconds()
        metrics |= {f"seconds/{path}": Mean(value) for path, value in seconds.items()}
        num_tokens = metrics.get("rollout/num_tokens")
        if TOKENS_PER_S not in metrics and num_tokens is not None and num_tokens.result is not None:
            # Steps with an evaluation or a checkpoint stay comparable with the others.
            training_s = step_s - sum(seconds.get(name, 0.0) for name in NOT_TRAINING)
            metrics[TOKENS_PER_S] = Mean(num_tokens.result / max(training_s, 1e-9))
        peak = self._memory.take_peak_bytes()
        if peak is not None:
            metrics["memory/peak_rss_bytes"] = Max(peak)
        numbers = flatten(metrics)
        self._metrics_file.write(record.step, numbers)
        for tracker in self._trackers:
            tracker.log(record.step, numbers)
        self.display.update(record.step, _headline(numbers))

    def close(self) -> None:
        """Finish all files and trackers; takes at most the trackers' close timeout each."""
        with ExitStack() as closing:  # closes the rest also when one of them raises
            for tracker in self._trackers:
                closing.callback(tracker.close)
            closing.callback(self._metrics_file.close)
            closing.callback(self.spans.close)
            closing.callback(self._memory.close)
            closing.callback(self.display.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _records(
    step: int, groups: Sequence[PromptGroup], dropped: Iterable[Dropped] = (), **annotations: Any
) -> list[GroupRecord]:
    left_out = {(each.group.prompt.prompt_id, each.group.group_id): each for each in dropped}
    given = {(group.prompt.prompt_id, group.group_id) for group in groups}
    everything = [*groups, *(each.group for key, each in left_out.items() if key not in given)]
    records = []
    for group in everything:
        drop = left_out.get((group.prompt.prompt_id, group.group_id))
        records.append(record_group(group, step=step, dropped="" if drop is None else drop.reason, **annotations))
    return records


def _trackers(
    run_dir: Path, config: ObserveConfig, resume_step: int, run_config: Mapping[str, Any]
) -> list[BackgroundTracker]:
    trackers = []
    if config.tensorboard:
        trackers.append(BackgroundTracker("tensorboard", lambda: TensorBoardTracker(run_dir, resume_step=resume_step)))
    mode = config.wandb
    if mode != "off":
        trackers.append(
            BackgroundTracker(
                "wandb",
                lambda: WandbTracker(
                    run_dir, mode=mode, name=run_dir.name, resume_step=resume_step, run_config=run_config
                ),
                close_timeout_s=90.0,
            )
        )
    return trackers


def _headline(numbers: Mapping[str, float]) -> dict[str, float]:
    shown = {
        "reward": REWARD,
        "success": SUCCESS,
        "eval_success": EVALUATION_SUCCESS,
        "tokens_per_s": TOKENS_PER_S,
        "step_s": "seconds/step",
    }
    return {label: numbers[name] for label, name in shown.items() if name in numbers}
