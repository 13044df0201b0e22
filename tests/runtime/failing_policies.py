"""Policies that fail in one way each, to be served as `tests.runtime.failing_policies:NAME`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from envs.state import Observation

FIRST = 1  # prefill 0, decode 0, its own cache


class Scripted:
    """Says what `action` is; 1 at first."""

    action: Any = FIRST
    name = "scripted"

    def decide(self, observation: Observation) -> Any:
        action = type(self).action
        if isinstance(action, BaseException):
            raise action
        return action(observation) if callable(action) else np.array([action])


class Hanging:
    """Does not return while `held` is set."""

    held = threading.Event()
    name = "hanging"

    def decide(self, observation: Observation) -> Any:
        while self.held.is_set():
            time.sleep(0.005)
        return np.array([FIRST])


class Canary(Scripted):
    """Another one that is told what to say."""

    action: Any = FIRST
    name = "canary"


class Misbehaving:
    """Does what the file named by CONDUCTOR_TEST_ORDERS says: raise, hang, nan, outside, else it decides."""

    name = "misbehaving"

    def decide(self, observation: Observation) -> Any:
        path = Path(os.environ["CONDUCTOR_TEST_ORDERS"])
        order = path.read_text().strip() if path.exists() else ""
        if order == "raise":
            raise RuntimeError("as ordered")
        while order == "hang" and path.read_text().strip() == "hang":
            time.sleep(0.01)
        if order in ("nan", "outside"):
            return np.array([np.nan if order == "nan" else 10**6])
        return np.array([FIRST])


class Unmakeable:
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no weights")
