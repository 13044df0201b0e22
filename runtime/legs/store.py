"""A store that both workers share (MooncakeStoreConnector, LMCache, a folder): decode finds there what prefill put."""

from __future__ import annotations

from aiohttp import ClientResponse

from ..workers import Worker
from .prefill_only import prefill_only
from .upstream import Call, Prefilled, Upstream


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`.

    A prefix that is to be fetched comes from the store too; the reference worker replicates it (docs/workers.md), and
    fetches nothing unasked. vLLM's connector always does.
    """
    params = {"kv_transfer_params": {"fetch_prefix": True}} if call.holder_for(prefill) else {}
    prefilled(await upstream.prefill(call, prefill, prefill_only(call.fields) | params))
    return await upstream.decode(call, decode, call.fields)
