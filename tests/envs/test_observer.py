"""A policy cannot tell the simulator from a state kept by hand: same state, same observation, same decision."""

from __future__ import annotations

import numpy as np
import pytest

from envs.observer import Observer
from envs.simulator import Simulator
from envs.spec import load_cluster
from policies import ADMISSIONS, ROUTERS, CompiledPolicy, make_policy
from traces import builtin


@pytest.mark.parametrize("disk_kv_tokens", [0, 300_000])
def test_same_state_same_observation_same_decision(disk_kv_tokens: int) -> None:
    cluster = load_cluster("5p3d")
    small = {"device_kv_tokens": 40_000, "host_kv_tokens": 100_000, "disk_kv_tokens": disk_kv_tokens}
    if disk_kv_tokens > 0:
        cluster = cluster.model_copy(update={"prefill": (cluster.prefill[0].model_copy(update=small),)})
    trace = builtin("synthetic", seed=4, n_requests=250)
    simulator = Simulator.for_trace(cluster, trace)
    observer = Observer(cluster, blocks=trace.n_distinct_blocks, in_flight=trace.n_requests)
    simulator.load(0, trace, speed=2.0)
    simulator.begin(0)
    policies = [make_policy(f"{router}+{admission}") for router in ROUTERS for admission in ADMISSIONS]
    twins = [make_policy(policy.name) for policy in policies]
    for policy in policies + twins:
        policy.reset(1, 5)
    leader = next(policy for policy in policies if policy.name == "conductor+predictive")
    assert isinstance(leader, CompiledPolicy)
    decided = read = 0
    while simulator.observe(0):
        for ours, theirs in zip(observer.state, simulator.state(0), strict=True):
            ours[...] = theirs
        request = int(simulator.batch.engine["next_request"][0, 0])
        ids = trace.block_ids[trace.block_offsets[request] : trace.block_offsets[request + 1]]
        observation = observer.observe(int(trace.input_tokens[request]), ids)
        for ours, theirs in zip(observation, simulator.observation_tables, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        chosen = [policy.decide(simulator.observation_tables)[0] for policy in policies]
        assert chosen == [policy.decide(observation)[0] for policy in twins]
        action = chosen[policies.index(leader)]
        pair, source = divmod(int(action) - 1, 3)
        if action == 0:
            simulator.decide(0, -1)
        else:
            simulator.decide(0, pair // 3, pair % 3, source)
        decided += 1
        read += int(observer.match[3].sum())
    assert decided == 250
    assert (read > 0) == (disk_kv_tokens > 0)


def test_it_refuses_what_it_cannot_hold() -> None:
    observer = Observer(load_cluster("2p2d"), blocks=10, in_flight=5)
    with pytest.raises(ValueError, match=r"block numbers must be in 0 \.\. 9, found 3 \.\. 10"):
        observer.observe(100, np.array([3, 10], np.int32))
    with pytest.raises(ValueError, match="at least 1"):
        observer.observe(0, np.array([], np.int32))
    observation = observer.observe(1000, np.array([0, 1], np.int32))
    assert observation.prefill["ttft_local_s"][0, 0] == pytest.approx(0.0498 + 1000 * 1.102e-4 + 7.61e-10 * 1e6)
