"""The same call to several servers at once, with the failures collected by server."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatrl.errors import MegatrlError
from megatrl.rollout.control import ServerControl

Failures = dict[str, str]
"""Server url -> why its part failed; empty where all went well."""


def on_each(servers: Sequence[ServerControl], call: Callable[[ServerControl], object]) -> Failures:
    """Run `call` for every server in parallel; each call has its own deadline. Returns the failures."""
    if not servers:
        return {}
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        running = {server.url: pool.submit(call, server) for server in servers}
    failures: Failures = {}
    for url, future in running.items():
        error = future.exception()
        if isinstance(error, MegatrlError):
            failures[url] = error.message
        elif error is not None:
            raise error
    return failures
