"""Route `broadcast`: trainer rank 0 and all server ranks form a torch.distributed group; buckets are broadcast.

The same code with gloo on CPU and NCCL on GPUs. The group lives across publishes. When a member is lost, the others
form a new one and get the bucket again that they were waiting for, so the weights are still gathered once.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatrl.rollout.control import ServerControl
from megatrl.rollout.ports import free_port
from megatrl.weight_sync.broadcast_group import Backend, InBackground, drop_group, form_group
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures, on_each
from megatrl.weight_sync.transport import UpdateSession

logger = logging.getLogger(__name__)

_POLL_S = 0.005
_LEAVE_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 10.0


class BroadcastTransport:
    """Broadcasts to servers of `tensor` ranks each."""

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
        self.bytes_beside_http: Counter[str] = Counter()
        self.num_groups = 0
        """Groups formed so far."""
        self._tensor = tensor
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._master_address = master_address
        self._device = torch.device(device)
        self._session = UpdateSession()
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._members: tuple[ServerControl, ...] = ()

    def start(self, servers: Sequence[ServerControl]) -> Failures:
        failures = self._regroup(servers) if self._members != tuple(servers) else {}
        return failures | on_each([server for server in servers if server.url not in failures], self._session.begin)

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        """Every round either delivers the bucket to all that are left or takes at least one of them out."""
        failures: Failures = {}
        live = list(servers)
        while live:
            lost = self._regroup(live) if self._members != tuple(live) else {}
            if not lost:
                broken = self._broadcast(live, bucket)
                if not broken:
                    break
                # Who no longer answers broke the group; where all answer, those that refused did.
                gone = self._leave_group()
                lost = {url: broken.get(url, reason) for url, reason in gone.items()} or broken
            for url, reason in lost.items():
                logger.warning("broadcast group lost server=%s bucket=%d reason=%s", url, bucket.index, reason)
            failures |= lost
            live = [server for server in live if server.url not in lost]
        return failures

    def finish(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.end)

    def abandon(self) -> None:
        self._leave_group()

    def close(self) -> None:
        if self._group is not None:
            self._leave_group()

    def _leave_group(self) -> Failures:
        """Drop the group on both sides and return who did not answer. Ours first: that wakes members in a broadcast.

        (A member that waits in an NCCL broadcast wakes only at its own deadline.)
        """
        members, group, name = self._members, self._group, self._group_name
        self._group, self._members = None, ()
        if group is not None:
            drop_group(group)
        leaving = InBackground(members, lambda server: server.destroy_weights_update_group(name))
        failures = leaving.failures(timeout_s=_LEAVE_TIMEOUT_S)
        for url, reason in failures.items():
            logger.warning("server did not leave the broadcast group url=%s reason=%s", url, reason)
        return failures

    def _regroup(self, servers: Sequence[ServerControl]) -> Failures:
        """A group of exactly these servers, or who is to blame that there is none."""
        self.close()
        # One that is gone would keep all others waiting in the rendezvous until its deadline.
        gone = on_each(servers, lambda server: server.model_info(timeout_s=_PROBE_TIMEOUT_S))
        if gone:
            return gone
        self._group_name = f"megatrl-{uuid.uuid4().hex[:12]}"
        world_size = 1 + self._tensor * len(servers)
        port = free_port(self._master_address)
        offsets = {server.url: 1 + self._tensor * place for place, server in enumerate(servers)}
        self._members = tuple(servers)
        joining = InBackground(
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
            self._group = form_group(
                self._backend, self._master_address, port, world_size, self._group_name, self._timeout_s
            )
            failures = joining.failures(timeout_s=self._timeout_s)
        except (RuntimeError, ValueError) as error:
            failures = joining.failures(timeout_s=1.0)
            failures = failures or {server.url: f"broadcast group was not formed: {error}" for server in servers}
        if failures:
            self._leave_group()
            return failures
        self.num_groups += 1
        logger.info("broadcast group formed servers=%d ranks=%d", len(servers), world_size)
        return {}

    def _receive(self, server: ServerControl, bucket: Bucket) -> None:
        server.update_weights_from_distributed(
            names=bucket.names,
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            shapes=[tuple(tensor.shape) for tensor in bucket.tensors],
            group_name=self._group_name,
            load_format="flattened_bucket",
            timeout_s=self._timeout_s,
        )

    def _broadcast(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        """Broadcast while watching the servers: one that refused the request will never take part."""
        assert self._group is not None, "_regroup comes first"
        flat = bucket.flatten().to(self._device)
        self.bytes_beside_http.update({server.url: bucket.num_bytes for server in servers})
        receiving = InBackground(servers, lambda server: self._receive(server, bucket))
        try:
            work: Any = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        except RuntimeError as error:  # gloo notices at once that a member has closed its end
            return receiving.failures(timeout_s=1.0) or _all(servers, f"broadcast failed: {error}")
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed() and not receiving.has_failed():
            if time.monotonic() > deadline:
                late = _all(servers, f"broadcast did not complete within {self._timeout_s:g} s")
                return receiving.failures(timeout_s=1.0) or late
            time.sleep(_POLL_S)
        if receiving.has_failed():
            return receiving.failures(timeout_s=1.0)
        try:
            work.wait()
        except RuntimeError as error:
            return receiving.failures(timeout_s=1.0) or _all(servers, f"broadcast failed: {error}")
        return receiving.failures(timeout_s=max(1.0, deadline - time.monotonic()))


def _all(servers: Sequence[ServerControl], reason: str) -> Failures:
    return dict.fromkeys((server.url for server in servers), reason)
