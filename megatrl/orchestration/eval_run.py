"""What `megatrl eval` does: episodes on held-out tasks under one policy, once for each way to choose its actions."""

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatrl.config.credit import DeltaTTGCredit
from megatrl.config.recipe import FrozenMeter as FrozenMeterConfig
from megatrl.config.recipe import Recipe
from megatrl.envs.registry import has_oracle_plan, make_environment, oracle_plan, prompt_source
from megatrl.errors import ConfigError, MegatrlError, ScoringError
from megatrl.meter.frozen import FrozenMeter, load_frozen_meter
from megatrl.observability.atomic_file import replace_text
from megatrl.observability.evaluation_plots import Bar, plot_evaluation
from megatrl.observability.logs import logging_to
from megatrl.observability.progress import ProgressDisplay
from megatrl.orchestration.eval_journal import (
    SETTINGS,
    EpisodeJournal,
    EpisodeRow,
    agree_on_settings,
    read_episodes,
)
from megatrl.orchestration.eval_oracle import OracleChooser
from megatrl.orchestration.eval_policy import EvaluatedPolicy, resolve_policy
from megatrl.orchestration.eval_servers import ReloadingServers, ServedPolicy, served_policy
from megatrl.orchestration.eval_summary import INTERVALS, comparison_rows, markdown, summarize_episodes
from megatrl.orchestration.meter_scoring import ReadoutKind, open_meter
from megatrl.orchestration.players import WatchedPlayer
from megatrl.orchestration.run_directory import claimed, identity_of
from megatrl.rendering.renderer import Renderer, load_renderer
from megatrl.rollout.collector import Collector, ServerSamplers
from megatrl.rollout.selection import Chooser, RandomChooser, SelectingSamplers
from megatrl.scoring.meter_choice import MeterChooser

logger = logging.getLogger(__name__)

Selection = Literal["natural", "random", "meter", "oracle"]
Mode = Literal["agent"]
"""How the policy is prompted: `agent` plays the recipe's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """One evaluation. None takes the recipe's value."""

    policy: Path
    recipe: Recipe
    step: int | None = None
    episodes: int | None = None
    repeats: int = 1
    selections: tuple[Selection, ...] = ("natural",)
    candidates: int = 4
    meter: Path | None = None
    readout: ReadoutKind | None = None
    temperature: float | None = None
    out: Path | None = None
    mode: Mode = "agent"

    @property
    def num_episodes(self) -> int:
        return self.recipe.evaluation.num_episodes if self.episodes is None else self.episodes

    @property
    def sampling_temperature(self) -> float:
        return self.recipe.evaluation.temperature if self.temperature is None else self.temperature

    @property
    def meter_readout(self) -> ReadoutKind:
        credit = self.recipe.credit
        return self.readout or (credit.readout if isinstance(credit, DeltaTTGCredit) else "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What was measured, and where it lies."""

    out: Path
    arms: Mapping[str, tuple[EpisodeRow, ...]]

    def as_json(self) -> dict[str, Any]:
        """Summary of each way to act, by name."""
        return {name: summarize_episodes(rows).as_json() for name, rows in self.arms.items()}


def evaluate(plan: EvaluationPlan) -> EvaluationReport:
    """Plays what is not played yet, and writes episodes, summary, table and plot below the plan's directory.

    Raises ConfigError for a plan that cannot be, and where the directory holds episodes of other settings;
    RolloutError where more episodes fail than `rollout.max_failure_fraction`. What was played then stays.
    """
    check_plan(plan)
    runs_dir = Path(plan.recipe.observe.runs_dir)
    policy = resolve_policy(plan.policy, step=plan.step, converted=runs_dir / "artifacts")
    meter = load_frozen_meter(_meter_path(plan)) if "meter" in plan.selections else None
    recipe = _without_training(plan.recipe)
    renderer = load_renderer(str(policy.path), recipe.rollout.chat_format, recipe.rollout.tool_format)
    if meter is not None and meter.prompt.tokenizer_fingerprint != renderer.fingerprint:
        raise ScoringError(
            f"the meter {meter.path} reads tokenizer {meter.prompt.tokenizer_fingerprint}, the policy writes "
            f"{renderer.fingerprint}: candidates are scored as the tokens that were sampled, so selection needs a "
            "meter with the policy's tokenizer, chat format and tool format"
        )
    settings = _settings(plan, policy)
    out = plan.out or runs_dir / "evaluations" / f"{recipe.name}-{_short_hash(settings)}"
    with claimed(out.parent, out.name), _logging(out / "logs"):
        agree_on_settings(out / SETTINGS, settings)
        for name in plan.selections:
            agree_on_settings(out / name / SETTINGS, _arm_settings(plan, name, meter))
        arms = _play_arms(plan, recipe, policy, renderer, meter, out)
        return _written(EvaluationReport(out=out, arms=arms), policy)


def check_plan(plan: EvaluationPlan) -> None:
    """Raises ConfigError, with what to change, for a plan that means nothing."""
    if plan.num_episodes < 1:
        raise ConfigError("--episodes: the recipe has evaluation.num_episodes = 0; give a number of at least 1")
    if len(set(plan.selections)) != len(plan.selections):
        raise ConfigError(f"--select: {', '.join(plan.selections)}: name each way once")
    choosing = [name for name in plan.selections if name != "natural"]
    if choosing and plan.candidates < 2:
        raise ConfigError(f"--candidates {plan.candidates}: --select {choosing[0]} chooses among at least 2")
    if "oracle" in choosing and not has_oracle_plan(plan.recipe.env):
        raise ConfigError(
            f"--select oracle: env.kind = {plan.recipe.env.kind} does not know the way; evidence_hunt does"
        )
    if choosing and plan.sampling_temperature == 0:
        raise ConfigError(
            f"--temperature 0 samples {plan.candidates} equal actions, and --select {choosing[0]} has nothing to "
            "choose from; give a temperature above 0"
        )


def _meter_path(plan: EvaluationPlan) -> Path:
    config = plan.recipe.meter
    if plan.meter is not None:
        return plan.meter
    if isinstance(config, FrozenMeterConfig):
        return Path(config.path)
    raise ConfigError(
        "--select meter needs a frozen meter: give --meter DIR (of `megatrl meter freeze`), or a recipe with "
        "meter.kind: frozen"
    )


def _without_training(recipe: Recipe) -> Recipe:
    """Nothing is trained from these episodes: no routes are recorded for a replay."""
    router = recipe.actor.router.model_copy(update={"replay": False})
    return recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"router": router})})


def _settings(plan: EvaluationPlan, policy: EvaluatedPolicy) -> dict[str, Any]:
    """Everything that an episode depends on, whatever chooses its actions."""
    identity = identity_of(plan.recipe)
    return {
        "mode": plan.mode,
        "policy": policy.content_hash,
        "episodes": plan.num_episodes,
        "repeats": plan.repeats,
        "temperature": plan.sampling_temperature,
        "seed": plan.recipe.seed,
        **{section: identity[section] for section in ("env", "rollout", "reward")},
    }


def _arm_settings(plan: EvaluationPlan, name: Selection, meter: FrozenMeter | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"select": name}
    if name != "natural":
        settings["candidates"] = plan.candidates
    if name == "meter":
        assert meter is not None
        settings |= {"meter": meter.identity, "readout": plan.meter_readout, "failure_cost": _cost(plan.recipe, meter)}
    return settings


def _cost(recipe: Recipe, meter: FrozenMeter) -> float:
    """C in tokens: the recipe's where its credit rule sets one, else the meter's."""
    credit = recipe.credit
    if not isinstance(credit, DeltaTTGCredit):
        return meter.cost_in(recipe.env.kind)
    cost = meter.cost_in(recipe.env.kind) if credit.failure_cost == "auto" else credit.failure_cost
    return cost * credit.failure_cost_scale


def _play_arms(
    plan: EvaluationPlan,
    recipe: Recipe,
    policy: EvaluatedPolicy,
    renderer: Renderer,
    meter: FrozenMeter | None,
    out: Path,
) -> dict[str, tuple[EpisodeRow, ...]]:
    missing: list[Selection] = [name for name in plan.selections if _num_missing(plan, out / name)]
    if missing:
        on_ranks = plan.meter_readout == "candidates" and recipe.scoring.backend in ("tree", "independent")
        with_ranks = "meter" in missing and on_ranks
        with served_policy(recipe, policy.path, out / "logs", with_ranks=with_ranks) as served:
            for name in missing:
                with _chooser(name, plan, recipe, renderer, meter, served, out) as chooser:
                    _play(name, plan, recipe, renderer, chooser, served, out / name)
    return {name: _rows(plan, out / name) for name in plan.selections}


def _play(
    name: Selection,
    plan: EvaluationPlan,
    recipe: Recipe,
    renderer: Renderer,
    chooser: Chooser,
    served: ServedPolicy,
    directory: Path,
) -> None:
    """The episodes of one way to act that are still missing."""
    samplers = SelectingSamplers(
        ServerSamplers(lambda: served.servers.urls, vocab_size=renderer.vocab_size),
        chooser,
        num_candidates=1 if name == "natural" else plan.candidates,
        is_deduplicated=name != "random",  # equal candidates in the control keep the policy's own odds
    )
    source = prompt_source(recipe.env, seed=recipe.seed, split="eval")
    with (
        contextlib.closing(
            EpisodeJournal(directory, repeats=plan.repeats, tally_of=samplers.tallies.__getitem__)
        ) as journal,
        _shown(name, plan.num_episodes * plan.repeats, journal) as progress,
    ):
        collector = Collector(
            config=recipe.rollout,
            reward=recipe.reward,
            renderer=renderer,
            make_environment=partial(make_environment, recipe.env),
            samplers=samplers,
            group_size=plan.repeats,
            seed=recipe.seed,
            temperature=plan.sampling_temperature,
            progress=progress,
        )
        prompts = [source.prompt(position) for position in range(plan.num_episodes)]
        begin = time.monotonic()
        try:
            WatchedPlayer(collector, ReloadingServers(served.servers)).collect(
                prompts, first_position=0, policy_version=0, journal=journal
            )
        except ExceptionGroup as group:
            raise _first_of_ours(group) from group
        logger.info("played select=%s seconds=%.1f %s", name, time.monotonic() - begin, samplers.tally.metrics)


@contextlib.contextmanager
def _chooser(
    name: Selection,
    plan: EvaluationPlan,
    recipe: Recipe,
    renderer: Renderer,
    meter: FrozenMeter | None,
    served: ServedPolicy,
    out: Path,
) -> Iterator[Chooser]:
    if name == "oracle":
        plan_of = partial(oracle_plan, recipe.env)
        limits = recipe.rollout
        yield OracleChooser(plan_of, renderer, tool_format=limits.tool_format, max_turns=limits.max_turns)
        return
    if name != "meter":
        yield RandomChooser()
        return
    assert meter is not None
    opened = open_meter(
        recipe,
        meter,
        policy=renderer,
        actor=served.actor,
        readout=plan.meter_readout,
        with_terminal=False,
        log_dir=out / "logs",
    )
    chooser = MeterChooser(opened.scorer, failure_cost=_cost(recipe, meter), timeout_s=recipe.actor.timeout_s)
    try:
        yield chooser
    finally:
        logger.info("meter choice %s", chooser.tally.metrics)
        chooser.close()
        opened.close()


@contextlib.contextmanager
def _shown(name: str, total: int, journal: EpisodeJournal) -> Iterator[Callable[[int, int, int], None]]:
    """A bar for the episodes of one way to act, and a line in the log now and then."""
    done = len(journal.rows) - journal.num_unknown
    display = ProgressDisplay(total, done=done, title=f"{name} episodes")
    every_s, shown = (0.2 if sys.stderr.isatty() else 10.0), time.monotonic()

    def progress(done: int, total: int, tokens: int) -> None:
        nonlocal shown
        if done == total or time.monotonic() - shown > every_s:
            shown = time.monotonic()
            known = [row.success for row in journal.rows if row.success is not None]
            success = {"success": sum(known) / len(known)} if known else {}
            display.update(done, {**success, "tokens": float(tokens)})

    try:
        yield progress
    finally:
        display.close()


def _written(report: EvaluationReport, policy: EvaluatedPolicy) -> EvaluationReport:
    """summary.json, table.md and comparison.png of what is measured."""
    summaries = {name: summarize_episodes(rows) for name, rows in report.arms.items()}
    content = {"policy": policy.what, "intervals": INTERVALS, "selections": report.as_json()}
    replace_text(report.out / "summary.json", json.dumps(content, indent=1) + "\n")
    replace_text(report.out / "table.md", markdown(comparison_rows(report.arms)))
    bars = [
        Bar(
            name=name,
            success=s.success,
            interval=s.success_interval,
            action_tokens=s.action_tokens or 0.0,
            sampled_tokens=s.sampled_tokens or 0.0,
        )
        for name, s in summaries.items()
        if s.success is not None and s.success_interval is not None
    ]
    plot_evaluation(bars, report.out / "comparison.png", title=policy.what)
    return report


def _rows(plan: EvaluationPlan, directory: Path) -> tuple[EpisodeRow, ...]:
    return tuple(row for rows in read_episodes(directory, repeats=plan.repeats) for row in rows)


def _num_missing(plan: EvaluationPlan, directory: Path) -> int:
    return plan.num_episodes * plan.repeats - sum(row.success is not None for row in _rows(plan, directory))


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of megatrl inside nested groups, or else the first of all."""
    ours = group.subgroup(MegatrlError)
    error: BaseException = ours or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _short_hash(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def _logging(logs: Path) -> contextlib.AbstractContextManager[object]:
    return logging_to(logs / "driver.log", to_stderr=not sys.stderr.isatty())
