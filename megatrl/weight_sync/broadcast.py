"""Route `broadcast`: trainer rank 0 and all server ranks form a torch.distributed group; buckets are broadcast.

The same code with gloo on CPU and NCCL on GPUs. The group lives across publishes and is rebuilt after a failure.
"""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrl.errors import WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.rollout.ports import free_port
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures, on_each
from megatrl.weight_sync.transport import UpdateSession

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.005
_LEAVE_TIMEOUT_S = 10.0


class BroadcastTransport:
    """Broadcasts to servers of `tensor` ranks each. A failure of one breaks the group, so it fails all."""

    changes_weights_while_sending = True

    def __init__(
        self,
        *,
        tensor: int,
        backend: Backend,
        timeout_s: float,
        master_address: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self._tensor = tensor
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._master_address = master_address
        self._device = torch.device(device)
        self._session = UpdateSession()
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._members: tuple[str, ...] = ()
        self._controls: tuple[ServerControl, ...] = ()

    def start(self, servers: Sequence[ServerControl]) -> Failures:
        if self._group is None or self._members != tuple(server.url for server in servers):
            self.close()
            failures = self._join(servers)
            if failures:
                self.abandon()
                return _spread(failures, servers)
        return on_each(servers, self._session.begin)

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        if tuple(server.url for server in servers) != self._members:
            return {server.url: "another member of the broadcast group failed" for server in servers}
        flat = bucket.flatten().to(self._device)
        receiving = _InBackground(servers, lambda server: self._receive(server, bucket))
        failures = self._broadcast(flat, receiving)
        if failures:
            self.abandon()
        return _spread(failures, servers)

    def finish(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.end)

    def abandon(self) -> None:
        """Drop the group on both sides. Ours first: that wakes members that still wait in a gloo broadcast.

        (A member that waits in an NCCL broadcast wakes only at its own deadline; restart such a server.)
        """
        controls, group = self._controls, self._group
        self._group, self._members, self._controls = None, (), ()
        if group is not None:
            _drop(group)
        leaving = _InBackground(controls, lambda server: self._leave(server))
        for url, reason in leaving.failures(timeout_s=_LEAVE_TIMEOUT_S).items():
            logger.warning("server did not leave the broadcast group url=%s reason=%s", url, reason)

    def close(self) -> None:
        if self._group is not None:
            self.abandon()

    def _join(self, servers: Sequence[ServerControl]) -> Failures:
        self._group_name = f"megatrl-{uuid.uuid4().hex[:12]}"
        world_size = 1 + self._tensor * len(servers)
        port = free_port(self._master_address)
        offsets = {server.url: 1 + self._tensor * place for place, server in enumerate(servers)}
        self._controls = tuple(servers)
        joining = _InBackground(
            servers,
            lambda server: server.init_weights_update_group(
                master_address=self._master_address,
                master_port=port,
                rank_offset=offsets[server.url],
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
                timeout_s=self._timeout_s,
            ),
        )
        try:
            self._group = _form_group(
                self._backend, self._master_address, port, world_size, self._group_name, self._timeout_s
            )
        except (RuntimeError, ValueError) as error:
            failures = joining.failures(timeout_s=1.0)
            return failures or {server.url: f"broadcast group was not formed: {error}" for server in servers}
        failures = joining.failures(timeout_s=self._timeout_s)
        if not failures:
            self._members = tuple(server.url for server in servers)
        return failures

    def _receive(self, server: ServerControl, bucket: Bucket) -> None:
        server.update_weights_from_distributed(
            names=bucket.names,
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            shapes=[tuple(tensor.shape) for tensor in bucket.tensors],
            group_name=self._group_name,
            load_format="flattened_bucket",
            timeout_s=self._timeout_s,
        )

    def _broadcast(self, flat: torch.Tensor, receiving: "_InBackground") -> Failures:
        """Broadcast while watching the servers: one that refused the request will never take part."""
        assert self._group is not None, "send comes after a start without failures"
        work: Any = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed() and not receiving.has_failed():
            if time.monotonic() > deadline:
                late = dict.fromkeys(self._members, f"broadcast did not complete within {self._timeout_s:g} s")
                return receiving.failures(timeout_s=1.0) or late
            time.sleep(_POLL_S)
        if receiving.has_failed():
            return receiving.failures(timeout_s=1.0)
        try:
            work.wait()
        except RuntimeError as error:
            return receiving.failures(timeout_s=1.0) or dict.fromkeys(self._members, f"broadcast failed: {error}")
        return receiving.failures(timeout_s=max(1.0, deadline - time.monotonic()))

    def _leave(self, server: ServerControl) -> None:
        server.destroy_weights_update_group(self._group_name)


class _InBackground:
    """One call to each server, running while this thread takes part in the collective."""

    def __init__(self, servers: Sequence[ServerControl], call: Any) -> None:
        self._urls = [server.url for server in servers]
        self._failures: dict[str, Failures] = {}
        self._threads = [threading.Thread(target=self._run, args=(server, call), daemon=True) for server in servers]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerControl, call: Any) -> None:
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


def _form_group(
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


def _drop(group: dist.ProcessGroup) -> None:
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


def _spread(failures: Failures, servers: Sequence[ServerControl]) -> Failures:
    """A broken group fails every member; the healthy ones are told whose fault it was."""
    if not failures:
        return {}
    culprits = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    return {server.url: failures.get(server.url, f"broadcast group broken by {culprits}") for server in servers}
