"""SGLang's disaggregation: the same body to both at once; the two meet in a room of the prefill's bootstrap server."""

from __future__ import annotations

import secrets

from aiohttp import ClientResponse

from ..workers import Worker
from .together import together
from .upstream import Call, Prefilled, Upstream

ROOM_BITS = 63


async def run(upstream: Upstream, call: Call, prefill: Worker, decode: Worker, prefilled: Prefilled) -> ClientResponse:
    """See `runtime.legs.Legs`."""
    host, _, port = prefill.bootstrap_address.rpartition(":")
    room = {
        "bootstrap_host": host.strip("[]"),
        "bootstrap_port": int(port),
        "bootstrap_room": secrets.randbits(ROOM_BITS),
    }
    whole = {name: value for name, value in call.fields.items() if name != "stream_options"}
    return await together(
        upstream.prefill(call, prefill, whole | room | {"stream": False}),
        upstream.decode(call, decode, call.fields | room),
        prefilled,
    )
