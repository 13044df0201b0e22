"""KV blocks on the prefill instances: prefix match, pins, tiers, eviction (docs/physics.md, "Tiers").

All works on runs: a request's blocks are a few runs, and who has which block of a run is a bit mask per instance. Pins
and releases always cover the first blocks of a request: whole runs, then perhaps the first blocks of one more, a part.

For LRU, recency is a chain of releases per instance, and each (run, instance) remembers its last release. Each tier
keeps its place in the chain: eviction walks on from there, passing over what was used again since. So a touch is one
write, and an eviction costs amortised constant time. By frequency, the uses of each block are counted (frequency.py).
"""

from __future__ import annotations

import numpy as np

from ..state import DEVICE, DISK, HOST, PENDING, ROW_BITS, TIERS, EvictionRule
from .compile import compiled
from .frequency import offer, take_first, withdraw
from .memory import (
    bits_in,
    cell_of,
    disk_index,
    engine_of,
    eviction_of,
    i4_at,
    i8_at,
    lowest_bit,
    part_of,
    prefetch_cells,
    prefill_of,
    prefill_timer_of,
    reference_of,
    release_of,
    request_of,
    row_bit,
    state_of,
    up_to_highest,
    use_of,
    word_index,
)

LRU = int(EvictionRule.LRU)


@compiled
def match(state, block_ids, count, local, ready, device, disk):
    """Leading blocks per instance of the `count` ids at `block_ids`: there or pending, resident, on device; and how
    many of the first of these are on disk and not pending.

    One walk for 16 instances; stops where none of them goes on. Writes int64 `local`, `ready`, `device`, `disk` [P].
    """
    words = i8_at(state.blocks)
    ids = i4_at(block_ids)
    for first in range(0, state.prefills, ROW_BITS):
        last = min(first + ROW_BITS, state.prefills)
        for p in range(first, last):
            local[p] = count
            ready[p] = count
            device[p] = count
            disk[p] = 0
        alive_local = (np.int64(1) << (last - first)) - 1
        alive_ready = alive_local
        alive_device = alive_local
        for i in range(count):
            word = words[word_index(state, ids[i], first)]
            host = word  # the host row is the lowest; what is above it is masked away by `alive`
            pending = word >> (ROW_BITS * PENDING)
            on_disk = word >> (ROW_BITS * DISK)
            still = alive_local & (host | pending | on_disk)
            if still != alive_local:
                _note(alive_local & ~still, first, i, local)
                alive_local = still
            reading = still & on_disk & ~pending
            while reading != 0:
                disk[first + lowest_bit(reading)] += 1
                reading &= reading - 1
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
def leading(mask):
    """How many of the first blocks are in a mask."""
    return lowest_bit(~mask)


@compiled
def mask_of(length):
    """A mask of the first `length` blocks, all of a run of that length."""
    return (np.int64(1) << length) - 1


@compiled
def on_disk(world, run, p):
    """Mask of the blocks of a run that are on an instance's disk."""
    if engine_of(world).disks == 0:
        return np.int64(0)
    return np.int64(i4_at(world.disks)[disk_index(world, run, p)])


@compiled
def take_off_disk(world, run, p):
    """A run is on an instance's disk no more. There must be disks."""
    at = disk_index(world, run, p)
    mask = np.int64(i4_at(world.disks)[at])
    i4_at(world.disks)[at] = 0
    prefill_timer_of(world, p).disk_free += bits_in(mask)
    if engine_of(world).eviction != LRU:
        while mask != 0:
            withdraw(world, p, DISK, i4_at(world.run_blocks)[run] + lowest_bit(mask))
            mask &= mask - 1


@compiled
def match_runs(world, request, local, ready, device, disk):
    """`match` for a request of the simulator."""
    asked = request_of(world, request)
    for p in range(world.prefills):
        local_blocks = 0
        ready_blocks = 0
        device_blocks = 0
        disk_blocks = 0
        all_ready = True
        all_device = True
        for i in range(asked.first, asked.first + asked.references):
            reference = reference_of(world, i)
            cell = cell_of(world, reference.run, p)
            if all_device:
                count = leading(cell.device)
                device_blocks += count
                all_device = count == reference.length
            if all_ready:
                count = leading(cell.host)
                ready_blocks += count
                all_ready = count == reference.length
            cold = on_disk(world, reference.run, p)
            count = leading(cell.host | cell.pending | cold)
            local_blocks += count
            disk_blocks += bits_in(cold & ~cell.pending & mask_of(count))
            if count < reference.length:
                break
        local[p] = local_blocks
        ready[p] = ready_blocks
        device[p] = device_blocks
        disk[p] = disk_blocks


@compiled
def fill_blocks(world, words):
    """Write who has which block into int64[blocks, words], laid out as `ClusterState.blocks`."""
    state = state_of(world)
    words[:] = 0
    engine = engine_of(world)
    numbers = i4_at(world.run_blocks)
    for run in range(engine.runs_met):
        stop = numbers[run + 1] if run + 1 < engine.runs else engine.blocks
        for p in range(state.prefills):
            cell = cell_of(world, run, p)
            cold = on_disk(world, run, p)
            for b in range(numbers[run], stop):
                i = b - numbers[run]
                words[b, p >> 4] |= (
                    (cell.host >> i & 1) * row_bit(HOST, p)
                    | (cell.device >> i & 1) * row_bit(DEVICE, p)
                    | (cold >> i & 1) * row_bit(DISK, p)
                    | (cell.pending >> i & 1) * row_bit(PENDING, p)
                )


@compiled
def count_copies(world, copies):
    """Write on how many instances each block is resident into int32[blocks]."""
    copies[:] = 0
    engine = engine_of(world)
    numbers = i4_at(world.run_blocks)
    for run in range(engine.runs_met):
        for p in range(world.prefills):
            mask = np.int64(cell_of(world, run, p).host)
            while mask != 0:
                copies[numbers[run] + lowest_bit(mask)] += 1
                mask &= mask - 1


@compiled
def _pin_part(world, run, p, blocks):
    cell = cell_of(world, run, p)
    part = part_of(world, run, p, blocks)
    bit = np.int64(1) << (blocks - 1)
    if cell.ends & bit == 0:
        cell.ends |= bit
        part.pins = 0
    part.pins += 1


@compiled
def _unpin_part(world, run, p, blocks):
    part = part_of(world, run, p, blocks)
    part.pins -= 1
    if part.pins == 0:
        cell_of(world, run, p).ends &= ~(np.int64(1) << (blocks - 1))


@compiled
def pin(world, request, p, pinned, stop):
    """Keep the first `stop` blocks of the request on instance p until they are released there; `pinned` are kept
    for it already.
    """
    asked = request_of(world, request)
    start = 0
    for i in range(asked.first, asked.first + asked.references):
        if start >= stop:
            return
        reference = reference_of(world, i)
        end = start + reference.length
        if end > pinned:
            if start < pinned:
                _unpin_part(world, reference.run, p, pinned - start)
            if end <= stop:
                cell_of(world, reference.run, p).pins += 1
            else:
                _pin_part(world, reference.run, p, stop - start)
        start = end


@compiled
def _request_of_release(world, entry):
    """A release of request r on its own instance is entry r, on the holder of its fetch R + r."""
    requests = engine_of(world).requests
    return entry if entry < requests else entry - requests


@compiled
def release(world, p, entry, stop):
    """The first `stop` blocks of the request of `entry` have been used on instance p: unpin, stamp and chain them."""
    if stop == 0:
        return
    asked = request_of(world, _request_of_release(world, entry))
    start = 0
    i = asked.first
    part = 0
    while start < stop:
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        if start + reference.length <= stop:
            cell.stamp = entry
            cell.cuts = 0
            cell.pins -= 1
        else:
            part = stop - start
            part_of(world, reference.run, p, part).stamp = entry
            cell.cuts = cell.cuts & ~mask_of(part) | np.int64(1) << (part - 1)
            _unpin_part(world, reference.run, p, part)
        start += reference.length
        i += 1
    chain_release(world, p, entry, asked.first, i - asked.first, part)


@compiled
def chain_release(world, p, entry, first, references, part):
    """`entry` is p's last release now: of the runs referred to, of the last one only `part` blocks unless that is 0."""
    released = release_of(world, entry)
    released.next = -1
    released.first = first
    released.references = references
    released.part = part
    timer = prefill_timer_of(world, p)
    if timer.last_release < 0:
        for tier in range(TIERS):
            place = eviction_of(world, p, tier)
            place.release = entry
            place.position = references - 1
    else:
        release_of(world, timer.last_release).next = entry
    timer.last_release = entry
    if engine_of(world).eviction != LRU:
        _count_uses(world, p, first, references, part)


@compiled
def _count_uses(world, p, first, references, part):
    timer = prefill_timer_of(world, p)
    timer.releases += 1
    depth = 0
    for i in range(first, first + references):
        reference = reference_of(world, i)
        cell = cell_of(world, reference.run, p)
        start = i4_at(world.run_blocks)[reference.run]
        for b in range(part if part > 0 and i == first + references - 1 else reference.length):
            use = use_of(world, p, start + b)
            if cell.host >> b & 1:
                use.count += 1
                use.release = timer.releases
                use.depth = depth
                offer(world, p, HOST, start + b)
                if cell.device >> b & 1:
                    offer(world, p, DEVICE, start + b)
            else:
                use.count = 0
            depth += 1


@compiled
def make_room(world, p, tier, capacity, blocks):
    """Room for `blocks` more blocks in a tier, by evicting if need be; returns for how many there is room."""
    prefill = prefill_of(state_of(world), p)
    used = prefill.host_used if tier == HOST else prefill.device_used
    free = capacity - used
    if blocks <= free:
        return blocks
    room = free + _evict(world, p, tier, blocks - free)
    disk_free = prefill_timer_of(world, p).disk_free
    if disk_free < 0:  # the disk has got more than it holds
        _evict(world, p, DISK, -disk_free)
    return room


@compiled
def _last_released(world, reference, p, entry, part):
    """Mask of the blocks of a run whose last release is `entry`, which covered `part` of it (0: all)."""
    cell = cell_of(world, reference.run, p)
    if part == 0:
        return mask_of(reference.length) & ~up_to_highest(cell.cuts) if cell.stamp == entry else 0
    bit = np.int64(1) << (part - 1)
    if cell.cuts & bit == 0 or part_of(world, reference.run, p, part).stamp != entry:
        return 0
    return mask_of(part) & ~up_to_highest(cell.cuts & (bit - 1))


@compiled
def _evict(world, p, tier, wanted):
    """Evict unpinned blocks by the rule; returns how many, fewer than `wanted` when the others are all pinned."""
    if engine_of(world).eviction == LRU:
        return _evict_oldest(world, p, tier, wanted)
    return _evict_least_used(world, p, tier, wanted)


@compiled
def _take_out(world, p, tier, run, mask):
    """Blocks of a run leave a tier: the host tier for the disk, if there is one, and the device tier with it."""
    cell = cell_of(world, run, p)
    prefill = prefill_of(state_of(world), p)
    count = bits_in(mask)
    if tier == HOST:
        cell.host &= ~mask
        prefill.host_used -= count
    if tier != DEVICE and engine_of(world).disks != 0:
        i4_at(world.disks)[disk_index(world, run, p)] ^= mask
        prefill_timer_of(world, p).disk_free += count if tier == DISK else -count
    mask &= cell.device
    cell.device &= ~mask
    prefill.device_used -= bits_in(mask)


@compiled
def _evict_least_used(world, p, tier, wanted):
    left = wanted
    while left > 0:
        block = take_first(world, p, tier)
        if block < 0:
            break
        use = use_of(world, p, block)
        run = np.int64(use.run)
        cell = cell_of(world, run, p)
        bit = np.int64(1) << (block - i4_at(world.run_blocks)[run])
        if cell.pins > 0 or up_to_highest(cell.ends) & bit != 0:
            continue  # it is offered again when it is released
        _take_out(world, p, tier, run, bit)
        left -= 1
        if tier == HOST:
            withdraw(world, p, DEVICE, block)
            if engine_of(world).disks != 0:
                offer(world, p, DISK, block)
            else:
                use.count = 0
        elif tier == DISK:
            use.count = 0
    return wanted - left


@compiled
def _evict_oldest(world, p, tier, wanted):
    """LRU: what was released least recently; of one release the deepest, so the rest stays reachable."""
    place = eviction_of(world, p, tier)
    front = eviction_of(world, p, HOST)
    chained = engine_of(world).chained != 0
    left = wanted
    while place.release >= 0:
        entry = place.release
        released = release_of(world, entry)
        position = place.position
        # on disk is what the host tier evicted: it may not get ahead of that, or it would miss what is still to come
        at_front = tier == DISK and entry == front.release
        last = max(0, front.position) if at_front else 0
        while position >= last:
            reference = reference_of(world, released.first + position)
            part = released.part if position == released.references - 1 else 0
            mask = _last_released(world, reference, p, entry, part)
            if mask == 0:
                # used again since; then so was all before it, where runs are chained as hashes of prefixes are
                position = position - 1 if not chained else -1
                continue
            cell = cell_of(world, reference.run, p)
            if cell.pins > 0:
                mask = 0
            if tier == DISK:
                there = on_disk(world, reference.run, p)
            else:
                there = np.int64(cell.host if tier == HOST else cell.device)
            mask &= ~up_to_highest(cell.ends) & there
            if mask != 0:
                count = bits_in(mask)
                while count > left:
                    mask &= mask - 1
                    count -= 1
                _take_out(world, p, tier, reference.run, mask)
                left -= count
                if left == 0:
                    place.position = position
                    return wanted
            position -= 1
        place.position = position
        if released.next < 0 or at_front:
            break
        following = release_of(world, released.next)
        place.release = released.next
        place.position = following.references - 1
        if following.next >= 0:
            later = release_of(world, following.next)
            prefetch_cells(world, later.first + later.references - 2, 2, p)
    return wanted - left
