"""Prefill instances: decisions are carried out, prefills start and end (docs/physics.md, "Prefill")."""

from __future__ import annotations

import numpy as np

from ..state import DEVICE, HOST, PENDING, TRANSIT, Source
from .compile import compiled
from .decode import finish, withdraw
from .kvcache import drop, has, make_room, pin, put, release
from .latency import block_load_time, compute_time, prefill_time, reuse_tokens
from .memory import (
    arrival_of,
    blocks_of,
    cell_of,
    clock_of,
    cluster_of,
    decode_of,
    engine_of,
    flight_of,
    i4_at,
    i8_at,
    input_of,
    job_of,
    outcome_of,
    output_of,
    prefill_node_of,
    prefill_of,
    prefill_timer_of,
    row_bit,
    state_of,
    word_index,
)
from .network import lift_cap, start_flow
from .timers import set_due

LOCAL, FETCH, RECOMPUTE = int(Source.LOCAL), int(Source.FETCH), int(Source.RECOMPUTE)


@compiled
def find_holder(state, ready, p):
    """The instance other than p with the longest resident prefix; ties: less to send, then lower index. -1 if none."""
    holder = -1
    longest = 0
    for h in range(state.prefills):
        if h == p or ready[h] == 0 or ready[h] < longest:
            continue
        if ready[h] > longest or prefill_of(state, h).tx_backlog_bytes < prefill_of(state, holder).tx_backlog_bytes:
            holder = h
            longest = ready[h]
    return holder


@compiled
def admit(world, parameters, request, p, d, source, ttft_s, tbt_s, fetch_s):
    """Carry out a decision for `request`, now. `ttft_s`, `tbt_s`, `fetch_s`: what was predicted for it.

    Relies on `observe` having been called for the request at this very state: its prefix match is used again.
    """
    state = state_of(world)
    clock = clock_of(state)
    cluster = cluster_of(parameters)
    prefill = prefill_of(state, p)
    node = prefill_node_of(parameters, p)
    job = job_of(world, request)
    outcome = outcome_of(world, request)
    address, count = blocks_of(world, request)
    ids = i4_at(address)
    local = i8_at(world.scratch_match)
    ready = i8_at(world.scratch_match + 8 * world.prefills)
    device = i8_at(world.scratch_match + 16 * world.prefills)
    hit = local[p] if source != RECOMPUTE else 0
    job.local = hit
    job.holder = -1
    job.landed = 1
    in_transfer = 0
    pin(world, request, p, 0, hit)
    if source == FETCH:
        source = LOCAL
        holder = find_holder(state, ready, p)
        if holder >= 0 and ready[holder] > hit:
            for i in range(hit, ready[holder]):
                b = ids[i]
                if not has(state, b, HOST, p) and not has(state, b, TRANSIT, p):
                    if not make_room(world, p, HOST, node.host_blocks):
                        break
                    prefill.host_used += 1
                    put(state, b, TRANSIT, p)
                    in_transfer += 1
                cell_of(world, b, p).pins += 1
                hit = i + 1
            if in_transfer > 0:
                source = FETCH
                job.holder = holder
                job.landed = 0
                pin(world, request, holder, 0, hit)
                size = in_transfer * cluster.block_tokens * cluster.kv_bytes_per_token
                start_flow(world, parameters, request, holder, world.prefills + p, size, np.inf)
    for i in range(job.local, count):
        if not has(state, ids[i], HOST, p):
            put(state, ids[i], PENDING, p)
    job.hit = hit
    job.fetch_eta_s = clock.now_s + fetch_s
    n = input_of(world, request)
    if source == RECOMPUTE:
        job.predicted_s = prefill_time(cluster, node, n, 0, 0.0)
    else:
        load_s = (hit - device[p]) * block_load_time(cluster, node)
        job.predicted_s = prefill_time(cluster, node, n, hit, load_s)
    outcome.prefill = p
    outcome.decode = d
    outcome.source = source
    outcome.fetched_blocks = in_transfer
    outcome.predicted_ttft_s = ttft_s
    outcome.predicted_tbt_s = tbt_s
    # the decode side
    decode = decode_of(state, d)
    decode.pending_requests += 1
    decode.pending_tokens += n
    entry = flight_of(state, clock.in_flight)
    entry.decode = d
    entry.request = request
    entry.start_s = clock.now_s + ttft_s
    entry.tokens = n
    job.flight = clock.in_flight
    clock.in_flight += 1
    # the queue
    job.next = -1
    timer = prefill_timer_of(world, p)
    if timer.queue_head < 0:
        timer.queue_head = request
    else:
        job_of(world, timer.queue_tail).next = request
    timer.queue_tail = request
    prefill.queue_requests += 1
    prefill.queued_s += job.predicted_s
    if prefill.running == 0:
        start_prefill(world, parameters, p)


@compiled
def start_prefill(world, parameters, p):
    """The head of p's queue starts, now."""
    state = state_of(world)
    now_s = clock_of(state).now_s
    cluster = cluster_of(parameters)
    node = prefill_node_of(parameters, p)
    prefill = prefill_of(state, p)
    timer = prefill_timer_of(world, p)
    request = timer.queue_head
    job = job_of(world, request)
    outcome = outcome_of(world, request)
    timer.queue_head = job.next
    if job.next < 0:
        timer.queue_tail = -1
    timer.job = request
    prefill.running = 1
    prefill.queue_requests -= 1
    prefill.queued_s = prefill.queued_s - job.predicted_s if prefill.queue_requests > 0 else 0.0

    address, count = blocks_of(world, request)
    ids = i4_at(address)
    blocks = 0
    on_device = 0
    if outcome.source != RECOMPUTE:
        while blocks < count and (
            has(state, ids[blocks], HOST, p) or (job.landed == 0 and job.local <= blocks < job.hit)
        ):
            blocks += 1
        while on_device < blocks and has(state, ids[on_device], DEVICE, p):
            on_device += 1
    pin(world, request, p, job.hit, count)

    n = input_of(world, request)
    reused = reuse_tokens(blocks, cluster.block_tokens, n)
    load_s = (blocks - on_device) * block_load_time(cluster, node)
    job.duration_s = prefill_time(cluster, node, n, blocks, load_s)
    job.compute_s = compute_time(node, n, reused)
    outcome.reused_tokens = reused
    outcome.device_tokens = min(on_device * cluster.block_tokens, reused)
    outcome.prefill_start_s = now_s
    if job.landed != 0:
        _know_finish(world, parameters, p, now_s + job.duration_s)
    else:
        prefill.running_end_s = max(now_s + job.duration_s, job.fetch_eta_s + job.compute_s / cluster.layers)


@compiled
def _know_finish(world, parameters, p, finish_s):
    """The running prefill will end at `finish_s`: its KV streams out until then, layer by layer."""
    state = state_of(world)
    cluster = cluster_of(parameters)
    request = prefill_timer_of(world, p).job
    prefill_of(state, p).running_end_s = finish_s
    set_due(world, p, finish_s)
    if output_of(world, request) > 1:
        size = input_of(world, request) * cluster.kv_bytes_per_token
        cap = (1.0 - 1.0 / cluster.layers) * size / (finish_s - clock_of(state).now_s)
        target = 2 * world.prefills + outcome_of(world, request).decode
        start_flow(world, parameters, engine_of(world).requests + request, p, target, size, cap)


@compiled
def land_fetch(world, parameters, request):
    """A fetched prefix has arrived on the request's prefill instance, now."""
    state = state_of(world)
    job = job_of(world, request)
    outcome = outcome_of(world, request)
    p = outcome.prefill
    address, _ = blocks_of(world, request)
    ids = i4_at(address)
    for i in range(job.local, job.hit):
        if has(state, ids[i], TRANSIT, p):
            drop(state, ids[i], TRANSIT, p)
            put(state, ids[i], HOST, p)
        drop(state, ids[i], PENDING, p)
    job.landed = 1
    release(world, job.holder, engine_of(world).requests + request, 0, job.hit)
    if prefill_timer_of(world, p).job == request:
        tail_s = job.compute_s / cluster_of(parameters).layers
        finish_s = max(outcome.prefill_start_s + job.duration_s, clock_of(state).now_s + tail_s)
        _know_finish(world, parameters, p, finish_s)


@compiled
def end_prefill(world, parameters, p):
    """The running prefill of p ends, now: its blocks become usable, its first token is out."""
    state = state_of(world)
    clock = clock_of(state)
    node = prefill_node_of(parameters, p)
    prefill = prefill_of(state, p)
    timer = prefill_timer_of(world, p)
    request = timer.job
    outcome = outcome_of(world, request)
    address, count = blocks_of(world, request)
    ids = i4_at(address)
    timer.job = -1
    prefill.running = 0
    set_due(world, p, np.inf)

    # 1. what was computed becomes usable, as far as room can be made
    words = i8_at(state.blocks)
    resident = count  # leading blocks
    for i in range(count):
        at = word_index(state, ids[i], p)
        word = words[at] & ~row_bit(PENDING, p)
        words[at] = word
        if resident == count and word & row_bit(HOST, p) == 0:
            if word & row_bit(TRANSIT, p) != 0:  # on its way to a later request: it has a place already
                words[at] = word ^ (row_bit(TRANSIT, p) | row_bit(HOST, p))
            elif make_room(world, p, HOST, node.host_blocks):
                words[at] = word | row_bit(HOST, p)
                prefill.host_used += 1
            else:
                resident = i
    for i in range(resident):
        at = word_index(state, ids[i], p)
        if words[at] & row_bit(DEVICE, p) == 0:
            if not make_room(world, p, DEVICE, node.device_blocks):
                break
            words[at] |= row_bit(DEVICE, p)
            prefill.device_used += 1
    release(world, p, request, 0, count)

    outcome.prefill_end_s = clock.now_s
    outcome.prefill_s = clock.now_s - outcome.prefill_start_s
    outcome.ttft_s = clock.now_s - arrival_of(world, request)
    clock.prefill_s += outcome.prefill_s
    if output_of(world, request) == 1:
        decode = decode_of(state, outcome.decode)
        decode.pending_requests -= 1
        decode.pending_tokens -= input_of(world, request)
        withdraw(world, request)
        finish(world, parameters, request, 0.0, 0.0)
    else:
        flight_of(state, job_of(world, request).flight).start_s = clock.now_s
        lift_cap(world, parameters, engine_of(world).requests + request)
    if timer.queue_head >= 0:
        start_prefill(world, parameters, p)
