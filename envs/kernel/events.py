"""The event loop: the cluster from one arrival to the next (docs/physics.md, "Order of events")."""

from __future__ import annotations

import math

import numpy as np

from ..state import TIERS, EvictionRule, Status
from .compile import compiled
from .decode import boundary, land_stream
from .frequency import forget
from .memory import (
    CELL_BYTES,
    arrival_of,
    clock_of,
    cluster_of,
    decode_of,
    decode_timer_of,
    disk_index,
    engine_of,
    eviction_of,
    i4_at,
    i8_at,
    outcome_of,
    prefill_node_of,
    prefill_of,
    prefill_timer_of,
    reference_of,
    request_of,
    state_of,
)
from .network import complete_flow, next_flow, schedule_network, take_landing
from .prefill import admit, advance_prefill, land_fetch
from .timers import clear_timers, next_due

LRU = int(EvictionRule.LRU)
MOST_BLOCKS = (1 << 31) - 1  # more than any trace has
REJECTED_AT_ARRIVAL = int(Status.REJECTED_AT_ARRIVAL)


@compiled
def advance(world, parameters, until_s):
    """Process every event up to and including `until_s`; the clock then stands at the last event."""
    clock = clock_of(state_of(world))
    engine = engine_of(world)
    while engine.error == 0:
        slot, due_s = next_due(world)
        if due_s > until_s or due_s == np.inf:
            return
        clock.now_s = max(clock.now_s, due_s)
        if slot < world.prefills:
            advance_prefill(world, parameters, slot)
        elif slot < world.prefills + world.decodes:
            boundary(world, parameters, slot - world.prefills)
        else:
            flow_id, lands = next_flow(world)
            if not lands:
                complete_flow(world, parameters, flow_id)
            else:
                take_landing(world)
                if flow_id < engine.requests:
                    land_fetch(world, parameters, flow_id)
                else:
                    land_stream(world, parameters, flow_id - engine.requests)
            schedule_network(world)


@compiled
def arrive(world, parameters):
    """Go to the next request's arrival; False when there is none left (the cluster is drained then)."""
    engine = engine_of(world)
    if engine.next_request >= engine.requests:
        advance(world, parameters, np.inf)
        return False
    arrival_s = arrival_of(world, engine.next_request)
    advance(world, parameters, arrival_s)
    note_arrival(clock_of(state_of(world)), cluster_of(parameters), arrival_s)
    return engine.error == 0


@compiled
def note_arrival(clock, cluster, arrival_s):
    """A request has arrived: the clock and the moving arrival rate."""
    clock.now_s = arrival_s
    clock.since_last_arrival_s = arrival_s - clock.last_arrival_s if clock.arrived > 0 else 0.0
    fade = math.exp(-(arrival_s - clock.last_arrival_s) / cluster.rate_horizon_s)
    clock.arrival_rate = fade * clock.arrival_rate + 1.0 / cluster.rate_horizon_s
    clock.last_arrival_s = arrival_s
    clock.arrived += 1


@compiled
def decide(world, parameters, prefill, decode, source, ttft_s, tbt_s, fetch_s):
    """Carry out a decision for the request that has just been observed; `prefill` < 0 rejects it."""
    engine = engine_of(world)
    request = engine.next_request
    engine.next_request += 1
    if prefill < 0:
        outcome_of(world, request).status = REJECTED_AT_ARRIVAL
        clock_of(state_of(world)).rejected_at_arrival += 1
    else:
        admit(world, parameters, request, prefill, decode, source, ttft_s, tbt_s, fetch_s)


@compiled
def meet(world, request):
    """`request` is about to be looked at: what it and its runs have in the tables is emptied, if it has not been.

    Not at the start of an episode, when all of that would come from afar.
    """
    engine = engine_of(world)
    if request >= engine.outcomes_met:
        empty_outcome(world, request)
        engine.outcomes_met = request + 1
    asked = request_of(world, request)
    row = (CELL_BYTES >> 3) * world.prefills
    numbers = i4_at(world.run_blocks)
    for i in range(asked.first, asked.first + asked.references):
        run = np.int64(reference_of(world, i).run)  # numbered in order of appearance
        if run >= engine.runs_met:
            words = i8_at(world.cells + 8 * row * run)
            for word in range(row):
                words[word] = 0
            if engine.disks != 0:
                for p in range(world.prefills):
                    i4_at(world.disks)[disk_index(world, run, p)] = 0
            if engine.eviction != LRU:
                last_block = numbers[run + 1] if run + 1 < engine.runs else engine.blocks
                for p in range(world.prefills):
                    for block in range(numbers[run], last_block):
                        forget(world, p, block, run)
            engine.runs_met = run + 1


@compiled
def empty_outcome(world, r):
    """Nothing is known of request r yet."""
    outcome = outcome_of(world, r)
    outcome.arrival_s = arrival_of(world, r)
    outcome.status = 0
    outcome.good = 0
    outcome.prefill = -1
    outcome.decode = -1
    outcome.source = -1
    outcome.fetched_blocks = 0
    outcome.reused_tokens = 0
    outcome.device_tokens = 0
    outcome.predicted_ttft_s = np.nan
    outcome.predicted_tbt_s = np.nan
    outcome.prefill_start_s = np.nan
    outcome.prefill_end_s = np.nan
    outcome.prefill_s = np.nan
    outcome.kv_ready_s = np.nan
    outcome.join_s = np.nan
    outcome.finish_s = np.nan
    outcome.ttft_s = np.nan
    outcome.tbt_s = np.nan
    outcome.tbt_mean_s = np.nan


@compiled
def empty_outcomes(world):
    """Empty the outcomes of all requests that have not arrived."""
    engine = engine_of(world)
    for r in range(engine.outcomes_met, engine.requests):
        empty_outcome(world, r)
    engine.outcomes_met = engine.requests


@compiled
def reset(world, parameters):
    """An empty cluster before the first request. The request columns are set already."""
    state = state_of(world)
    cluster = cluster_of(parameters)
    engine = engine_of(world)
    clock = clock_of(state)
    clock.now_s = 0.0
    clock.last_arrival_s = 0.0
    clock.since_last_arrival_s = 0.0
    clock.arrival_rate = 0.0
    clock.expected_output_tokens = cluster.prior_output_tokens
    clock.expected_decode_s = cluster.prior_decode_s
    clock.in_flight = 0
    clock.arrived = 0
    clock.good = 0
    clock.violated = 0
    clock.rejected_at_arrival = 0
    clock.rejected_at_decode = 0
    clock.wasted_prefill_s = 0.0
    clock.prefill_s = 0.0
    engine.error = 0
    engine.disks = 0
    engine.eviction = cluster.eviction
    if engine.eviction != LRU and world.use_capacity == 0:
        engine.error = 4
    for p in range(world.prefills):
        prefill = prefill_of(state, p)
        prefill.up = 1
        prefill.running = 0
        prefill.queue_requests = 0
        prefill.running_end_s = 0.0
        prefill.queued_s = 0.0
        prefill.host_used = 0
        prefill.device_used = 0
        prefill.tx_flows = 0
        prefill.rx_flows = 0
        prefill.tx_used = 0.0
        prefill.rx_used = 0.0
        prefill.tx_backlog_bytes = 0.0
        prefill.drain_s = 0.0
        timer = prefill_timer_of(world, p)
        timer.queue_head = -1
        timer.queue_tail = -1
        timer.job = -1
        timer.last_release = -1
        timer.drain_head = -1
        timer.drain_tail = -1
        timer.releases = 0
        timer.disk_free = min(prefill_node_of(parameters, p).disk_blocks, MOST_BLOCKS)
        if timer.disk_free > 0:
            engine.disks = 1
            if world.disk_capacity == 0:
                engine.error = 3
        for tier in range(TIERS):
            place = eviction_of(world, p, tier)
            place.release = -1
            place.position = -1
            place.size = 0
    for d in range(world.decodes):
        decode = decode_of(state, d)
        decode.up = 1
        decode.batch = 0
        decode.kv_tokens = 0.0
        decode.updated_s = 0.0
        decode.pending_requests = 0
        decode.pending_tokens = 0.0
        decode.waiting_requests = 0
        decode.waiting_tokens = 0.0
        decode.stall_rate = 0.0
        decode.join_rate = 0.0
        decode.last_join_s = 0.0
        decode.rx_flows = 0
        decode.rx_used = 0.0
        run = decode_timer_of(world, d)
        run.iteration = 0
        run.segments = 0
        run.planned = 0
        run.wait_head = -1
        run.wait_tail = -1
        run.reserved_tokens = 0
        run.step_s = 0.0
        run.growth_s = 0.0
        run.stall_s = 0.0
    engine.runs_met = 0
    engine.outcomes_met = 0
    engine.next_request = 0
    engine.active_flows = 0
    engine.uncapped_flows = 0
    engine.held_flows = 0
    engine.landing_head = -1
    engine.landing_tail = -1
    clear_timers(world)
