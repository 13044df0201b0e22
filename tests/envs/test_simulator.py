"""Invariants of the compiled simulator, forks, and what it must reproduce on the real traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.simulator import Simulator
from envs.spec import ClusterSpec, load_cluster
from envs.state import (
    CLUSTER_PARAMETERS,
    DECODE_PARAMETERS,
    DEVICE,
    DISK,
    HOST,
    PREFILL_PARAMETERS,
    ROW_BITS,
    EvictionRule,
    Parameters,
    Status,
)
from policies import CompiledPolicy, make_policy
from tests.envs.test_against_reference import as_trace, records
from tests.random_clusters import random_case, random_decision
from traces import Trace, builtin
from traces import load as load_trace
from traces.statistics import lfu_hit_rate, lru_hit_rate

TRACES = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.gz"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces (../shared/traces) are not here")


def residents(simulator: Simulator, row: int, cluster: int = 0) -> np.ndarray:
    """bool[blocks, P]: which block is in a row for which instance."""
    words = simulator.state(cluster).blocks
    p = np.arange(simulator.prefills)
    return (words[:, p // ROW_BITS] >> (ROW_BITS * row + p % ROW_BITS)) & 1 != 0


def check_state(simulator: Simulator) -> None:
    state = simulator.batch.state
    parameters = simulator.parameter_tables
    prefill, decode = state.prefill[0], state.decode[0]
    host, device, disk = (residents(simulator, row) for row in (HOST, DEVICE, DISK))
    nodes = parameters.prefill[0]
    assert (prefill["host_used"] <= nodes["host_blocks"]).all()
    assert (prefill["device_used"] <= nodes["device_blocks"]).all()
    assert (host.sum(axis=0) <= prefill["host_used"]).all()  # places may be held for blocks in transfer
    assert (device.sum(axis=0) == prefill["device_used"]).all()
    assert (nodes["disk_blocks"] - disk.sum(axis=0) == simulator.batch.prefill_timers["disk_free"][0]).all()
    assert (disk.sum(axis=0) <= nodes["disk_blocks"]).all()
    assert not (device & ~host).any()
    assert not (disk & host).any()
    assert (simulator.batch.cells["pins"][0] >= 0).all()
    for name in ("tx_used", "rx_used"):
        assert (prefill[name] <= nodes["nic_bytes_per_s"] * (1 + 1e-9)).all()
    assert (decode["rx_used"] <= parameters.decode[0]["nic_bytes_per_s"] * (1 + 1e-9)).all()
    assert (decode["batch"] <= parameters.decode[0]["max_batch"]).all()
    reserved = simulator.batch.decode_timers["reserved_tokens"][0]
    assert (reserved <= parameters.decode[0]["kv_capacity_tokens"]).all()
    assert (decode["pending_requests"] >= decode["waiting_requests"]).all()
    in_flight = int(state.clock["in_flight"][0, 0])
    assert in_flight == decode["batch"].sum() + decode["pending_requests"].sum()
    flight = state.flight[0, :in_flight]
    assert len(np.unique(flight["request"])) == in_flight


def simulator_of(seed: int) -> tuple[Simulator, Trace, object]:
    cluster, prefill, decode, requests, rng = random_case(seed)
    parameters = Parameters(
        records(CLUSTER_PARAMETERS, [cluster]),
        records(PREFILL_PARAMETERS, prefill),
        records(DECODE_PARAMETERS, decode),
    )
    trace = as_trace(requests, cluster["block_tokens"])
    simulator = Simulator.for_trace(parameters, trace, clusters=2)
    simulator.begin(0)
    return simulator, trace, rng


def decide_randomly(simulator: Simulator, rng) -> None:
    decision = random_decision(rng, simulator.prefills, simulator.decodes)
    if decision is None:
        simulator.decide(0, -1)
    else:
        simulator.decide(0, decision[0], decision[1], ("local", "fetch", "recompute").index(decision[2]))


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=0, max_value=2**31))
def test_invariants(seed: int) -> None:
    simulator, trace, rng = simulator_of(seed)
    now_s = 0.0
    while simulator.observe(0):
        check_state(simulator)
        clock = simulator.batch.state.clock[0, 0]
        assert clock["now_s"] >= now_s
        now_s = float(clock["now_s"])
        decide_randomly(simulator, rng)
        check_state(simulator)
    check_state(simulator)
    state, outcomes = simulator.batch.state, simulator.outcomes(0)
    clock = state.clock[0, 0]
    # every request ended, once, in one outcome
    assert np.isin(outcomes["status"], [s for s in Status if s != Status.OPEN]).all()
    counted = clock["good"] + clock["violated"] + clock["rejected_at_arrival"] + clock["rejected_at_decode"]
    assert counted == len(outcomes) == clock["arrived"]
    # nothing is left behind
    assert clock["in_flight"] == 0
    assert (simulator.batch.cells["pins"][0] == 0).all()
    assert (simulator.batch.cells["ends"][0] == 0).all()
    assert (state.prefill["tx_flows"] == 0).all()
    assert (state.prefill["tx_used"] == 0).all()
    assert (state.decode["pending_tokens"] == 0).all()
    assert (simulator.batch.decode_timers["reserved_tokens"][0] == 0).all()
    assert (residents(simulator, HOST).sum(axis=0) == state.prefill["host_used"][0]).all()
    # the sum of work is the sum of its parts, and times come in order
    assert clock["prefill_s"] == pytest.approx(np.nansum(outcomes["prefill_s"]))
    wasted = outcomes["status"] == Status.REJECTED_AT_DECODE
    assert clock["wasted_prefill_s"] == pytest.approx(outcomes["prefill_s"][wasted].sum())
    done = outcomes[(outcomes["status"] == Status.COMPLETED) & (trace.output_tokens > 1)]
    for earlier, later in (
        ("prefill_start_s", "prefill_end_s"),
        ("prefill_end_s", "kv_ready_s"),
        ("kv_ready_s", "join_s"),
        ("join_s", "finish_s"),
    ):
        assert (done[earlier] <= done[later] + 1e-12).all()
    assert (done["tbt_s"] >= done["tbt_mean_s"] * (1 - 1e-12)).all()
    # one prefill at a time in the first stage of each instance, and none overtakes in the later ones
    for p in range(simulator.prefills):
        mine = np.sort(outcomes[outcomes["prefill"] == p], order="prefill_start_s")
        left_s = mine["prefill_start_s"] + mine["prefill_s"]
        assert (mine["prefill_start_s"][1:] >= left_s[:-1] - 1e-9).all()
        assert (np.diff(mine["prefill_end_s"]) > 0).all()
        if simulator.parameter_tables.prefill["pipeline_nodes"][0, p] == 1:
            assert mine["prefill_end_s"] == pytest.approx(left_s)
        else:
            assert (mine["prefill_end_s"] > left_s).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(min_value=0, max_value=2**31), st.integers(min_value=0, max_value=40))
def test_a_fork_lives_on_by_itself(seed: int, at: int) -> None:
    simulator, trace, rng = simulator_of(seed)
    for _ in range(min(at, trace.n_requests - 1)):
        simulator.observe(0)
        decide_randomly(simulator, rng)
    simulator.observe(0)
    simulator.fork(0, 1)
    policy = make_policy("conductor+predictive")
    assert isinstance(policy, CompiledPolicy)

    def finish(cluster: int) -> bytes:
        done = np.zeros(2, bool)
        while not done[cluster]:
            policy.reset(2, 0)
            actions = policy.decide(simulator.observation_tables)
            simulator.step(actions, done, cluster, cluster + 1)
        return simulator.outcomes(cluster).tobytes()

    middle = simulator.outcomes(0).tobytes()
    first = finish(1)
    assert simulator.outcomes(0).tobytes() == middle  # the original stood still
    assert finish(0) == first


def test_replay_equals_stepping() -> None:
    trace = builtin("synthetic", seed=1, n_requests=600)
    simulator = Simulator.for_trace(load_cluster("3p1d"), trace, clusters=2)
    for name in ("conductor", "random+early", "round_robin+baseline", "power_of_two", "lmetric+predictive", "dynamo"):
        policy = make_policy(name)
        assert isinstance(policy, CompiledPolicy)
        policy.reset(2, 7)
        simulator.begin(0, recheck=policy.recheck)
        simulator.begin(1, recheck=policy.recheck)
        policy.memory[1] = policy.memory[0]
        policy.replay(simulator, 0)
        simulator.observe(1)
        done = np.zeros(2, bool)
        while not done[1]:
            simulator.step(policy.decide(simulator.observation_tables), done, 1, 2)
        assert simulator.outcomes(0).tobytes() == simulator.outcomes(1).tobytes(), name


def test_what_was_not_begun_can_be_used() -> None:
    trace = load_trace("builtin:conversation")
    policy = make_policy("conductor")
    policy.reset(1, 0)
    empty = Simulator.with_room(load_cluster("2p2d"), trace)
    assert not empty.observe(0)
    policy.replay(empty)
    assert empty.state(0).clock["now_s"] == 0
    loaded = Simulator.for_trace(load_cluster("2p2d"), trace, clusters=2)
    policy.replay(loaded)
    assert (loaded.outcomes(0)["status"] != Status.OPEN).all()
    assert loaded.observe(1)


def test_a_replay_can_be_stopped_to_count_replicas() -> None:
    trace = builtin("synthetic", seed=3, n_requests=300)
    simulator = Simulator.for_trace(load_cluster("3p2d"), trace, clusters=2)
    simulator.parameter_tables.prefill["host_blocks"] = 150
    simulator.parameter_tables.prefill["device_blocks"] = 60
    policy = make_policy("conductor+predictive")
    assert isinstance(policy, CompiledPolicy)
    policy.reset(2, 7)
    simulator.begin(0)
    simulator.begin(1)
    policy.replay(simulator, 0)
    most = 0
    until_s = 0.0
    while simulator.batch.state.clock["arrived"][1, 0] < trace.n_requests:
        policy.replay(simulator, 1, until_s=until_s)
        clock = simulator.batch.state.clock[1, 0]
        assert clock["now_s"] <= until_s
        assert clock["arrived"] == (trace.arrival_s <= until_s).sum()
        finished = simulator.outcomes(1)["finish_s"]
        assert not (finished > until_s).any()
        copies = simulator.replicas(1)
        assert (copies == residents(simulator, HOST, 1).sum(axis=1)).all()
        most = max(most, int(copies.max()))
        until_s += 30.0
    assert most > 1
    policy.replay(simulator, 1)
    assert simulator.outcomes(0).tobytes() == simulator.outcomes(1).tobytes()


def test_an_eviction_rule_needs_room_in_the_tables() -> None:
    trace = builtin("conversation", seed=0, n_requests=50)
    simulator = Simulator.for_trace(load_cluster("2p2d"), trace)
    simulator.parameter_tables.cluster["eviction"] = 1
    simulator.begin(0)
    with pytest.raises(RuntimeError, match="made for LRU"):
        simulator.observe(0)


def test_a_disk_needs_room_in_the_tables() -> None:
    trace = builtin("conversation", seed=0, n_requests=50)
    simulator = Simulator.for_trace(load_cluster("2p2d"), trace)
    simulator.parameter_tables.prefill["disk_blocks"] = 10
    simulator.begin(0)
    with pytest.raises(RuntimeError, match="made without a disk tier"):
        simulator.observe(0)


@pytest.mark.parametrize("blocks", [1 << 31, (1 << 32) + 1, 1 << 41])
def test_no_disk_is_too_large(blocks: int) -> None:
    trace = load_trace("builtin:conversation")
    node = {"hardware": "a800x8-llama2-70b", "device_kv_tokens": 50_000, "host_kv_tokens": 100_000}
    decode = {"count": 2, "hardware": "a800x8-llama2-70b"}
    pools = {"prefill": [{"count": 2, **node, "disk_kv_tokens": 512 << 30}], "decode": [decode]}
    parameters = ClusterSpec.model_validate(pools).parameters()
    reused = []
    for disk_blocks in (1 << 30, blocks):
        parameters.prefill["disk_blocks"] = disk_blocks
        simulator = Simulator.for_trace(parameters, trace)
        policy = make_policy("cache_aware")
        policy.reset(1, 0)
        policy.replay(simulator)
        reused.append(int(simulator.outcomes(0)["reused_tokens"].sum()))
    assert reused[0] == reused[1] > 0


def test_windows_that_do_not_fit_are_refused() -> None:
    trace = builtin("conversation", seed=0, n_requests=50)
    simulator = Simulator.for_trace(load_cluster("2p2d"), trace)
    longer = builtin("conversation", seed=0, n_requests=60)
    with pytest.raises(ValueError, match="60 requests, this simulator has room for 50"):
        simulator.load(0, longer)
    with pytest.raises(ValueError, match="blocks of 256 tokens, the cluster of 512"):
        simulator.load(0, trace.reblock(1024) if trace.block_tokens == 256 else _with_blocks_of(trace, 256))


def _with_blocks_of(trace: Trace, tokens: int) -> Trace:
    import dataclasses

    halves = (trace.input_tokens + 1) // 2
    return dataclasses.replace(trace, block_tokens=tokens, input_tokens=halves.astype(np.int32))


@needs_traces
@pytest.mark.parametrize(("eviction", "oracle"), [(EvictionRule.LRU, lru_hit_rate), (EvictionRule.LFU, lfu_hit_rate)])
def test_one_fast_instance_hits_as_often_as_the_oracle(eviction: EvictionRule, oracle) -> None:
    """Nearly: the oracle takes the blocks of one request one after the other, and keeps none for a request."""
    trace = load_trace(CONVERSATION)
    parameters = load_cluster("1p1d").parameters()
    parameters.cluster["eviction"] = eviction
    parameters.prefill["host_blocks"], parameters.prefill["device_blocks"] = 30_000, 0
    for name in ("base_s", "linear_s", "quadratic_s"):
        parameters.prefill[name] = 1e-12
    parameters.prefill["h2d_bytes_per_s"] = 1e30
    parameters.prefill["nic_bytes_per_s"] = parameters.decode["nic_bytes_per_s"] = 1e30
    simulator = Simulator.for_trace(parameters, trace)
    policy = make_policy("round_robin+none")
    assert isinstance(policy, CompiledPolicy)
    policy.reset(1, 0)
    simulator.begin(0, recheck=False)
    policy.replay(simulator)
    hits = -(-simulator.outcomes(0)["reused_tokens"] // trace.block_tokens).sum()
    assert hits / len(trace.block_ids) == pytest.approx(oracle(trace, 30_000), abs=0.001)


@needs_traces
def test_conversation_as_the_paper_has_it() -> None:
    """FAST'25 Fig. 8: mean prefill GPU time 1.06 s with Mooncake, 1.66 s without reuse; Fig. 5: order of mean TTFT."""
    trace = load_trace(CONVERSATION)
    simulator = Simulator.for_trace(load_cluster("8p8d"), trace)

    def run(name: str) -> np.ndarray:
        policy = make_policy(name)
        assert isinstance(policy, CompiledPolicy)
        policy.reset(1, 0)
        simulator.begin(0, recheck=policy.recheck)
        policy.replay(simulator)
        return simulator.outcomes(0).copy()

    ttft_s = {}
    for name in ("conductor", "cache_aware", "load_balancing", "random"):
        outcomes = run(f"{name}+none")
        assert (outcomes["status"] == Status.COMPLETED).all()
        ttft_s[name] = outcomes["ttft_s"].mean()
        if name == "conductor":
            assert outcomes["prefill_s"].mean() == pytest.approx(1.06, rel=0.10)
    assert ttft_s["conductor"] < ttft_s["cache_aware"] < ttft_s["load_balancing"] < ttft_s["random"] / 2

    simulator.parameter_tables.prefill["host_blocks"] = 0
    simulator.parameter_tables.prefill["device_blocks"] = 0
    outcomes = run("load_balancing+none")
    assert (outcomes["reused_tokens"] == 0).all()
    assert outcomes["prefill_s"].mean() == pytest.approx(1.66, rel=0.05)
