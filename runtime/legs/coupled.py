"""One worker that does both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import ClientResponse

from ..workers import Worker
from .upstream import Call, Upstream


async def run(
    upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Callable[[dict[str, Any]], None]
) -> ClientResponse:
    """See `runtime.legs.Legs`. When its prefill is done shows in its first token only."""
    return await upstream.decode(call, decode, call.fields)
