"""A whole run in a few processes without Ray or servers: the real loop, real ranks on gloo, scripted episodes.

Rank 0 lives in the driver's process, the others are forked before anything is initialised. Nothing here knows how to
resume: that is the run's own.
"""

import contextlib
import hashlib
import json
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrl.actor.worker import UpdateResult, WorkerSpec
from megatrl.config.recipe import Recipe
from megatrl.envs.registry import make_environment
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.devices import OwnedDevices
from megatrl.orchestration.filling import LiveRollout
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.rank_worker import RankWorker
from megatrl.orchestration.run import Run, open_run
from megatrl.rendering.renderer import load_renderer
from megatrl.rollout.collector import Collector, ScriptedSamplers

STATES = "states.jsonl"
EPISODES = "episodes.jsonl"


class HashedWorker(RankWorker):
    """A rank that can say, in one hash each, what its next step depends on. There are no servers to connect to."""

    def initialize(self) -> int:
        place = super().initialize()
        torch.manual_seed(11 + self._spec.rank)
        random.seed(12 + self._spec.rank)
        np.random.seed(13 + self._spec.rank)
        return place

    def update(self, *args: Any) -> UpdateResult:
        for draw in (torch.rand(1).item, random.random, np.random.rand):
            draw()  # so that generators which are not restored show
        return super().update(*args)

    def state_hashes(self) -> dict[str, str]:
        return {
            "parameters": self.actor.parameter_hash(),
            "optimizer": _digest(optimizer_values(self.actor.optimizer)),
            "torch": _digest([torch.get_rng_state()]),
            "python": _digest([repr(random.getstate())]),
            "numpy": _digest([repr(np.random.get_state(legacy=False))]),
        }

    def connect_servers(self, *_: Any) -> None:
        return None


def optimizer_values(optimizer: Any) -> list[Any]:
    """Master weights, moments and step counts of this rank's part of the optimizer, in its own order."""
    values: list[Any] = []
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # no parameter of this kind on this rank
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                values += [parameter.detach(), *(state[name] for name in sorted(state))]
    return values


def _digest(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        raw = value if isinstance(value, str) else value.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        digest.update(raw.encode() if isinstance(raw, str) else raw)
    return digest.hexdigest()


class LocalWorkers:
    """The ranks of one run as `WorkerGroup` shows them: rank 0 here, the others behind pipes."""

    def __init__(self, recipe: Recipe, model: Path, port: int, logs: Path) -> None:
        specs = [
            WorkerSpec(
                rank=rank,
                world_size=recipe.actor.layout.world_size,
                master_addr="127.0.0.1",
                master_port=port,
                actor=recipe.actor,
                model_path=str(model),
                seed=recipe.seed,
                num_steps=recipe.train.num_steps,
            )
            for rank in range(recipe.actor.layout.world_size)
        ]
        context = multiprocessing.get_context("fork")
        self._pipes = []
        for spec in specs[1:]:
            mine, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, spec, logs), daemon=True).start()
            self._pipes.append(mine)
        self._own = HashedWorker(specs[0], str(logs / "rank-0.log"))
        self._timeout_s = recipe.actor.timeout_s

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = [getattr(self._own, method)(*args)]
        for rank, pipe in enumerate(self._pipes, start=1):
            if not pipe.poll(timeout_s or self._timeout_s):
                raise TimeoutError(f"rank {rank} did not answer {method}")
            answer = pipe.recv()
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers


def _serve(pipe: Any, spec: WorkerSpec, logs: Path) -> None:
    worker = HashedWorker(spec, str(logs / f"rank-{spec.rank}.log"))
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(worker, method)(*args))
        except Exception as error:
            pipe.send(error)


class NoServers:
    def wait_ready(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    """What `open_run` asks of a cluster."""

    workers: Any
    servers: NoServers

    def actor(self, recipe: Recipe) -> ActorGroup:
        return ActorGroup(self.workers, temperature=recipe.rollout.sampling.temperature, loss=recipe.loss)

    def devices(self, actor: ActorGroup) -> OwnedDevices:
        return OwnedDevices()


class HashingSync:
    """Publishes nothing; writes down what every rank is at each policy version."""

    def __init__(self, actor: ActorGroup, path: Path) -> None:
        self._actor, self._path = actor, path
        self.metrics: dict[str, float] = {}

    def publish(self, policy_version: int) -> None:
        append(self._path, {"version": policy_version, "ranks": self._actor.workers.call("state_hashes")})


class CountedRollout:
    """Writes down how many episodes a step had to play."""

    def __init__(self, rollout: LiveRollout, collector: Collector, path: Path) -> None:
        self.inner, self._collector, self._path = rollout, collector, path

    def fill(self, prompts: Any, progress: Progress) -> Any:
        batch = self.inner.fill(prompts, progress)
        append(self._path, {"step": progress.step + 1, "played": self._collector.report.num_attempts})
        return batch


def append(path: Path, value: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def scripted_collector(recipe: Recipe, start: Path) -> Collector:
    """Plays the environment's scripted policy in groups; the same prompt gives the same group each time."""
    renderer = load_renderer(str(start), recipe.rollout.chat_format, recipe.rollout.tool_format)
    return Collector(
        config=recipe.rollout,
        reward=recipe.reward,
        renderer=renderer,
        make_environment=partial(make_environment, recipe.env),
        samplers=ScriptedSamplers(renderer, seed=recipe.seed, detour=0.4, premature=0.3),
        group_size=recipe.batch.group_size,
        seed=recipe.seed,
    )


@contextlib.contextmanager
def open_local_run(
    recipe: Recipe, run_dir: Path, start: Path, workers: Any, *, meter: Path | None, resume: bool
) -> Iterator[Run]:
    """The run that `megatrl train` would open, with scripted episodes and without servers."""
    cluster: Any = LocalCluster(workers=workers, servers=NoServers())
    with open_run(recipe, cluster, run_dir=run_dir, start=start, meter=meter, resume=resume) as run:
        collector = scripted_collector(recipe, start)
        rollout = LiveRollout(
            collector,
            recipe.batch,
            recipe.reward,
            recipe.selection,
            journal=run.checkpoints.journal,  # type: ignore[attr-defined]
        )
        yield replace(
            run,
            rollout=CountedRollout(rollout, collector, run_dir / EPISODES),
            weight_sync=HashingSync(run.actor, run_dir / STATES),
        )
