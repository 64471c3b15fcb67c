"""A stub of SGLang's /generate over real HTTP, in the words of recorded traffic, with faults to switch on.

It refuses what the real server refuses (repeated ids, empty or long input, unknown fields), so a
client that passes here does not lean on a lenient fake.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TRAFFIC: dict[str, Any] = json.loads((Path(__file__).parent / "generate_traffic.json").read_text())["cases"]

Edit = Callable[[dict[str, Any]], Any]
"""Changes a good reply; may return a web.Response or raw bytes instead."""


@dataclass
class SGLangStub:
    """`edits` are used up one a request, then replies are good."""

    edits: list[Edit] = field(default_factory=list)
    always: Edit | None = None
    context_length: int = 4096
    weight_version: str = "0"
    delay_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    url: str = ""
    seen_ids: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["SGLangStub"]:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/generate", self._generate), web.post("/abort_request", self._abort)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        refusal = self._refusal(body)
        if refusal is not None:
            return web.json_response(refusal, status=400)
        self.seen_ids.add(body["rid"])
        await asyncio.sleep(self.delay_s)
        reply = good_reply(body, self.weight_version)
        edit = self.edits.pop(0) if self.edits else self.always
        edited = edit(reply) if edit is not None else None
        if isinstance(edited, web.StreamResponse):
            return edited
        content = edited if isinstance(edited, bytes) else json.dumps(reply).encode()
        return web.Response(body=content, content_type="application/json")

    def _refusal(self, body: dict[str, Any]) -> Any:
        if set(body["sampling_params"]) - set(TRAFFIC["length"]["request"]["sampling_params"]):
            return TRAFFIC["unknown_field"]["reply"]
        if not body["input_ids"]:
            return TRAFFIC["empty"]["reply"]
        if len(body["input_ids"]) >= self.context_length:
            return TRAFFIC["too_long"]["reply"]
        if body["rid"] in self.seen_ids:
            return TRAFFIC["duplicate_id"]["reply"]
        return None


def good_reply(body: dict[str, Any], weight_version: str) -> dict[str, Any]:
    """The recorded reply with its ids, lengths and version made to fit the request."""
    reply = json.loads(json.dumps(TRAFFIC["length"]["reply"]))
    count = min(3, body["sampling_params"]["max_new_tokens"])
    stopped = count < body["sampling_params"]["max_new_tokens"]
    meta = reply["meta_info"]
    reply["output_ids"] = [10 + position for position in range(count)]
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in reply["output_ids"]]
    meta["output_token_logprobs_length"] = meta["completion_tokens"] = count
    meta["finish_reason"] = {"type": "stop", "matched": 9 + count} if stopped else {"type": "length", "length": count}
    meta["id"] = body["rid"]
    meta["prompt_tokens"] = len(body["input_ids"])
    meta["weight_version"] = weight_version
    meta["weight_versions"] = [{"version": weight_version, "start": 0, "end": count}]
    return reply
