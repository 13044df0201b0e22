"""`observe`: the features a policy decides on. One implementation, for the simulator and for live traffic.

Sees a `ClusterState` and a request (its length and block ids), never what only a simulator could know.
docs/physics.md, "What the scheduler knows and predicts", defines every feature.
"""

from __future__ import annotations

import numpy as np

from .kernel.compile import compiled
from .kernel.kvcache import match
from .kernel.latency import (
    compute_time,
    context_tokens,
    drain_ahead,
    expected_stall,
    load_time,
    nic_share,
    prefill_time,
    reuse_tokens,
    stage_layers,
    tbt,
)
from .kernel.memory import (
    clock_of,
    cluster_features,
    cluster_of,
    decode_features,
    decode_node_of,
    decode_of,
    f8_at,
    flight_of,
    i8_at,
    prefill_features,
    prefill_node_of,
    prefill_of,
    request_features,
    u1_at,
)
from .kernel.prefill import find_holder


@compiled
def observe(state, parameters, input_tokens, block_ids, block_count, observation, matched, forecast):
    """Fill `observation` for a request of `input_tokens` tokens with the ids at `block_ids`, at the state's clock.

    `state`, `parameters`, `observation` are headers (envs.kernel.memory); `matched` is the address of int64[4, P],
    which holds the request's prefix match afterwards (see `match`);
    `forecast` that of float64[D, 2], room to work in.
    """
    row = 8 * state.prefills
    local = i8_at(matched)
    match(
        state, block_ids, block_count, local, i8_at(matched + row), i8_at(matched + 2 * row), i8_at(matched + 3 * row)
    )
    observe_matched(state, parameters, input_tokens, observation, matched, forecast)


@compiled
def observe_matched(state, parameters, input_tokens, observation, matched, forecast):
    """`observe` for a request whose prefix match is in `matched` already."""
    clock = clock_of(state)
    now_s = clock.now_s
    cluster = cluster_of(parameters)
    prefills = state.prefills
    decodes = state.decodes
    n = input_tokens
    local = i8_at(matched)
    ready = i8_at(matched + 8 * prefills)
    device = i8_at(matched + 16 * prefills)
    disk = i8_at(matched + 24 * prefills)
    prefill_mask = u1_at(observation.prefill_mask)
    decode_mask = u1_at(observation.decode_mask)

    # the two instances with the longest resident prefix: any instance's holder is one of them
    first = find_holder(state, ready, -1)
    second = find_holder(state, ready, first) if first >= 0 else -1

    least_ttft_s = np.inf
    best_blocks = 0
    block_bytes = cluster.block_tokens * cluster.kv_bytes_per_token
    for p in range(prefills):
        prefill = prefill_of(state, p)
        instance = prefill_node_of(parameters, p)
        features = prefill_features(observation, p)
        queue_s = 0.0
        if prefill.running != 0:
            queue_s = max(0.0, prefill.running_end_s - now_s) + prefill.queued_s
        local_tokens = reuse_tokens(local[p], cluster.block_tokens, n)
        features.queue_s = queue_s
        features.queue_requests = prefill.queue_requests
        features.local_tokens = local_tokens
        features.device_tokens = min(reuse_tokens(device[p], cluster.block_tokens, n), local_tokens)
        load_s = load_time(cluster, instance, local[p] - device[p], disk[p])
        ttft_local_s = queue_s + prefill_time(cluster, instance, n, local[p], load_s)
        ttft_local_s += drain_ahead(prefill, instance, now_s, n, local_tokens)
        ttft_fetch_s = ttft_local_s
        fetch_s = 0.0
        fetch_tokens = 0
        holder = first if p != first else second
        best_blocks = max(best_blocks, local[p], ready[p])
        if holder >= 0 and ready[holder] > local[p]:
            sender = prefill_of(state, holder)
            rate = min(
                nic_share(prefill_node_of(parameters, holder).nic_bytes_per_s, sender.tx_flows, sender.tx_used),
                nic_share(instance.nic_bytes_per_s, prefill.rx_flows, prefill.rx_used),
            )
            fetch_s = (ready[holder] - local[p]) * block_bytes / rate + cluster.transfer_latency_s
            reused = reuse_tokens(ready[holder], cluster.block_tokens, n)
            fetch_tokens = reused - local_tokens
            load_s = load_time(cluster, instance, ready[holder] - device[p], disk[p])
            ttft_fetch_s = max(
                queue_s + prefill_time(cluster, instance, n, ready[holder], load_s),
                fetch_s + compute_time(instance, n, reused) / stage_layers(cluster, instance),
            )
            ttft_fetch_s += drain_ahead(prefill, instance, now_s, n, reused)
        features.fetch_tokens = fetch_tokens
        features.fetch_s = fetch_s
        features.ttft_local_s = ttft_local_s
        features.ttft_fetch_s = ttft_fetch_s
        ttft_recompute_s = queue_s + prefill_time(cluster, instance, n, 0, 0.0)
        features.ttft_recompute_s = ttft_recompute_s + drain_ahead(prefill, instance, now_s, n, 0)
        per_bandwidth = 1.0 / instance.nic_bytes_per_s
        features.tx_used_share = prefill.tx_used * per_bandwidth
        features.rx_used_share = prefill.rx_used * per_bandwidth
        features.host_used_share = prefill.host_used / max(1, instance.host_blocks)
        features.device_used_share = prefill.device_used / max(1, instance.device_blocks)
        prefill_mask[3 * p] = prefill.up
        prefill_mask[3 * p + 1] = prefill.up != 0 and fetch_tokens > 0
        prefill_mask[3 * p + 2] = prefill.up != 0 and local_tokens > 0
        if prefill.up != 0:
            least_ttft_s = min(least_ttft_s, ttft_local_s, ttft_fetch_s)

    # who will be decoding when this request joins ([A] 7.4)
    join_s = now_s + least_ttft_s
    since_s = join_s - (cluster.decode_time_s if cluster.decode_time_s > 0.0 else clock.expected_decode_s)
    joining = f8_at(forecast)
    for d in range(decodes):
        joining[2 * d] = 0.0
        joining[2 * d + 1] = 0.0
    for i in range(clock.in_flight):
        entry = flight_of(state, i)
        there = 1.0 if (since_s < entry.start_s) & (entry.start_s <= join_s) else 0.0  # cheaper than a branch
        joining[2 * entry.decode] += there
        joining[2 * entry.decode + 1] += there * entry.tokens

    least_tbt_s = np.inf
    sum_tbt_s = 0.0
    up = 0
    for d in range(decodes):
        decode = decode_of(state, d)
        instance_d = decode_node_of(parameters, d)
        features_d = decode_features(observation, d)
        kv_tokens = context_tokens(instance_d, decode, now_s)
        assigned = decode.batch + decode.pending_requests
        features_d.batch = decode.batch
        features_d.kv_tokens = kv_tokens
        features_d.free_tokens = (
            instance_d.kv_capacity_tokens - kv_tokens - decode.pending_tokens - assigned * clock.expected_output_tokens
        )
        features_d.pending_requests = decode.pending_requests
        features_d.pending_tokens = decode.pending_tokens
        features_d.waiting_requests = decode.waiting_requests
        stall_share, stall_s = expected_stall(cluster, decode)
        tbt_now_s = tbt(instance_d, decode.batch + 1.0, kv_tokens + n, stall_share, stall_s)
        joined = joining[2 * d]
        joined_tokens = joining[2 * d + 1] + joined * clock.expected_output_tokens / 2.0
        tbt_at_join_s = tbt(instance_d, joined + 1.0, joined_tokens + n, stall_share, stall_s)
        features_d.tbt_now_s = tbt_now_s
        assigned_tokens = kv_tokens + decode.pending_tokens + n
        features_d.tbt_assigned_s = tbt(instance_d, assigned + 1.0, assigned_tokens, stall_share, stall_s)
        features_d.tbt_at_join_s = tbt_at_join_s
        features_d.rx_used_share = decode.rx_used / instance_d.nic_bytes_per_s
        decode_mask[d] = decode.up
        if decode.up != 0:
            up += 1
            least_tbt_s = min(least_tbt_s, tbt_now_s)
            sum_tbt_s += tbt_at_join_s

    request = request_features(observation)
    request.input_tokens = n
    request.best_tokens = reuse_tokens(best_blocks, cluster.block_tokens, n)
    request.since_last_arrival_s = clock.since_last_arrival_s
    request.ttft_slo_s = cluster.ttft_slo_s
    request.tbt_slo_s = cluster.tbt_slo_s
    overview = cluster_features(observation)
    overview.arrival_rate = clock.arrival_rate
    overview.in_flight = clock.in_flight
    overview.expected_output_tokens = clock.expected_output_tokens
    overview.expected_decode_s = clock.expected_decode_s
    overview.prefill_load = least_ttft_s / cluster.ttft_slo_s
    overview.decode_load_now = least_tbt_s / cluster.tbt_slo_s
    overview.decode_load_forecast = sum_tbt_s / max(1, up) / cluster.tbt_slo_s


@compiled
def holder(state, matched, p):
    """Whom p would fetch from, for the request whose match is at `matched` (see `observe`); -1 if nobody has any."""
    return find_holder(state, i8_at(matched + 8 * state.prefills), p)
