"""Prefill instances: decisions are carried out, prefills start and end (docs/physics.md, "Prefill")."""

from __future__ import annotations

import numpy as np

from ..state import DEVICE, HOST, Source
from .compile import compiled
from .decode import finish, withdraw
from .kvcache import chain_release, leading, make_room, mask_of, on_disk, pin, release, take_off_disk
from .latency import (
    compute_time,
    drain_ahead,
    drain_time,
    load_time,
    prefill_time,
    reuse_tokens,
    stage_layers,
)
from .memory import (
    arrival_of,
    bits_in,
    cell_of,
    clock_of,
    cluster_of,
    decode_of,
    engine_of,
    flight_of,
    i8_at,
    input_of,
    job_of,
    lowest_bit,
    outcome_of,
    output_of,
    prefill_node_of,
    prefill_of,
    prefill_timer_of,
    reference_of,
    request_of,
    state_of,
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
def _part_mask(reference, at, start, stop):
    """Which blocks of a run are among blocks [start, stop) of the request, where the run's first is block `at`."""
    length = reference.length
    return mask_of(min(max(stop - at, 0), length)) & ~mask_of(min(max(start - at, 0), length))


@compiled
def _missing(world, request, p, start, stop):
    """How many of blocks [start, stop) of the request are neither on p nor in transfer to it."""
    asked = request_of(world, request)
    at = 0
    missing = 0
    for i in range(asked.first, asked.first + asked.references):
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        there = cell.host | cell.transit | on_disk(world, reference.run, p)
        missing += bits_in(_part_mask(reference, at, start, stop) & ~there)
        at += reference.length
    return missing


@compiled
def _expect(world, request, p, start, stop):
    """Blocks [start, stop) of the request take a place on p, keep it pinned, and are in transfer to it."""
    prefill_of(state_of(world), p).host_used += stop - start
    asked = request_of(world, request)
    at = 0
    for i in range(asked.first, asked.first + asked.references):
        reference = reference_of(world, i)
        cell_of(world, reference.run, p).transit |= _part_mask(reference, at, start, stop)
        at += reference.length
    pin(world, request, p, start, stop)


@compiled
def _reserve(world, request, p, start, stop, capacity):
    """Places on p for what is missing there of blocks [start, stop) of the request, of which [0, start) are pinned.

    Returns (the block that found no place, or `stop`; how many took one). All before that block are pinned then.
    """
    chained = engine_of(world).chained != 0  # no block comes twice in a request
    if chained and _missing(world, request, p, start, stop) == stop - start:
        taken = make_room(world, p, HOST, capacity, stop - start)
        _expect(world, request, p, start, start + taken)
        return start + taken, taken
    # what is there already could be evicted before its turn comes
    taken = 0
    for i in range(start, stop):
        if _missing(world, request, p, i, i + 1) == 0:
            pin(world, request, p, i, i + 1)
        elif make_room(world, p, HOST, capacity, 1) == 1:
            _expect(world, request, p, i, i + 1)
            taken += 1
        else:
            return i, taken
    return stop, taken


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
    asked = request_of(world, request)
    local = i8_at(world.scratch_match)
    ready = i8_at(world.scratch_match + 8 * world.prefills)
    device = i8_at(world.scratch_match + 16 * world.prefills)
    disk = i8_at(world.scratch_match + 24 * world.prefills)
    hit = local[p] if source != RECOMPUTE else 0
    job.local = hit
    job.holder = -1
    job.landed = 1
    in_transfer = 0
    if hit > 0:
        pin(world, request, p, 0, hit)
    if source == FETCH:
        source = LOCAL
        holder = find_holder(state, ready, p)
        if holder >= 0 and ready[holder] > hit:
            hit, in_transfer = _reserve(world, request, p, hit, ready[holder], node.host_blocks)
            if in_transfer > 0:
                source = FETCH
                job.holder = holder
                job.landed = 0
                pin(world, request, holder, 0, hit)
                size = in_transfer * cluster.block_tokens * cluster.kv_bytes_per_token
                start_flow(world, parameters, request, holder, world.prefills + p, size, np.inf)
    start = 0
    known = job.local if engine_of(world).disks == 0 else 0  # what is on disk will be promoted
    for i in range(asked.first, asked.first + asked.references):
        reference = reference_of(world, i)
        if start + reference.length > known:
            cell = cell_of(world, reference.run, p)
            cell.pending |= _part_mask(reference, start, known, asked.blocks) & ~cell.host
        start += reference.length
    job.hit = hit
    job.due_s = clock.now_s + fetch_s
    n = input_of(world, request)
    if source == RECOMPUTE:
        job.predicted_s = prefill_time(cluster, node, n, 0, 0.0)
    else:
        load_s = load_time(cluster, node, hit - device[p], disk[p])
        job.predicted_s = prefill_time(cluster, node, n, hit, load_s)
    reused = reuse_tokens(hit, cluster.block_tokens, n)
    prefill.drain_s = drain_ahead(prefill, node, clock.now_s, n, reused)
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

    asked = request_of(world, request)
    blocks = 0
    on_device = 0
    from_disk = 0
    if outcome.source != RECOMPUTE:
        at = 0
        all_device = True
        for i in range(asked.first, asked.first + asked.references):
            reference = reference_of(world, i)
            cell = cell_of(world, reference.run, p)
            cold = on_disk(world, reference.run, p)
            usable = np.int64(cell.host) | cold
            if job.landed == 0:
                usable |= cell.transit & _part_mask(reference, at, job.local, job.hit)
            count = leading(usable)
            blocks += count
            from_disk += bits_in(cold & mask_of(count))
            if all_device:
                count_device = min(count, leading(cell.device))
                on_device += count_device
                all_device = count_device == reference.length
            if count < reference.length:
                break
            at += reference.length
    pin(world, request, p, job.hit, asked.blocks)

    n = input_of(world, request)
    reused = reuse_tokens(blocks, cluster.block_tokens, n)
    load_s = load_time(cluster, node, blocks - on_device, from_disk)
    job.duration_s = prefill_time(cluster, node, n, blocks, load_s)
    job.compute_s = compute_time(node, n, reused)
    outcome.reused_tokens = reused
    outcome.device_tokens = min(on_device * cluster.block_tokens, reused)
    outcome.prefill_start_s = now_s
    if job.landed != 0:
        _know_end(world, parameters, p, now_s + job.duration_s)
    else:
        tail_s = job.compute_s / stage_layers(cluster, node)
        prefill.running_end_s = max(now_s + job.duration_s, job.due_s + tail_s)
        _schedule(world, p)


@compiled
def _schedule(world, p):
    """Set when p is due next: its first stage is left, or what has drained longest ends."""
    timer = prefill_timer_of(world, p)
    due_s = np.inf
    if timer.job >= 0 and job_of(world, timer.job).landed != 0:
        due_s = prefill_of(state_of(world), p).running_end_s
    if timer.drain_head >= 0:
        due_s = min(due_s, job_of(world, timer.drain_head).due_s)
    set_due(world, p, due_s)


@compiled
def _know_end(world, parameters, p, free_s):
    """The running prefill will leave the first stage at `free_s`: its KV streams out until its end, layer by layer."""
    state = state_of(world)
    cluster = cluster_of(parameters)
    timer = prefill_timer_of(world, p)
    request = timer.job
    job = job_of(world, request)
    prefill_of(state, p).running_end_s = free_s
    n = input_of(world, request)
    finish_s = free_s + drain_time(prefill_node_of(parameters, p), n, outcome_of(world, request).reused_tokens)
    if timer.drain_head >= 0:
        finish_s = max(finish_s, job_of(world, timer.drain_tail).due_s + job.duration_s)
    job.due_s = finish_s
    _schedule(world, p)
    if output_of(world, request) > 1:
        size = n * cluster.kv_bytes_per_token
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
    asked = request_of(world, request)
    at = 0
    for i in range(asked.first, asked.first + asked.references):
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        mask = _part_mask(reference, at, job.local, job.hit)
        landed = cell.transit & mask
        cell.transit ^= landed
        cell.host |= landed
        cell.pending &= ~landed
        at += reference.length
    job.landed = 1
    release(world, job.holder, engine_of(world).requests + request, job.hit)
    if prefill_timer_of(world, p).job == request:
        tail_s = job.compute_s / stage_layers(cluster_of(parameters), prefill_node_of(parameters, p))
        free_s = max(outcome.prefill_start_s + job.duration_s, clock_of(state).now_s + tail_s)
        _know_end(world, parameters, p, free_s)


@compiled
def _lowest(mask, count):
    """The `count` lowest bits of a mask, all if it has no more."""
    left = mask
    for _ in range(count):
        left &= left - 1
    return mask ^ left


@compiled
def _keep(world, request, p, node):
    """What the request computed becomes usable on p, as far as room can be made; its pins there end."""
    prefill = prefill_of(state_of(world), p)
    asked = request_of(world, request)
    last = asked.first + asked.references
    if engine_of(world).disks != 0:
        for i in range(asked.first, last):
            take_off_disk(world, reference_of(world, i).run, p)
    resident = 0  # leading blocks
    for i in range(asked.first, last):
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        # what is on its way to a later request has a place already
        missing = mask_of(reference.length) & ~(cell.host | cell.transit)
        blocks = reference.length
        if missing != 0:
            wanted = bits_in(missing)
            room = make_room(world, p, HOST, node.host_blocks, wanted)
            prefill.host_used += room
            if room < wanted:
                blocks = lowest_bit(missing ^ _lowest(missing, room))
        usable = mask_of(blocks)
        cell.host |= usable
        cell.transit &= ~usable
        resident += blocks
        if blocks < reference.length:
            break
    loading = True
    for i in range(asked.first, last):
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        missing = mask_of(min(reference.length, resident)) & ~cell.device
        resident -= min(reference.length, resident)
        if loading and missing != 0:
            wanted = bits_in(missing)
            room = make_room(world, p, DEVICE, node.device_blocks, wanted)
            prefill.device_used += room
            if room < wanted:
                missing = _lowest(missing, room)
                loading = False
            cell.device |= missing
    for i in range(asked.first, last):  # kept until all have their places
        cell = cell_of(world, reference_of(world, i).run, p)
        cell.pending = 0
        cell.stamp = request
        cell.cuts = 0
        cell.pins -= 1
    if asked.references > 0:
        chain_release(world, p, request, asked.first, asked.references, 0)


@compiled
def advance_prefill(world, parameters, p):
    """What is due on p, now: its first stage is left, or a prefill ends, or both (always both on one node)."""
    now_s = clock_of(state_of(world)).now_s
    prefill = prefill_of(state_of(world), p)
    timer = prefill_timer_of(world, p)
    if timer.job >= 0 and job_of(world, timer.job).landed != 0 and prefill.running_end_s <= now_s:
        _leave_first_stage(world, parameters, p)
    ended = timer.drain_head
    if ended >= 0 and job_of(world, ended).due_s <= now_s:
        timer.drain_head = job_of(world, ended).next
        _end_prefill(world, parameters, ended)
    if prefill.running == 0 and timer.queue_head >= 0:
        start_prefill(world, parameters, p)
    else:
        _schedule(world, p)


@compiled
def _leave_first_stage(world, parameters, p):
    """The running prefill of p makes way for the next, now: its blocks become usable; it drains."""
    clock = clock_of(state_of(world))
    timer = prefill_timer_of(world, p)
    request = timer.job
    outcome = outcome_of(world, request)
    timer.job = -1
    prefill_of(state_of(world), p).running = 0
    _keep(world, request, p, prefill_node_of(parameters, p))
    outcome.prefill_s = clock.now_s - outcome.prefill_start_s
    clock.prefill_s += outcome.prefill_s
    job_of(world, request).next = -1
    if timer.drain_head < 0:
        timer.drain_head = request
    else:
        job_of(world, timer.drain_tail).next = request
    timer.drain_tail = request


@compiled
def _end_prefill(world, parameters, request):
    """The prefill of a request ends, now: its first token is out."""
    state = state_of(world)
    clock = clock_of(state)
    outcome = outcome_of(world, request)
    outcome.prefill_end_s = clock.now_s
    outcome.ttft_s = clock.now_s - arrival_of(world, request)
    if output_of(world, request) == 1:
        decode = decode_of(state, outcome.decode)
        decode.pending_requests -= 1
        decode.pending_tokens -= input_of(world, request)
        withdraw(world, request)
        finish(world, parameters, request, 0.0, 0.0)
    else:
        flight_of(state, job_of(world, request).flight).start_s = clock.now_s
        lift_cap(world, parameters, engine_of(world).requests + request)
