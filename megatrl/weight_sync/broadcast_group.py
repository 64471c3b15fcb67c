"""The process group of route `broadcast` seen from rank 0, and calls to servers that run beside a collective."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrl.errors import WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.fanout import Failures, on_each

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]


class InBackground:
    """One call to each server, running while this thread takes part in the collective."""

    def __init__(self, servers: Sequence[ServerControl], call: Callable[[ServerControl], object]) -> None:
        self._urls = [server.url for server in servers]
        self._failures: dict[str, Failures] = {}
        self._threads = [threading.Thread(target=self._run, args=(server, call), daemon=True) for server in servers]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerControl, call: Callable[[ServerControl], object]) -> None:
        self._failures[server.url] = on_each([server], call)

    def has_failed(self) -> bool:
        return any(self._failures.values())

    def failures(self, *, timeout_s: float) -> Failures:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        found: Failures = {}
        for url in self._urls:
            found |= self._failures.get(url, {} if self.has_failed() else {url: f"no answer within {timeout_s:g} s"})
        return found


def form_group(
    backend: Backend, address: str, port: int, world_size: int, name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Rank 0 of a group beside the trainer's default one: the rendezvous SGLang's servers use."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False
    )
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    if not isinstance(group, dist.ProcessGroup):
        raise WeightSyncError(f"torch made no process group for broadcast (backend {backend}); is it compiled in?")
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def drop_group(group: dist.ProcessGroup) -> None:
    """Destroy a group without waiting for members that are gone."""
    thread = threading.Thread(target=_destroy, args=(group,), daemon=True)
    thread.start()
    thread.join(timeout=5.0)
    if thread.is_alive():
        logger.warning("broadcast group is still waiting for a lost member; it ends at its own deadline")


def _destroy(group: dist.ProcessGroup) -> None:
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError) as error:
        logger.warning("broadcast group was not destroyed cleanly reason=%s", error)
