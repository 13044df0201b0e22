"""The reference simulator against numbers worked out by hand, and against what must always hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_clusters import random_case, random_decision
from tests.reference_simulator import (
    ReferenceCluster,
    Request,
    max_min_rates,
    tail_mean,
)

Decision = tuple[int, int, str] | None
INFINITY = math.inf

# compute(h) = 1 + 0.1 (n - h); 10 bytes per block, loaded and sent at 100 bytes/s; two layers.
CLUSTER: dict[str, Any] = {
    "block_tokens": 10,
    "kv_bytes_per_token": 1.0,
    "layers": 2,
    "transfer_latency_s": 0.5,
    "ttft_slo_s": 1000.0,
    "tbt_slo_s": 1000.0,
    "tbt_tail_share": 1.0,
    "decode_recheck": False,
    "prior_output_tokens": 100.0,
    "prior_decode_s": 10.0,
    "decode_time_s": 0.0,
    "rate_horizon_s": 10.0,
    "eviction": 0,
}
PREFILL: dict[str, Any] = {
    "base_s": 1.0,
    "linear_s": 0.1,
    "quadratic_s": 0.0,
    "chunk_tokens": 1000,
    "chunk_overhead_s": 0.0,
    "h2d_bytes_per_s": 100.0,
    "nic_bytes_per_s": 100.0,
    "device_blocks": 0,
    "host_blocks": 100,
    "pipeline_nodes": 1,
    "disk_blocks": 0,
    "disk_bytes_per_s": 20.0,
}
# step(B, K) = 1 + 0.5 B + 0.01 K. The sending side is what limits a stream.
DECODE: dict[str, Any] = {
    "step_base_s": 1.0,
    "step_request_s": 0.5,
    "step_token_s": 0.01,
    "join_bytes_per_s": 100.0,
    "nic_bytes_per_s": 1000.0,
    "kv_capacity_tokens": 10000,
    "max_batch": 10,
}


def build(
    requests: Sequence[Request],
    prefill: Sequence[dict[str, Any]] = ({},),
    decode: Sequence[dict[str, Any]] = ({},),
    **cluster: Any,
) -> ReferenceCluster:
    """The cluster above, with changes."""
    simulator = ReferenceCluster(
        CLUSTER | cluster,
        [PREFILL | changes for changes in prefill],
        [DECODE | changes for changes in decode],
        list(requests),
    )
    simulator.check_every_event = True
    return simulator


def run(simulator: ReferenceCluster, decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """Decide every request in turn; what was observed before each decision."""
    observed = []
    for decision in decisions:
        assert simulator.advance_to_next_arrival()
        observed.append(simulator.observe())
        simulator.decide(decision)
    assert not simulator.advance_to_next_arrival()
    simulator.drain()
    return observed


def run_random(seed: int, check: bool) -> ReferenceCluster:
    cluster, prefill, decode, requests, rng = random_case(seed)
    simulator = ReferenceCluster(cluster, prefill, decode, requests)
    simulator.check_every_event = check
    while simulator.advance_to_next_arrival():
        simulator.decide(random_decision(rng, len(prefill), len(decode)))
    simulator.drain()
    return simulator


# ---------------------------------------------------------------------- one request


def test_one_request_by_hand() -> None:
    simulator = build([Request(0.0, 20, 3, [1, 2])])
    (seen,) = run(simulator, [(0, 0, "local")])
    outcome = simulator.outcomes[0]
    # compute(0) = 1 + 0.1 * 20.
    assert outcome["prefill_start_s"] == 0.0
    assert outcome["prefill_s"] == outcome["ttft_s"] == pytest.approx(3.0)
    # The stream of 20 bytes: half of it in the 3 s of the prefill, the other half at 100 bytes/s.
    assert outcome["kv_ready_s"] == pytest.approx(3.0 + 10 / 100 + 0.5)
    # The join loads 20 bytes at 100 bytes/s.
    assert outcome["join_s"] == pytest.approx(3.6 + 0.2)
    # Two iterations: step(1, 20) = 1.7 and step(1, 21) = 1.71.
    assert outcome["finish_s"] == pytest.approx(3.8 + 1.7 + 1.71)
    assert outcome["tbt_s"] == outcome["tbt_mean_s"] == pytest.approx(1.705)
    assert outcome["status"] == "completed" and outcome["good"] is True
    assert outcome["predicted_ttft_s"] == pytest.approx(3.0)
    assert outcome["predicted_tbt_s"] == pytest.approx(1.7)
    assert (outcome["reused_tokens"], outcome["device_tokens"]) == (0, 0)
    assert outcome["source"] == "local" and outcome["fetched_blocks"] == 0
    # What was seen: an empty cluster.
    assert seen["prefill"]["queue_s"] == [0.0]
    assert seen["decode"]["free_tokens"] == [10000.0]
    assert seen["decode"]["tbt_at_join_s"] == [pytest.approx(1.7)]
    assert seen["arrival_rate"] == pytest.approx(0.1)
    assert seen["in_flight"] == 0
    # One completion moves both expectations by 2%: 3 tokens, 3.41 s.
    assert simulator.expected_output_tokens == pytest.approx(98.0 + 0.06)
    assert simulator.expected_decode_s == pytest.approx(9.8 + 0.02 * 3.41)


def test_the_tail_share_takes_the_longest_intervals() -> None:
    simulator = build([Request(0.0, 20, 3, [1, 2])], tbt_tail_share=0.5)
    run(simulator, [(0, 0, "local")])
    assert simulator.outcomes[0]["tbt_s"] == pytest.approx(1.71)
    assert simulator.outcomes[0]["tbt_mean_s"] == pytest.approx(1.705)
    assert tail_mean([1.0, 5.0, 3.0, 2.0], 0.5) == 4.0
    assert tail_mean([1.0] * 9 + [11.0], 0.1) == 11.0  # not 2 of 10 by rounding
    assert tail_mean([7.0], 0.1) == 7.0


def test_the_slos_decide_what_is_good() -> None:
    requests = [Request(0.0, 20, 3, [1, 2])]
    cases: tuple[tuple[dict[str, Any], bool], ...] = (
        ({"ttft_slo_s": 3.1, "tbt_slo_s": 1.71}, True),
        ({"ttft_slo_s": 2.9, "tbt_slo_s": 1.71}, False),
        ({"ttft_slo_s": 3.1, "tbt_slo_s": 1.70}, False),
    )
    for slos, good in cases:
        simulator = build(requests, **slos)
        run(simulator, [(0, 0, "local")])
        assert simulator.outcomes[0]["good"] is good


def test_one_output_token_never_decodes() -> None:
    simulator = build([Request(0.0, 20, 1, [1, 2])])
    run(simulator, [(0, 0, "local")])
    outcome = simulator.outcomes[0]
    assert outcome["status"] == "completed"
    assert outcome["finish_s"] == outcome["ttft_s"] == pytest.approx(3.0)
    assert outcome["tbt_s"] == 0.0
    assert math.isnan(outcome["kv_ready_s"]) and math.isnan(outcome["join_s"])
    assert simulator.transfers_started == 0
    assert simulator.expected_output_tokens == pytest.approx(98.02)
    assert simulator.expected_decode_s == 10.0


def test_no_blocks() -> None:
    simulator = build([Request(0.0, 20, 1, []), Request(10.0, 20, 1, [])], [{}, {}])
    seen = run(simulator, [(0, 0, "local"), (0, 0, "fetch")])
    assert seen[1]["prefill"]["local_tokens"] == [0, 0]
    assert seen[1]["prefill"]["fetch_s"] == [0.0, 0.0]
    assert [outcome["source"] for outcome in simulator.outcomes] == ["local", "local"]
    assert [outcome["ttft_s"] for outcome in simulator.outcomes] == pytest.approx([3.0, 3.0])


def test_chunks() -> None:
    # 20 tokens in chunks of 7: three chunks, two overheads.
    simulator = build([Request(0.0, 20, 1, [])], [{"chunk_tokens": 7, "chunk_overhead_s": 0.25}])
    run(simulator, [(0, 0, "local")])
    assert simulator.outcomes[0]["ttft_s"] == pytest.approx(3.5)


# Two nodes, three chunks: 10, 10 and 5 tokens take one node 2, 3 and 2.125 s.
PIPELINE: dict[str, Any] = {
    "base_s": 0.5,
    "linear_s": 0.1,
    "quadratic_s": 0.005,
    "chunk_tokens": 10,
    "chunk_overhead_s": 0.5,
    "pipeline_nodes": 2,
}


def test_a_pipeline_by_hand() -> None:
    requests = [Request(0.0, 25, 1, []), Request(1.0, 10, 1, []), Request(4.0, 10, 2, [])]
    simulator = build(requests, [PIPELINE])
    seen = run(simulator, [(0, 0, "local")] * 3)
    first, second, third = simulator.outcomes
    # First stage 0-1, 1-2.5, 2.5-3.5625. Second 1-2, 2.5-4, 4-5.0625.
    assert first["prefill_s"] == pytest.approx(3.5625)
    assert first["ttft_s"] == first["prefill_end_s"] == pytest.approx(3.5625 + 3 / 2)
    # Its one chunk: first stage 3.5625-4.5625, second 5.0625-6.0625, behind the first request.
    assert second["prefill_start_s"] == pytest.approx(3.5625)
    assert second["prefill_end_s"] == pytest.approx(6.0625)
    # Predicted when the first was running: it will be 1.5 s behind the first stage.
    assert second["predicted_ttft_s"] == second["ttft_s"] == pytest.approx(5.0625)
    assert simulator.seen["held up in the pipeline"] == 2
    # First stage 4.5625-5.5625, second 6.0625-7.0625.
    assert third["prefill_end_s"] == pytest.approx(7.0625)
    assert third["predicted_ttft_s"] == third["ttft_s"]
    assert seen[2]["prefill"]["queue_s"] == pytest.approx([0.5625])
    # Its stream: half of 10 bytes until the prefill ends.
    assert third["kv_ready_s"] == pytest.approx(7.0625 + 5 / 100 + 0.5)


def test_what_is_in_the_pipeline_drains_while_nothing_enters() -> None:
    requests = [Request(0.0, 25, 1, []), Request(4.5625, 10, 1, [])]
    simulator = build(requests, [PIPELINE])
    seen = run(simulator, [(0, 0, "local")] * 2)
    # The first has left the first stage at 3.5625 and ends at 5.0625: it is out of the way.
    assert seen[1]["prefill"]["queue_s"] == [0.0]
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(1.0 + 1.0)
    assert simulator.outcomes[1]["predicted_ttft_s"] == pytest.approx(2.0)


def test_the_next_request_reuses_what_drains() -> None:
    requests = [Request(0.0, 25, 1, [1, 2, 3]), Request(3.625, 30, 1, [1, 2, 3])]
    simulator = build(requests, [PIPELINE | {"device_blocks": 3}])
    run(simulator, [(0, 0, "local")] * 2)
    second = simulator.outcomes[1]
    assert second["prefill_start_s"] == 3.625 < simulator.outcomes[0]["prefill_end_s"]
    # One token, at 29: 0.5 + 0.1 + 0.005 (900 - 841) = 0.895 s on one node.
    assert second["reused_tokens"] == 29
    assert second["prefill_end_s"] == pytest.approx(5.0625 + 0.895 / 2)


def test_loads_and_fetches_are_shared_by_the_nodes_of_a_pipeline() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 20, 1, [1, 2])]
    group = PIPELINE | {"h2d_bytes_per_s": 8.0}
    simulator = build(requests, [group])
    run(simulator, [(0, 0, "local")] * 2)
    # One of two layers per node: all of C = (0.5 + 0.1 + 0.005 (400 - 361)) / 2 comes after H = 20 / 8.
    compute_s = 0.795 / 2
    assert simulator.outcomes[1]["prefill_s"] == pytest.approx(2.5 + compute_s)
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(2.5 + 2 * compute_s)
    simulator = build(requests, [group, group], transfer_latency_s=5.0)
    run(simulator, [(0, 0, "local"), (1, 0, "fetch")])
    # The fetch lands 20 / 100 + 5 s after the decision; then a layer, and the second stage.
    assert simulator.outcomes[1]["prefill_s"] == pytest.approx(5.2 + compute_s)
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(5.2 + 2 * compute_s)
    assert simulator.outcomes[1]["predicted_ttft_s"] == pytest.approx(5.2 + 2 * compute_s)


def through_the_stages(nodes: int, chunks: Sequence[tuple[float, float]]) -> list[float]:
    """When each chunk leaves the last stage, one stage and chunk after the other. A chunk: (may start, seconds)."""
    free = [0.0] * nodes
    ends = []
    for ready_s, chunk_s in chunks:
        for k in range(nodes):
            ready_s = free[k] = max(ready_s, free[k]) + chunk_s / nodes
        ends.append(ready_s)
    return ends


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_a_pipeline_chunk_by_chunk(seed: int) -> None:
    """The closed form for requests behind each other is what comes of moving every chunk through every stage."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 5))
    changes = PIPELINE | {"pipeline_nodes": nodes, "quadratic_s": 10.0 ** rng.uniform(-6, -2)}
    changes["base_s"], changes["chunk_overhead_s"] = rng.uniform(0, 2, 2)
    arrivals = np.cumsum(rng.exponential(10.0 ** rng.uniform(-1, 1.5), 12))
    requests = [Request(float(t), int(rng.integers(1, 80)), 1, []) for t in arrivals]
    simulator = build(requests, [changes], layers=4)
    run(simulator, [(0, 0, "local")] * len(requests))
    chunks, last = [], []
    for request in requests:
        for s in range(0, request.input_tokens, 10):
            e = min(s + 10, request.input_tokens)
            fixed_s = changes["chunk_overhead_s"] if s else changes["base_s"]
            work_s = 0.1 * (e - s) + changes["quadratic_s"] * (e**2 - s**2)
            chunks.append((request.arrival_s, work_s + fixed_s))
        last.append(len(chunks) - 1)
    ends = through_the_stages(nodes, chunks)
    expected = [ends[i] for i in last]
    assert [outcome["prefill_end_s"] for outcome in simulator.outcomes] == pytest.approx(expected)
    predicted = [outcome["predicted_ttft_s"] for outcome in simulator.outcomes]
    assert [outcome["ttft_s"] for outcome in simulator.outcomes] == pytest.approx(predicted)


def test_rejected_at_arrival() -> None:
    simulator = build([Request(0.0, 20, 3, [1, 2])])
    run(simulator, [None])
    outcome = simulator.outcomes[0]
    assert outcome["status"] == "rejected_at_arrival"
    assert (outcome["prefill"], outcome["decode"], outcome["good"]) == (-1, -1, False)
    assert math.isnan(outcome["ttft_s"]) and math.isnan(outcome["predicted_ttft_s"])
    assert not simulator.seen["source local"]


# ---------------------------------------------------------------------- prefix reuse and tiers


def test_two_requests_share_a_prefix_that_is_still_pending() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(1.0, 30, 1, [1, 2, 3])]
    simulator = build(requests)
    seen = run(simulator, [(0, 0, "local"), (0, 0, "local")])
    # At t = 1 blocks 1 and 2 are pending. C = 1 + 0.1 * 10, H = 20 / 100: 2 + 0.2 / 2.
    assert seen[1]["prefill"]["local_tokens"] == [20]
    assert seen[1]["prefill"]["queue_s"] == pytest.approx([2.0])
    assert seen[1]["prefill"]["ttft_local_s"] == pytest.approx([2.0 + 2.1])
    assert seen[1]["prefill"]["ttft_recompute_s"] == pytest.approx([2.0 + 4.0])
    second = simulator.outcomes[1]
    assert second["prefill_start_s"] == pytest.approx(3.0)
    assert second["ttft_s"] == second["predicted_ttft_s"] == pytest.approx(4.1)
    assert second["reused_tokens"] == 20
    assert simulator.prefill[0].resident == {1, 2, 3}


def test_blocks_on_device_are_not_loaded() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(1.0, 30, 1, [1, 2, 3])]
    simulator = build(requests, [{"device_blocks": 1}])
    run(simulator, [(0, 0, "local"), (0, 0, "local")])
    second = simulator.outcomes[1]
    # Predicted with two blocks to load, started with one: 2 + 0.1 / 2.
    assert second["predicted_ttft_s"] == pytest.approx(4.1)
    assert second["prefill_s"] == pytest.approx(2.05)
    assert second["device_tokens"] == 10
    assert simulator.prefill[0].device == {1}


def test_one_token_is_always_computed() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 20, 1, [1, 2])]
    simulator = build(requests, [{"device_blocks": 2}])
    run(simulator, [(0, 0, "local"), (0, 0, "local")])
    assert simulator.outcomes[1]["reused_tokens"] == simulator.outcomes[1]["device_tokens"] == 19
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(1.1)


def test_recompute_ignores_the_cache() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 20, 1, [1, 2])]
    simulator = build(requests)
    run(simulator, [(0, 0, "local"), (0, 0, "recompute")])
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(3.0)
    assert simulator.outcomes[1]["reused_tokens"] == 0
    assert simulator.outcomes[1]["source"] == "recompute"


def test_eviction_order() -> None:
    chains = [[1, 2, 3], [4, 5], [1, 6], [7, 8, 9, 10, 11]]
    requests = [Request(10.0 * i, 10 * len(c), 1, c) for i, c in enumerate(chains)]
    simulator = build(requests, [{"host_blocks": 4, "device_blocks": 2}])
    node = simulator.prefill[0]
    host, device = [], []
    for _ in requests:
        simulator.advance_to_next_arrival()
        host.append(set(node.resident))
        device.append(set(node.device))
        simulator.decide((0, 0, "local"))
    simulator.drain()
    assert host[1] == {1, 2, 3} and device[1] == {1, 2}
    # The oldest release is that of 1, 2, 3; its deepest block goes. Device: 2, then 1.
    assert host[2] == {1, 2, 4, 5} and device[2] == {4, 5}
    # 1 is pinned, so 2 goes. Device: 5, then 4.
    assert host[3] == {1, 4, 5, 6} and device[3] == {1, 6}
    # 5, 4 (older), then 6, 1; no room for 11. On device 1 and 6 fell out with their host copies.
    assert node.resident == {7, 8, 9, 10} and node.device == {7, 8}
    assert simulator.seen["no room in host"] == 1
    assert simulator.seen["eviction skips a pinned block"] > 0


def test_a_block_on_disk_is_a_hit_and_is_promoted() -> None:
    chains = [[1, 2], [3, 4, 5], [1, 2, 6], [7, 8, 9]]
    requests = [Request(10.0 * i, 10 * len(c), 1, c) for i, c in enumerate(chains)]
    simulator = build(requests, [{"host_blocks": 3, "device_blocks": 1, "disk_blocks": 2}])
    node = simulator.prefill[0]
    host, disk, seen = [], [], []
    for _ in requests:
        simulator.advance_to_next_arrival()
        host.append(set(node.resident))
        disk.append(set(node.disk))
        seen.append(simulator.observe()["prefill"])
        simulator.decide((0, 0, "local"))
    simulator.drain()
    # 3, 4, 5 drove out 2, then 1: both are on disk.
    assert host[2] == {3, 4, 5} and disk[2] == {1, 2}
    # Read at 20 bytes/s: 1 s for 20 bytes, more than the 0.2 s from host to device; compute(20) = 2.
    assert seen[2]["local_tokens"] == [20] and seen[2]["device_tokens"] == [0]
    assert seen[2]["ttft_local_s"] == [pytest.approx(2.0 + 1.0 / 2)]
    assert simulator.outcomes[2]["prefill_s"] == pytest.approx(2.5)
    # Promoted: they are in host memory, and no longer on disk, where 5, 4, 3 take their place; 5 has to go again.
    assert host[3] == {1, 2, 6} and disk[3] == {3, 4}
    # 6, 2, 1 go on disk, one after the other; first the older ones give way, then the deeper one.
    assert node.resident == {7, 8, 9} and node.disk == {1, 2}


def test_who_fetches_does_not_see_the_disk_of_others() -> None:
    chains = [[1, 2], [3, 4], [1, 2], [1, 2, 5]]
    requests = [Request(10.0 * i, 10 * len(c), 1, c) for i, c in enumerate(chains)]
    simulator = build(requests, [{"host_blocks": 2, "disk_blocks": 2}, {}])
    seen = run(simulator, [(0, 0, "local"), (0, 0, "local"), (0, 0, "recompute"), (1, 0, "fetch")])
    assert seen[2]["prefill"]["local_tokens"] == [19, 0]
    assert seen[2]["prefill"]["fetch_tokens"] == [0, 0]
    # computed anew, the blocks are in host memory, and can be fetched
    assert seen[3]["prefill"]["fetch_tokens"] == [0, 20]
    assert simulator.outcomes[3]["fetched_blocks"] == 2
    assert simulator.prefill[0].disk == {3, 4}


def test_a_promotion_on_its_way_is_not_loaded_twice() -> None:
    chains = [[1, 2], [3, 4], [1, 2], [1, 2]]
    times = (0.0, 10.0, 20.0, 20.5)
    requests = [Request(t, 20, 1, c) for t, c in zip(times, chains, strict=True)]
    simulator = build(requests, [{"host_blocks": 2, "disk_blocks": 2}])
    seen = run(simulator, [(0, 0, "local")] * 4)
    # 1.1 s to compute a token, 1 s from disk, half hidden; for the second, 0.2 s from host memory, after the first.
    assert seen[2]["prefill"]["ttft_local_s"] == [pytest.approx(1.1 + 0.5)]
    assert seen[3]["prefill"]["ttft_local_s"] == [pytest.approx(1.1 + 1.1 + 0.1)]
    assert simulator.outcomes[3]["ttft_s"] == pytest.approx(2.3)


def test_lfu_keeps_a_hot_old_block() -> None:
    chains = [[1, 2], [1, 2], [3, 4], [5], [6]]
    requests = [Request(10.0 * i, 10 * len(c), 1, c) for i, c in enumerate(chains)]
    resident = []
    for eviction in (0, 1):
        simulator = build(requests, [{"host_blocks": 4, "device_blocks": 2}], eviction=eviction)
        run(simulator, [(0, 0, "local")] * 5)
        resident.append(simulator.prefill[0].resident)
    # 2 and 1 were used twice, but not of late.
    assert resident == [{3, 4, 5, 6}, {1, 2, 5, 6}]


def test_lfu_counts_anew_what_came_back() -> None:
    chains = [[1], [1], [1], [2], [2], [3], [3], [1], [4]]
    requests = [Request(10.0 * i, 10, 1, c) for i, c in enumerate(chains)]
    simulator = build(requests, [{"host_blocks": 1}], eviction=1)
    run(simulator, [(0, 0, "local")] * 9)
    assert simulator.prefill[0].resident == {4}
    assert simulator.prefill[0].uses == {1: 0, 2: 0, 3: 0, 4: 1}


def test_length_aware_evicts_the_deepest_of_the_least_used() -> None:
    chains = [[1], [2, 3], [4]]
    requests = [Request(10.0 * i, 10 * len(c), 1, c) for i, c in enumerate(chains)]
    resident = []
    for eviction in (1, 2):
        simulator = build(requests, [{"host_blocks": 3}], eviction=eviction)
        run(simulator, [(0, 0, "local")] * 3)
        resident.append(simulator.prefill[0].resident)
    # 3 is deeper than 1, though younger.
    assert resident == [{2, 3, 4}, {1, 2, 4}]


def test_a_fresh_release_protects() -> None:
    chains = [[1], [2], [1], [3]]
    requests = [Request(10.0 * i, 10, 1, c) for i, c in enumerate(chains)]
    simulator = build(requests, [{"host_blocks": 2}])
    run(simulator, [(0, 0, "local")] * 4)
    assert simulator.prefill[0].resident == {1, 3}


def test_a_block_that_was_not_kept_is_computed_again() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(1.0, 20, 1, [1, 2])]
    simulator = build(requests, [{"host_blocks": 1}])
    run(simulator, [(0, 0, "local"), (0, 0, "local")])
    second = simulator.outcomes[1]
    # Predicted: both are pending, 19 tokens of reuse. In fact only block 1 was kept.
    assert second["predicted_ttft_s"] == pytest.approx(2.0 + 1.1 + 0.2 / 2)
    assert second["reused_tokens"] == 10
    assert second["prefill_s"] == pytest.approx(2.0 + 0.1 / 2)


# ---------------------------------------------------------------------- fetches


def test_two_fetches_halve_the_holders_nic() -> None:
    chain = [1, 2]
    requests = [
        Request(0.0, 20, 1, chain),
        Request(10.0, 40, 1, [*chain, 3, 4]),
        Request(10.0, 40, 1, [*chain, 5, 6]),
    ]
    simulator = build(requests, [{"nic_bytes_per_s": 4.0}, {}, {}])
    seen = run(simulator, [(0, 0, "local"), (1, 0, "fetch"), (2, 0, "fetch")])
    # 20 bytes at 4 bytes/s; the second request is told of half of that, and that is what both get.
    assert seen[1]["prefill"]["fetch_s"] == pytest.approx([0.0, 5.5, 5.5])
    assert seen[1]["prefill"]["fetch_tokens"] == [0, 20, 20]
    assert seen[2]["prefill"]["fetch_s"] == pytest.approx([0.0, 0.0, 10.5])  # pending at 1
    assert seen[2]["prefill"]["local_tokens"] == [20, 20, 0]
    assert seen[2]["prefill"]["tx_used_share"] == pytest.approx([1.0, 0.0, 0.0])
    assert seen[2]["prefill"]["rx_used_share"] == pytest.approx([0.0, 0.04, 0.0])
    # compute(20) = 3: after the landing half of it (two layers) remains.
    assert seen[1]["prefill"]["ttft_fetch_s"][1] == pytest.approx(5.5 + 1.5)
    for outcome, predicted in zip(simulator.outcomes[1:], (7.0, 12.0), strict=True):
        assert outcome["predicted_ttft_s"] == pytest.approx(predicted)
        assert outcome["ttft_s"] == pytest.approx(10.5 + 1.5)
        assert (outcome["source"], outcome["fetched_blocks"]) == ("fetch", 2)
        assert outcome["reused_tokens"] == 20
    assert simulator.prefill[1].resident == {1, 2, 3, 4}
    assert not simulator.prefill[0].pins


def test_a_fetch_hidden_behind_the_compute() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 40, 1, [1, 2, 3, 4])]
    simulator = build(requests, [{}, {}])
    run(simulator, [(0, 0, "local"), (1, 0, "fetch")])
    # 0.7 s of fetch; duration(2, 2) = 3 + 0.2 / 2.
    assert simulator.outcomes[1]["ttft_s"] == pytest.approx(3.1)
    assert simulator.outcomes[1]["predicted_ttft_s"] == pytest.approx(3.1)


def test_a_fetch_without_room_is_local() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 40, 1, [1, 2, 3, 4])]
    simulator = build(requests, [{}, {"host_blocks": 0}])
    run(simulator, [(0, 0, "local"), (1, 0, "fetch")])
    outcome = simulator.outcomes[1]
    assert (outcome["source"], outcome["fetched_blocks"]) == ("local", 0)
    assert outcome["ttft_s"] == pytest.approx(5.0)
    assert outcome["predicted_ttft_s"] == pytest.approx(3.1)


def test_a_fetch_cut_short() -> None:
    requests = [Request(0.0, 20, 1, [1, 2]), Request(10.0, 40, 1, [1, 2, 3, 4])]
    simulator = build(requests, [{}, {"host_blocks": 1}])
    run(simulator, [(0, 0, "local"), (1, 0, "fetch")])
    outcome = simulator.outcomes[1]
    assert (outcome["source"], outcome["fetched_blocks"]) == ("fetch", 1)
    assert outcome["reused_tokens"] == 10
    assert outcome["ttft_s"] == pytest.approx(4.0 + 0.1 / 2)


def test_the_fetch_range_may_hold_a_resident_block() -> None:
    requests = [
        Request(0.0, 30, 1, [1, 2, 3]),
        Request(10.0, 30, 1, [1, 2, 3]),
        Request(20.0, 30, 1, [1, 2, 3]),
    ]
    simulator = build(requests, [{}, {}])
    for decision in ((0, 0, "local"), (1, 0, "local")):
        simulator.advance_to_next_arrival()
        simulator.decide(decision)
    simulator.advance_to_next_arrival()
    simulator.prefill[1].resident.remove(1)  # a hole: 2 and 3 are still there
    assert simulator.observe()["prefill"]["fetch_s"] == pytest.approx([0.0, 0.3 + 0.5])
    simulator.decide((1, 0, "fetch"))
    simulator.drain()
    outcome = simulator.outcomes[2]
    assert outcome["fetched_blocks"] == 1  # one block moves: 0.1 + 0.5 s
    assert outcome["reused_tokens"] == 29
    # C = 1.1, H = 0.3: the start is at 20 and the fetch, landed at 20.6, adds at least C / 2.
    assert outcome["ttft_s"] == pytest.approx(max(1.1 + 0.15, 0.6 + 0.55))


def test_the_fetch_range_may_hold_a_block_in_transfer_for_another() -> None:
    chain = [9, 1, 2]
    requests = [
        Request(0.0, 30, 1, chain),  # at 1
        Request(0.0, 10, 1, [50]),  # at 0
        Request(10.0, 20, 1, chain[:2]),  # at 0, runs until 13
        Request(10.0, 30, 1, chain),  # at 0: fetches block 2 from 1, very slowly
        Request(10.0, 10, 1, [50]),  # at 2: fetches 50 from 0, which pins it there until 14.5
        Request(16.0, 30, 1, chain),  # at 0: 9 is there, 1 was not kept, 2 is on its way
    ]
    prefill: list[dict[str, Any]] = [
        {"host_blocks": 3},
        {"nic_bytes_per_s": 0.5},
        {"nic_bytes_per_s": 2.5},
    ]
    simulator = build(requests, prefill)
    decisions = [(1, 0, "local"), (0, 0, "local"), (0, 0, "local"), (0, 0, "fetch")]
    for decision in [*decisions, (2, 0, "fetch")]:
        assert simulator.advance_to_next_arrival()
        simulator.decide(decision)
    assert simulator.advance_to_next_arrival()
    assert simulator.prefill[0].resident == {9, 50}
    assert simulator.prefill[0].arriving == {2}
    assert simulator.observe()["prefill"]["local_tokens"][0] == 10
    assert simulator.observe()["prefill"]["host_used_share"][0] == 1.0
    simulator.decide((0, 0, "fetch"))
    assert simulator.seen["fetch range has a block in transfer for another"] == 1
    assert simulator.outcomes[5]["fetched_blocks"] == 1  # block 1, in the place of 50
    assert simulator.prefill[0].arriving == {1, 2}
    simulator.drain()
    assert simulator.prefill[0].resident == {9, 1, 2}


def test_the_holder_with_the_smaller_backlog() -> None:
    requests = [
        Request(0.0, 20, 1, [1, 2]),
        Request(0.0, 20, 1, [1, 2]),
        Request(10.0, 20, 1, [1, 2]),
        Request(10.0, 20, 1, [1, 2]),
    ]
    simulator = build(requests, [{}, {}, {}, {}])
    decisions: list[Decision] = [(0, 0, "local"), (1, 0, "local"), (2, 0, "fetch"), (3, 0, "fetch")]
    run(simulator, decisions)
    assert simulator.seen["holder tie by index"] and simulator.seen["holder tie by backlog"]
    # No contention: each fetch has a holder of its own, 0.2 + 0.5 s and half of compute(19).
    assert not simulator.seen["contention on tx"]
    assert simulator.outcomes[2]["ttft_s"] == pytest.approx(0.7 + 1.1 / 2)
    assert simulator.outcomes[3]["ttft_s"] == pytest.approx(0.7 + 1.1 / 2)


# ---------------------------------------------------------------------- network


def test_max_min_rates_by_hand() -> None:
    a, b, x, y = ("tx", 0), ("tx", 1), ("rx", 0), ("rx", 1)
    bandwidth = {a: 10.0, b: 4.0, x: 6.0, y: 100.0}
    flows = [(a, x, INFINITY), (b, x, INFINITY), (a, y, INFINITY)]
    # x is shared in halves; what the first leaves of a goes to the third.
    assert max_min_rates(flows, bandwidth) == pytest.approx([3.0, 3.0, 7.0])
    # A cap on the second gives its share to the first.
    flows[1] = (b, x, 1.0)
    assert max_min_rates(flows, bandwidth) == pytest.approx([5.0, 1.0, 5.0])
    flows[1] = (b, x, 0.0)
    assert max_min_rates(flows, bandwidth) == pytest.approx([5.0, 0.0, 5.0])
    assert max_min_rates([], bandwidth) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_max_min_rates_are_max_min(data: st.DataObject) -> None:
    nics = [(side, i) for side in ("tx", "rx") for i in range(3)]
    positive = st.floats(0.1, 100.0)
    bandwidth = {nic: data.draw(positive) for nic in nics}
    flow = st.tuples(st.sampled_from(nics[:3]), st.sampled_from(nics[3:]), st.just(INFINITY) | positive)
    flows = data.draw(st.lists(flow, max_size=8))
    rates = max_min_rates(flows, bandwidth)
    through = {nic: [rate for rate, flow in zip(rates, flows, strict=True) if nic in flow[:2]] for nic in nics}
    for nic, shares in through.items():
        assert sum(shares) <= bandwidth[nic] * (1 + 1e-9)
    for rate, (sender, receiver, cap) in zip(rates, flows, strict=True):
        assert rate <= cap
        full_where_largest = any(
            sum(through[nic]) >= bandwidth[nic] * (1 - 1e-9) and rate >= max(through[nic]) * (1 - 1e-9)
            for nic in (sender, receiver)
        )
        assert rate == cap or full_where_largest


def test_two_streams_share_the_decode_nic() -> None:
    # Both prefills end at 3 with 10 bytes left each; 10 bytes/s at the decode side for the two.
    requests = [Request(0.0, 20, 2, []), Request(0.0, 20, 2, [])]
    simulator = build(requests, [{}, {}], [{"nic_bytes_per_s": 10.0}])
    run(simulator, [(0, 0, "local"), (1, 0, "local")])
    for outcome in simulator.outcomes:
        assert outcome["kv_ready_s"] == pytest.approx(3.0 + 20 / 10 + 0.5)


def test_one_layer_streams_only_after_the_prefill() -> None:
    simulator = build([Request(0.0, 20, 2, [])], layers=1)
    run(simulator, [(0, 0, "local")])
    assert simulator.outcomes[0]["kv_ready_s"] == pytest.approx(3.0 + 0.2 + 0.5)


# ---------------------------------------------------------------------- decode


def test_a_join_stalls_the_batch() -> None:
    # The first joins at 3.8 (see above). The second: prefill 1 .. 3, ready at 3 + 0.05 + 0.5 = 3.55
    # is before that, so let it arrive at 2: prefill 2 .. 4, ready at 4.55, joins at 5.5.
    requests = [Request(0.0, 20, 4, [1, 2]), Request(2.0, 10, 2, [3])]
    simulator = build(requests, [{}, {}])
    run(simulator, [(0, 0, "local"), (1, 0, "local")])
    first, second = simulator.outcomes
    assert second["kv_ready_s"] == pytest.approx(4.55)
    assert second["join_s"] == pytest.approx(5.5 + 0.1)
    # step(2, 21 + 10) = 2.31, then the second leaves; step(1, 22) = 1.72.
    assert second["finish_s"] == pytest.approx(5.6 + 2.31)
    assert second["tbt_s"] == pytest.approx(2.31)  # its own join is not in its TBT
    assert first["finish_s"] == pytest.approx(5.6 + 2.31 + 1.72)
    assert first["tbt_s"] == pytest.approx((1.7 + (0.1 + 2.31) + 1.72) / 3)
    node = simulator.decode[0]
    # Joins at 3.6 (stall 0.2) and 5.5 (stall 0.1), horizon 10.
    assert node.stall_rate == pytest.approx(math.exp(-0.19) * 0.02 + 0.01)
    assert node.join_rate == pytest.approx(math.exp(-0.19) * 0.1 + 0.1)


def test_ready_during_a_stall_joins_after_the_next_iteration() -> None:
    requests = [Request(0.0, 20, 3, []), Request(0.1, 20, 3, [])]
    simulator = build(requests, [{}, {}])
    run(simulator, [(0, 0, "local"), (1, 0, "local")])
    # Ready at 3.6 and 3.7; the stall of the first lasts until 3.8, its iteration until 5.5.
    assert simulator.seen["ready during a stall"] == 1
    assert simulator.outcomes[1]["kv_ready_s"] == pytest.approx(3.7)
    assert simulator.outcomes[1]["join_s"] == pytest.approx(5.5 + 0.2)


def test_what_the_scheduler_sees_of_a_batch() -> None:
    requests = [Request(0.0, 20, 5, []), Request(3.7, 10, 2, []), Request(6.0, 10, 2, [])]
    simulator = build(requests)
    seen = run(simulator, [(0, 0, "local"), (0, 0, "local"), None])
    # During the stall the first counts as joined with its 20 tokens; one join of 0.2 s so far:
    # stall_rate 0.02, join_rate 0.1.
    during = seen[1]["decode"]
    assert (during["batch"], during["kv_tokens"]) == ([1], [20.0])
    step = 1 + 0.5 * 2 + 0.01 * 30
    assert during["tbt_now_s"] == pytest.approx([step + 0.02 * step])
    assert during["free_tokens"] == pytest.approx([10000 - 20 - 100])
    # At 6 s: 20 + (6 - 3.8) / 1.7 tokens; the second (prefill 3.7 .. 5.7) is pending.
    later = seen[2]["decode"]
    kv = 20 + 2.2 / 1.7
    assert later["kv_tokens"] == pytest.approx([kv])
    assert (later["pending_requests"], later["pending_tokens"]) == ([1], [10])
    step = 1 + 0.5 * 3 + 0.01 * (kv + 20)
    assert later["tbt_assigned_s"] == pytest.approx([step + 0.02 * step])
    # At the join, 6 + 2: the first joined at 3.8, the second ended its prefill at 5.7; none ended.
    step = 1 + 0.5 * 3 + 0.01 * (20 + 10 + 2 * 100 / 2 + 10)
    assert later["tbt_at_join_s"] == pytest.approx([step + 0.02 * step])
    assert seen[2]["in_flight"] == 2


def test_a_fixed_decode_time_forgets_who_joined_longer_ago() -> None:
    requests = [Request(0.0, 20, 5, []), Request(3.7, 10, 2, []), Request(6.0, 10, 2, [])]
    simulator = build(requests, decode_time_s=4.0)
    later = run(simulator, [(0, 0, "local"), (0, 0, "local"), None])[2]["decode"]
    # At the join, 6 + 2, the first has been there since 3.8 and counts as gone; the second ended its prefill at 5.7.
    step = 1 + 0.5 * 2 + 0.01 * (10 + 100 / 2 + 10)
    assert later["tbt_at_join_s"] == pytest.approx([step + 0.02 * step])
    assert simulator.expected_decode_s != 4.0


def test_waiting_for_vram() -> None:
    requests = [Request(0.0, 20, 3, []), Request(0.5, 20, 3, [])]
    simulator = build(requests, [{}, {}], [{"kv_capacity_tokens": 40}])
    run(simulator, [(0, 0, "local"), (1, 0, "local")])
    # 23 reserved of 40: the second waits until the first leaves at 7.21.
    assert simulator.seen["wait for VRAM"] >= 1
    assert simulator.outcomes[1]["kv_ready_s"] == pytest.approx(4.1)
    assert simulator.outcomes[1]["join_s"] == pytest.approx(7.21 + 0.2)
    assert simulator.outcomes[1]["tbt_s"] == pytest.approx(1.705)


def test_waiting_for_a_place_in_the_batch_and_joining_together() -> None:
    requests = [Request(0.0, 20, 3, []), Request(0.5, 20, 3, []), Request(0.5, 10, 3, [])]
    simulator = build(requests, [{}, {}, {}], [{"kv_capacity_tokens": 47}])
    run(simulator, [(0, 0, "local"), (1, 0, "local"), (2, 0, "local")])
    # 23 of 47 are taken. The third, ready at 3.05, is alone until it leaves: see that it is first.
    assert simulator.outcomes[2]["join_s"] == pytest.approx(3.05 + 0.1)
    assert simulator.seen["several joiners at one boundary"] == 0
    simulator = build(requests, [{}, {}, {}], [{"max_batch": 1}])
    run(simulator, [(0, 0, "local"), (1, 0, "local"), (2, 0, "local")])
    assert simulator.seen["wait for max_batch"] > 0
    # Third, first, second, each alone: 1.6 + 1.61 s and 1.7 + 1.71 s.
    assert simulator.outcomes[0]["join_s"] == pytest.approx(3.15 + 3.21 + 0.2)
    assert simulator.outcomes[1]["join_s"] == pytest.approx(6.56 + 3.41 + 0.2)
    # Two wait while the batch of the third decodes and join at one boundary, at 3.15 + 1.6.
    simulator = build(requests, [{}, {}, {}], [{}])
    run(simulator, [(0, 0, "local"), (1, 0, "local"), (2, 0, "local")])
    assert simulator.seen["several joiners at one boundary"] == 1
    joins = [outcome["join_s"] for outcome in simulator.outcomes[:2]]
    assert joins == pytest.approx([4.75 + 0.4] * 2)


def test_too_long_for_the_decode_instance() -> None:
    simulator = build([Request(0.0, 20, 3, [])], [{}], [{"kv_capacity_tokens": 22}])
    run(simulator, [(0, 0, "local")])
    outcome = simulator.outcomes[0]
    assert outcome["status"] == "rejected_at_decode" and outcome["good"] is False
    assert outcome["prefill_s"] == pytest.approx(3.0)
    assert outcome["kv_ready_s"] == pytest.approx(3.6)
    assert math.isnan(outcome["join_s"]) and math.isnan(outcome["finish_s"])
    assert simulator.expected_output_tokens == 100.0


def test_the_recheck() -> None:
    requests = [Request(0.0, 20, 4, []), Request(2.0, 10, 2, [])]
    # At 4.55: B' = 2, K' = 20 + (4.55 - 3.8) / 1.7 + 10; one join so far (0.02 of stall per s).
    step = 1 + 0.5 * 2 + 0.01 * (30 + 0.75 / 1.7)
    tbt = step + 0.02 * step
    for slo, recheck, status in (
        (tbt - 1e-6, True, "rejected_at_decode"),
        (tbt + 1e-6, True, "completed"),
        (tbt - 1e-6, False, "completed"),
    ):
        simulator = build(requests, [{}, {}], tbt_slo_s=slo, decode_recheck=recheck)
        run(simulator, [(0, 0, "local"), (1, 0, "local")])
        assert simulator.outcomes[0]["status"] == "completed"
        assert simulator.outcomes[1]["status"] == status


# ---------------------------------------------------------------------- always


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_invariants(seed: int) -> None:
    """Nothing impossible after any event, and every request ends exactly once."""
    simulator = run_random(seed, check=True)
    cluster = simulator.x
    for request, outcome in zip(simulator.requests, simulator.outcomes, strict=True):
        status = outcome["status"]
        assert status in ("rejected_at_arrival", "rejected_at_decode", "completed")
        if status == "rejected_at_arrival":
            assert math.isnan(outcome["ttft_s"])
            continue
        assert request.arrival_s <= outcome["prefill_start_s"] < outcome["prefill_end_s"]
        assert 0 <= outcome["device_tokens"] <= outcome["reused_tokens"] < request.input_tokens
        assert (outcome["fetched_blocks"] > 0) == (outcome["source"] == "fetch")
        if request.output_tokens > 1:
            total = request.input_tokens * cluster["kv_bytes_per_token"]
            nic = min(
                simulator.prefill[outcome["prefill"]].x["nic_bytes_per_s"],
                simulator.decode[outcome["decode"]].x["nic_bytes_per_s"],
            )
            landed = outcome["prefill_end_s"] + cluster["transfer_latency_s"]
            assert outcome["kv_ready_s"] >= (landed + total / cluster["layers"] / nic) * (1 - 1e-9)
        if status == "completed" and request.output_tokens > 1:
            assert outcome["kv_ready_s"] < outcome["join_s"] < outcome["finish_s"]
            assert outcome["tbt_s"] >= outcome["tbt_mean_s"] * (1 - 1e-9)
            decode_s = outcome["finish_s"] - outcome["join_s"]
            assert outcome["tbt_mean_s"] * (request.output_tokens - 1) == pytest.approx(decode_s)
    # Nothing is left behind.
    assert not simulator.active and not simulator.landing
    for node in simulator.prefill:
        assert not node.pins and not node.pending and not node.arriving
        assert node.running is None and not node.queue and not node.draining
    for node_d in simulator.decode:
        assert not node_d.batch and not node_d.waiting


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_recompute_is_predicted_exactly(seed: int) -> None:
    """Without caches and fetches the queue is a plain FIFO and the predicted TTFT is the TTFT."""
    cluster, prefill, decode, requests, rng = random_case(seed)
    simulator = ReferenceCluster(cluster, prefill, decode, requests)
    while simulator.advance_to_next_arrival():
        simulator.decide((rng.randrange(len(prefill)), rng.randrange(len(decode)), "recompute"))
    simulator.drain()
    for outcome in simulator.outcomes:
        assert outcome["ttft_s"] == pytest.approx(outcome["predicted_ttft_s"], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_observe_changes_nothing(seed: int) -> None:
    cluster, prefill, decode, requests, rng = random_case(seed)
    simulator = ReferenceCluster(cluster, prefill, decode, requests)
    while simulator.advance_to_next_arrival():
        seen = simulator.observe()
        assert seen == simulator.observe()
        for p in range(len(prefill)):
            row = {name: values[p] for name, values in seen["prefill"].items()}
            assert row["device_tokens"] <= row["local_tokens"]
            assert row["fetch_tokens"] >= 0
            if row["fetch_s"] == 0.0:
                assert row["fetch_tokens"] == 0
                assert row["ttft_fetch_s"] == row["ttft_local_s"]
        simulator.decide(random_decision(rng, len(prefill), len(decode)))
    simulator.drain()
    again = run_random(seed, check=False)
    np.testing.assert_equal(again.outcomes, simulator.outcomes)


def test_structured_records_work_as_well_as_dictionaries() -> None:
    def record(parameters: dict[str, Any]) -> Any:
        kinds = {bool: "?", int: "i8", float: "f8"}
        dtype = [(name, kinds[type(value)]) for name, value in parameters.items()]
        return np.array([tuple(parameters.values())], dtype=dtype)[0]

    cluster, prefill, decode, requests, rng = random_case(7)
    simulator = ReferenceCluster(record(cluster), [record(x) for x in prefill], [record(x) for x in decode], requests)
    while simulator.advance_to_next_arrival():
        simulator.decide(random_decision(rng, len(prefill), len(decode)))
    simulator.drain()
    np.testing.assert_equal(simulator.outcomes, run_random(7, check=False).outcomes)


def test_random_cases_take_every_branch() -> None:
    """Across 200 seeds every branch of docs/physics.md is taken (the last few are rare).

    Not asked for here: a fetch range with a block that is resident or in transfer already. Each has a test of its own.
    """
    seen: Counter[str] = Counter()
    for seed in range(200):
        seen += run_random(seed, check=False).seen
    often = (
        "arrivals at the same time",
        "contention on decode",
        "contention on rx",
        "contention on tx",
        "device eviction",
        "disk eviction",
        "disk eviction of the newcomer",
        "disk faster than h2d",
        "disk slower than h2d",
        "eviction skips a pinned block",
        "expects to drain behind another",
        "fetch cut short",
        "fetch degraded to local",
        "fetch delays its prefill",
        "fetch finds no room",
        "fetch hidden",
        "fetch landed before the start",
        "fetch without more at the holder is local",
        "good",
        "held up in the pipeline",
        "hit on pending blocks",
        "holder tie by backlog",
        "holder tie by index",
        "host eviction",
        "host eviction drops the device copy",
        "leave and join at one boundary",
        "less resident at the start than the hit",
        "load longer than compute",
        "no room in host",
        "no room on device",
        "not kept though another request needs it",
        "one output token",
        "promotion",
        "ready during a stall",
        "rejected at arrival",
        "rejected by the re-check",
        "rejected: too long",
        "request without blocks",
        "several chunks",
        "several joiners at one boundary",
        "several leave at one boundary",
        "source fetch",
        "source local",
        "source recompute",
        "stall of a running batch",
        "start with an unlanded fetch",
        "starts while another drains",
        "stream at its cap",
        "stream below cap",
        "the first chunk is the longest",
        "the last chunk is the longest",
        "the last full chunk is the longest",
        "violated",
        "wait for VRAM",
        "wait for max_batch",
    )
    rare = (
        "a block lands with another request's fetch",
        "computed while in transfer for another",
        "more resident at the start than the hit",
    )
    assert not {name: seen[name] for name in often if seen[name] < 10}
    assert not [name for name in rare if not seen[name]]
