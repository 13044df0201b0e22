"""Transfers over the nodes' NICs, max-min fair (docs/physics.md, "Network").

NIC sides are numbered: sending side of prefill p is p, its receiving side P + p, the receiving side of decode d
2 P + d. Most changes touch NICs with room to spare and are done in constant time; where a NIC is full, the
transfers connected to it through shared NICs are shared out afresh.

`active` lists the transfers that hold NICs, `uncapped` those among them that can complete. A transfer that is done
waits for its landing in a queue: the latency is the same for all.
"""

from __future__ import annotations

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

SAME_TIME_S = 1e-9  # landings less than this apart have one time


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
def _count_receiver(state, nic, change):
    """Change the number of transfers of a receiving side; returns what it is then."""
    prefills = state.prefills
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
    flow.slot = engine.active_flows
    flow.bytes = size
    flow.remaining = size
    flow.cap = cap
    flow.rate = 0.0
    flow.updated_s = clock_of(state).now_s
    flow.due_s = np.inf
    i4_at(world.active)[engine.active_flows] = flow_id
    engine.active_flows += 1
    if cap == np.inf:
        _list_uncapped(world, flow_id)
    sender = prefill_of(state, source)
    sender.tx_flows += 1
    sender.tx_backlog_bytes += size
    _count_receiver(state, target, 1)
    _admit_flow(world, parameters, flow_id)


@compiled
def _list_uncapped(world, flow_id):
    engine = engine_of(world)
    i4_at(world.uncapped)[engine.uncapped_flows] = flow_id
    engine.uncapped_flows += 1


@compiled
def _admit_flow(world, parameters, flow_id):
    """Give a transfer that has just come, or whose cap has gone, its rate; others change only where they must."""
    state = state_of(world)
    flow = flow_of(world, flow_id)
    source_used = prefill_of(state, flow.source).tx_used - flow.rate
    target_used = used(state, flow.target) - flow.rate
    node = prefill_node_of(parameters, flow.source)
    rate = min(node.nic_bytes_per_s - source_used, bandwidth(parameters, flow.target) - target_used)
    if flow.cap > rate:
        # it takes what the others leave; fair as long as they are all at their caps and none of them has more
        if _held_back(world, flow_id) or (max(source_used, target_used) > rate and _most_of_others(world, flow) > rate):
            if flow.cap != np.inf:
                flow.rate = flow.cap
                prefill_of(state, flow.source).tx_used = source_used + flow.cap
                _set_used(state, flow.target, target_used + flow.cap)
            _share(world, parameters, flow.source, flow.target)
            schedule_network(world)
            return
        engine_of(world).held_flows += flow.cap != np.inf
    else:
        rate = flow.cap
    flow.rate = rate
    prefill_of(state, flow.source).tx_used = source_used + rate
    _set_used(state, flow.target, target_used + rate)
    if flow.cap == np.inf:
        flow.due_s = flow.updated_s + flow.remaining / rate
        slot = network_slot(world)
        if flow.due_s < f8_at(world.due_s)[slot]:
            set_due(world, slot, flow.due_s)


@compiled
def _held_back(world, flow_id):
    """Whether another transfer on the same NIC sides is held below its cap."""
    engine = engine_of(world)
    flow = flow_of(world, flow_id)
    flows = i4_at(world.uncapped)
    count = engine.uncapped_flows
    if engine.held_flows > 0:
        flows = i4_at(world.active)
        count = engine.active_flows
    for i in range(count):
        other = flow_of(world, flows[i])
        if (
            (other.source == flow.source or other.target == flow.target)
            and flows[i] != flow_id
            and other.rate < other.cap
        ):
            return True
    return False


@compiled
def _most_of_others(world, flow):
    """The highest rate among the other transfers on the same NIC sides."""
    active = i4_at(world.active)
    most = 0.0
    for i in range(engine_of(world).active_flows):
        other = flow_of(world, active[i])
        if i != flow.slot and (other.source == flow.source or other.target == flow.target):
            most = max(most, other.rate)
    return most


@compiled
def lift_cap(world, parameters, flow_id):
    """The prefill behind a capped transfer has ended: what is left may go at full speed."""
    state = state_of(world)
    now_s = clock_of(state).now_s
    flow = flow_of(world, flow_id)
    flow.remaining = max(0.0, flow.remaining - flow.rate * (now_s - flow.updated_s))
    flow.updated_s = now_s
    engine_of(world).held_flows -= flow.rate < flow.cap
    flow.cap = np.inf
    _list_uncapped(world, flow_id)
    _admit_flow(world, parameters, flow_id)


@compiled
def next_flow(world):
    """(the transfer that is next to complete, or that lands then; whether it lands), a landing before a completion."""
    engine = engine_of(world)
    uncapped = i4_at(world.uncapped)
    best = engine.landing_head
    best_s = flow_of(world, best).due_s if best >= 0 else np.inf
    lands = True
    for i in range(engine.uncapped_flows):
        due_s = flow_of(world, uncapped[i]).due_s
        if due_s < best_s:
            best = uncapped[i]
            best_s = due_s
            lands = False
    return best, lands


@compiled
def schedule_network(world):
    """Set the network's next event from its flows."""
    engine = engine_of(world)
    uncapped = i4_at(world.uncapped)
    due_s = flow_of(world, engine.landing_head).due_s if engine.landing_head >= 0 else np.inf
    for i in range(engine.uncapped_flows):
        due_s = min(due_s, flow_of(world, uncapped[i]).due_s)
    set_due(world, network_slot(world), due_s)


@compiled
def complete_flow(world, parameters, flow_id):
    """All bytes are moved, now: leave the NICs, land after the latency."""
    state = state_of(world)
    engine = engine_of(world)
    flow = flow_of(world, flow_id)
    sender = prefill_of(state, flow.source)
    sender.tx_flows -= 1
    sender.tx_used = sender.tx_used - flow.rate if sender.tx_flows > 0 else 0.0
    target_left = _count_receiver(state, flow.target, -1)
    _set_used(state, flow.target, used(state, flow.target) - flow.rate if target_left > 0 else 0.0)
    # off the lists; that of the uncapped stays in order
    active = i4_at(world.active)
    engine.active_flows -= 1
    last = active[engine.active_flows]
    active[flow.slot] = last
    flow_of(world, last).slot = flow.slot
    # summed afresh: what subtraction leaves would break ties between equal backlogs
    sender.tx_backlog_bytes = 0.0
    if sender.tx_flows > 0:
        for i in range(engine.active_flows):
            other = flow_of(world, active[i])
            sender.tx_backlog_bytes += other.bytes if other.source == flow.source else 0.0
    uncapped = i4_at(world.uncapped)
    i = 0
    while uncapped[i] != flow_id:
        i += 1
    engine.uncapped_flows -= 1
    for j in range(i, engine.uncapped_flows):
        uncapped[j] = uncapped[j + 1]
    flow.slot = -1
    # into the queue of landings
    flow.due_s = clock_of(state).now_s + cluster_of(parameters).transfer_latency_s
    if engine.landing_head >= 0 and flow.due_s - flow_of(world, engine.landing_tail).due_s < SAME_TIME_S:
        flow.due_s = flow_of(world, engine.landing_tail).due_s  # by rounding alone it would be later, or not
    before, after = -1, engine.landing_head
    if after >= 0 and flow_of(world, engine.landing_tail).due_s < flow.due_s:
        before, after = engine.landing_tail, -1
    while after >= 0 and (flow_of(world, after).due_s < flow.due_s or after < flow_id):
        before, after = after, flow_of(world, after).next
    flow.next = after
    if before < 0:
        engine.landing_head = flow_id
    else:
        flow_of(world, before).next = flow_id
    if after < 0:
        engine.landing_tail = flow_id
    if _held_back(world, flow_id):
        _share(world, parameters, flow.source, flow.target)  # those that were held back can go faster now


@compiled
def take_landing(world):
    """The first of the queue of landings leaves it."""
    engine = engine_of(world)
    engine.landing_head = flow_of(world, engine.landing_head).next


@compiled
def _mark(world, parameters, nic, count):
    """Put a NIC side on the list of `_fill` unless it is there; returns the length of the list."""
    nics = 2 * world.prefills + world.decodes
    listed = i8_at(world.scratch_nics)
    unfixed = i8_at(world.scratch_nics + 8 * nics)
    for i in range(count):
        if listed[i] == nic:
            return count
    listed[count] = nic
    unfixed[nic] = 0
    f8_at(world.scratch_capacity)[nic] = bandwidth(parameters, nic)
    return count + 1


@compiled
def _share(world, parameters, source, target):
    """Share out afresh the NICs that are connected to `source` or `target`."""
    # mostly, the capped transfers can keep their caps
    if engine_of(world).held_flows > 0 or not _fill(world, parameters, source, target, True):
        _fill(world, parameters, source, target, False)


@compiled
def _fill(world, parameters, source, target, only_uncapped):
    """Progressive filling. `only_uncapped`: only uncapped transfers change; False if that would not be fair."""
    engine = engine_of(world)
    state = state_of(world)
    now_s = clock_of(state).now_s
    sides = 2 * world.prefills + world.decodes
    listed = i8_at(world.scratch_nics)
    unfixed = i8_at(world.scratch_nics + 8 * sides)
    capacity = f8_at(world.scratch_capacity)
    fixed = f8_at(world.scratch_capacity + 8 * sides)  # bytes per second of the transfers that do not change
    members = i4_at(world.scratch_members)
    flows = i4_at(world.uncapped) if only_uncapped else i4_at(world.active)
    candidates = engine.uncapped_flows if only_uncapped else engine.active_flows

    # 1. the connected component: its NICs in `listed`, its flows at the front of `members`
    nics = _mark(world, parameters, source, 0)
    nics = _mark(world, parameters, target, nics)
    for i in range(candidates):
        members[i] = flows[i]
    count = 0
    grown = True
    while grown:
        grown = False
        for i in range(count, candidates):
            flow = flow_of(world, members[i])
            by_source = False
            by_target = False
            for j in range(nics):
                by_source = by_source or listed[j] == flow.source
                by_target = by_target or listed[j] == flow.target
            if by_source or by_target:
                if not by_source:
                    nics = _mark(world, parameters, flow.source, nics)
                if not by_target:
                    nics = _mark(world, parameters, flow.target, nics)
                _swap(members, i, count)
                count += 1
                grown = True

    # 2. bring its flows up to now; fill
    for j in range(nics):
        fixed[listed[j]] = used(state, listed[j]) if only_uncapped else 0.0
    for i in range(count):
        flow = flow_of(world, members[i])
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now_s - flow.updated_s))
        flow.updated_s = now_s
        unfixed[flow.source] += 1
        unfixed[flow.target] += 1
        if only_uncapped:
            fixed[flow.source] -= flow.rate
            fixed[flow.target] -= flow.rate
        else:
            engine.held_flows -= flow.cap != np.inf and flow.rate < flow.cap
    for j in range(nics):
        nic = listed[j]
        capacity[nic] -= fixed[nic]
        if capacity[nic] < 0.0:
            return False
    left = count
    while left > 0:
        level = np.inf
        bottleneck = -1
        for j in range(nics):
            nic = listed[j]
            if unfixed[nic] > 0:
                share = capacity[nic] / unfixed[nic]
                if share < level:
                    level = share
                    bottleneck = nic
        if only_uncapped and fixed[bottleneck] > level:
            return False  # one that does not change could have more than those that are held back
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
    for i in range(count):
        flow = flow_of(world, members[i])
        fixed[flow.source] += flow.rate
        fixed[flow.target] += flow.rate
        if flow.cap == np.inf:
            flow.due_s = now_s + flow.remaining / flow.rate
        elif flow.rate < flow.cap:
            engine.held_flows += 1
    for j in range(nics):
        _set_used(state, listed[j], fixed[listed[j]])
    return True


@compiled
def _swap(numbers, i, j):
    kept = numbers[i]
    numbers[i] = numbers[j]
    numbers[j] = kept
