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
        self._began = time.monotonic()
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
            self._buckets = request.async_fn_args[1]
            _bring_to_host(self._buckets, copy=in_background)
        self._thread: threading.Thread | None = None
        if in_background:
            # A daemon: a disk that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def wait(self, timeout_s: float) -> bool:
        """Whether this rank's files are there, after at most `timeout_s`. Not collective: a slow disk of one rank
        keeps no other in a collective until its process group gives up."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self._is_writing

    def finish(self) -> None:
        """Completes the save together with the other ranks; waits for no file.

        Raises CheckpointError on every rank where one rank's files are not there yet or could not be written.
        """
        is_late = torch.tensor([float(self._is_writing)], device=self._device)
        dist.all_reduce(is_late, op=dist.ReduceOp.MAX)  # a rank that alone gave up would leave the others waiting
        if is_late.item():
            raise CheckpointError(
                f"the shards in {self._directory} are not all written after {time.monotonic() - self._began:.1f} s; "
                "check the disk, or raise checkpoint.timeout_s"
            )
        for finalize in self._finalize:
            finalize()
        self._buckets, self._finalize = [], []  # they hold the copies

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _write(self) -> None:
        if self._buckets:
            self._results.put(_write_buckets(self._transforms, self._buckets))


def _bring_to_host(buckets: Sequence[Any], *, copy: bool) -> None:
    """Host tensors in place of the buckets' own: with `copy` none shares memory with the model or the optimizer.

    In place, because Megatron's writer holds the same lists to the end: nothing is kept twice.
    """
    for _, _, (_, tensors) in buckets:
        tensors[:] = [(item, tensor.detach().to("cpu", copy=copy)) for item, tensor in tensors]


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
