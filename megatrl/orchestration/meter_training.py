"""The meter that a recipe makes for itself: record, label, fine-tune, measure, freeze."""

import logging
from collections.abc import Iterable
from pathlib import Path

from megatrl.config.credit import CreditConfig, DeltaTTGCredit
from megatrl.config.recipe import FrozenMeter, Recipe, SFTConfig, TrainedMeter
from megatrl.data.meter_labels import MeterLabels, content_hash
from megatrl.data.trajectories import PromptGroup, Trajectory
from megatrl.envs.registry import prompt_source
from megatrl.errors import ScoringError
from megatrl.meter.collection import Source, gather
from megatrl.meter.frozen import freeze_meter
from megatrl.meter.labelling import Labelling, label_collection
from megatrl.meter.labels import LabelRule
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.artifacts import Artifacts
from megatrl.orchestration.cluster import Cluster
from megatrl.orchestration.devices import OwnedDevices
from megatrl.orchestration.meter_fitting import evaluate_meter, fit_meter, frozen_copy_meter
from megatrl.orchestration.players import WatchedPlayer, policy_player
from megatrl.orchestration.start import artifact_key, scripted_groups
from megatrl.orchestration.weight_sync import ProvenWeightSync
from megatrl.rendering.renderer import load_renderer

logger = logging.getLogger(__name__)

_FIRST_POSITION = 20_000_000  # tasks that neither the loop nor the demonstrations reach
_STRIDE = 1_000_000


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
    refuse_partial_scores((t for group in groups for t in group.trajectories), recipe.credit)
    labels = _labels(recipe, meter, start, groups)
    budget = recipe.batch.microbatch_tokens
    if meter.sft is not None:
        fit_meter(actor, labels, meter.sft, microbatch_tokens=budget, seed=recipe.seed + 1)
    actor.save_hf(out / "weights", start)
    # The weights to freeze are still in the actor: a frozen copy of them is the meter.
    scorer = frozen_copy_meter(actor, labels, microbatch_tokens=budget)
    evaluation = evaluate_meter(scorer, labels.validation).metrics if labels.validation else {}
    logger.info("meter validation %s", {name: round(value, 4) for name, value in evaluation.items()})
    freeze_meter(
        out / "weights",
        out / "meter",
        prompt=labels.prompt,
        failure_cost=labels.failure_cost,
        failure_costs=labels.failure_costs,
        chat_format=labels.chat_format,
        tool_format=labels.tool_format,
        training_hash=content_hash(labels.training),
        evaluation=evaluation,
    )


def _labels(recipe: Recipe, meter: TrainedMeter, start: Path, groups: Iterable[PromptGroup]) -> MeterLabels:
    """The labels of the recorded groups, as `megatrl meter collect` and `label` make them."""
    rollout = recipe.rollout
    renderer = load_renderer(str(start), rollout.chat_format, rollout.tool_format)
    source = Source(
        name=recipe.name,
        domain=recipe.env.kind,
        tokenizer=str(start),
        tokenizer_fingerprint=renderer.fingerprint,
        chat_format=rollout.chat_format,
        tool_format=rollout.tool_format,
    )
    collection, _ = gather([(source, groups)])
    rule = LabelRule(
        max_prefixes_per_trajectory=meter.max_prefixes_per_trajectory,
        with_terminal=_is_asked_at_the_end(recipe.credit),
    )
    how = Labelling(rule=rule, seed=recipe.seed)
    labelled = label_collection(
        collection, renderer, how, chat_format=rollout.chat_format, tool_format=rollout.tool_format
    )
    labels = labelled.labels
    logger.info(
        "meter labels=%d left_out=%s failure_cost=%.1f",
        len(labels.training),
        labelled.left_out["training"],
        labels.failure_cost,
    )
    return labels


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
