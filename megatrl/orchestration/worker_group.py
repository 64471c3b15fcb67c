"""One Ray actor for each rank around a plain class, called together, with deadlines."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatrl.errors import DeadlineError, MegatrlError

_MAX_REASON_CHARS = 240  # of Ray's account, which goes on with general advice


class WorkerGroup:
    """Calls a method on all ranks at once and gives the answers in rank order.

    The first rank that fails ends the call for all: the others may be waiting for it in a collective.
    """

    def __init__(self, role: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.role = role
        self._actors = list(actors)
        self._timeout_s = timeout_s

    @classmethod
    def start(
        cls,
        role: str,
        worker_class: type,
        arguments: Sequence[tuple[Any, ...]],
        *,
        placement: PlacementGroup,
        bundles: Sequence[int],
        cpus: float,
        gpus: float,
        environment: dict[str, str],
        timeout_s: float,
    ) -> "WorkerGroup":
        """Starts one actor for each element of `arguments` in its bundle; does not wait for readiness."""
        remote = ray.remote(worker_class)
        actors = [
            remote.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
            ).remote(*args)
            for args, bundle in zip(arguments, bundles, strict=True)
        ]
        return cls(role, actors, timeout_s)

    def __len__(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Runs `method(*args)` on every rank. Raises the worker's own MegatrlError, or DeadlineError."""
        shared = [ray.put(arg) for arg in args]
        return self._gather(method, [getattr(actor, method).remote(*shared) for actor in self._actors], timeout_s)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Runs `method(*arguments[rank])` on every rank."""
        calls = zip(self._actors, arguments, strict=True)
        return self._gather(method, [getattr(actor, method).remote(*args) for actor, args in calls], timeout_s)

    def _gather(self, method: str, references: list[Any], timeout_s: float | None) -> list[Any]:
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        pending = list(references)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [references.index(reference) for reference in pending]
                raise DeadlineError(f"{self.role}.{method} did not answer within {limit:.0f} s on ranks {ranks}")
            rank = references.index(ready[0])
            _raise_cause(
                lambda reference=ready[0]: ray.get(reference, timeout=limit), f"{self.role} rank {rank}.{method}"
            )
        return ray.get(references)

    def stop(self) -> None:
        """Ends the actors of this group, and no other process."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []


def _raise_cause(fetch: Callable[[], Any], what: str) -> None:
    """Turns Ray's wrappers back into the error that the worker raised, where a person can act on it."""
    try:
        fetch()
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegatrlError | OSError):
            raise cause from error
        raise
    except RayActorError as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise MegatrlError(
            f"{what}: its process died, killed from outside or for lack of memory ({reason} ...). See logs/ in the run "
            "directory and the kernel's log; the last checkpoint is intact: continue with --resume"
        ) from error
    except GetTimeoutError as error:
        raise DeadlineError(f"{what}: the answer did not arrive") from error
