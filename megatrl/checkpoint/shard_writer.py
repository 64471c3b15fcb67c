"""Megatron's distributed writer in three parts: capture (collective), write (this process alone), finish (collective).

Between capture and finish the files may be written by a thread while training goes on. Upstream (0.16.1) offers
forked writers for that; forking a process that has gloo, NCCL or Ray threads can deadlock, and its spawned queue
server imports the main module again, which takes seconds.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatrl.errors import CheckpointError


class ShardWrite:
    """The shards of one rank on their way to disk. Made on all ranks together; `finish` ends on all together."""

    def __init__(self, state: dict[str, Any], directory: Path, *, device: torch.device, in_background: bool) -> None:
        """Captures `state`. In the background the tensors are copied to host memory now and written by a thread;
        otherwise they are written before this returns."""
        self._directory, self._device = directory, device
        self._results: queue.Queue[Any] = queue.Queue()
        with _results_into(self._results):
            request: Any = dist_checkpointing.save(
                state,
                str(directory),
                TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
                async_sharded_save=True,
            )
        self._finalize = request.finalize_fns
        self._buckets: list[Any] = []
        self._transforms: list[Any] = []
        if request.async_fn is not None:  # None on a rank that has nothing to write
            self._transforms = request.async_fn.args[0]
            self._buckets = _on_host(request.async_fn_args[1], copy=in_background)
        self._thread: threading.Thread | None = None
        if in_background:
            # A daemon: a disk that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def finish(self, timeout_s: float) -> None:
        """Waits for this rank's files, then completes the save together with the other ranks.

        Raises CheckpointError on every rank where one rank's files are not there in time or could not be written.
        """
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join(timeout_s)
        is_late = torch.tensor([float(self._thread is not None and self._thread.is_alive())], device=self._device)
        dist.all_reduce(is_late, op=dist.ReduceOp.MAX)  # a rank that alone gave up would leave the others waiting
        if is_late.item():
            raise CheckpointError(
                f"the shards in {self._directory} were not written within {timeout_s:g} s (waited "
                f"{time.monotonic() - began:.0f} s); check the disk, or raise checkpoint.timeout_s"
            )
        for finalize in self._finalize:
            finalize()
        self._buckets = []

    def _write(self) -> None:
        if self._buckets:
            self._results.put(_write_buckets(self._transforms, self._buckets))


def _on_host(buckets: Sequence[Any], *, copy: bool) -> list[Any]:
    """The buckets with host tensors: with `copy` nothing in them shares memory with the model or the optimizer."""
    return [
        (path, key, (objects, [(item, tensor.detach().to("cpu", copy=copy)) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]


def _write_buckets(transforms: list[Any], buckets: Sequence[Any]) -> dict[int, Any] | Exception:
    """Bucket number -> what was written, or the error of the first that failed."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        outcome: Any = queue.Queue()
        pending: Any = queue.Queue()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcome, pending, True)
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            return result
        written[number] = result
    return written


@contextmanager
def _results_into(results: "queue.Queue[Any]") -> Iterator[None]:
    """Megatron's writer takes its queue from a module variable, and would start a process to serve one."""
    upstream = filesystem_async._results_queue
    filesystem_async._results_queue = results  # type: ignore[assignment]
    try:
        yield
    finally:
        filesystem_async._results_queue = upstream
