"""A frozen meter put to work: its readout, its tokens where they are not the policy's, its cost in this domain."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megatrl.config.model_shape import read_model_shape
from megatrl.config.recipe import OracleMeterConfig, Recipe
from megatrl.envs.registry import make_environment, oracle_plan
from megatrl.errors import ScoringError
from megatrl.meter.frozen import FrozenMeter
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.frozen_server import FrozenServer
from megatrl.orchestration.meter_server import MeterServer
from megatrl.rendering.renderer import Renderer, load_renderer
from megatrl.rendering.retokenize import Retokenizer, TrajectoryView
from megatrl.rollout.client import SGLangSampler
from megatrl.scoring.backends import branch_backend, server_backend
from megatrl.scoring.decode_meter import DecodeMeter
from megatrl.scoring.group_meter import GroupMeter
from megatrl.scoring.meter import CandidateMeter
from megatrl.scoring.oracle_meter import OracleMeter

logger = logging.getLogger(__name__)

ReadoutKind = Literal["candidates", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMeter:
    """A meter that answers, and how to let go of what it holds."""

    scorer: GroupMeter
    identity: str  # of its weights
    close: Callable[[], None]


def open_meter(
    recipe: Recipe,
    frozen: FrozenMeter,
    *,
    policy: Renderer,
    actor: ActorGroup | None,
    readout: ReadoutKind,
    with_terminal: bool,
    log_dir: Path,
) -> OpenMeter:
    """The meter of a recipe whose policy renders with `policy`.

    `candidates` reads it on the actor's ranks or, with `scoring.backend: sglang`, on a server of its own; `decode` on
    a server of its own, without an actor. A meter with another tokenizer or template reads the messages, rendered
    with its own. Raises ScoringError where its directory holds another tokenizer than the one it was trained with.
    """
    view, longest = meter_view(recipe, frozen, policy)
    cost = frozen.cost_in(recipe.env.kind)
    if recipe.env.kind not in frozen.failure_costs:
        logger.warning(
            "the meter was trained in %s, not in %s: its own cost C=%.1f is used; credit.failure_cost sets another",
            ", ".join(frozen.failure_costs) or "unnamed domains",
            recipe.env.kind,
            cost,
        )
    common = {
        "prompt": frozen.prompt,
        "failure_cost": cost,
        "policy_fingerprint": policy.fingerprint,
        "max_sequence_tokens": longest,
        "with_terminal": with_terminal,
        "view": view,
    }
    if readout == "candidates" and recipe.scoring.backend == "sglang":
        holder = FrozenServer(recipe, frozen.path, log_dir, role="meter", remedy="set scoring.backend: tree")
        vocab_size, timeout_s = read_model_shape(frozen.path).vocab_size, recipe.rollout.servers.request_timeout_s
        backend = server_backend(holder.urls, vocab_size, request_timeout_s=timeout_s)
        return OpenMeter(scorer=CandidateMeter(backend=backend, **common), identity=frozen.identity, close=holder.close)
    if readout == "candidates":
        assert actor is not None, "candidates are scored on the actor's ranks"
        actor.load_meter(frozen.path)
        runner = actor.query_runner("meter")
        budget = recipe.batch.microbatch_tokens
        backend = branch_backend(recipe.scoring.backend, runner=runner, microbatch_tokens=budget)
        return OpenMeter(scorer=CandidateMeter(backend=backend, **common), identity=frozen.identity, close=lambda: None)
    server, renderer = MeterServer(recipe, frozen.path, log_dir), own_renderer(frozen)
    scorer = DecodeMeter(
        renderer=renderer,
        samplers=lambda: SGLangSampler(server.urls, vocab_size=renderer.vocab_size),
        request_timeout_s=recipe.rollout.servers.request_timeout_s,
        **common,
    )
    return OpenMeter(scorer=scorer, identity=frozen.identity, close=server.close)


def oracle_meter(recipe: Recipe, meter: OracleMeterConfig, policy: Renderer) -> OracleMeter:
    """The remaining work of every state as the environment knows it."""
    return OracleMeter(
        plan=partial(oracle_plan, recipe.env),
        encoder=policy,
        max_turns=min(recipe.env.max_turns, recipe.rollout.max_turns),
        failure_cost=meter.failure_cost,
    )


def meter_view(recipe: Recipe, frozen: FrozenMeter, policy: Renderer) -> tuple[TrajectoryView | None, int]:
    """How the meter sees trajectories (None: as they are), and the longest sequence it reads, in its tokens."""
    if frozen.prompt.tokenizer_fingerprint == policy.fingerprint:
        return None, recipe.rollout.context_tokens + frozen.prompt.num_extra_tokens
    logger.info("the meter has a tokenizer or template of its own; it renders the messages itself")
    renderer = own_renderer(frozen)
    view = Retokenizer(renderer, lambda group: make_environment(recipe.env, group.prompt).tools)
    return view, read_model_shape(frozen.path).max_positions


def own_renderer(frozen: FrozenMeter) -> Renderer:
    """The meter's own renderer. Raises ScoringError where its tokenizer is not the one it was trained with."""
    renderer = load_renderer(str(frozen.path), frozen.chat_format, frozen.tool_format)  # type: ignore[arg-type]
    if renderer.fingerprint != frozen.prompt.tokenizer_fingerprint:
        raise ScoringError(
            f"the tokenizer in {frozen.path} is {renderer.fingerprint}, the meter was trained with "
            f"{frozen.prompt.tokenizer_fingerprint}; freeze it again from its own weights"
        )
    return renderer
