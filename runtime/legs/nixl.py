"""vLLM's NixlConnector: prefill first, then decode, which pulls the KV from where the prefill's reply says it is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aiohttp import ClientResponse

from ..workers import Worker
from .prefill_only import prefill_only
from .upstream import Call, LegFailed, Prefilled, Upstream

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`."""
    params = KEEP | prefix_holder(call, prefill)
    reply = await upstream.prefill(call, prefill, prefill_only(call.fields) | {"kv_transfer_params": params})
    kept = reply.get("kv_transfer_params")
    if not kept:
        message = "its reply has no kv_transfer_params: does it run with NixlConnector as kv_producer?"
        raise LegFailed("prefill", prefill, message, status=502)
    fetching = call.fields | {"kv_transfer_params": kept}
    try:
        prefilled(reply)
        return await upstream.decode(call, decode, fetching)
    except BaseException as error:
        refused = isinstance(error, LegFailed) and error.refused
        if not refused:  # then only the lease of the prefill worker ends it
            upstream.later(let_go(upstream, call, decode, fetching))
        raise


def prefix_holder(call: Call, prefill: Worker) -> dict[str, Any]:
    """Whom the prefill worker is to fetch the prefix from: the `bootstrap` address of a holder that hands prefixes out.

    The reference worker does (docs/workers.md); vLLM's NixlConnector fetches whole prompts only.
    """
    holder = call.holder_for(prefill)
    if holder is None or not holder.bootstrap:
        return {}
    host, _, port = holder.bootstrap.rpartition(":")
    return {"prefix_holder": {"host": host.strip("[]"), "port": int(port)}}


async def let_go(upstream: Upstream, call: Call, decode: Worker, fetching: dict[str, Any]) -> None:
    """Have the KV freed that nobody will fetch: a decode worker whose request is gone tells the prefill worker so."""
    with suppress(LegFailed):
        response = await upstream.decode(call, decode, fetching | {"stream": True, "max_tokens": 1})
        response.close()
