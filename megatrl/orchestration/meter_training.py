"""The meter that a recipe makes for itself: record, label, fine-tune, measure, freeze."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatrl.config.credit import CreditConfig, DeltaTTGCredit
from megatrl.config.engines import TinyModel
from megatrl.config.recipe import FrozenMeter, Recipe, SFTConfig, TrainedMeter
from megatrl.data.trajectories import PromptGroup, Trajectory
from megatrl.envs.registry import prompt_source
from megatrl.errors import ScoringError
from megatrl.meter.evaluation import evaluate_forecasts
from megatrl.meter.frozen import freeze_meter
from megatrl.meter.labels import (
    LabelRule,
    collect_labels,
    failure_cost,
    log_spaced_grid,
    split_by_task,
    trajectory_labels,
)
from megatrl.meter.prompt import MeterText, build_meter_prompt, can_answer
from megatrl.meter.sft_set import build_sft_set
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster
from megatrl.orchestration.devices import OwnedDevices
from megatrl.orchestration.players import WatchedPlayer, policy_player
from megatrl.orchestration.start import artifact_key, scripted_groups
from megatrl.orchestration.supervision import supervise
from megatrl.orchestration.weight_sync import ProvenWeightSync
from megatrl.rendering.renderer import load_renderer
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import CandidateMeter

logger = logging.getLogger(__name__)

_FIRST_POSITION = 20_000_000  # tasks that neither the loop nor the demonstrations reach
_STRIDE = 1_000_000
_GRID_SIZE = 24
_VALIDATION_FRACTION = 0.1
_COMPACT = MeterText(header="", question="forecast")
"""For word-level tokenizers, which know no sentences."""


def meter_directory(recipe: Recipe, start: Path, artifacts: Artifacts, cluster: Cluster) -> Path | None:
    """The frozen meter of a recipe: the directory it names, one trained now, or None where it needs none."""
    meter = recipe.meter
    if isinstance(meter, FrozenMeter):
        return Path(meter.path)
    if not isinstance(meter, TrainedMeter):
        return None
    key = {
        **artifact_key(recipe),
        "start_policy": start.name,
        "meter": meter.model_dump(mode="json"),
        "with_terminal": _is_asked_at_the_end(recipe.credit),
    }
    made = artifacts.get_or_make("meter", key, lambda out: _train_meter(recipe, meter, start, out, cluster))
    return made / "meter"


def _train_meter(recipe: Recipe, meter: TrainedMeter, start: Path, out: Path, cluster: Cluster) -> None:
    actor = cluster.actor(recipe)
    sft = meter.sft or SFTConfig()  # without SFT the weights are loaded and stay as they are
    actor.load_policy(start, sft.optimizer, sft.num_steps)
    groups = _record(recipe, meter, start, actor, cluster)
    trajectories = [t for group in groups for t in group.trajectories]
    refuse_partial_scores(trajectories, recipe.credit)
    training, validation = split_by_task(trajectories, validation_fraction=_VALIDATION_FRACTION, seed=recipe.seed)
    labels = collect_labels(
        training,
        LabelRule(
            max_prefixes_per_trajectory=meter.max_prefixes_per_trajectory,
            with_terminal=_is_asked_at_the_end(recipe.credit),
        ),
        seed=recipe.seed,
        domain_of=lambda trajectory: recipe.env.kind,
    )
    cost = failure_cost(labels.examples)
    renderer = load_renderer(str(start), recipe.rollout.chat_format, recipe.rollout.tool_format)
    text = _COMPACT if isinstance(recipe.model, TinyModel) else MeterText()
    grid = log_spaced_grid(labels.examples, size=_GRID_SIZE, is_spellable=partial(can_answer, renderer))
    prompt = build_meter_prompt(renderer, grid, text)
    max_tokens = recipe.rollout.context_tokens + prompt.num_extra_tokens
    logger.info("meter labels=%d left_out=%s failure_cost=%.1f", len(labels.examples), labels.left_out, cost)
    if meter.sft is not None:
        sft_set = build_sft_set(labels.examples, prompt, max_sequence_tokens=max_tokens)
        supervise(
            actor,
            sft_set.samples,
            meter.sft,
            microbatch_tokens=recipe.batch.microbatch_tokens,
            seed=recipe.seed + 1,
            title="SFT of the meter",
        )
    actor.save_hf(out / "weights", start)
    # The weights to freeze are still in the actor: a frozen copy of them is the meter.
    actor.freeze_reference()
    runner = actor.query_runner("reference")
    scorer = CandidateMeter(
        prompt=prompt,
        backend=IndependentBackend(runner=runner, microbatch_tokens=recipe.batch.microbatch_tokens),
        failure_cost=cost,
        policy_fingerprint=renderer.fingerprint,
        max_sequence_tokens=max_tokens,
    )
    evaluation = _evaluate(prompt_groups(validation, groups), scorer)
    logger.info("meter validation %s", {name: round(value, 4) for name, value in evaluation.items()})
    freeze_meter(
        out / "weights",
        out / "meter",
        prompt=prompt,
        failure_cost=cost,
        training_hash=labels.content_hash,
        evaluation=evaluation,
    )


def _is_asked_at_the_end(credit: CreditConfig) -> bool:
    """True where the credit rule also reads the forecast of the state after the last action."""
    return isinstance(credit, DeltaTTGCredit) and credit.terminal == "meter"


def refuse_partial_scores(trajectories: Iterable[Trajectory], credit: CreditConfig) -> None:
    """Raises ScoringError where `target: outcome` would take a completion bit for a partial score."""
    if not isinstance(credit, DeltaTTGCredit) or credit.target != "outcome":
        return
    partial = sorted({t.reward for t in trajectories if t.reward is not None} - {0.0, 1.0})
    if partial:
        raise ScoringError(
            f"credit.target: outcome reads the meter's completion probability as the expected score, but the "
            f"environment gives scores other than 0 and 1, such as {partial[0]}; use credit.target: completion_prob"
        )


def _record(recipe: Recipe, meter: TrainedMeter, start: Path, actor: ActorGroup, cluster: Cluster) -> list[PromptGroup]:
    """Episodes of scripted policies of several qualities and of the start policy itself."""
    groups: list[PromptGroup] = []
    for number, detour in enumerate(meter.detours):
        groups += scripted_groups(
            recipe,
            start,
            num_episodes=meter.num_scripted_episodes // len(meter.detours),
            detour=detour,
            premature=0.08,
            first_position=_FIRST_POSITION + number * _STRIDE,
        )
    if meter.num_policy_episodes:
        cluster.servers.wait_ready()
        actor.connect_servers(recipe.publish, recipe.rollout.servers, Path(recipe.observe.runs_dir) / "publish")
        weight_sync = ProvenWeightSync(actor, cluster.servers, OwnedDevices())
        weight_sync.publish(0)
        renderer = load_renderer(str(start), recipe.rollout.chat_format, recipe.rollout.tool_format)
        episodes = policy_player(recipe, renderer, lambda: cluster.servers.urls, group_size=1)
        player = WatchedPlayer(episodes, weight_sync)
        source = prompt_source(recipe.env, seed=recipe.seed, split="train")
        first = _FIRST_POSITION + len(meter.detours) * _STRIDE
        prompts = [source.prompt(first + i) for i in range(meter.num_policy_episodes)]
        groups += player.collect(prompts, first_position=first, policy_version=0)
    return groups


def prompt_groups(trajectories: Iterable[Trajectory], groups: Iterable[PromptGroup]) -> list[PromptGroup]:
    """The groups with only the given trajectories in them; empty groups are left out."""
    wanted = {t.id for t in trajectories}
    narrowed = (replace(g, trajectories=tuple(t for t in g.trajectories if t.id in wanted)) for g in groups)
    return [group for group in narrowed if group.trajectories]


def _evaluate(groups: list[PromptGroup], meter: CandidateMeter) -> dict[str, float]:
    """Forecast quality on held-out tasks; empty where nothing was held out."""
    scores, _ = meter.score(groups)
    forecasts, labels = [], []
    for trajectory in (t for group in groups for t in group.trajectories if t.id in scores):
        labels += [labeled.label for labeled in trajectory_labels(trajectory)]
        forecasts += scores[trajectory.id].forecasts
    return evaluate_forecasts(forecasts, labels) if labels else {}
