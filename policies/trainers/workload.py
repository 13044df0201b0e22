"""What is trained on: traces, each at a range of speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.policy import PolicyError
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


def at_one_load(workloads: Sequence[Workload]) -> tuple[list[Trace], tuple[float, float]]:
    """Their traces, sped up so that one range of loads is each one's own.

    Raises:
        PolicyError: one's range is not a multiple of another's.
    """
    low, high = workloads[0].load
    for workload in workloads:
        if abs(workload.load[1] / workload.load[0] - high / low) > 1e-6:
            raise PolicyError(f"{workload.trace.name} has loads that are no multiple of {workloads[0].trace.name}'s")
    return [w.trace if w.load[0] == low else w.trace.speed_up(w.load[0] / low) for w in workloads], (low, high)
