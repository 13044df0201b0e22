"""Whole replays and batched steps, compiled: the loops that call the rest.

A policy inside a replay is a pair of compiled functions, declared as first-class functions with the signatures
`ROUTER` and `ADMISSION`, so that one compiled replay serves them all:

- `router(observation, values, memory, decision)` writes decision[0:3] = prefill, decode, source (prefill -1: reject);
- `admission(observation, values, decision) -> bool`: whether to accept.

`values` are the policy's parameters, `memory` (uint64) what it keeps between decisions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import typeof_impl

from ..observe import observe_matched
from ..state import TIERS, EvictionRule, Source
from .compile import compiled
from .events import advance, arrive, decide, meet, reset
from .kvcache import match_runs
from .memory import (
    OBSERVATION,
    arrival_of,
    cell_of,
    clock_of,
    decode_allowed,
    decode_features,
    decode_of,
    decode_timer_of,
    engine_of,
    eviction_of,
    f4_at,
    f8_at,
    flow_of,
    i4_at,
    i8_at,
    input_of,
    job_of,
    member_of,
    prefetch_events,
    prefetch_request,
    prefetch_tables,
    prefill_features,
    reference_of,
    request_of,
    source_allowed,
    state_of,
    u1_at,
)
from .splitmix import random_below

LARGEST = 1e9  # of any feature in a float32 observation
FAILED, OUT_OF_RANGE = -1, -2  # what may become of a step of a batch
LRU = int(EvictionRule.LRU)
LOCAL, FETCH, RECOMPUTE = int(Source.LOCAL), int(Source.FETCH), int(Source.RECOMPUTE)

_OBSERVATION = numba.from_dtype(OBSERVATION)
ROUTER = types.void(_OBSERVATION, types.float64[::1], types.uint64[::1], types.int64[::1])
ADMISSION = types.boolean(_OBSERVATION, types.float64[::1], types.int64[::1])


class Callback(types.WrapperAddressProtocol):  # type: ignore[misc]
    """A compiled function as an argument of a kernel, known by its signature only.

    A bare dispatcher would have a type of its own, and every kernel it is handed to would be compiled anew for it.
    """

    def __init__(self, function: Any, signature: Any) -> None:
        self.function = function
        self._signature = signature
        self.numba_type = types.FunctionType(signature)

    @cached_property
    def _address(self) -> int:
        self.function.compile(self._signature.args)
        code = self.function.overloads[self._signature.args]
        return int(code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name))

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._signature


@typeof_impl.register(Callback)
def _callback_type(callback: Callback, _: Any) -> Any:
    """Numba's own way makes the type anew at every call, which takes longer than most calls."""
    return callback.numba_type


@compiled
def load(
    world,
    arrival_s,
    speed,
    input_tokens,
    output_tokens,
    block_offsets,
    offsets,
    runs,
    lengths,
    chained,
    first,
    last,
    seen,
):
    """Give a cluster the requests first .. last - 1 of a trace, `speed` times as fast.

    `offsets`, `runs`, `lengths`, `chained`: the trace's `Runs`. Runs and blocks are renumbered in order of appearance.
    `seen` int32[runs of the trace + 1, 2] is scratch: for each run the number of the load that saw it last and its
    number there; the last row counts loads.
    """
    engine = engine_of(world)
    engine.requests = last - first
    engine.chained = chained
    seen[-1, 0] += 1
    number = seen[-1, 0]
    base = offsets[first]
    numbers = i4_at(world.run_blocks)
    count = 0
    blocks = 0
    for r in range(first, last):
        request = request_of(world, r - first)
        request.arrival_s = (arrival_s[r] - arrival_s[first]) / speed
        request.input_tokens = input_tokens[r]
        request.output_tokens = output_tokens[r]
        request.first = offsets[r] - base
        request.references = offsets[r + 1] - offsets[r]
        request.blocks = block_offsets[r + 1] - block_offsets[r]
        for i in range(offsets[r], offsets[r + 1]):
            run = runs[i]
            if seen[run, 0] != number:
                seen[run, 0] = number
                seen[run, 1] = count
                numbers[count] = blocks
                count += 1
                blocks += lengths[run]
            reference = reference_of(world, i - base)
            reference.run = seen[run, 1]
            reference.length = lengths[run]
    engine.runs = count
    engine.blocks = blocks


@compiled
def begin(world, parameters, recheck):
    """The cluster is empty again, before its first request."""
    engine_of(world).recheck = recheck
    reset(world, parameters)


@compiled
def observe_arrival(world, parameters, observation):
    """Go to the next arrival and observe that request; False when there is none (the cluster is drained then)."""
    if not arrive(world, parameters):
        return False
    request = engine_of(world).next_request
    prefetch_request(world, request + 1)
    meet(world, request)
    matched = world.scratch_match
    row = 8 * world.prefills
    local = i8_at(matched)
    match_runs(world, request, local, i8_at(matched + row), i8_at(matched + 2 * row), i8_at(matched + 3 * row))
    observe_matched(state_of(world), parameters, input_of(world, request), observation, matched, world.scratch_forecast)
    return True


@compiled
def carry_out(world, parameters, observation, prefill, decode, source):
    """Apply a choice to the observed request, with the predictions the observation held."""
    if prefill < 0:
        decide(world, parameters, -1, -1, 0, 0.0, 0.0, 0.0)
        return
    features = prefill_features(observation, prefill)
    if source == RECOMPUTE:
        ttft_s = features.ttft_recompute_s
    elif source == FETCH:
        ttft_s = features.ttft_fetch_s
    else:
        ttft_s = features.ttft_local_s
    tbt_s = decode_features(observation, decode).tbt_assigned_s
    decide(world, parameters, prefill, decode, source, ttft_s, tbt_s, features.fetch_s)


@compiled
def choose(observation, router, router_values, admission, admission_values, memory, decision):
    """A policy's decision for an observation, in `decision`: prefill (-1 rejects), decode, source."""
    decision[0] = -1
    router(observation, router_values, memory, decision)
    if decision[0] >= 0 and not admission(observation, admission_values, decision):
        decision[0] = -1


@compiled
def replay(
    world,
    parameters,
    observation,
    router,
    router_values,
    admission,
    admission_values,
    memory,
    decision,
    limit,
    until_s,
):
    """Run a cluster for up to `limit` more requests under a policy, at most up to and including time `until_s`; past
    the last request it drains.
    """
    while limit > 0:
        if until_s < np.inf:
            request = engine_of(world).next_request
            if request >= engine_of(world).requests or arrival_of(world, request) > until_s:
                advance(world, parameters, until_s)
                return
        if not observe_arrival(world, parameters, observation):
            return
        choose(observation, router, router_values, admission, admission_values, memory, decision)
        carry_out(world, parameters, observation, decision[0], decision[1], decision[2])
        limit -= 1


@compiled
def _step(worlds, parameters, observations, actions, done, c, stop):
    world = worlds[c]
    observation = observations[c]
    if c + 2 < stop:
        prefetch_tables(worlds[c + 2], parameters[c + 2], observations[c + 2])
    if c + 1 < stop:
        coming = (actions[c + 1] - 1) // (3 * world.decodes) if actions[c + 1] > 0 else -1
        prefetch_events(worlds[c + 1], coming)
    if engine_of(world).next_request >= engine_of(world).requests:
        done[c] = True
        return
    prefill = -1
    decode = -1
    source = 0
    if actions[c] > 0:
        pair = (actions[c] - 1) // 3
        prefill = pair // world.decodes
        decode = pair % world.decodes
        source = (actions[c] - 1) % 3
        if not source_allowed(observation, prefill, LOCAL) or not decode_allowed(observation, decode):
            prefill = -1
    carry_out(world, parameters[c], observation, prefill, decode, source)
    done[c] = not observe_arrival(world, parameters[c], observation)


@compiled
def step(worlds, parameters, observations, actions, done, start, stop):
    """One decision in each of the clusters start .. stop - 1, then on to their next arrivals, observed.

    `actions[c]`: 0 rejects, else 1 + (prefill * D + decode) * 3 + source; with an instance that is down it rejects too.
    `done[c]` is set where no request is left; such a cluster has been drained, and further steps leave it alone.
    """
    for c in range(start, stop):
        _step(worlds, parameters, observations, actions, done, c, stop)


@compiled
def step_and_show(
    worlds,
    parameters,
    observations,
    actions,
    weights,
    done,
    settled,
    rewards,
    elapsed_s,
    masks,
    request,
    prefill,
    decode,
    cluster,
):
    """`step` for all clusters, then `show`; returns how many are done, FAILED (`engine.error`) or OUT_OF_RANGE.

    Written for each cluster, besides: `rewards`, by how much each column of `settled` grew times `weights` [5], and
    `elapsed_s`, the simulated time that went by.
    """
    count = len(actions)
    for c in range(count):
        if actions[c] < 0 or actions[c] >= masks.shape[1]:
            return OUT_OF_RANGE  # nothing is done then
    ended = 0
    failed = False
    for c in range(count):
        clock = clock_of(state_of(worlds[c]))
        now_s = clock.now_s
        good = clock.good
        violated = clock.violated
        rejected_at_arrival = clock.rejected_at_arrival
        rejected_at_decode = clock.rejected_at_decode
        wasted_prefill_s = clock.wasted_prefill_s
        _step(worlds, parameters, observations, actions, done, c, count)
        show(worlds, observations, settled, masks, request, prefill, decode, cluster, c)
        rewards[c] = (
            weights[0] * (clock.good - good)
            + weights[1] * (clock.violated - violated)
            + weights[2] * (clock.rejected_at_arrival - rejected_at_arrival)
            + weights[3] * (clock.rejected_at_decode - rejected_at_decode)
            + weights[4] * (clock.wasted_prefill_s - wasted_prefill_s)
        )
        elapsed_s[c] = clock.now_s - now_s
        ended += done[c]
        failed = failed or engine_of(worlds[c]).error != 0
    return FAILED if failed else ended


@compiled
def show(worlds, observations, settled, masks, request, prefill, decode, cluster, c):
    """Write what is to be seen of cluster c into row c of each table.

    `settled` float64[C, 5]: good, violated, rejected at arrival, at decode, wasted prefill seconds so far; `masks` bool
    [C, 1 + P D 3]: which actions are valid, rejecting always is; the observation as float32 tables, cut to +-LARGEST.
    """
    clock = clock_of(state_of(worlds[c]))
    settled[c, 0] = clock.good
    settled[c, 1] = clock.violated
    settled[c, 2] = clock.rejected_at_arrival
    settled[c, 3] = clock.rejected_at_decode
    settled[c, 4] = clock.wasted_prefill_s
    observation = observations[c]
    _mask(observation, masks[c])
    _export(observation.request, request[c])
    _export(observation.prefill, prefill[c])
    _export(observation.decode, decode[c])
    _export(observation.cluster, cluster[c])


@compiled
def features(observations, masks, request, prefill, decode, cluster):
    """What a network reads of a batch of observations: see `show`."""
    for c in range(len(observations)):
        observation = observations[c]
        _mask(observation, masks[c])
        _export(observation.request, request[c])
        _export(observation.prefill, prefill[c])
        _export(observation.decode, decode[c])
        _export(observation.cluster, cluster[c])


@compiled
def choose_actions(observations, router, router_values, admission, admission_values, memory, actions):
    """A compiled policy's actions, as `step` takes them, for a batch of observations; `memory` uint64[C, 4]."""
    decision = np.empty(3, np.int64)
    for c in range(len(observations)):
        choose(observations[c], router, router_values, admission, admission_values, memory[c], decision)
        if decision[0] < 0:
            actions[c] = 0
        else:
            actions[c] = 1 + (decision[0] * observations[c].decodes + decision[1]) * 3 + decision[2]


# Words of every third byte, from byte 0, 1 and 2 on.
_FROM_0, _FROM_1, _FROM_2 = 0x0001000001000001, 0x0100000100000100, 0x0000010000010000


@compiled
def _mask(observation, row):
    """`row` bool[1 + P D 3]: which actions are valid."""
    sources = u1_at(observation.prefill_mask)
    up = u1_at(observation.decode_mask)
    decodes = observation.decodes
    address = row.ctypes.data
    values = u1_at(address)
    values[0] = 1
    for p in range(observation.prefills):
        local = np.int64(sources[3 * p])
        fetch = np.int64(sources[3 * p + 1])
        recompute = np.int64(sources[3 * p + 2])
        i = 1 + 3 * decodes * p
        for _ in range(decodes >> 3):  # eight decodes are three words
            words = i8_at(address + i)
            words[0] = local * _FROM_0 + fetch * _FROM_1 + recompute * _FROM_2
            words[1] = local * _FROM_1 + fetch * _FROM_2 + recompute * _FROM_0
            words[2] = local * _FROM_2 + fetch * _FROM_0 + recompute * _FROM_1
            i += 24
        for _ in range(decodes & 7):
            values[i] = local
            values[i + 1] = fetch
            values[i + 2] = recompute
            i += 3
    for d in range(decodes):
        if up[d] == 0:
            for p in range(observation.prefills):
                i = 1 + 3 * (decodes * p + d)
                values[i] = 0
                values[i + 1] = 0
                values[i + 2] = 0


@compiled
def _export(source, target):
    values = f8_at(source)
    flat = f4_at(target.ctypes.data)
    for i in range(target.size):
        flat[i] = min(max(values[i], -LARGEST), LARGEST)


@compiled
def _copy4(source, target, start, stop):
    a = i4_at(source)
    b = i4_at(target)
    for i in range(start, stop):
        b[i] = a[i]


@compiled
def _copy8(source, target, start, stop):
    a = i8_at(source)
    b = i8_at(target)
    for i in range(start, stop):
        b[i] = a[i]


@compiled
def fork(source, target, sizes):
    """Make cluster `target` a copy of cluster `source` of the same batch; only what is in use is copied.

    `sizes`: bytes of the records CLOCK, PREFILL, DECODE, FLIGHT, REQUEST, CELL, OUTCOME, JOB, ENGINE, PREFILL_TIMER,
    DECODE_TIMER, EVICTION, RELEASE, FLOW, MEMBER, SEGMENT, USE.
    """
    clock, prefill, decode, flight, request, cell, outcome, job, engine_size, prefill_timer, decode_timer = (
        sizes[:11] // 8
    )
    eviction, release, flow, member, segment, use = sizes[11:] // 4
    a = state_of(source)
    b = state_of(target)
    engine = engine_of(source)
    requests = engine.requests
    seen = engine.next_request
    runs = engine.runs
    met = engine.runs_met
    in_flight = clock_of(a).in_flight
    _copy8(a.clock, b.clock, 0, clock)
    _copy8(a.prefill, b.prefill, 0, prefill * source.prefills)
    _copy8(a.decode, b.decode, 0, decode * source.decodes)
    _copy8(a.flight, b.flight, 0, flight * in_flight)
    _copy8(source.requests, target.requests, 0, request * requests)
    references = 0
    if requests > 0:
        final = request_of(source, requests - 1)
        references = final.first + final.references
    _copy8(source.references, target.references, 0, references)
    _copy4(source.run_blocks, target.run_blocks, 0, runs)
    _copy8(source.cells, target.cells, 0, cell * met * source.prefills)
    if engine.disks != 0:
        _copy4(source.disks, target.disks, 0, met * source.prefills)
    numbers = i4_at(source.run_blocks)
    for run in range(met):
        last_block = numbers[run + 1] if run + 1 < runs else engine.blocks
        for p in range(source.prefills):
            state_there = cell_of(source, run, p)
            if state_there.cuts | state_there.ends != 0:
                row = p * source.block_capacity
                _copy8(source.parts, target.parts, row + numbers[run], row + last_block)
    if engine.eviction != LRU:
        blocks = numbers[met] if met < runs else engine.blocks
        for p in range(source.prefills):
            row = p * source.use_capacity
            _copy4(source.uses, target.uses, use * row, use * (row + blocks))
            for tier in range(TIERS):
                row = (p * TIERS + tier) * source.use_capacity
                _copy4(source.heaps, target.heaps, row, row + eviction_of(source, p, tier).size)
                _copy4(source.places, target.places, row, row + blocks)
    _copy8(source.outcomes, target.outcomes, 0, outcome * engine.outcomes_met)
    _copy8(source.jobs, target.jobs, 0, job * seen)
    _copy8(source.engine, target.engine, 0, engine_size)
    _copy8(source.prefill_timers, target.prefill_timers, 0, prefill_timer * source.prefills)
    _copy8(source.decode_timers, target.decode_timers, 0, decode_timer * source.decodes)
    _copy4(source.evictions, target.evictions, 0, eviction * TIERS * source.prefills)
    _copy4(source.releases, target.releases, 0, release * seen)
    _copy4(source.releases, target.releases, release * requests, release * (requests + seen))
    active = i4_at(source.active)
    _copy4(source.active, target.active, 0, engine.active_flows)
    for i in range(engine.active_flows):
        _copy4(source.flows, target.flows, flow * active[i], flow * (active[i] + 1))
    _copy4(source.uncapped, target.uncapped, 0, engine.uncapped_flows)
    landing = engine.landing_head
    while landing >= 0:
        _copy4(source.flows, target.flows, flow * landing, flow * (landing + 1))
        landing = flow_of(source, landing).next
    for d in range(source.decodes):
        members = decode_of(a, d).batch
        row = member * source.batch_limit * d
        _copy4(source.members, target.members, row, row + member * members)
        last = decode_timer_of(source, d).segments
        first = last
        for i in range(members):
            first = min(first, job_of(source, member_of(source, d, i).request).first_segment)
        for s in range(first, last):
            at = segment * (source.ring * d + (s & (source.ring - 1)))
            _copy4(source.segments, target.segments, at, at + segment)
    slots = source.prefills + source.decodes + 1
    _copy8(source.due_s, target.due_s, 0, slots)
    _copy4(source.winners, target.winners, 0, 2 * source.leaves)
    _copy8(source.scratch_match, target.scratch_match, 0, 4 * source.prefills)


@compiled
def branch(
    world,
    parameters,
    observation,
    scratch,
    scratch_observation,
    sizes,
    router,
    router_values,
    admission,
    admission_values,
    memory,
    actions,
    horizon,
    good,
):
    """How many more requests become good after each of some decisions for the observed request, all else being equal.

    Each of `actions` is carried out in `scratch`, a copy of the cluster; the next `horizon` requests follow the policy,
    then nothing arrives any more until all is settled. `good` [actions] is written; `memory` is left as it was.
    """
    kept = memory.copy()
    decision = np.zeros(3, np.int64)
    before = clock_of(state_of(world)).good
    for i in range(len(actions)):
        fork(world, scratch, sizes)
        memory[:] = kept
        prefill = -1
        decode = -1
        source = 0
        if actions[i] > 0:
            pair, source = divmod(actions[i] - 1, 3)
            prefill, decode = divmod(pair, world.decodes)
        carry_out(scratch, parameters, observation, prefill, decode, source)
        replay(
            scratch,
            parameters,
            scratch_observation,
            router,
            router_values,
            admission,
            admission_values,
            memory,
            decision,
            horizon,
            np.inf,
        )
        advance(scratch, parameters, np.inf)
        good[i] = clock_of(state_of(scratch)).good - before
    memory[:] = kept


@compiled
def random_actions(masks, memory, actions):
    """A random valid action for each row of `masks` bool[C, A]; `memory` uint64[1] is the generator (splitmix64)."""
    count = masks.shape[1]
    for c in range(len(masks)):
        row = masks[c]
        while True:
            action = random_below(memory, count)
            if row[action]:
                actions[c] = action
                break
