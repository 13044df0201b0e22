"""Decode instances: continuous batching in closed form (docs/physics.md, "Decode").

Between two changes of a batch an iteration's time grows by a constant from one to the next, so a whole run of
iterations, a *segment*, is one event. Boundaries are only where something joins or leaves.
"""

from __future__ import annotations

import math

import numpy as np

from ..state import Status
from .compile import compiled
from .latency import context_tokens, expected_stall, step_time, tbt
from .memory import (
    clock_of,
    cluster_of,
    decode_node_of,
    decode_of,
    decode_timer_of,
    engine_of,
    flight_of,
    input_of,
    job_of,
    member_of,
    outcome_of,
    output_of,
    segment_of,
    state_of,
)
from .tail import tail_mean
from .timers import set_due

REJECTED_AT_DECODE, COMPLETED = int(Status.REJECTED_AT_DECODE), int(Status.COMPLETED)
OVERFLOW_MEMBERS, OVERFLOW_SEGMENTS = 1, 2  # engine.error


@compiled
def withdraw(world, request):
    """`request` is in flight no more: the last entry takes its place."""
    state = state_of(world)
    clock = clock_of(state)
    clock.in_flight -= 1
    slot = job_of(world, request).flight
    last = flight_of(state, clock.in_flight)
    entry = flight_of(state, slot)
    entry.decode = last.decode
    entry.request = last.request
    entry.start_s = last.start_s
    entry.tokens = last.tokens
    job_of(world, last.request).flight = slot
    job_of(world, request).flight = -1


@compiled
def finish(world, parameters, request, tbt_s, tbt_mean_s):
    """`request` is complete, now."""
    clock = clock_of(state_of(world))
    cluster = cluster_of(parameters)
    outcome = outcome_of(world, request)
    outcome.status = COMPLETED
    outcome.finish_s = clock.now_s
    outcome.tbt_s = tbt_s
    outcome.tbt_mean_s = tbt_mean_s
    if outcome.ttft_s <= cluster.ttft_slo_s and tbt_s <= cluster.tbt_slo_s:
        outcome.good = 1
        clock.good += 1
    else:
        clock.violated += 1
    tokens = output_of(world, request)
    clock.expected_output_tokens = 0.98 * clock.expected_output_tokens + 0.02 * tokens
    if tokens > 1:
        clock.expected_decode_s = 0.98 * clock.expected_decode_s + 0.02 * (clock.now_s - outcome.join_s)


@compiled
def land_stream(world, parameters, request):
    """All KV of `request` is in its decode node's memory, now: check again, then wait for the next boundary."""
    state = state_of(world)
    clock = clock_of(state)
    cluster = cluster_of(parameters)
    outcome = outcome_of(world, request)
    d = outcome.decode
    decode = decode_of(state, d)
    node = decode_node_of(parameters, d)
    timer = decode_timer_of(world, d)
    n = input_of(world, request)
    outcome.kv_ready_s = clock.now_s
    reject = n + output_of(world, request) > node.kv_capacity_tokens
    if not reject and engine_of(world).recheck != 0:
        batch = float(decode.batch + decode.waiting_requests + 1)
        context = context_tokens(node, decode, clock.now_s) + decode.waiting_tokens + n
        stall_share, stall_s = expected_stall(cluster, decode)
        reject = tbt(node, batch, context, stall_share, stall_s) > cluster.tbt_slo_s
    if reject:
        decode.pending_requests -= 1
        decode.pending_tokens -= n
        withdraw(world, request)
        outcome.status = REJECTED_AT_DECODE
        clock.rejected_at_decode += 1
        clock.wasted_prefill_s += outcome.prefill_s
        return
    job = job_of(world, request)
    job.next = -1
    if timer.wait_head < 0:
        timer.wait_head = request
    else:
        job_of(world, timer.wait_tail).next = request
    timer.wait_tail = request
    decode.waiting_requests += 1
    decode.waiting_tokens += n
    if decode.batch == 0:
        _join(world, parameters, d)
    elif timer.wait_head == request and _fits(world, parameters, d):
        _cut(world, d)


@compiled
def _fits(world, parameters, d):
    """Whether the first that waits could join now."""
    timer = decode_timer_of(world, d)
    node = decode_node_of(parameters, d)
    need = input_of(world, timer.wait_head) + output_of(world, timer.wait_head)
    return (
        decode_of(state_of(world), d).batch < node.max_batch and timer.reserved_tokens + need <= node.kv_capacity_tokens
    )


@compiled
def _run_time(timer, iterations):
    """Seconds of the first `iterations` iterations of a segment."""
    return iterations * timer.step_s + timer.growth_s * (iterations * (iterations - 1.0) / 2.0)


@compiled
def _cut(world, d):
    """End the present segment at the first iteration boundary from now on."""
    state = state_of(world)
    timer = decode_timer_of(world, d)
    start_s = decode_of(state, d).updated_s
    elapsed = clock_of(state).now_s - start_s
    k = 1.0
    if elapsed > timer.step_s:
        # smallest k with run_time(k) >= elapsed: the root of g k^2/2 + (s - g/2) k - elapsed, then set right
        half = timer.step_s - timer.growth_s / 2.0
        k = math.ceil(2.0 * elapsed / (half + math.sqrt(half * half + 2.0 * timer.growth_s * elapsed)))
        while k > 1.0 and _run_time(timer, k - 1.0) >= elapsed:
            k -= 1.0
        while _run_time(timer, k) < elapsed:
            k += 1.0
    if k < timer.planned:
        timer.planned = np.int64(k)
        set_due(world, world.prefills + d, start_s + _run_time(timer, k))


@compiled
def boundary(world, parameters, d):
    """The planned iterations of d's segment are done, now: leave, join, go on."""
    decode = decode_of(state_of(world), d)
    timer = decode_timer_of(world, d)
    segment = segment_of(world, d, timer.segments)
    segment.step_s = timer.step_s
    segment.growth_s = timer.growth_s
    segment.stall_s = timer.stall_s
    segment.count = timer.planned
    timer.segments += 1
    timer.iteration += timer.planned
    decode.kv_tokens += float(decode.batch * timer.planned)
    while decode.batch > 0 and member_of(world, d, decode.batch - 1).leave <= timer.iteration:
        _leave(world, parameters, d)
    _join(world, parameters, d)


@compiled
def _leave(world, parameters, d):
    """The member that leaves first has its last token."""
    decode = decode_of(state_of(world), d)
    timer = decode_timer_of(world, d)
    decode.batch -= 1
    request = member_of(world, d, decode.batch).request
    n = input_of(world, request)
    o = output_of(world, request)
    decode.kv_tokens -= n + o - 1
    timer.reserved_tokens -= n + o
    withdraw(world, request)
    first = job_of(world, request).first_segment
    if timer.segments - first > world.ring:
        engine_of(world).error = OVERFLOW_SEGMENTS
        return
    share = cluster_of(parameters).tbt_tail_share
    tail_s, mean_s = tail_mean(world, d, first, timer.segments, o - 1, share, 0.0)
    finish(world, parameters, request, tail_s, mean_s)


@compiled
def add_member(world, d, members, leave, request):
    """Put a request that leaves after iteration `leave` among the `members` of d's batch.

    They are sorted by leaving, last first; of those that leave together the older leaves first.
    """
    i = members
    while i > 0 and member_of(world, d, i - 1).leave <= leave:
        above = member_of(world, d, i - 1)
        member = member_of(world, d, i)
        member.leave = above.leave
        member.request = above.request
        i -= 1
    member = member_of(world, d, i)
    member.leave = leave
    member.request = request


@compiled
def _join(world, parameters, d):
    """Let those that wait join as far as there is room, then start the next segment."""
    state = state_of(world)
    now_s = clock_of(state).now_s
    cluster = cluster_of(parameters)
    decode = decode_of(state, d)
    timer = decode_timer_of(world, d)
    node = decode_node_of(parameters, d)
    first_joiner = timer.wait_head
    joiners = 0
    stall_s = 0.0
    while timer.wait_head >= 0 and _fits(world, parameters, d):
        request = timer.wait_head
        timer.wait_head = job_of(world, request).next
        n = input_of(world, request)
        o = output_of(world, request)
        stall_s += n * cluster.kv_bytes_per_token / node.join_bytes_per_s
        joiners += 1
        decode.waiting_requests -= 1
        decode.waiting_tokens -= n
        decode.pending_requests -= 1
        decode.pending_tokens -= n
        decode.kv_tokens += n
        timer.reserved_tokens += n + o
        if decode.batch >= world.batch_limit:
            engine_of(world).error = OVERFLOW_MEMBERS
            return
        add_member(world, d, decode.batch, timer.iteration + o - 1, request)
        decode.batch += 1
    if timer.wait_head < 0:
        timer.wait_tail = -1
    if joiners > 0:
        fade = math.exp(-(now_s - decode.last_join_s) / cluster.rate_horizon_s)
        decode.stall_rate = fade * decode.stall_rate + stall_s / cluster.rate_horizon_s
        decode.join_rate = fade * decode.join_rate + joiners / cluster.rate_horizon_s
        decode.last_join_s = now_s
        request = first_joiner
        for _ in range(joiners):
            job = job_of(world, request)
            job.first_segment = timer.segments
            outcome_of(world, request).join_s = now_s + stall_s
            flight_of(state, job.flight).start_s = now_s + stall_s
            request = job.next
    slot = world.prefills + d
    if decode.batch == 0:
        decode.kv_tokens = 0.0
        set_due(world, slot, np.inf)
        return
    timer.stall_s = stall_s
    timer.step_s = step_time(node, float(decode.batch), decode.kv_tokens)
    timer.growth_s = node.step_token_s * decode.batch
    decode.updated_s = now_s + stall_s
    timer.planned = member_of(world, d, decode.batch - 1).leave - timer.iteration
    set_due(world, slot, decode.updated_s + _run_time(timer, float(timer.planned)))
