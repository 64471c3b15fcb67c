"""What every way of moving weights to the servers has in common."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from megatrl.errors import ServerRejectedError
from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures


class Transport(Protocol):
    """Moves the buckets of one publish. Every call covers all given servers and returns who failed and why."""

    changes_weights_while_sending: bool
    """False where servers keep their weights until `finish`, so they are paused only then."""
    bytes_beside_http: Counter[str]
    """Server url -> bytes put within its reach outside of HTTP, since the publisher last cleared it.

    Bytes that several servers read are counted for each of them, a broadcast for one rank of a server.
    """

    def start(self, servers: Sequence[ServerControl]) -> Failures: ...

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures: ...

    def finish(self, servers: Sequence[ServerControl]) -> Failures: ...

    def abandon(self) -> None:
        """Forget a publish that reached no server's `finish`; the next `start` begins afresh."""
        ...

    def close(self) -> None:
        """Release what outlives a publish: groups, files."""
        ...


class UpdateSession:
    """begin/end_weight_update of SGLang 0.5.21 and later; nothing on older servers, which answer 404."""

    def __init__(self) -> None:
        self._without_session: set[str] = set()

    def begin(self, server: ServerControl) -> None:
        """Open a session. One left open by a publish that failed is closed first."""
        try:
            server.begin_weight_update()
        except ServerRejectedError as error:
            if "HTTP 404" in error.message:
                self._without_session.add(server.url)
                return
            if "already open" not in error.message:
                raise
            server.end_weight_update()
            server.begin_weight_update()

    def end(self, server: ServerControl) -> None:
        if server.url not in self._without_session:
            server.end_weight_update()
