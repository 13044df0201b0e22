"""One worker that does both."""

from __future__ import annotations

from aiohttp import ClientResponse

from ..workers import Worker
from .upstream import Call, Prefilled, Upstream


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`. When its prefill is done shows in its first token only."""
    return await upstream.decode(call, decode, call.fields)
