"""Waiting for what comes about in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    """Return when something holds; it has to before long."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.1)
