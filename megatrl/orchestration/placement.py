"""Where processes go: Ray bundles for ranks and servers, with a deadline and a table when they do not fit."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from megatrl.config.recipe import Recipe
from megatrl.errors import DeadlineError, Terminated
from megatrl.observability.progress import waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Bundles of one placement group: `actor_bundles[rank]` and `server_bundles[server]`."""

    group: PlacementGroup
    actor_bundles: tuple[int, ...]
    server_bundles: tuple[int, ...]
    gpus_per_actor: float
    gpus_per_server: float


@dataclass(frozen=True, slots=True)
class BundlePlan:
    bundles: list[dict[str, float]]
    actor_bundles: tuple[int, ...]
    server_bundles: tuple[int, ...]
    gpus_per_actor: float
    gpus_per_server: float


def plan_bundles(recipe: Recipe) -> BundlePlan:
    """One bundle for each rank; servers get their own, or share the ranks' where colocated.

    Pure. A GPU is shared in halves; a CPU role takes one logical CPU.
    """
    ranks, servers = recipe.actor.layout.world_size, recipe.rollout.servers
    actor_gpu = 1.0 if recipe.actor.device == "cuda" else 0.0
    server_gpu = float(servers.tensor) if servers.device == "cuda" else 0.0
    colocated = recipe.placement.kind == "colocated"
    if colocated and actor_gpu and servers.tensor == 1:
        bundles = [{"CPU": 2.0, "GPU": 1.0} for _ in range(ranks)]
        shared = tuple(i % ranks for i in range(servers.num_servers))
        return BundlePlan(bundles, tuple(range(ranks)), shared, 0.5, 0.5)
    bundles = [{"CPU": 1.0, **({"GPU": actor_gpu} if actor_gpu else {})} for _ in range(ranks)]
    bundles += [{"CPU": 1.0, **({"GPU": server_gpu} if server_gpu else {})} for _ in range(servers.num_servers)]
    own = tuple(range(ranks, ranks + servers.num_servers))
    return BundlePlan(bundles, tuple(range(ranks)), own, actor_gpu, server_gpu)


@contextlib.contextmanager
def ray_cluster(recipe: Recipe) -> Iterator[Placement]:
    """Joins the Ray cluster that the job brought up (RAY_ADDRESS), or starts one of our own here.

    Raises DeadlineError with wanted and available resources where the bundles do not become ready.
    """
    plan = plan_bundles(recipe)
    address = os.environ.get("RAY_ADDRESS", "local")
    own: dict[str, Any] = {}
    if address == "local":  # a CPU here is a slot, not a core: the roles take turns
        own = {"num_cpus": max(len(plan.bundles) * 2, os.cpu_count() or 1), "include_dashboard": False}
    _join_our_log()
    with waiting("Ray"):
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **own)
    earlier = raise_on_sigterm()
    try:
        group = placement_group(plan.bundles, strategy="PACK")
        if not group.wait(recipe.placement.ready_timeout_s):
            raise DeadlineError(
                f"Ray could not reserve {len(plan.bundles)} bundles within {recipe.placement.ready_timeout_s:.0f} s\n"
                + resource_table(plan.bundles, ray.nodes())
            )
        try:
            yield Placement(
                group=group,
                actor_bundles=plan.actor_bundles,
                server_bundles=plan.server_bundles,
                gpus_per_actor=plan.gpus_per_actor,
                gpus_per_server=plan.gpus_per_server,
            )
        finally:
            remove_placement_group(group)
    finally:
        ray.shutdown()
        if earlier is not None:
            signal.signal(signal.SIGTERM, earlier)


def raise_on_sigterm() -> Any:
    """Makes SIGTERM raise Terminated in the main thread; returns the earlier handler, None in another thread.

    Ray's own handler raises SystemExit, which an environment may raise as well.
    """

    def terminate(signum: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, terminate)


def _join_our_log() -> None:
    """Ray's errors go where ours go. Its own handler would write notices across the screen."""
    logger = logging.getLogger("ray")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.ERROR)


def node_address(group: PlacementGroup, bundle: int) -> str:
    """Address of the node that holds a bundle; loopback while the whole cluster is one node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) == 1:
        return "127.0.0.1"
    node_id = placement_group_table(group)["bundles_to_node_id"][bundle]
    return next(node["NodeManagerAddress"] for node in alive if node["NodeID"] == node_id)


def resource_table(bundles: list[dict[str, float]], nodes: list[dict]) -> str:
    """Wanted against available resources, one line for each node."""
    wanted = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    lines = [f"  wanted: CPU {wanted['CPU']:g}, GPU {wanted['GPU']:g} in bundles {bundles}"]
    for node in nodes:
        has = node.get("Resources", {})
        state = "alive" if node.get("Alive") else "dead"
        lines.append(f"  {node.get('NodeName', '?')} ({state}): CPU {has.get('CPU', 0):g}, GPU {has.get('GPU', 0):g}")
    return "\n".join([*lines, "  lower actor.layout.world_size or rollout.servers.num_servers, or add nodes"])
