"""Who holds the devices: a turn-taking pair when roles are colocated, nothing when each owns its own."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class MemoryOwner(Protocol):
    """A role that can hand its device memory over and take it back."""

    def release_memory(self) -> None: ...

    def resume_memory(self) -> None:
        """Also called after a `release_memory` that failed half way; raises when something did not come back."""
        ...


class OwnedDevices:
    """Separate placement: every role keeps its devices."""

    @contextlib.contextmanager
    def lend_to_rollout(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def lend_to_actor(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def interrupt_rollout(self) -> Iterator[None]:
        yield


class SharedDevices:
    """Colocated placement: the role that works holds the memory, and gives it back in a finally."""

    def __init__(self, actor: MemoryOwner, servers: MemoryOwner) -> None:
        self._actor, self._servers = actor, servers

    @contextlib.contextmanager
    def lend_to_rollout(self) -> Iterator[None]:
        """The actor hands its memory over while episodes are played."""
        with _lent(self._actor):
            yield

    @contextlib.contextmanager
    def lend_to_actor(self) -> Iterator[None]:
        """The servers hand their memory over while the actor scores and learns."""
        with _lent(self._servers):
            yield

    @contextlib.contextmanager
    def interrupt_rollout(self) -> Iterator[None]:
        """Inside `lend_to_rollout`: the actor takes its memory back, to publish to a restarted server."""
        self._actor.resume_memory()
        try:
            yield
        finally:
            self._actor.release_memory()


@contextlib.contextmanager
def _lent(owner: MemoryOwner) -> Iterator[None]:
    try:
        owner.release_memory()  # inside: some ranks may have released when another one fails
        yield
    finally:
        owner.resume_memory()
