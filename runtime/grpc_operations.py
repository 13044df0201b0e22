"""Reads and writes of a gRPC call that go on while something else is done.

Each takes a turn through gRPC's threads, which is as long as a decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def begun(operation: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """An operation that gRPC has been asked for."""
    future = asyncio.ensure_future(operation)
    await asyncio.sleep(0)
    return future


def left(*operations: asyncio.Future[Any] | None) -> None:
    """Nobody waits for these any more: they end with their call, and how is of no interest."""
    for operation in operations:
        if operation is not None:
            operation.add_done_callback(lambda done: done.cancelled() or done.exception())
