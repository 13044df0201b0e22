"""Both legs at once, for connectors whose decode worker waits for the KV by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiohttp import ClientResponse

from .upstream import Prefilled


async def together(
    prefill: Coroutine[Any, Any, dict[str, Any]],
    decode: Coroutine[Any, Any, ClientResponse],
    prefilled: Prefilled,
) -> ClientResponse:
    """The decode leg's response once the prefill leg has replied. The first that fails ends the other.

    Raises:
        LegFailed: of the leg that failed first. What `prefilled` raises.
    """

    async def reply() -> None:
        prefilled(await prefill)

    first, second = asyncio.ensure_future(reply()), asyncio.ensure_future(decode)
    try:
        await asyncio.gather(first, second)
        return second.result()
    except BaseException:
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        if not second.cancelled() and second.exception() is None:
            second.result().close()
        raise
