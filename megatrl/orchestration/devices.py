"""Who holds the devices: a turn-taking pair when roles are colocated, nothing when each owns its own."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class MemoryOwner(Protocol):
    """A role that can hand its device memory over and take it back."""

    def release_memory(self) -> None: ...

    def resume_memory(self) -> None: ...


class OwnedDevices:
    """Separate placement: every role keeps its devices."""

    @contextlib.contextmanager
    def lend_to_rollout(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def lend_to_actor(self) -> Iterator[None]:
        yield


class SharedDevices:
    """Colocated placement: the role that works holds the memory, and gives it back in a finally."""

    def __init__(self, actor: MemoryOwner, servers: MemoryOwner) -> None:
        self._actor, self._servers = actor, servers

    @contextlib.contextmanager
    def lend_to_rollout(self) -> Iterator[None]:
        """The actor hands its memory over while episodes are played."""
        self._actor.release_memory()
        try:
            yield
        finally:
            self._actor.resume_memory()

    @contextlib.contextmanager
    def lend_to_actor(self) -> Iterator[None]:
        """The servers hand their memory over while the actor scores and learns."""
        self._servers.release_memory()
        try:
            yield
        finally:
            self._servers.resume_memory()
