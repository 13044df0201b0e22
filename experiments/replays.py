"""Replays of traces on the simulated clusters, for experiments."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.coupled import CoupledSimulator
from envs.metrics import Replay
from envs.simulator import Simulator
from envs.spec import ClusterSpec, CoupledSpec
from policies import CompiledPolicy, make_policy
from traces import Trace


def replay(
    cluster: ClusterSpec | CoupledSpec, trace: Trace, policy: str = "", *, speed: float = 1.0, seed: int = 0
) -> Replay:
    """What becomes of a trace's requests, arriving `speed` times as fast, on an empty cluster.

    Args:
        policy: who decides in a Mooncake cluster, by the name of a compiled policy; coupled instances need none.
        seed: of its randomness, if it has any.
    """
    if isinstance(cluster, CoupledSpec):
        return CoupledSimulator(cluster, trace, speed=speed).replay()
    simulator, decider = started(cluster, trace, policy, speed=speed, seed=seed)
    decider.replay(simulator, 0)
    return replay_of(simulator, trace)


def started(
    cluster: ClusterSpec, trace: Trace, policy: str, *, speed: float = 1.0, seed: int = 0
) -> tuple[Simulator, CompiledPolicy]:
    """A cluster before the first request of a trace, and its policy, for experiments that look in between."""
    decider = make_policy(policy)
    assert isinstance(decider, CompiledPolicy)
    decider.reset(1, seed)
    simulator = Simulator.with_room(cluster, trace)
    simulator.load(0, trace, speed=speed, recheck=decider.recheck)
    return simulator, decider


def replay_of(simulator: Simulator, trace: Trace) -> Replay:
    """What a drained cluster made of a trace."""
    outcomes = simulator.outcomes(0).copy()
    block_tokens = int(simulator.parameter_tables.cluster["block_tokens"][0, 0])
    return Replay(outcomes["arrival_s"], trace.input_tokens, trace.output_tokens, outcomes, block_tokens)


def alone(cluster: ClusterSpec, input_tokens: int, output_tokens: int, cached_share: float = 0.0) -> Any:
    """The `OUTCOME` of a single request, a share of whose prompt an earlier one left in the cache (whole blocks)."""
    size = cluster.block_tokens
    prefix = int(cached_share * input_tokens) // size
    blocks = -(-input_tokens // size)
    rest = np.arange(prefix, blocks)
    trace = Trace(
        arrival_s=np.array([0.0, 1000.0]),
        input_tokens=np.array([input_tokens] * 2, np.int32),
        output_tokens=np.array([output_tokens] * 2, np.int32),
        block_offsets=np.array([0, blocks, 2 * blocks]),
        block_ids=np.concatenate([np.arange(blocks), np.arange(prefix), rest + len(rest)]).astype(np.int32),
        block_tokens=size,
    )
    return replay(cluster, trace, "cache_aware+none").outcomes[1]


def prefill_seconds(replays: Replay) -> float:
    """Mean seconds of prefill of a request."""
    return float(np.nanmean(replays.outcomes["prefill_s"]))


def hit_rate(replays: Replay) -> float:
    """Reused tokens over prompt tokens."""
    return float(replays.outcomes["reused_tokens"].sum() / replays.input_tokens.sum(dtype=np.int64))
