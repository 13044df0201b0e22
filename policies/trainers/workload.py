"""What is trained on: traces, each at a range of speeds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traces import Trace


class Workload(NamedTuple):
    """A whole trace, the part of it to train on, and the range of arrival speeds, times its own."""

    trace: Trace
    part: str
    load: tuple[float, float]

    @property
    def train(self) -> Trace:
        """The requests to train on."""
        return self.trace if self.part == "all" else getattr(self.trace.split(), self.part)  # type: ignore[no-any-return]

    @property
    def validation(self) -> Trace:
        """The requests policies are compared on: the validation part, or where it has none those trained on."""
        part = self.trace.split().validation
        return part if part.n_requests else self.train

    def loads(self, count: int) -> list[float]:
        """`count` speeds, evenly over the range by factor."""
        low, high = self.load
        return [low] if low == high else np.geomspace(low, high, count).tolist()
