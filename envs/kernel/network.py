"""Transfers over the nodes' NICs, max-min fair (docs/physics.md, "Network").

NIC sides are numbered: sending side of prefill p is p, its receiving side P + p, the receiving side of decode d
2 P + d. Most changes touch NICs with room to spare and are done in constant time; where a NIC is full, the
transfers connected to it through shared NICs are shared out afresh.
"""

from __future__ import annotations

import math

import numpy as np

from .compile import compiled
from .memory import (
    clock_of,
    cluster_of,
    decode_node_of,
    decode_of,
    engine_of,
    f8_at,
    flow_of,
    i4_at,
    i8_at,
    prefill_node_of,
    prefill_of,
    state_of,
)
from .timers import network_slot, set_due

INACTIVE, MOVING, LANDING = 0, 1, 2  # phases of a flow


@compiled
def bandwidth(parameters, nic):
    """Bytes per second of a NIC side."""
    prefills = parameters.prefills
    if nic < prefills:
        return prefill_node_of(parameters, nic).nic_bytes_per_s
    if nic < 2 * prefills:
        return prefill_node_of(parameters, nic - prefills).nic_bytes_per_s
    return decode_node_of(parameters, nic - 2 * prefills).nic_bytes_per_s


@compiled
def used(state, nic):
    """Bytes per second that the transfers of a NIC side have now."""
    prefills = state.prefills
    if nic < prefills:
        return prefill_of(state, nic).tx_used
    if nic < 2 * prefills:
        return prefill_of(state, nic - prefills).rx_used
    return decode_of(state, nic - 2 * prefills).rx_used


@compiled
def _set_used(state, nic, rate):
    prefills = state.prefills
    if nic < prefills:
        prefill_of(state, nic).tx_used = rate
    elif nic < 2 * prefills:
        prefill_of(state, nic - prefills).rx_used = rate
    else:
        decode_of(state, nic - 2 * prefills).rx_used = rate


@compiled
def _count(state, nic, change):
    """Change the number of transfers of a NIC side; returns what it is then."""
    prefills = state.prefills
    if nic < prefills:
        sender = prefill_of(state, nic)
        sender.tx_flows += change
        return sender.tx_flows
    if nic < 2 * prefills:
        receiver = prefill_of(state, nic - prefills)
        receiver.rx_flows += change
        return receiver.rx_flows
    decode = decode_of(state, nic - 2 * prefills)
    decode.rx_flows += change
    return decode.rx_flows


@compiled
def start_flow(world, parameters, flow_id, source, target, size, cap):
    """A transfer of `size` bytes begins, now; with a finite `cap` (bytes/s) it only completes after `lift_cap`."""
    engine = engine_of(world)
    state = state_of(world)
    flow = flow_of(world, flow_id)
    flow.source = source
    flow.target = target
    flow.bytes = size
    flow.remaining = size
    flow.cap = cap
    flow.rate = 0.0
    flow.updated_s = clock_of(state).now_s
    flow.due_s = np.inf
    flow.phase = MOVING
    i4_at(world.active)[engine.active_flows] = flow_id
    engine.active_flows += 1
    _count(state, source, 1)
    _count(state, target, 1)
    prefill_of(state, source).tx_backlog_bytes += size
    _admit_flow(world, parameters, flow_id)


@compiled
def _admit_flow(world, parameters, flow_id):
    """Give a transfer that has just come, or whose cap has gone, its rate; others change only where they must."""
    state = state_of(world)
    flow = flow_of(world, flow_id)
    source_used = used(state, flow.source) - flow.rate
    target_used = used(state, flow.target) - flow.rate
    rate = min(bandwidth(parameters, flow.source) - source_used, bandwidth(parameters, flow.target) - target_used)
    if flow.cap > rate:
        # it takes what the others leave; fair as long as they are all at their caps and none of them has more
        most = _most_of_others(world, flow_id)
        if most > rate:
            _share(world, parameters, flow.source, flow.target)
            schedule_network(world)
            return
    rate = min(rate, flow.cap)
    flow.rate = rate
    _set_used(state, flow.source, source_used + rate)
    _set_used(state, flow.target, target_used + rate)
    if math.isinf(flow.cap):
        flow.due_s = flow.updated_s + flow.remaining / rate
        slot = network_slot(world)
        if flow.due_s < f8_at(world.due_s)[slot]:
            set_due(world, slot, flow.due_s)


@compiled
def _most_of_others(world, flow_id):
    """The highest rate among the other transfers on the same NIC sides; infinite if one is held below its cap."""
    flow = flow_of(world, flow_id)
    active = i4_at(world.active)
    most = 0.0
    for i in range(engine_of(world).active_flows):
        other = flow_of(world, active[i])
        if (
            active[i] != flow_id
            and (other.source == flow.source or other.target == flow.target)
            and other.phase == MOVING
        ):
            most = max(most, other.rate if other.rate >= other.cap else np.inf)
    return most


@compiled
def lift_cap(world, parameters, flow_id):
    """The prefill behind a capped transfer has ended: what is left may go at full speed."""
    state = state_of(world)
    now_s = clock_of(state).now_s
    flow = flow_of(world, flow_id)
    flow.remaining = max(0.0, flow.remaining - flow.rate * (now_s - flow.updated_s))
    flow.updated_s = now_s
    flow.cap = np.inf
    _admit_flow(world, parameters, flow_id)


@compiled
def next_flow(world):
    """The flow whose next event is due first; a landing before a completion of the same time, then the older flow."""
    active = i4_at(world.active)
    best = -1
    best_s = np.inf
    for i in range(engine_of(world).active_flows):
        flow = flow_of(world, active[i])
        if flow.due_s < best_s or (flow.due_s == best_s and best >= 0 and flow.phase > flow_of(world, best).phase):
            best = active[i]
            best_s = flow.due_s
    return best


@compiled
def schedule_network(world):
    """Set the network's next event from its flows."""
    active = i4_at(world.active)
    due_s = np.inf
    for i in range(engine_of(world).active_flows):
        due_s = min(due_s, flow_of(world, active[i]).due_s)
    set_due(world, network_slot(world), due_s)


@compiled
def complete_flow(world, parameters, flow_id):
    """All bytes are moved, now: leave the NICs, land after the latency."""
    state = state_of(world)
    flow = flow_of(world, flow_id)
    source = flow.source
    target = flow.target
    rate = flow.rate
    flow.remaining = 0.0
    flow.rate = 0.0
    flow.phase = LANDING
    flow.due_s = clock_of(state).now_s + cluster_of(parameters).transfer_latency_s
    source_used = used(state, source)
    target_used = used(state, target)
    source_left = _count(state, source, -1)
    target_left = _count(state, target, -1)
    _set_used(state, source, source_used - rate if source_left > 0 else 0.0)
    _set_used(state, target, target_used - rate if target_left > 0 else 0.0)
    sender = prefill_of(state, source)
    sender.tx_backlog_bytes = sender.tx_backlog_bytes - flow.bytes if source_left > 0 else 0.0
    if (source_left > 0 or target_left > 0) and math.isinf(_most_of_others(world, flow_id)):
        _share(world, parameters, source, target)  # those that were held back can go faster now


@compiled
def remove_flow(world, flow_id):
    """A flow that lands leaves the list, which stays in order of starting."""
    engine = engine_of(world)
    active = i4_at(world.active)
    i = 0
    while active[i] != flow_id:
        i += 1
    engine.active_flows -= 1
    for j in range(i, engine.active_flows):
        active[j] = active[j + 1]
    flow_of(world, flow_id).phase = INACTIVE


@compiled
def _share(world, parameters, source, target):
    """Share out afresh the NICs that are connected to `source` or `target` (progressive filling)."""
    state = state_of(world)
    now_s = clock_of(state).now_s
    nics = 2 * world.prefills + world.decodes
    marked = i8_at(world.scratch_nics)
    unfixed = i8_at(world.scratch_nics + 8 * nics)
    capacity = f8_at(world.scratch_capacity)
    members = i4_at(world.scratch_members)
    active = i4_at(world.active)

    # 1. the connected component: its flows go to the front of `members`
    for nic in range(nics):
        marked[nic] = 0
    marked[source] = 1
    marked[target] = 1
    candidates = 0
    for i in range(engine_of(world).active_flows):
        if flow_of(world, active[i]).phase == MOVING:
            members[candidates] = active[i]
            candidates += 1
    count = 0
    grown = True
    while grown:
        grown = False
        for i in range(count, candidates):
            flow = flow_of(world, members[i])
            if marked[flow.source] != 0 or marked[flow.target] != 0:
                marked[flow.source] = 1
                marked[flow.target] = 1
                _swap(members, i, count)
                count += 1
                grown = True

    # 2. bring its flows up to now; fill
    for nic in range(nics):
        if marked[nic] != 0:
            capacity[nic] = bandwidth(parameters, nic)
            unfixed[nic] = 0
    for i in range(count):
        flow = flow_of(world, members[i])
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now_s - flow.updated_s))
        flow.updated_s = now_s
        unfixed[flow.source] += 1
        unfixed[flow.target] += 1
    left = count
    while left > 0:
        level = np.inf
        bottleneck = -1
        for nic in range(nics):
            if marked[nic] != 0 and unfixed[nic] > 0:
                share = capacity[nic] / unfixed[nic]
                if share < level:
                    level = share
                    bottleneck = nic
        for i in range(left):
            cap = flow_of(world, members[i]).cap
            if cap <= level:
                level = cap
                bottleneck = -1
        i = 0
        while i < left:
            flow = flow_of(world, members[i])
            if flow.cap <= level if bottleneck < 0 else flow.source == bottleneck or flow.target == bottleneck:
                flow.rate = level
                capacity[flow.source] = max(0.0, capacity[flow.source] - level)
                capacity[flow.target] = max(0.0, capacity[flow.target] - level)
                unfixed[flow.source] -= 1
                unfixed[flow.target] -= 1
                left -= 1
                _swap(members, i, left)
            else:
                i += 1

    # 3. what it means for NICs and completions
    for nic in range(nics):
        if marked[nic] != 0:
            capacity[nic] = 0.0
    for i in range(count):
        flow = flow_of(world, members[i])
        capacity[flow.source] += flow.rate
        capacity[flow.target] += flow.rate
        if math.isinf(flow.cap):
            flow.due_s = now_s + flow.remaining / flow.rate
    for nic in range(nics):
        if marked[nic] != 0:
            _set_used(state, nic, capacity[nic])


@compiled
def _swap(numbers, i, j):
    kept = numbers[i]
    numbers[i] = numbers[j]
    numbers[j] = kept
