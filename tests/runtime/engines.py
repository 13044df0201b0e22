"""HTTP servers that speak the contracts of engines whose legs they serve, and hold callers to them.

A decode worker answers only when the KV of just this request has come: by NIXL's params of a prefill that was done, by
a transfer id or room in which a prefill is going on at the same time, or from the store that both share.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any

from aiohttp import web

from .backends import free_port

TOKENS = 5  # of an answer, where the body does not say


@dataclass
class Fabric:
    """What connects the engines: KV that was prefilled, and prefills that go on."""

    kept: dict[str, str] = field(default_factory=dict)  # NIXL: prompt by the id of its KV
    stored: set[str] = field(default_factory=set)  # prompts in the store
    meeting: dict[str, asyncio.Event] = field(default_factory=dict)  # by transfer id or room: the prefill is done
    numbers: Iterator[int] = field(default_factory=count)

    def meet(self, place: str) -> asyncio.Event:
        return self.meeting.setdefault(place, asyncio.Event())


@dataclass
class Engine:
    """`async with Engine(fabric, "nixl") as engine`: a worker at `engine.address`.

    Args:
        status: other than 200: what requests are answered with. hang: they are not answered. cut: the answer breaks off
            after so many events. gap_s: between two tokens. prefill_s: how long a prefill takes. loses_kv: of NIXL,
            what it keeps is gone when it is to be fetched.

    Attributes:
        bodies: of the requests so far. running: of those, how many are served now. gone: how many clients went away.
    """

    fabric: Fabric
    connector: str
    status: int = 200
    hang: bool = False
    cut: int = -1
    gap_s: float = 0.001
    prefill_s: float = 0.0
    renders: bool = False
    cached_tokens: int = 0
    loses_kv: bool = False
    port: int = field(default_factory=free_port)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    gone: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Engine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._counted)
        app.router.add_post("/v1/chat/completions", self._counted)
        app.router.add_post("/v1/completions/render", self._render)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/query", self._query)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        """Listen no more, and cut what is under way."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _health(self, request: web.Request) -> web.Response:
        self.asked["health"] += 1
        return web.Response(status=self.status if self.status != 400 else 200)

    async def _query(self, request: web.Request) -> web.Response:
        self.asked["query"] += 1
        return web.json_response({"0": {"engine_id": f"engine-{self.port}"}})

    async def _render(self, request: web.Request) -> web.Response:
        if not self.renders:
            raise web.HTTPNotFound
        body = await request.json()
        return web.json_response([{"token_ids": [ord(c) for c in body["prompt"]]}])

    async def _counted(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            return await self._generate(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.hang:
            await asyncio.sleep(3600)
        if self.status != 200:
            said = {"message": "no such thing", "type": "BadRequestError", "param": "prompt", "code": self.status}
            return web.json_response({"error": said}, status=self.status)
        prompt = json.dumps(body.get("prompt") or body.get("messages"))
        params = body.get("kv_transfer_params")
        reply: dict[str, Any] = {}
        if self.connector == "nixl" and params and params["do_remote_decode"]:
            assert params["do_remote_prefill"] is False and body["max_tokens"] == 1 and body["stream"] is False
            assert "stop" not in body and "stream_options" not in body
            await asyncio.sleep(self.prefill_s)
            number = str(next(self.fabric.numbers))
            self.fabric.kept[number] = "" if self.loses_kv else prompt
            reply = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[number]]}
            reply |= {"remote_engine_id": f"engine-{self.port}", "tp_size": 1}
        elif self.connector == "nixl" and params:
            assert self.fabric.kept.pop(params["remote_block_ids"][0][0]) == prompt, "the KV of another prompt"
            assert params["do_remote_prefill"] is True and params["tp_size"] == 1
        elif self.connector == "mooncake" and params:
            place = self.fabric.meet(params["transfer_id"])
            if params["do_remote_decode"]:
                assert body["max_tokens"] == 1
                await asyncio.sleep(self.prefill_s)
                place.set()
            else:
                assert params["remote_engine_id"].startswith("engine-")
                assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
                await asyncio.wait_for(place.wait(), 5)
        elif self.connector == "sglang-prefill":
            assert 0 <= body["bootstrap_room"] < 1 << 63 and body["bootstrap_host"] == "127.0.0.1"
            await asyncio.wait_for(self.fabric.meet(f"decode {body['bootstrap_room']}").wait(), 5)
            self.fabric.meet(f"prefill {body['bootstrap_room']}").set()
        elif self.connector == "sglang-decode":
            self.fabric.meet(f"decode {body['bootstrap_room']}").set()
            await asyncio.wait_for(self.fabric.meet(f"prefill {body['bootstrap_room']}").wait(), 5)
        elif self.connector == "store-prefill":
            assert params is None and body["max_tokens"] == 1
            self.fabric.stored.add(prompt)
        elif self.connector == "store-decode":
            assert params is None and prompt in self.fabric.stored
        return await self._answer(request, body, reply)

    async def _answer(self, request: web.Request, body: dict[str, Any], params: dict[str, Any]) -> web.StreamResponse:
        tokens = body.get("max_tokens") or TOKENS
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        usage |= {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        if not body.get("stream"):
            await asyncio.sleep(self.gap_s * tokens)
            choices = [{"index": 0, "text": f"{self.port}", "finish_reason": "length"}]
            return web.json_response({"choices": choices, "usage": usage, "kv_transfer_params": params or None})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for i in range(tokens):
            if i == self.cut:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(b"data: " + json.dumps({"choices": [{"index": 0, "text": f"{i}"}]}).encode() + b"\n\n")
            await asyncio.sleep(self.gap_s)
        if body.get("stream_options", {}).get("include_usage"):
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
