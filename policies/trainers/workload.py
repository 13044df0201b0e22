"""What is trained on: traces, each at a range of speeds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from envs.metrics import highest_load
from envs.simulator import Simulator
from envs.spec import ClusterSpec
from policies.policy import PolicyError
from policies.registry import CompiledPolicy, make_policy
from traces import Trace

TARGET = 0.9  # share of good requests at capacity


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


def capacity(spec: ClusterSpec, trace: Trace, reference: str = "conductor") -> float:
    """The highest speed, times the trace's own, at which a heuristic serves 90 % of the requests within both SLOs.

    Raises:
        PolicyError: there is no such speed.
    """
    policy = make_policy(reference)
    assert isinstance(policy, CompiledPolicy)
    simulator = Simulator.with_room(spec, trace)

    def attainment(loads: list[float]) -> list[float]:
        shares = []
        for load in loads:
            policy.reset(1, 0)
            simulator.load(0, trace, speed=load, recheck=policy.recheck)
            policy.replay(simulator, 0)
            shares.append(float(simulator.outcomes(0)["good"].mean()))
        return shares

    found = highest_load(attainment, TARGET)  # type: ignore[arg-type]
    if found.load is None:
        raise PolicyError(f"{trace.name} on {spec.name}: {TARGET:.0%} of good requests is {found.note}: give --load")
    return found.load
