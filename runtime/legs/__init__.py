"""The legs of a request: what is sent to its two workers so that one prefills and the other decodes.

How KV moves between engines is a matter of their connector. One module here is one connector; its `run` sends the legs
and returns the response of the decode worker, of which nothing has been read yet. docs/gateway.md has the table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import ClientResponse

from ..workers import Connector, Worker
from . import coupled, mooncake, nixl, sglang, store
from .upstream import Call, LegFailed, Prefilled, Timeouts, Upstream

__all__ = ["Call", "LegFailed", "Legs", "Timeouts", "Upstream", "legs_of"]

Legs = Callable[[Upstream, Call, Worker, Worker, Prefilled], Awaitable[ClientResponse]]
"""Sends the legs of a call to a (prefill, decode) pair.

`prefilled` is called with the prefill worker's reply as soon as that is there. What it raises ends both legs, and
whatever else does, cancellation too, leaves neither of the workers with anything to do.

Raises:
    LegFailed: one of them failed.
"""

_BY_CONNECTOR: dict[Connector, Legs] = {
    Connector.NIXL: nixl.run,
    Connector.MOONCAKE: mooncake.run,
    Connector.STORE: store.run,
    Connector.SGLANG: sglang.run,
}


def legs_of(prefill: Worker, decode: Worker) -> Legs:
    """How a request gets from one worker to the other.

    Raises:
        LegFailed: KV cannot move between them.
    """
    if prefill.id == decode.id:
        return coupled.run
    if prefill.kv_connector != decode.kv_connector:
        raise LegFailed(
            "prefill",
            prefill,
            f"its connector is {prefill.kv_connector}, that of decode worker {decode.id} is {decode.kv_connector}",
        )
    return _BY_CONNECTOR[prefill.kv_connector]
