"""What a reservation changes in the state's tables, as `envs.kernel.prefill.admit` and `start_prefill` do it."""

from __future__ import annotations

from envs.kernel.compile import compiled
from envs.kernel.latency import block_load_time, prefill_time, reuse_tokens
from envs.kernel.memory import (
    clock_of,
    cluster_of,
    decode_node_of,
    decode_of,
    flight_of,
    i4_at,
    i8_at,
    prefill_node_of,
    prefill_of,
    row_bit,
    u1_at,
    word_index,
)
from envs.state import HOST, Source

RECOMPUTE = int(Source.RECOMPUTE)


@compiled
def enter(state, parameters, matched, p, d, source, hit, input_tokens, ttft_s, flight):
    """An admitted request joins p's queue and is assigned to d; (predicted seconds of its prefill, tokens it reuses).

    `hit`: leading blocks it will reuse; `flight`: its row of the flight table.
    """
    clock = clock_of(state)
    cluster = cluster_of(parameters)
    node = prefill_node_of(parameters, p)
    on_device = i8_at(matched + 16 * state.prefills)[p]
    load_s = 0.0 if source == RECOMPUTE else (hit - on_device) * block_load_time(cluster, node)
    predicted_s = prefill_time(cluster, node, input_tokens, hit, load_s)
    decode = decode_of(state, d)
    decode.pending_requests += 1
    decode.pending_tokens += input_tokens
    entry = flight_of(state, flight)
    entry.decode = d
    entry.request = 0
    entry.start_s = clock.now_s + ttft_s
    entry.tokens = input_tokens
    clock.in_flight = flight + 1
    prefill = prefill_of(state, p)
    prefill.queue_requests += 1
    prefill.queued_s += predicted_s
    return predicted_s, reuse_tokens(hit, cluster.block_tokens, input_tokens)


@compiled
def leave_queue(state, p, predicted_s, external_requests, external_s):
    """A request of ours is in p's queue no more; what others have there stays."""
    prefill = prefill_of(state, p)
    prefill.queue_requests -= 1
    if prefill.queue_requests > external_requests:
        prefill.queued_s -= predicted_s
    else:
        prefill.queued_s = external_s


@compiled
def start(state, p, now_s, predicted_s, external_requests, external_s):
    """The first of ours in p's queue starts; when it is expected to end."""
    leave_queue(state, p, predicted_s, external_requests, external_s)
    prefill = prefill_of(state, p)
    prefill.running = 1
    prefill.running_end_s = now_s + predicted_s + external_s
    return prefill.running_end_s


@compiled
def flow(state, parameters, reported, source, target, size, rate, sign):
    """A transfer of `size` bytes, at most `rate` per second, begins (sign 1) or ends (-1) on two NIC sides.

    `target`: a prefill instance, or P + a decode instance. `reported`: address of uint8[P + D], whose NICs are told by
    their engines and need no reckoning.
    """
    told = u1_at(reported)
    if told[source] == 0:
        sender = prefill_of(state, source)
        nic = prefill_node_of(parameters, source).nic_bytes_per_s
        sender.tx_flows += sign
        sender.tx_backlog_bytes += sign * size
        sender.tx_used = min(nic, max(0.0, sender.tx_used + sign * min(rate, nic))) if sender.tx_flows > 0 else 0.0
    if told[target] == 0:
        if target < state.prefills:
            taker = prefill_of(state, target)
            nic = prefill_node_of(parameters, target).nic_bytes_per_s
            taker.rx_flows += sign
            taker.rx_used = min(nic, max(0.0, taker.rx_used + sign * min(rate, nic))) if taker.rx_flows > 0 else 0.0
        else:
            d = target - state.prefills
            other = decode_of(state, d)
            nic = decode_node_of(parameters, d).nic_bytes_per_s
            other.rx_flows += sign
            other.rx_used = min(nic, max(0.0, other.rx_used + sign * min(rate, nic))) if other.rx_flows > 0 else 0.0


@compiled
def missing(state, p, blocks, count):
    """How many of the blocks int32[count] at address `blocks` are not on p."""
    ids = i4_at(blocks)
    lacking = 0
    for i in range(count):
        if i8_at(state.blocks)[word_index(state, ids[i], p)] & row_bit(HOST, p) == 0:
            lacking += 1
    return lacking
