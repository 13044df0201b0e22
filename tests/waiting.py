"""Waiting for what comes about in another process, or in another task of this one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def eventually(holds: Callable[[], Any], within_s: float = 30.0, what: Callable[[], Any] = lambda: "") -> None:
    """Return when something holds; it has to before long. `what` is said where it does not."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"it does not come about {what()}"
        time.sleep(0.05)


async def until(holds: Callable[[], Any], within_s: float = 10.0) -> None:
    """`eventually`, while other tasks run."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.005)
