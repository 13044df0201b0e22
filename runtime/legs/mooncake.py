"""vLLM's MooncakeConnector: both legs at once. The prefill worker's bootstrap server says which engine is behind it,
and the two find each other by a transfer id.
"""

from __future__ import annotations

import uuid

import aiohttp
from aiohttp import ClientResponse

from ..workers import Worker
from .prefill_only import prefill_only
from .together import together
from .upstream import Call, LegFailed, Prefilled, Upstream

BOOTSTRAP_S = 3.0


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`."""
    bootstrap = prefill.bootstrap_address
    engine_id = await _engine(upstream, prefill, bootstrap)
    transfer_id = f"xfer-{uuid.uuid4()}"
    sends = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    fetches = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{bootstrap}",
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }
    ranks = {"X-data-parallel-rank": str(prefill.dp_rank)} if prefill.dp_rank else {}
    try:
        return await together(
            upstream.prefill(call, prefill, prefill_only(call.fields) | {"kv_transfer_params": sends}, **ranks),
            upstream.decode(call, decode, call.fields | {"kv_transfer_params": fetches}),
            prefilled,
        )
    except LegFailed:
        upstream.engines.pop(_key(prefill, bootstrap), None)  # it may be another after a restart
        raise


async def _engine(upstream: Upstream, prefill: Worker, bootstrap: str) -> str:
    """The id of the engine behind a bootstrap server."""
    known = upstream.engines.get(_key(prefill, bootstrap))
    if known is not None:
        return known
    try:
        ranks = await upstream.get(f"http://{bootstrap}/query", BOOTSTRAP_S)
        engine_id = str(ranks[str(prefill.dp_rank)]["engine_id"])
    except (aiohttp.ClientConnectorError, TimeoutError) as error:
        raise LegFailed("prefill", prefill, f"its bootstrap server {bootstrap} does not answer: {error}") from None
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        message = f"its bootstrap server {bootstrap} knows no engine of rank {prefill.dp_rank}: {error!r}"
        raise LegFailed("prefill", prefill, message) from None
    upstream.engines[_key(prefill, bootstrap)] = engine_id
    return engine_id


def _key(prefill: Worker, bootstrap: str) -> str:
    return f"{bootstrap}/{prefill.dp_rank}"
