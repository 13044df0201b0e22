"""Goodput of a policy on whole replays: how trainers choose the best of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from policies.policy import Policy
from traces import Trace


def goodput(
    policy: Policy, spec: ClusterSpec, trace: Trace, loads: Sequence[float], requests: int, seed: int = 0
) -> list[float]:
    """Share of good requests at each load, over the first `requests` of a trace, from empty clusters.

    The loads run side by side, one cluster each, as a batch.
    """
    trace = trace.rows(0, requests)
    simulator = Simulator.for_trace(spec, trace, clusters=len(loads))
    for c, load in enumerate(loads):
        simulator.load(c, trace, speed=load)
        simulator.begin(c, recheck=policy.recheck)
        simulator.observe(c)
    policy.reset(len(loads), seed)
    done = np.zeros(len(loads), np.bool_)
    while not done.all():
        simulator.step(policy.decide(simulator.observation_tables), done)
    return [float(np.mean(simulator.outcomes(c)["good"])) for c in range(len(loads))]
