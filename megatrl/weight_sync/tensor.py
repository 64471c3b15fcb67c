"""Route `tensor`: each bucket travels inside the HTTP request, as one pickle.

Plain pickle on purpose: shared memory handles (the `file_system` strategy) leave a torch_shm_manager process
behind that keeps pipes open. The server's unpickler allows torch tensors and types.SimpleNamespace, so the
metadata needs no sglang class here.
"""

import base64
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures, on_each
from megatrl.weight_sync.transport import UpdateSession


class TensorTransport:
    """Sends full tensors to servers of `tensor` ranks each; every rank cuts out its own part."""

    changes_weights_while_sending = True

    def __init__(self, *, tensor: int, timeout_s: float) -> None:
        self._tensor = tensor
        self._timeout_s = timeout_s
        self._session = UpdateSession()

    def start(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.begin)

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        payload = [serialize(bucket)] * self._tensor
        return on_each(servers, lambda server: server.update_weights_from_tensor(payload, timeout_s=self._timeout_s))

    def finish(self, servers: Sequence[ServerControl]) -> Failures:
        return on_each(servers, self._session.end)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def serialize(bucket: Bucket) -> str:
    """Base64 pickle in SGLang's `flattened_bucket` form."""
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
    content = {"flattened_tensor": bucket.flatten().cpu(), "metadata": metadata}
    return base64.b64encode(pickle.dumps(content, protocol=4)).decode("ascii")
