"""The table of known blocks: from a block's hash to its dense number, and which instance has it on which medium.

One header record (`INDEX`) holds sizes and addresses; kernels get its address. Five tables hang on it:

- `slots`, an open-addressing hash table by own hash; a slot holds the number.
- `blocks` (the ClusterState's) and `media`, residency per block: four rows of 16 instances per word in each. `media`
  has the truth per medium (GPU, CPU, DISK, and ROUTED for what is only assumed), `blocks` what policies look at.
- `cells`, one record per number: hash, the block before it, how many follow it, how many requests hold it, and whether
  it was touched of late.
- `engine`, what the engines call the blocks (engine_hashes.py).
- `expected`, how many requests will bring a block to an instance; `routes` and `routed`, what is only assumed to be
  somewhere (expectations.py).
- `lingering`, a ring of the ends of chains that nothing refers to, until when they stay known all the same.

A block with followers is never recycled, so the block before a known one stays known unless it never was. A number is
free again as soon as nothing refers to it: not resident, not expected, not held, no follower; only the blocks of a
prefill that is done linger, for the worker's KV events are about to say that they are there. Those that linger go
first where room is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import check, i4_at, i8_at, prefetch, record_at
from envs.state import DEVICE, HOST, PENDING, ROW_BITS

from .xxh3 import next_hash, u8_at

GPU, CPU, DISK, ROUTED = 0, 1, 2, 3
MEDIA = 4

SLOT = np.dtype([("hash", "u8"), ("number", "i8")])  # number + 1; 0 is an empty slot
CELL = np.dtype(
    [
        *(("hash", "u8"), ("before", "i4"), ("followers", "i4"), ("held", "i4")),
        *(("used", "i1"), ("lingers", "i1"), ("touched", "i2")),
    ]
)
LINGER = np.dtype([("hash", "u8"), ("until_us", "i8")])
INSTANCE = np.dtype(
    [
        ("gpu", "i8"),  # blocks per medium
        ("cpu", "i8"),
        ("disk", "i8"),
        ("routed", "i8"),
        ("host", "i8"),  # blocks in row HOST
        ("device", "i8"),
        ("generation", "i8"),  # entries of `engine` made before the last clearing have another
        ("group", "i8"),  # the KV-cache group that is indexed, -1 if not known yet
    ]
)
INDEX = np.dtype(
    [
        (name, "i8")
        for name in (
            *("capacity", "words", "instances", "block_tokens"),
            *("used", "free", "evicted", "hand", "next_victim", "exhausted"),
            *("slot_mask", "slot_shift"),
            *("engine_mask", "engine_shift", "engine_used", "engine_limit"),
            *("expected_mask", "expected_shift", "expected_used", "expected_limit"),
            *("linger_mask", "linger_first", "linger_last"),
            *("route_mask", "route_limit", "route_first", "route_last", "routed_mask", "routed_shift", "routed_used"),
            # addresses
            *("slots", "cells", "blocks", "media", "free_list", "engine", "expected", "routes", "routed", "places"),
            "lingering",
        )
    ]
)
INSTANCE_BYTES = INSTANCE.itemsize

_PHI = np.uint64(0x9E3779B97F4A7C15)
AHEAD = 12  # look-ups between a prefetch and its use
_ROW = (1 << ROW_BITS) - 1

index_at: Any = record_at(INDEX)
_slot_at: Any = record_at(SLOT)
_cell_at: Any = record_at(CELL)
_instance_at: Any = record_at(INSTANCE)
_linger_at: Any = record_at(LINGER)


@compiled
def slot_of(index, at):
    return _slot_at(index.slots, check(at, index.slot_mask + 1))


@compiled
def cell_of(index, number):
    return _cell_at(index.cells, check(number, index.capacity))


@compiled
def instance_of(index, p):
    return _instance_at(index.places, check(p, index.instances))


@compiled
def word_of(index, number, p):
    """Where in `blocks` and `media` the rows of a block for instance p are."""
    return check(number, index.capacity) * index.words + check(p >> 4, index.words)


@compiled
def bit_of(row, p):
    return np.int64(1) << (ROW_BITS * row + (p & 15))


@compiled
def home(key, shift):
    """Where in a table of 2 ** (64 - shift) entries the search for a uint64 key starts."""
    return np.int64((key * _PHI) >> np.uint64(shift))


# --- slots ----------------------------------------------------------------------------------------------------------


@compiled
def search(index, own):
    """The slot of a hash, or the empty one where it would go."""
    at = home(own, index.slot_shift)
    while True:
        slot = slot_of(index, at)
        if slot.number == 0 or slot.hash == own:
            return at
        at = (at + 1) & index.slot_mask


@compiled
def follows(index, own, before):
    """Whether a hash has the number after `before` (-1: none is). Most of a chain got its numbers in a row, and so lies
    in a row, while the slots of its hashes are all over memory."""
    number = before + 1
    if before < 0 or number >= index.capacity:
        return False
    cell = cell_of(index, number)
    return cell.used != 0 and cell.hash == own


@compiled
def touch(index, number):
    """A block was asked for; its number."""
    cell = cell_of(index, number)
    if cell.touched == 0:
        cell.touched = 1
    return number


@compiled
def look_up(index, own, before):
    """The number of a hash, touched; -1 if it is not known. `before`: the number of the block before it, or -1."""
    if follows(index, own, before):
        return touch(index, before + 1)
    number = np.int64(slot_of(index, search(index, own)).number) - 1
    return touch(index, number) if number >= 0 else number


@compiled
def _vacate(index, at):
    """Empty a slot, and move up what a search would no longer reach past it."""
    mask = index.slot_mask
    hole = at
    while True:
        at = (at + 1) & mask
        slot = slot_of(index, at)
        if slot.number == 0:
            break
        if ((at - home(slot.hash, index.slot_shift)) & mask) >= ((at - hole) & mask):
            target = slot_of(index, hole)
            target.hash = slot.hash
            target.number = slot.number
            hole = at
    slot_of(index, hole).number = 0


# --- residency ------------------------------------------------------------------------------------------------------


@compiled
def _add_to_medium(place, medium, amount):
    if medium == GPU:
        place.gpu += amount
    elif medium == CPU:
        place.cpu += amount
    elif medium == DISK:
        place.disk += amount
    else:
        place.routed += amount


@compiled
def put(index, number, p, medium):
    """A block is on a medium of instance p, and so no longer on its way there; whether it was not there before."""
    at = word_of(index, number, p)
    blocks = i8_at(index.blocks)
    media = i8_at(index.media)
    fresh = media[at] & bit_of(medium, p) == 0
    word = blocks[at]
    if fresh:
        media[at] |= bit_of(medium, p)
        place = instance_of(index, p)
        _add_to_medium(place, medium, 1)
        if word & bit_of(HOST, p) == 0:
            word |= bit_of(HOST, p)
            place.host += 1
        if medium in (GPU, ROUTED) and word & bit_of(DEVICE, p) == 0:
            word |= bit_of(DEVICE, p)
            place.device += 1
    blocks[at] = word & ~bit_of(PENDING, p)
    return fresh


@compiled
def drop(index, number, p, medium):
    """A block is no longer on a medium of instance p; whether it was."""
    at = word_of(index, number, p)
    media = i8_at(index.media)
    here = media[at]
    if here & bit_of(medium, p) == 0:
        return False
    here &= ~bit_of(medium, p)
    media[at] = here
    place = instance_of(index, p)
    _add_to_medium(place, medium, -1)
    blocks = i8_at(index.blocks)
    if medium in (GPU, ROUTED) and here & (bit_of(GPU, p) | bit_of(ROUTED, p)) == 0:
        blocks[at] &= ~bit_of(DEVICE, p)
        place.device -= 1
    if here & (bit_of(GPU, p) | bit_of(CPU, p) | bit_of(DISK, p) | bit_of(ROUTED, p)) == 0:
        blocks[at] &= ~bit_of(HOST, p)
        place.host -= 1
    return True


@compiled
def drop_all(index, number, p):
    """A block is on no medium of instance p; on how many it was."""
    dropped = 0
    for medium in range(MEDIA):
        if drop(index, number, p, medium):
            dropped += 1
    return dropped


# --- numbers --------------------------------------------------------------------------------------------------------


@compiled
def _free(index, number):
    """Give back a number; the one before it."""
    cell = cell_of(index, number)
    _vacate(index, search(index, cell.hash))
    before = np.int64(cell.before)
    if before >= 0:
        cell_of(index, before).followers -= 1
    cell.used = 0
    cell.before = -1
    for w in range(index.words):
        i8_at(index.blocks)[number * index.words + w] = 0
        i8_at(index.media)[number * index.words + w] = 0
    i4_at(index.free_list)[check(index.free, index.capacity)] = number
    index.free += 1
    index.used -= 1
    index.exhausted = 0
    if index.next_victim == number:
        index.next_victim = -1
    return before


@compiled
def _is_idle(index, number):
    """Whether nothing refers to a number in use."""
    cell = cell_of(index, number)
    if cell.used == 0 or cell.followers != 0 or cell.held != 0:
        return False
    for w in range(index.words):
        if i8_at(index.blocks)[number * index.words + w] != 0 or i8_at(index.media)[number * index.words + w] != 0:
            return False
    return True


@compiled
def retire(index, number):
    """Give back a number nothing refers to, then those before it that only this one kept."""
    while number >= 0 and _is_idle(index, number):
        number = _free(index, number)


@compiled
def _dismiss_first(index):
    """What has lingered longest is given back, unless something refers to it by now."""
    entry = _linger_at(index.lingering, index.linger_first & index.linger_mask)
    index.linger_first += 1
    number = np.int64(slot_of(index, search(index, entry.hash)).number) - 1
    if number >= 0:
        cell_of(index, number).lingers = 0
        retire(index, number)


@compiled
def linger(index, number, until_us):
    """`retire` a number later: it stays known until then, and with it those before it."""
    cell = cell_of(index, number)
    if cell.lingers != 0 or not _is_idle(index, number):
        return
    if index.linger_last - index.linger_first > index.linger_mask:
        _dismiss_first(index)
    entry = _linger_at(index.lingering, index.linger_last & index.linger_mask)
    index.linger_last += 1
    entry.hash = cell.hash
    entry.until_us = until_us
    cell.lingers = 1


@compiled
def dismiss(at, now_us):
    """Give back what was to linger until `now_us` at the latest."""
    index = index_at(at, 0)
    while (
        index.linger_first < index.linger_last
        and _linger_at(index.lingering, index.linger_first & index.linger_mask).until_us <= now_us
    ):
        _dismiss_first(index)


@compiled
def _can_go(index, number):
    cell = cell_of(index, number)
    if cell.followers != 0 or cell.held != 0:
        return False
    waiting = np.int64(_ROW) << (ROW_BITS * PENDING)
    found = np.int64(0)
    for w in range(index.words):
        found |= i8_at(index.blocks)[number * index.words + w] & waiting
    return found == 0


@compiled
def _evict(index, number):
    for w in range(index.words):
        here = i8_at(index.media)[number * index.words + w]
        if here != 0:
            index.evicted += 1
            for i in range(min(16, index.instances - 16 * w)):
                if here & (bit_of(GPU, i) | bit_of(CPU, i) | bit_of(DISK, i) | bit_of(ROUTED, i)) != 0:
                    drop_all(index, number, 16 * w + i)
    before = _free(index, number)
    retire(index, before)  # it may have been kept by its follower only
    left = before >= 0 and cell_of(index, before).used != 0
    index.next_victim = before if left and _can_go(index, before) else np.int64(-1)


@compiled
def _make_room(index):
    """Free a number: of a block that lingers; of the block before the last one evicted, if that was not touched since;
    else by second chance.

    The hand goes round the numbers. A touched block loses its touch as the hand passes, an untouched one at the end of
    a chain goes. So a chain goes from its end, and only after a whole round in which nobody asked for it.
    """
    while index.linger_first < index.linger_last:
        _dismiss_first(index)
        if index.free > 0:
            return True
    if index.exhausted != 0:
        return False
    victim = index.next_victim
    index.next_victim = -1
    if victim >= 0 and _can_go(index, victim) and cell_of(index, victim).touched == 0:
        _evict(index, victim)
        return True
    for _ in range(2 * index.capacity + 1):
        number = index.hand
        index.hand = number + 1 if number + 1 < index.capacity else 0
        cell = cell_of(index, number)
        if cell.used != 0 and cell.touched == 0 and _can_go(index, number):
            _evict(index, number)
            return True
        cell.touched = 0
    index.exhausted = 1  # until something is let go, looking again would find nothing
    return False


@compiled
def number_of(index, own, before):
    """The number of a hash, touched, given one if it has none; -1 if there is no room. `before` is kept meanwhile."""
    if follows(index, own, before):
        return touch(index, before + 1)
    at = search(index, own)
    number = np.int64(slot_of(index, at).number) - 1
    if number >= 0:
        return touch(index, number)
    if index.free == 0:
        if before >= 0:
            cell_of(index, before).held += 1
        made = _make_room(index)
        if before >= 0:
            cell_of(index, before).held -= 1
            if _can_go(index, before):
                index.exhausted = 0  # there was nothing else, but for another chain this one may go
        if not made:
            return np.int64(-1)
        at = search(index, own)
    index.free -= 1
    index.used += 1
    number = np.int64(i4_at(index.free_list)[check(index.free, index.capacity)])
    slot = slot_of(index, at)
    slot.hash = own
    slot.number = number + 1
    cell = cell_of(index, number)
    cell.hash = own
    cell.before = before
    cell.followers = 0
    cell.held = 0
    cell.used = 1
    cell.lingers = 0
    cell.touched = 1
    if before >= 0:
        cell_of(index, before).followers += 1
    return number


@compiled
def prefetch_slot(index, own):
    prefetch(index.slots + 16 * home(own, index.slot_shift))


# --- operations on whole arrays; `at` is the address of the header ------------------------------------------------


@compiled
def find(at, hashes, numbers):
    """Numbers (int32) of the leading known ones of hashes (uint64); how many. They are touched."""
    index = index_at(at, 0)
    count = len(hashes)
    number = np.int64(-1)
    in_a_row = False
    for i in range(count):
        if not in_a_row and i + AHEAD < count:
            prefetch_slot(index, hashes[i + AHEAD])
        last = number
        number = look_up(index, hashes[i], last)
        if number < 0:
            return i
        in_a_row = number == last + 1
        numbers[i] = number
    return count


@compiled
def find_tokens(at, tokens, seed, root_extra, extras, hashes, numbers):
    """Hashes of the full blocks of uint32 tokens, and numbers of the leading known; how many. Words are int64.

    Hashing runs ahead of looking up, so that the slot of a block that does not follow in a row is on its way from
    memory while the next blocks are hashed.
    """
    index = index_at(at, 0)
    size = 4 * index.block_tokens
    address = np.int64(tokens.ctypes.data)
    count = len(hashes)
    before = np.uint64(0)
    known = np.int64(0)
    number = np.int64(-1)
    in_a_row = False
    open_end = True
    for i in range(count):
        extra = extras[i] if i < len(extras) else np.uint64(0)
        if i == 0:
            extra += np.uint64(root_extra)
        before = next_hash(before, i == 0, address + i * size, size, extra, np.uint64(seed))
        hashes[i] = before
        if open_end:
            if not in_a_row:
                prefetch_slot(index, before)
            if i >= AHEAD:
                last = number
                number = look_up(index, hashes[known], last)
                if number < 0:
                    open_end = False
                else:
                    in_a_row = number == last + 1
                    numbers[known] = number
                    known += 1
    while open_end and known < count:
        number = look_up(index, hashes[known], number)
        if number < 0:
            break
        numbers[known] = number
        known += 1
    return known


@compiled
def intern(at, hashes, numbers, keep):
    """Numbers of a chain of hashes, new ones where unknown; how many before there was no room. All are held meanwhile,
    and stay held once more if `keep`.
    """
    index = index_at(at, 0)
    count = len(hashes)
    before = np.int64(-1)
    done = count
    for i in range(min(count, AHEAD)):
        prefetch_slot(index, hashes[i])
    for i in range(count):
        if i + AHEAD < count:
            prefetch_slot(index, hashes[i + AHEAD])
        before = number_of(index, hashes[i], before)
        if before < 0:
            done = i
            break
        cell_of(index, before).held += 1
        numbers[i] = before
    if keep == 0:
        index.exhausted = 0
        for i in range(done):
            cell_of(index, np.int64(numbers[i])).held -= 1
    return done


@compiled
def first_bad(index, numbers, held):
    """The place of the first number that is not in use (or, if asked for, held by nobody); -1 if there is none."""
    for i in range(len(numbers)):
        number = np.int64(numbers[i])
        if number < 0 or number >= index.capacity:
            return i
        cell = cell_of(index, number)
        if cell.used == 0 or (held and cell.held == 0):
            return i
    return -1


@compiled
def hold(at, numbers):
    """One more request holds each of the numbers. -1, or the place of one not in use, and nothing is done."""
    index = index_at(at, 0)
    bad = first_bad(index, numbers, False)
    if bad < 0:
        for i in range(len(numbers)):
            cell_of(index, np.int64(numbers[i])).held += 1
    return bad


@compiled
def release(at, numbers):
    """One request fewer holds each of the numbers; from the end, so that a chain goes whole.

    -1, or the place of one nobody holds. If it was held before the call, but not as often as it is listed, the rest is
    done all the same.
    """
    index = index_at(at, 0)
    bad = first_bad(index, numbers, True)
    if bad >= 0:
        return bad
    index.exhausted = 0
    for i in range(len(numbers) - 1, -1, -1):
        number = np.int64(numbers[i])
        cell = cell_of(index, number)
        if cell.held <= 0:
            bad = i
            continue
        cell.held -= 1
        if cell.held == 0:
            retire(index, number)
    return bad


@compiled
def store(at, p, medium, hashes, before_hash, linked):
    """A chain of blocks, after the one of `before_hash` if it is `linked` to one, is on a medium; how many got in."""
    index = index_at(at, 0)
    count = len(hashes)
    before = look_up(index, np.uint64(before_hash), -1) if linked != 0 else np.int64(-1)
    done = 0
    for i in range(min(count, AHEAD)):
        prefetch_slot(index, hashes[i])
    for i in range(count):
        if i + AHEAD < count:
            prefetch_slot(index, hashes[i + AHEAD])
        before = number_of(index, hashes[i], before)
        if before < 0:
            break  # what follows would be of no use without it
        put(index, before, p, medium)
        done += 1
    return done


@compiled
def remove(at, p, medium, hashes):
    """Blocks are no longer on a medium; how many were."""
    index = index_at(at, 0)
    done = 0
    for i in range(len(hashes) - 1, -1, -1):
        slot = slot_of(index, search(index, hashes[i]))
        if slot.number != 0:
            number = np.int64(slot.number) - 1
            if drop(index, number, p, medium):
                done += 1
                retire(index, number)
    return done


@compiled
def clear(at, p, medium):
    """Instance p has nothing on a medium, or (-1) on any; how many blocks lost a place there."""
    index = index_at(at, 0)
    done = 0
    mine = bit_of(medium, p) if medium >= 0 else bit_of(GPU, p) | bit_of(CPU, p) | bit_of(DISK, p) | bit_of(ROUTED, p)
    for number in range(index.capacity):
        here = i8_at(index.media)[word_of(index, number, p)] & mine
        if here != 0:
            for row in range(MEDIA):
                if here & bit_of(row, p) != 0:
                    drop(index, number, p, row)
                    done += 1
            retire(index, number)
    place = instance_of(index, p)
    if medium < 0:
        place.generation = (place.generation + 1) & 0x7FFF
        place.group = -1
    return done


# --- instances come and go ------------------------------------------------------------------------------------------


@compiled
def renumber(at, words, instances, blocks, media, places, renumbered):
    """Write residency for renumbered instances into new, empty tables, and make them the index's.

    `renumbered` is int64 by old instance, -1 where one is dropped. Blocks nothing refers to any more are given back.
    """
    index = index_at(at, 0)
    fresh = i8_at(blocks)
    fresh_media = i8_at(media)
    for number in range(index.capacity):
        if cell_of(index, number).used == 0:
            continue
        for p in range(index.instances):
            q = i8_at(renumbered)[p]
            if q < 0:
                continue
            old = word_of(index, number, p)
            new = number * words + (q >> 4)
            fresh[new] |= ((i8_at(index.blocks)[old] >> (p & 15)) & 0x0001000100010001) << (q & 15)
            fresh_media[new] |= ((i8_at(index.media)[old] >> (p & 15)) & 0x0001000100010001) << (q & 15)
    for p in range(index.instances):
        q = i8_at(renumbered)[p]
        if q >= 0:
            for i in range(INSTANCE_BYTES // 8):
                i8_at(places + INSTANCE_BYTES * q)[i] = i8_at(index.places + INSTANCE_BYTES * p)[i]
    index.words = words
    index.instances = instances
    index.blocks = blocks
    index.media = media
    index.places = places
    index.exhausted = 0


@compiled
def retire_all(at):
    """Give back every number nothing refers to."""
    index = index_at(at, 0)
    for number in range(index.capacity):
        retire(index, number)


# --- snapshots ------------------------------------------------------------------------------------------------------


@compiled
def restore_blocks(at, numbers, hashes, before, media, count):
    """Fill an empty index with `count` blocks of a snapshot; False where a number or hash occurs twice."""
    index = index_at(at, 0)
    for i in range(count):
        number = np.int64(i4_at(numbers)[i])
        own = u8_at(hashes)[i]
        slot = slot_of(index, search(index, own))
        cell = cell_of(index, number)
        if slot.number != 0 or cell.used != 0:
            return False
        slot.hash = own
        slot.number = number + 1
        cell.hash = own
        cell.before = i4_at(before)[i]
        cell.used = 1
        for w in range(index.words):
            here = i8_at(media)[i * index.words + w]
            for p in range(min(16, index.instances - 16 * w)):
                for medium in range(MEDIA):
                    if here & bit_of(medium, p) != 0:
                        put(index, number, 16 * w + p, medium)
    for i in range(count):
        above = np.int64(i4_at(before)[i])
        if above >= 0:
            if cell_of(index, above).used == 0:
                return False
            cell_of(index, above).followers += 1
    index.used = count
    index.free = 0
    for free in range(index.capacity - 1, -1, -1):
        if cell_of(index, free).used == 0:
            i4_at(index.free_list)[index.free] = free
            index.free += 1
    return True
