"""KV blocks on the prefill instances: prefix match, pins, tiers, LRU eviction (docs/physics.md, "Tiers").

Recency is a chain of releases per instance. A release names a request and a range of its blocks, and each
(block, instance) remembers its last release. Each tier keeps its place in the chain: eviction walks on from there,
passing over what was used again since. So a touch is one write, and an eviction costs amortised constant time.
"""

from __future__ import annotations

import numpy as np

from ..state import DEVICE, HOST, PENDING
from .compile import compiled
from .memory import (
    blocks_of,
    cell,
    engine_of,
    eviction_of,
    i4_at,
    i8_at,
    mask_index,
    prefill_of,
    prefill_timer_of,
    release_of,
    state_of,
)


@compiled
def has(state, block, row, p):
    """Whether the bit of instance p is set in a row of a block."""
    return (i8_at(state.blocks)[mask_index(state, block, row, p >> 6)] >> (p & 63)) & 1 != 0


@compiled
def put(state, block, row, p):
    """Set the bit of instance p."""
    i8_at(state.blocks)[mask_index(state, block, row, p >> 6)] |= np.int64(1) << (p & 63)


@compiled
def drop(state, block, row, p):
    """Clear the bit of instance p."""
    i8_at(state.blocks)[mask_index(state, block, row, p >> 6)] &= ~(np.int64(1) << (p & 63))


@compiled
def match(state, block_ids, count, local, ready, device):
    """Leading blocks per instance of the `count` ids at `block_ids`: resident or pending, resident, on device.

    One walk for all instances; stops where no instance goes on. Writes int64 `local`, `ready`, `device` [P].
    """
    masks = i8_at(state.blocks)
    ids = i4_at(block_ids)
    for word in range(state.words):
        first = word << 6
        last = min(first + 64, state.prefills)
        for p in range(first, last):
            local[p] = count
            ready[p] = count
            device[p] = count
        everyone = np.int64(-1) if last - first == 64 else (np.int64(1) << (last - first)) - 1
        alive_local = everyone
        alive_ready = everyone
        alive_device = everyone
        for i in range(count):
            at = mask_index(state, ids[i], HOST, word)
            host = masks[at + HOST * state.words]
            still = alive_local & (host | masks[at + PENDING * state.words])
            if still != alive_local:
                _note(alive_local & ~still, first, i, local)
                alive_local = still
            still = alive_ready & host
            if still != alive_ready:
                _note(alive_ready & ~still, first, i, ready)
                alive_ready = still
            still = alive_device & masks[at + DEVICE * state.words]
            if still != alive_device:
                _note(alive_device & ~still, first, i, device)
                alive_device = still
            if alive_local == 0:
                break


@compiled
def _note(gone, first, length, lengths):
    p = first
    while gone != 0:
        if gone & 1:
            lengths[p] = length
        gone = (gone >> 1) & np.int64(0x7FFFFFFFFFFFFFFF)
        p += 1


@compiled
def _request_of(world, entry):
    """A release of request r on its own instance is entry r, on the holder of its fetch R + r."""
    requests = engine_of(world).requests
    return entry if entry < requests else entry - requests


@compiled
def release(world, p, entry, start, stop):
    """Blocks [start, stop) of the request of `entry` have been used on instance p: unpin, stamp and chain them."""
    if stop <= start:
        return
    address, _ = blocks_of(world, _request_of(world, entry))
    ids = i4_at(address)
    stamps = i4_at(world.stamps)
    pins = i4_at(world.pins)
    for i in range(start, stop):
        at = cell(world, ids[i], p)
        stamps[at] = entry
        pins[at] -= 1
    released = release_of(world, entry)
    released.next = -1
    released.start = start
    released.stop = stop
    timer = prefill_timer_of(world, p)
    if timer.last_release < 0:
        for tier in range(2):
            place = eviction_of(world, p, tier)
            place.release = entry
            place.position = stop - 1
    else:
        release_of(world, timer.last_release).next = entry
    timer.last_release = entry


@compiled
def pin(world, request, p, start, stop):
    """Keep blocks [start, stop) of the request on instance p until they are released there."""
    address, _ = blocks_of(world, request)
    ids = i4_at(address)
    pins = i4_at(world.pins)
    for i in range(start, stop):
        pins[cell(world, ids[i], p)] += 1


@compiled
def make_room(world, p, tier, capacity):
    """Room for one more block in a tier, by evicting if need be; False if every block there is pinned."""
    prefill = prefill_of(state_of(world), p)
    used = prefill.host_used if tier == HOST else prefill.device_used
    return used < capacity or _evict(world, p, tier)


@compiled
def _evict(world, p, tier):
    """Evict the least recently released, unpinned block; inside one release the deepest, so the rest stays reachable."""
    state = state_of(world)
    prefill = prefill_of(state, p)
    place = eviction_of(world, p, tier)
    stamps = i4_at(world.stamps)
    pins = i4_at(world.pins)
    while place.release >= 0:
        entry = place.release
        address, _ = blocks_of(world, _request_of(world, entry))
        ids = i4_at(address)
        released = release_of(world, entry)
        position = place.position
        while position >= released.start:
            b = ids[position]
            position -= 1
            at = cell(world, b, p)
            if stamps[at] == entry and pins[at] == 0 and has(state, b, tier, p):
                if tier == HOST:
                    drop(state, b, HOST, p)
                    prefill.host_used -= 1
                if has(state, b, DEVICE, p):
                    drop(state, b, DEVICE, p)
                    prefill.device_used -= 1
                place.position = position
                return True
        place.position = position
        if released.next < 0:
            return False
        place.release = released.next
        place.position = release_of(world, place.release).stop - 1
    return False
