"""HTTP servers that stand for workers: they say what reached them, or stream events."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Backend:
    """`async with Backend() as backend`: a worker at `backend.address`.

    It answers with JSON: its address, the method, the path, the headers and the body's length and SHA-256. With header
    `x-events: N` it answers with N server-sent events, `gap_s` apart, the last of which has the usage.
    """

    port: int = field(default_factory=free_port)
    gap_s: float = 0.05
    served: int = 0
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Backend:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.served += 1
        events = int(request.headers.get("x-events", "0"))
        if events:
            return await self._stream(request, events)
        said: dict[str, Any] = {
            "address": self.address,
            "method": request.method,
            "path": request.path_qs,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "length": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "usage": {"completion_tokens": 7},
        }
        return web.json_response(said, headers={"x-served-by": self.address})

    async def _stream(self, request: web.Request, events: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-served-by": self.address})
        await response.prepare(request)
        for i in range(events):
            await response.write(f'data: {{"n": {i}}}\n\n'.encode())
            await asyncio.sleep(self.gap_s)
        await response.write(f'data: {{"usage": {{"completion_tokens": {events}}}}}\n\ndata: [DONE]\n\n'.encode())
        await response.write_eof()
        return response
