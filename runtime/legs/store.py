"""A store that both workers share (MooncakeStoreConnector, LMCache, a folder): decode finds there what prefill put."""

from __future__ import annotations

from aiohttp import ClientResponse

from ..workers import Worker
from .prefill_only import prefill_only
from .upstream import Call, Prefilled, Upstream


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`."""
    prefilled(await upstream.prefill(call, prefill, prefill_only(call.fields)))
    return await upstream.decode(call, decode, call.fields)
