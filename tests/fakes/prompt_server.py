"""A scoring server without HTTP: it reads the bodies that are sent and answers as SGLang 0.5.23 does.

Its prefix cache is exact: it gives the longest beginning that an earlier, finished request brought, and no more than
`logprob_start_len` tokens of it. What it says of a real server's replies is checked against one in
tests/integration/test_scoring_server.py.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from megatrl.rollout.prompt_logprobs import (
    PromptLogprobs,
    PromptRequest,
    check_prompt,
    prompt_body,
    read_prompt_reply,
)
from megatrl.scoring.server_backend import FROZEN_VERSION

VOCABULARY = 512


class PromptServer:
    """A PromptReader from a function (whole prefix, target) -> logprob; also the context manager that opens it."""

    def __init__(
        self,
        logprob: Callable[[tuple[int, ...], int], float],
        *,
        version: int = FROZEN_VERSION,
        keeps: bool = True,
        edit: Callable[[dict[str, Any]], Any] = lambda reply: None,
    ) -> None:
        self._logprob, self._version, self._keeps, self._edit = logprob, version, keeps, edit
        self._cache: set[tuple[int, ...]] = set()  # every beginning of every prompt that was read to its end
        self.bodies: list[dict[str, Any]] = []
        self.num_computed = 0
        self.num_running = self.most_running = 0

    async def __aenter__(self) -> "PromptServer":
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def prompt_logprobs(self, request: PromptRequest) -> PromptLogprobs:
        check_prompt(request, VOCABULARY)
        body = json.loads(prompt_body(request, "rid"))
        self.bodies.append(body)
        ids, start = tuple(body["input_ids"]), body["logprob_start_len"]
        cached = max(n for n in range(min(start, len(ids) - 1) + 1) if n == 0 or ids[:n] in self._cache)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)  # others get their turn while this one is in flight, and share nothing with it
        self.num_running -= 1
        self.num_computed += len(ids) - cached
        if self._keeps:
            self._cache.update(ids[:n] for n in range(1, len(ids) + 1))
        reply = self._reply(ids, start, cached, body.get("token_ids_logprob"))
        self._edit(reply)
        return read_prompt_reply(json.dumps(reply).encode(), request, "rid", VOCABULARY)

    def _reply(self, ids: tuple[int, ...], start: int, cached: int, others: list[int] | None) -> dict[str, Any]:
        places = range(start + 1, len(ids))
        meta: dict[str, Any] = {
            "id": "rid",
            "finish_reason": {"type": "length", "length": 0},
            "weight_version": str(self._version),
            "cached_tokens": cached,
            "input_token_logprobs": [[None, ids[start], None]]
            + [[self._logprob(ids[:p], ids[p]), ids[p] if ids[p] < VOCABULARY - 1 else 0, None] for p in places],
        }
        if others:
            meta["input_token_ids_logprobs"] = [None] + [
                [[self._logprob(ids[:p], t), t, None] for t in others] for p in places
            ]
        return {"output_ids": [], "meta_info": meta}
