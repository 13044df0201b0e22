"""What a reservation changes in the state's tables, from its admission to its end.

As `envs.kernel.prefill.admit`, `start_prefill` and `envs.kernel.decode` do it. `at` is the address of a ledger.
"""

from __future__ import annotations

import math

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.latency import (
    context_tokens,
    drain_ahead,
    expected_stall,
    load_time,
    prefill_time,
    reuse_tokens,
    step_time,
    tbt,
)
from envs.kernel.memory import (
    clock_of,
    cluster_of,
    decode_node_of,
    decode_of,
    flight_of,
    i8_at,
    prefill_node_of,
    prefill_of,
    row_bit,
    u1_at,
    word_index,
)
from envs.state import HOST, Source

from .expectations import bring, route, settle
from .ledger import ledger_of, parameters_of, state_of

LOCAL, FETCH, RECOMPUTE = int(Source.LOCAL), int(Source.FETCH), int(Source.RECOMPUTE)
WAITING, DECODE = 3, 4  # of runtime.live_state.Stage
LINGER_S = 1.0  # for which blocks stay known after their prefill: by then KV events have said that they are there
MEMORY = 0.98  # of the moving output length and decode time (docs/physics.md)


@compiled
def admit(at, hashes, known, blocks, p, d, source, holder, input_tokens, ttft_s, slot, now_s, idle, others, others_s):
    """Enter a reservation for the request observed last ("A decision", steps 1-5).

    Args:
        hashes: of all full blocks. known: numbers of the leading ones that are known. blocks: gets the numbers of all.
        slot: its row of the flight table. idle: nothing of ours runs or waits on p, so that it may start at once.
        others, others_s: requests of others in p's queue, and their seconds.

    Returns (blocks that got a number, source, blocks to fetch, blocks to load, predicted seconds of its prefill, tokens
    reused, when it is expected to be through (the first stage of a group) or NaN where it has to wait). The first is -2
    where the table of expectations has to grow, and nothing is done then.
    """
    ledger = ledger_of(at)
    state = state_of(ledger)
    parameters = parameters_of(ledger)
    held = bring(ledger.index, p, hashes, known, blocks)
    if held == -2:
        return held, source, 0, 0, 0.0, 0, np.nan
    local = i8_at(ledger.matched)
    ready = i8_at(ledger.matched + 8 * state.prefills)
    device = i8_at(ledger.matched + 16 * state.prefills)
    disk = i8_at(ledger.matched + 24 * state.prefills)
    clock = clock_of(state)
    cluster = cluster_of(parameters)
    node = prefill_node_of(parameters, p)
    hit = local[p] if source != RECOMPUTE else np.int64(0)
    fetched = 0
    if source == FETCH:
        for i in range(hit, ready[holder]):
            if i8_at(state.blocks)[word_index(state, known[i], p)] & row_bit(HOST, p) == 0:
                fetched += 1
        hit = ready[holder]
        if fetched > 0:
            i8_at(ledger.fetching)[p] += fetched
            flow(at, holder, p, fetched * cluster.block_tokens * cluster.kv_bytes_per_token, np.inf, 1)
        else:
            source = LOCAL
    loaded = max(0, hit - device[p]) if source != RECOMPUTE else np.int64(0)
    load_s = 0.0 if source == RECOMPUTE else load_time(cluster, node, hit - device[p], disk[p])
    predicted_s = prefill_time(cluster, node, input_tokens, hit, load_s)
    decode = decode_of(state, d)
    decode.pending_requests += 1
    decode.pending_tokens += input_tokens
    entry = flight_of(state, slot)
    entry.decode = d
    entry.request = 0
    entry.start_s = clock.now_s + ttft_s
    entry.tokens = input_tokens
    clock.in_flight = slot + 1
    reused = reuse_tokens(hit, cluster.block_tokens, input_tokens)
    prefill = prefill_of(state, p)
    prefill.drain_s = drain_ahead(prefill, node, clock.now_s, input_tokens, reused)
    prefill.queue_requests += 1
    prefill.queued_s += predicted_s
    end_s = np.nan
    if idle != 0 and prefill.running == 0:
        end_s = start(at, p, d, input_tokens, now_s, predicted_s, others, others_s)
    return held, source, fetched, loaded, predicted_s, reused, end_s


@compiled
def leave_queue(at, p, predicted_s, others, others_s):
    """A request of ours is in p's queue no more; what others have there stays."""
    prefill = prefill_of(state_of(ledger_of(at)), p)
    prefill.queue_requests -= 1
    if prefill.queue_requests > others:
        prefill.queued_s -= predicted_s
    else:
        prefill.queued_s = others_s


@compiled
def start(at, p, d, input_tokens, now_s, predicted_s, others, others_s):
    """The first of ours in p's queue starts, and its KV streams to d; when it is expected to be through."""
    leave_queue(at, p, predicted_s, others, others_s)
    prefill = prefill_of(state_of(ledger_of(at)), p)
    prefill.running = 1
    prefill.running_end_s = now_s + predicted_s + others_s
    stream(at, p, d, input_tokens, predicted_s, 1)
    return prefill.running_end_s


@compiled
def stream(at, p, d, input_tokens, predicted_s, sign):
    """The KV of a request streams from p to d while it is computed ([A] 5.2), or does so no more (sign -1)."""
    ledger = ledger_of(at)
    size = input_tokens * cluster_of(parameters_of(ledger)).kv_bytes_per_token
    flow(at, p, state_of(ledger).prefills + d, size, size / predicted_s, sign)


@compiled
def flow(at, source, target, size, rate, sign):
    """A transfer of `size` bytes, at most `rate` per second, begins (sign 1) or ends (-1) on two NIC sides.

    `target`: a prefill instance, or P + a decode instance.
    """
    ledger = ledger_of(at)
    state = state_of(ledger)
    parameters = parameters_of(ledger)
    told = u1_at(ledger.told)
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
def prefilled(at, hashes, blocks, p, d, input_tokens, slot, at_s, prefill_s, running, until_us):
    """A prefill is done; seconds in which the rest of its KV goes to d. -1 where the ring of assumptions has to grow,
    and nothing is done then.

    Args:
        running: it was the one that ran on p. until_us: until when p is assumed to keep the blocks, -1 where it says
            itself what it keeps.
    """
    ledger = ledger_of(at)
    state = state_of(ledger)
    parameters = parameters_of(ledger)
    if until_us >= 0 and route(ledger.index, p, hashes, blocks, until_us) == -2:
        return -1.0
    settle(ledger.index, p, blocks, np.int64(1e6 * (at_s + LINGER_S)))
    if running != 0:
        prefill_of(state, p).running = 0
    clock_of(state).prefill_s += prefill_s
    flight_of(state, slot).start_s = at_s
    cluster = cluster_of(parameters)
    size = input_tokens * cluster.kv_bytes_per_token
    return size / decode_node_of(parameters, d).nic_bytes_per_s / cluster.layers


@compiled
def land(at, p, d, input_tokens, predicted_s):
    """All of a request's KV is on d, where it waits to join."""
    stream(at, p, d, input_tokens, predicted_s, -1)
    decode = decode_of(state_of(ledger_of(at)), d)
    decode.waiting_requests += 1
    decode.waiting_tokens += input_tokens


@compiled
def recheck(at, d, input_tokens, at_s):
    """Predicted TBT of d if a request whose KV has come now joins after those that wait (docs/physics.md, "Decode")."""
    ledger = ledger_of(at)
    parameters = parameters_of(ledger)
    node, decode = decode_node_of(parameters, d), decode_of(state_of(ledger), d)
    batch = float(decode.batch + decode.waiting_requests + 1)
    context = context_tokens(node, decode, at_s) + decode.waiting_tokens + input_tokens
    stall_share, stall_s = expected_stall(cluster_of(parameters), decode)
    return tbt(node, batch, context, stall_share, stall_s)


@compiled
def join(at, d, count, tokens, at_s, stall_s):
    """`count` waiting requests with KV of `tokens` join d's batch at a boundary, which waits `stall_s` (NaN: as long
    as their KV takes); (the stall, the batch and its context tokens, seconds that a request is expected to decode).
    """
    ledger = ledger_of(at)
    state = state_of(ledger)
    cluster = cluster_of(parameters_of(ledger))
    node = decode_node_of(parameters_of(ledger), d)
    decode = decode_of(state, d)
    kv_tokens = context_tokens(node, decode, at_s) + tokens
    if math.isnan(stall_s):
        stall_s = tokens * cluster.kv_bytes_per_token / node.join_bytes_per_s
    decode.waiting_requests -= count
    decode.waiting_tokens -= tokens
    decode.pending_requests -= count
    decode.pending_tokens -= tokens
    decode.batch += count
    decode.kv_tokens = kv_tokens
    decode.updated_s = at_s + stall_s
    horizon_s = cluster.rate_horizon_s
    fade = math.exp(-(at_s - decode.last_join_s) / horizon_s)
    decode.stall_rate = fade * decode.stall_rate + stall_s / horizon_s
    decode.join_rate = fade * decode.join_rate + count / horizon_s
    decode.last_join_s = at_s
    return stall_s, float(decode.batch), kv_tokens, clock_of(state).expected_decode_s


@compiled
def context(at, d, at_s):
    """Context tokens of d's batch at a time."""
    ledger = ledger_of(at)
    return context_tokens(decode_node_of(parameters_of(ledger), d), decode_of(state_of(ledger), d), at_s)


@compiled
def finish(at, d, at_s, output_tokens, decode_s, good):
    """A request is complete: the moving means and counts; d's batch and its context tokens until now."""
    ledger = ledger_of(at)
    state = state_of(ledger)
    clock = clock_of(state)
    if output_tokens > 0:
        clock.expected_output_tokens = MEMORY * clock.expected_output_tokens + (1 - MEMORY) * output_tokens
    if output_tokens > 1 and not math.isnan(decode_s):
        clock.expected_decode_s = MEMORY * clock.expected_decode_s + (1 - MEMORY) * decode_s
    if good != 0:
        clock.good += 1
    else:
        clock.violated += 1
    decode = decode_of(state, d)
    return float(decode.batch), context(at, d, at_s)


@compiled
def leave(at, stage, d, input_tokens, slot, last, at_s, join_s, output_tokens):
    """A reservation is no more: what it took of d, and its row of the flight table, which row `last` takes."""
    ledger = ledger_of(at)
    state = state_of(ledger)
    decode = decode_of(state, d)
    if stage < DECODE:
        decode.pending_requests -= 1
        decode.pending_tokens -= input_tokens
    if stage == WAITING:
        decode.waiting_requests -= 1
        decode.waiting_tokens -= input_tokens
    if stage == DECODE:
        node = decode_node_of(parameters_of(ledger), d)
        kv_tokens = context_tokens(node, decode, at_s)
        grown = float(output_tokens)
        if output_tokens == 0:
            grown = max(0.0, at_s - join_s) / step_time(node, float(decode.batch), decode.kv_tokens)
        decode.batch -= 1
        decode.kv_tokens = max(0.0, kv_tokens - input_tokens - max(0.0, grown - 1.0)) if decode.batch > 0 else 0.0
        decode.updated_s = max(at_s, decode.updated_s)
    if slot != last:
        entry = flight_of(state, slot)
        moved = flight_of(state, last)
        entry.decode = moved.decode
        entry.request = moved.request
        entry.start_s = moved.start_s
        entry.tokens = moved.tokens
    clock_of(state).in_flight = last
