"""A bucket in memory that servers on the same host map, so that its bytes are written once and sent nowhere.

Anonymous (memfd) and reached through /proc: nothing is left behind, however the trainer ends. Linux only.
"""

import contextlib
import functools
import io
import mmap
import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch

from megatrl.rollout.server import reachable_address
from megatrl.weight_sync.buckets import Bucket


class SharedBytes:
    """Pickles as the call that maps the bytes, private to the reader, as a uint8 tensor."""

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(torch.from_file, dtype=torch.uint8), (self.path, False, self.num_bytes)


@contextlib.contextmanager
def in_shared_memory(bucket: Bucket) -> Iterator[SharedBytes]:
    """The bucket's bytes as other processes of this user map them; gone after the block but for who has mapped them."""
    descriptor = os.memfd_create("megatrl-bucket")
    try:
        os.ftruncate(descriptor, bucket.num_bytes)
        with mmap.mmap(descriptor, bucket.num_bytes) as memory:
            _fill(memory, bucket)
        yield SharedBytes(f"/proc/{os.getpid()}/fd/{descriptor}", bucket.num_bytes)
    finally:
        os.close(descriptor)


def _fill(memory: mmap.mmap, bucket: Bucket) -> None:
    """In a function of its own: the mapping can be closed only when no tensor looks into it any more."""
    flat, start = torch.frombuffer(memory, dtype=torch.uint8), 0
    for tensor in bucket.tensors:
        flat[start : start + tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        start += tensor.nbytes


class _NamesTorchFunctions(pickle.Pickler):
    """Writes `torch.from_file` as that name: by itself pickle spells it getattr(), which SGLang refuses."""

    def reducer_override(self, obj: Any) -> Any:
        return "from_file" if obj is torch.from_file else NotImplemented


def dumps(content: object) -> bytes:
    written = io.BytesIO()
    _NamesTorchFunctions(written, protocol=4).dump(content)
    return written.getvalue()


@functools.cache
def is_on_this_host(url: str) -> bool:
    """True where a server's address is one of this machine's own."""
    host = urlsplit(url).hostname or ""
    if host in ("127.0.0.1", "localhost", "::1", socket.gethostname()):
        return True
    return host == reachable_address("0.0.0.0")
