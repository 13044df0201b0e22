"""KV blocks on the prefill instances: prefix match, pins, tiers, LRU eviction (docs/physics.md, "Tiers").

Recency is a chain of releases per instance. A release names a request and a range of its blocks, and each
(block, instance) remembers its last release. Each tier keeps its place in the chain: eviction walks on from there,
passing over what was used again since. So a touch is one write, and an eviction costs amortised constant time.
"""

from __future__ import annotations

import numpy as np

from ..state import DEVICE, HOST, PENDING, ROW_BITS
from .compile import compiled
from .memory import (
    blocks_of,
    cell_of,
    engine_of,
    eviction_of,
    i4_at,
    i8_at,
    prefetch,
    prefetch_block,
    prefill_of,
    prefill_timer_of,
    release_of,
    row_bit,
    state_of,
    word_index,
)


@compiled
def has(state, block, row, p):
    """Whether a block is in a row for instance p."""
    return i8_at(state.blocks)[word_index(state, block, p)] & row_bit(row, p) != 0


@compiled
def put(state, block, row, p):
    """Put a block in a row for instance p."""
    i8_at(state.blocks)[word_index(state, block, p)] |= row_bit(row, p)


@compiled
def drop(state, block, row, p):
    """Take a block out of a row for instance p."""
    i8_at(state.blocks)[word_index(state, block, p)] &= ~row_bit(row, p)


@compiled
def match(state, block_ids, count, local, ready, device):
    """Leading blocks per instance of the `count` ids at `block_ids`: resident or pending, resident, on device.

    One walk for 16 instances; stops where none of them goes on. Writes int64 `local`, `ready`, `device` [P].
    """
    words = i8_at(state.blocks)
    ids = i4_at(block_ids)
    for first in range(0, state.prefills, ROW_BITS):
        last = min(first + ROW_BITS, state.prefills)
        for p in range(first, last):
            local[p] = count
            ready[p] = count
            device[p] = count
        alive_local = (np.int64(1) << (last - first)) - 1
        alive_ready = alive_local
        alive_device = alive_local
        for i in range(count):
            word = words[word_index(state, ids[i], first)]
            host = word  # the host row is the lowest; what is above it is masked away by `alive`
            still = alive_local & (host | (word >> (ROW_BITS * PENDING)))
            if still != alive_local:
                _note(alive_local & ~still, first, i, local)
                alive_local = still
            still = alive_ready & host
            if still != alive_ready:
                _note(alive_ready & ~still, first, i, ready)
                alive_ready = still
            still = alive_device & (word >> (ROW_BITS * DEVICE))
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
        gone >>= 1
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
    for i in range(start, stop):
        cell = cell_of(world, ids[i], p)
        cell.stamp = entry
        cell.pins -= 1
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
    for i in range(start, stop):
        cell_of(world, ids[i], p).pins += 1


@compiled
def make_room(world, p, tier, capacity):
    """Room for one more block in a tier, by evicting if need be; False if every block there is pinned."""
    prefill = prefill_of(state_of(world), p)
    used = prefill.host_used if tier == HOST else prefill.device_used
    return used < capacity or _evict(world, p, tier)


@compiled
def _enter(world, state, place, entry, p):
    """Go on with eviction at release `entry`. What follows has not been looked at for long: have it brought in time."""
    released = release_of(world, entry)
    place.release = entry
    place.position = released.stop - 1
    if released.next < 0:
        return
    following = release_of(world, released.next)
    address, _ = blocks_of(world, _request_of(world, released.next))
    ids = i4_at(address)
    for i in range(following.stop - 1, following.start - 1, -8):
        prefetch_block(world, state, ids[i], p)
    if following.next >= 0:
        later = release_of(world, following.next)
        address, _ = blocks_of(world, _request_of(world, following.next))
        for i in range(later.stop - 1, later.start - 1, -16):
            prefetch(address + 4 * i)


@compiled
def _evict(world, p, tier):
    """Evict the least recently released, unpinned block; of one release the deepest, so the rest stays reachable."""
    state = state_of(world)
    prefill = prefill_of(state, p)
    place = eviction_of(world, p, tier)
    words = i8_at(state.blocks)
    chained = engine_of(world).chained != 0
    while place.release >= 0:
        entry = place.release
        address, _ = blocks_of(world, _request_of(world, entry))
        ids = i4_at(address)
        released = release_of(world, entry)
        position = place.position
        while position >= released.start:
            b = ids[position]
            position -= 1
            cell = cell_of(world, b, p)
            if cell.stamp != entry:
                # used again since; then so was all before it, when block ids are chained as hashes of prefixes are
                if chained:
                    position = released.start - 1
            elif cell.pins == 0:
                at = word_index(state, b, p)
                word = words[at]
                if word & row_bit(tier, p) != 0:
                    if tier == HOST:
                        word &= ~row_bit(HOST, p)
                        prefill.host_used -= 1
                    if word & row_bit(DEVICE, p) != 0:
                        word &= ~row_bit(DEVICE, p)
                        prefill.device_used -= 1
                    words[at] = word
                    place.position = position
                    return True
        place.position = position
        if released.next < 0:
            return False
        _enter(world, state, place, released.next, p)
    return False
