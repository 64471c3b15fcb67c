"""Route `tensor`: each bucket is handed over with an HTTP request.

To a server on this host as the name of shared memory; to one elsewhere inside the request, as base64, which makes
four bytes of three for each rank of the server (the route for such servers is `broadcast`). The server's unpickler
allows torch tensors and types.SimpleNamespace, so the metadata needs no sglang class here. torch's own shared memory
is not used: one strategy needs a common secret, the other leaves a torch_shm_manager process that keeps pipes open.
"""

import base64
import contextlib
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from torch import Tensor

from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures, on_each
from megatrl.weight_sync.shared_memory import SharedBytes, dumps, in_shared_memory, is_on_this_host
from megatrl.weight_sync.transport import UpdateSession


class TensorTransport:
    """Sends full tensors to servers of `tensor` ranks each; every rank cuts out its own part."""

    changes_weights_while_sending = True

    def __init__(self, *, tensor: int, timeout_s: float) -> None:
        self.bytes_beside_http: Counter[str] = Counter()
        self._tensor = tensor
        self._timeout_s = timeout_s
        self._session = UpdateSession()

    def start(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.begin)

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        near = [server for server in servers if is_on_this_host(server.url)]
        payloads: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            if near:
                shared = serialize(bucket, stack.enter_context(in_shared_memory(bucket)))
                payloads |= {server.url: shared for server in near}
            if len(near) < len(servers):
                inline = serialize(bucket, bucket.flatten().cpu())
                payloads |= {server.url: inline for server in servers if server not in near}
            failures = on_each(
                servers,
                lambda server: server.update_weights_from_tensor(
                    [payloads[server.url]] * self._tensor, timeout_s=self._timeout_s
                ),
            )
        self.bytes_beside_http.update({server.url: bucket.num_bytes for server in near})
        return failures

    def finish(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.end)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def serialize(bucket: Bucket, flat: Tensor | SharedBytes) -> str:
    """Base64 pickle in SGLang's `flattened_bucket` form; `flat` holds the bytes or says where they are."""
    metadata: list[SimpleNamespace] = []
    start = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        end = start + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        start = end
    return base64.b64encode(dumps({"flattened_tensor": flat, "metadata": metadata})).decode("ascii")
