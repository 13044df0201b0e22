"""Goodput of a policy on whole replays: how trainers choose the best of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from policies.policy import Policy
from traces import Trace


def goodput(
    policy: Policy,
    spec: ClusterSpec,
    trace: Trace,
    loads: Sequence[float],
    requests: int,
    seed: int = 0,
) -> list[float]:
    """Share of good requests at each load, over windows of about `requests` requests.

    Every window starts with an empty cluster; all windows at all loads run as one batch.
    """
    windows = max(1, round(trace.n_requests / requests))
    length = trace.n_requests // windows
    clusters = [(load, first) for load in loads for first in range(0, windows * length, length)]
    simulator = Simulator.with_room(spec, trace, clusters=len(clusters), requests=length)
    for c, (load, first) in enumerate(clusters):
        simulator.load(c, trace, first, first + length, speed=load, recheck=policy.recheck)
        simulator.observe(c)
    policy.reset(len(clusters), seed)
    done = np.zeros(len(clusters), np.bool_)
    while not done.all():
        simulator.step(policy.decide(simulator.observation_tables), done)
    good = [float(np.mean(simulator.outcomes(c)["good"])) for c in range(len(clusters))]
    return np.reshape(good, (len(loads), windows)).mean(1).tolist()  # type: ignore[no-any-return]
