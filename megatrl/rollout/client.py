"""SGLangSampler: samples actions from one or several SGLang servers over HTTP."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import aiohttp
import orjson

from megatrl.config.model_shape import ModelShape
from megatrl.errors import RolloutError, ServerRejectedError
from megatrl.rollout.control import error_text
from megatrl.rollout.prompt_logprobs import PromptLogprobs, PromptRequest, check_prompt, prompt_body, read_prompt_reply
from megatrl.rollout.replies import check_request, read_reply, request_body
from megatrl.rollout.sampler import Sample, SampleRequest

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
_BACKOFF_S = 0.1  # before the second attempt; doubles with each further one
_ABORT_TIMEOUT_S = 5.0
_MAX_KEYS = 100_000
_Answer = TypeVar("_Answer")
_TRANSIENT = (408, 429)  # timeout at the server, too many requests


@dataclass(slots=True)
class _Server:
    """What the client knows of one server."""

    url: str
    is_alive: bool = True
    num_running: int = 0
    last_answer: float = field(default_factory=time.monotonic)
    last_error: str = ""

    def __str__(self) -> str:
        state = "alive" if self.is_alive else "dead"
        age = time.monotonic() - self.last_answer
        return f"{self.url} {state}, last answer {age:.0f} s ago, last error: {self.last_error or 'none'}"


class SGLangSampler:
    """A Sampler over the servers at `urls`. Use as an async context manager inside one event loop.

    Each HTTP attempt has an id of its own. Refusals (4xx) are never retried; connection errors, 5xx
    and aborts are, at most MAX_ATTEMPTS times in all and within the request's deadline. A server that
    refuses connections is taken out until the next `async with`; its requests move to the others.
    """

    def __init__(self, urls: Sequence[str], *, vocab_size: int, routed_shape: ModelShape | None = None) -> None:
        """With `routed_shape`, a mixture model's, every sample brings its tokens' expert choices."""
        if not urls:
            raise RolloutError("SGLangSampler needs the URL of at least one server")
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._vocab_size = vocab_size
        self._routed_shape = routed_shape
        self._homes: dict[str, _Server] = {}
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for server in self._servers:
            server.is_alive, server.num_running = True, 0
        self._homes.clear()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
            trust_env=False,  # a proxy variable must not catch traffic inside the cluster
            headers={"Content-Type": "application/json"},
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def sample(self, request: SampleRequest) -> Sample:
        """One action. Raises ServerRejectedError, or RolloutError after retries or past the deadline."""
        check_request(request, self._vocab_size)
        return await self._retried(request, lambda server: self._sample_once(server, request))

    async def prompt_logprobs(self, request: PromptRequest) -> PromptLogprobs:
        """Logprobs of given tokens; raises as `sample` does."""
        check_prompt(request, self._vocab_size)
        return await self._retried(request, lambda server: self._read_once(server, request))

    async def _retried(
        self, request: SampleRequest | PromptRequest, attempt: Callable[[_Server], Awaitable[_Answer]]
    ) -> _Answer:
        last_error: RolloutError | None = None
        try:
            async with asyncio.timeout(request.deadline_s):
                for number in range(MAX_ATTEMPTS):
                    if number:
                        await asyncio.sleep(_BACKOFF_S * 2 ** (number - 1))
                    try:
                        return await attempt(self._choose(request.routing_key))
                    except ServerRejectedError:
                        raise
                    except RolloutError as error:
                        last_error = error
                        logger.debug("attempt %d failed: %s", number + 1, error.message)
        except TimeoutError:
            what = last_error.message if last_error else "no attempt had failed"
            raise RolloutError(
                f"no answer to /generate within {request.deadline_s:g} s ({what}); servers: {self._states()}"
            ) from None
        assert last_error is not None
        raise RolloutError(f"{last_error.message} ({MAX_ATTEMPTS} attempts); servers: {self._states()}") from last_error

    def _choose(self, key: str) -> _Server:
        home = self._homes.get(key)
        if home is not None and home.is_alive:
            return home
        alive = [server for server in self._servers if server.is_alive]
        if not alive:
            raise RolloutError(f"no rollout server is alive: {self._states()}")
        server = min(alive, key=lambda candidate: candidate.num_running)
        if key:
            if len(self._homes) >= _MAX_KEYS:
                self._homes.pop(next(iter(self._homes)))
            self._homes[key] = server
        return server

    async def _sample_once(self, server: _Server, request: SampleRequest) -> Sample:
        rid = uuid.uuid4().hex
        content = request_body(request, rid, record_routing=self._routed_shape is not None)
        body = await self._generate(server, rid, content)
        return read_reply(body, request, rid, self._vocab_size, routed_shape=self._routed_shape)

    async def _read_once(self, server: _Server, request: PromptRequest) -> PromptLogprobs:
        rid = uuid.uuid4().hex
        body = await self._generate(server, rid, prompt_body(request, rid))
        return read_prompt_reply(body, request, rid, self._vocab_size)

    async def _generate(self, server: _Server, rid: str, content: bytes) -> bytes:
        """One HTTP exchange under a fresh id; the server is told where we stop waiting."""
        server.num_running += 1
        try:
            status, body = await self._post(server, "/generate", content)
        except asyncio.CancelledError:
            self._abort_later(server, rid)
            raise
        finally:
            server.num_running -= 1
        if 400 <= status < 500 and status not in _TRANSIENT:
            raise ServerRejectedError(f"{server.url} refused a request (HTTP {status}): {error_text(_text(body))}")
        if status != 200:
            server.last_error = f"HTTP {status}: {error_text(_text(body))}"
            raise RolloutError(f"{server.url} failed a request: {server.last_error}")
        return body

    async def _post(self, server: _Server, path: str, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            raise RolloutError("SGLangSampler is used outside its `async with` block")
        try:
            async with self._session.post(server.url + path, data=body) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            if server.is_alive:
                logger.warning("server taken out url=%s error=%s", server.url, error)
            server.is_alive, server.last_error = False, str(error)
            raise RolloutError(f"{server.url} accepts no connection: {error}") from error
        except aiohttp.ClientError as error:
            server.last_error = f"{type(error).__name__}: {error}"
            raise RolloutError(f"{server.url} broke the connection: {server.last_error}") from error
        server.last_answer = time.monotonic()
        return response.status, content

    def _abort_later(self, server: _Server, rid: str) -> None:
        """Free the server of a request nobody waits for; best effort."""

        async def abort() -> None:
            try:
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await self._post(server, "/abort_request", orjson.dumps({"rid": rid}))
            except (TimeoutError, RolloutError) as error:
                logger.debug("abort of %s at %s failed: %s", rid, server.url, error)

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _states(self) -> str:
        return "; ".join(map(str, self._servers))


def _text(body: bytes) -> str:
    return body.decode(errors="replace")
