"""A run put together: every role of the loop, built from a recipe on a cluster."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatrl.algorithms.advantages import AdvantageEstimate
from megatrl.algorithms.off_policy import exclude_rejected
from megatrl.batching.packing import attach_old_logprobs
from megatrl.config.credit import DeltaTTGCredit, TraceCredit
from megatrl.config.recipe import OracleMeterConfig, Recipe
from megatrl.data.prompts import PromptStream
from megatrl.data.samples import FloatArray, PackedBatch
from megatrl.envs.registry import prompt_source
from megatrl.errors import ConfigError
from megatrl.meter.frozen import load_frozen_meter
from megatrl.observability.record import Observation
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.orchestration.actor_group import ActorGroup, UpdateResult
from megatrl.orchestration.checkpoints import RunCheckpoints, run_config
from megatrl.orchestration.cluster import Cluster
from megatrl.orchestration.devices import OwnedDevices, SharedDevices
from megatrl.orchestration.evaluation import Evaluation, Evaluator, NullEvaluator
from megatrl.orchestration.filling import FilledBatch, LiveRollout
from megatrl.orchestration.meter_scoring import open_meter, oracle_meter
from megatrl.orchestration.mismatch import MismatchMonitor
from megatrl.orchestration.players import WatchedPlayer, policy_player
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.reference import open_reference
from megatrl.orchestration.replay import RecordedRollout
from megatrl.orchestration.scorers import (
    AnswerProbe,
    MeterScorer,
    NullMeter,
    NullProbe,
    NullReference,
    ReferencePolicy,
    Scorers,
)
from megatrl.orchestration.weight_sync import NullWeightSync, ProvenWeightSync, WeightSync
from megatrl.rendering.renderer import Renderer, load_renderer


class BatchFiller(Protocol):
    def fill(self, prompts: PromptStream, progress: Progress) -> FilledBatch: ...


class Checkpoints(Protocol):
    def restore_latest(self) -> Progress: ...

    def step_done(self, progress: Progress) -> None: ...


class HeldOut(Protocol):
    def run(self, progress: Progress) -> Evaluation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything `train` needs. Absent roles are null objects."""

    config: Recipe
    prompts: PromptStream
    rollout: BatchFiller
    actor: ActorGroup
    scorers: Scorers
    weight_sync: WeightSync
    devices: OwnedDevices | SharedDevices
    checkpoints: Checkpoints
    evaluator: HeldOut
    observe: Observation
    mismatch: MismatchMonitor

    @property
    def credit(self) -> dict[str, Any]:
        """The sections that `estimate_advantages` reads."""
        config = self.config
        return {"credit": config.credit, "group_statistics": config.group_statistics, "reward": config.reward}

    @property
    def packing(self) -> dict[str, Any]:
        """The numbers that `pack` reads."""
        config = self.config
        return {
            "num_minibatches": config.batch.num_minibatches,
            "microbatch_tokens": config.batch.microbatch_tokens,
            "loss": config.loss,
            "context_tokens": config.rollout.context_tokens,
        }

    def with_old_logprobs(self, packed: PackedBatch, old_logprobs: dict[int, FloatArray]) -> PackedBatch:
        """The batch with the old policy's logprobs, and without what the mismatch correction rejects for good."""
        return exclude_rejected(attach_old_logprobs(packed, old_logprobs), self.config.loss)

    def step_metrics(
        self, batch: FilledBatch, packed: PackedBatch, estimate: AdvantageEstimate, update: UpdateResult
    ) -> dict[str, float]:
        """What the parts of one step report, under their own prefixes."""
        return {
            **{f"actor/{name}": value for name, value in update.metrics.items()},
            **estimate.metrics,
            **self.scorers.metrics,
            **self.weight_sync.metrics,
            **self.mismatch.metrics,
            "batch/rounds": float(batch.rounds),
            "batch/samples": float(len(packed.samples)),
            "batch/action_tokens": float(packed.num_action_tokens),
        }


@contextlib.contextmanager
def open_run(
    recipe: Recipe,
    cluster: Cluster,
    *,
    run_dir: Path,
    start: Path,
    meter: Path | None = None,
    resume: bool = False,
) -> Iterator[Run]:
    """Builds a run in `run_dir` that begins at the Hugging Face directory `start`.

    `meter` is a frozen meter's directory where the credit rule needs one. With `resume` the loop
    continues at the newest checkpoint in `run_dir`.
    """
    actor = cluster.actor(recipe)
    actor.load_policy(start, recipe.actor.optimizer, recipe.train.num_steps)
    renderer = load_renderer(str(start), recipe.rollout.chat_format, recipe.rollout.tool_format)
    scorers, frozen_models = make_scorers(recipe, actor, renderer, start, meter, run_dir / "logs")
    prompts = PromptStream(prompt_source(recipe.env, seed=recipe.seed, split="train"))
    directory = run_dir / "checkpoints"
    checkpoints = RunCheckpoints(
        directory,
        recipe,
        actor=actor,
        prompts=prompts,
        frozen_models=frozen_models,
        restore_from=directory if resume else None,
    )
    servers = cluster.servers
    servers.wait_ready()
    actor.connect_servers(recipe.publish, recipe.rollout.servers, run_dir / "publish")
    devices = cluster.devices(actor)
    weight_sync = ProvenWeightSync(actor, servers, devices)
    player = policy_player(recipe, renderer, lambda: servers.urls, group_size=recipe.batch.group_size)
    with (
        contextlib.closing(scorers),
        contextlib.closing(checkpoints),
        _observation(run_dir, recipe, checkpoints) as observe,
    ):
        yield Run(
            config=recipe,
            prompts=prompts,
            rollout=LiveRollout(
                WatchedPlayer(player, weight_sync),
                recipe.batch,
                recipe.reward,
                recipe.selection,
                journal=checkpoints.journal,
            ),
            actor=actor,
            scorers=scorers,
            weight_sync=weight_sync,
            devices=devices,
            checkpoints=checkpoints,
            evaluator=_evaluator(recipe, renderer, cluster, weight_sync, devices),
            observe=observe,
            mismatch=MismatchMonitor(recipe.train.max_mismatch),
        )


def _evaluator(
    recipe: Recipe,
    renderer: Renderer,
    cluster: Cluster,
    weight_sync: ProvenWeightSync,
    devices: OwnedDevices | SharedDevices,
) -> Evaluator:
    config, servers = recipe.evaluation, cluster.servers
    player = policy_player(recipe, renderer, lambda: servers.urls, group_size=1, temperature=config.temperature)
    source = prompt_source(recipe.env, seed=recipe.seed, split="eval")
    return Evaluator(WatchedPlayer(player, weight_sync), source, config, devices)


@contextlib.contextmanager
def open_replay(
    recipe: Recipe,
    cluster: Cluster,
    *,
    recorded: Path,
    from_step: int,
    out: Path,
    start: Path,
    meter: Path | None = None,
) -> Iterator[Run]:
    """Builds the same run with the trajectories of `recorded` in place of a rollout, and without servers.

    It begins at the checkpoint of `from_step` in `recorded`, or at `start` for 0, and writes to `out`.
    """
    actor = cluster.actor(recipe)
    actor.load_policy(start, recipe.actor.optimizer, recipe.train.num_steps)
    renderer = load_renderer(str(start), recipe.rollout.chat_format, recipe.rollout.tool_format)
    scorers, frozen_models = make_scorers(recipe, actor, renderer, start, meter, out / "logs")
    prompts = PromptStream(prompt_source(recipe.env, seed=recipe.seed, split="train"))
    checkpoints = RunCheckpoints(
        out / "checkpoints",
        recipe,
        actor=actor,
        prompts=prompts,
        frozen_models=frozen_models,
        restore_from=recorded / "checkpoints" if from_step else None,
        restore_step=from_step or None,
    )
    with (
        contextlib.closing(scorers),
        contextlib.closing(checkpoints),
        _observation(out, recipe, checkpoints) as observe,
    ):
        yield Run(
            config=recipe,
            prompts=prompts,
            rollout=RecordedRollout(TrajectoryStore(recorded)),
            actor=actor,
            scorers=scorers,
            weight_sync=NullWeightSync(),
            devices=OwnedDevices(),
            checkpoints=checkpoints,
            evaluator=NullEvaluator(),
            observe=observe,
            mismatch=MismatchMonitor(recipe.train.max_mismatch),
        )


def _observation(run_dir: Path, recipe: Recipe, checkpoints: RunCheckpoints) -> Observation:
    return Observation.open(
        run_dir,
        recipe.observe,
        num_steps=recipe.train.num_steps,
        resume_step=checkpoints.resume_step,
        run_config=run_config(recipe),
    )


def make_scorers(
    recipe: Recipe, actor: ActorGroup, renderer: Renderer, start: Path, meter: Path | None, log_dir: Path
) -> tuple[Scorers, dict[str, str]]:
    """The frozen models that credit rule and loss ask for, and the identity of each by role.

    The actor must hold the start policy: the reference is a copy of it.
    """
    identities: dict[str, str] = {}
    answers: AnswerProbe = NullProbe()
    scorer: MeterScorer = NullMeter()
    reference: ReferencePolicy = NullReference()
    with contextlib.ExitStack() as opened:
        if isinstance(recipe.credit, TraceCredit) or recipe.loss.kl_coefficient > 0:
            frozen = open_reference(recipe, actor=actor, renderer=renderer, start=start, log_dir=log_dir)
            opened.callback(frozen.close)
            identities["reference"] = frozen.identity
            answers = frozen.probe if isinstance(recipe.credit, TraceCredit) else answers
            reference = frozen.probe if recipe.loss.kl_coefficient > 0 else reference
        if isinstance(recipe.meter, OracleMeterConfig):
            scorer, identities["meter"] = oracle_meter(recipe, recipe.meter, renderer), "oracle"
        elif isinstance(recipe.credit, DeltaTTGCredit):
            if meter is None:
                raise ConfigError("credit.kind is deltattg but there is no meter; set meter.kind to frozen or trained")
            its = open_meter(
                recipe,
                load_frozen_meter(meter),
                policy=renderer,
                actor=actor,
                readout=recipe.credit.readout,
                with_terminal=recipe.credit.terminal == "meter",
                log_dir=log_dir,
            )
            opened.callback(its.close)
            scorer, identities["meter"] = its.scorer, its.identity
        scorers = Scorers(
            answers=answers,
            meter=scorer,
            reference=reference,
            credit=recipe.credit,
            group_statistics=recipe.group_statistics,
            close=opened.pop_all().close,
        )
    return scorers, identities
