"""Blocks that requests will bring, and blocks that are only assumed to be somewhere: tables of (number, instance)."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import i8_at, prefetch, record_at
from envs.state import HOST, PENDING

from .block_table import (
    AHEAD,
    ROUTED,
    bit_of,
    cell_of,
    drop,
    first_bad,
    home,
    index_at,
    linger,
    number_of,
    prefetch_slot,
    put,
    retire,
    word_of,
)

PAIR = np.dtype([("key", "i8"), ("value", "i8")])  # key 0 is an empty pair
ROUTE = np.dtype([("hash", "u8"), ("number", "i4"), ("instance", "i4"), ("expires_us", "i8")])
PAIR_BYTES = PAIR.itemsize
_LANES = 7
_pair_at: Any = record_at(PAIR)
_route_at: Any = record_at(ROUTE)


@compiled
def _pair_key(number, p):
    return (number << 16) + p + 1


@compiled
def _home(key, shift):
    """Where the search for a pair starts. Those of an instance and eight numbers in a row lie in a row, for so the
    blocks of a prompt are mostly numbered: a few of them come from memory together."""
    lane = (key >> 16) & _LANES
    return home(np.uint64(key - (lane << 16)), shift) & ~_LANES | lane


@compiled
def _search_pair(table, mask, shift, key):
    at = _home(key, shift)
    while True:
        pair = _pair_at(table, at)
        if pair.key == 0 or pair.key == key:
            return at
        at = (at + 1) & mask


@compiled
def _prefetch_pair(table, shift, key):
    prefetch(table + PAIR_BYTES * _home(key, shift))


@compiled
def _vacate_pair(table, mask, shift, at):
    hole = at
    while True:
        at = (at + 1) & mask
        pair = _pair_at(table, at)
        if pair.key == 0:
            break
        if ((at - _home(pair.key, shift)) & mask) >= ((at - hole) & mask):
            target = _pair_at(table, hole)
            target.key = pair.key
            target.value = pair.value
            hole = at
    _pair_at(table, hole).key = 0


@compiled
def move_pairs(old, size, table, mask, shift, renumbered):
    """Copy pairs to an empty table, with instances renumbered (int64; -1: dropped); how many there are now."""
    kept = 0
    for i in range(size):
        pair = _pair_at(old, i)
        if pair.key == 0:
            continue
        p = i8_at(renumbered)[(pair.key - 1) & 0xFFFF]
        if p < 0:
            continue
        key = _pair_key((pair.key - 1) >> 16, p)
        target = _pair_at(table, _search_pair(table, mask, shift, key))
        target.key = key
        target.value = pair.value
        kept += 1
    return kept


@compiled
def _expect_one(index, p, number):
    key = _pair_key(number, p)
    pair = _pair_at(index.expected, _search_pair(index.expected, index.expected_mask, index.expected_shift, key))
    if pair.key == 0:
        pair.key = key
        pair.value = 0
        index.expected_used += 1
    pair.value += 1
    cell_of(index, number).held += 1
    word = word_of(index, number, p)
    if i8_at(index.blocks)[word] & bit_of(HOST, p) == 0:
        i8_at(index.blocks)[word] |= bit_of(PENDING, p)


@compiled
def expect(at, p, numbers):
    """A request will bring blocks to instance p: they are held, and pending where not resident.

    -1, or the place of a number not in use, and nothing is done; -2 if the table of pairs must grow first.
    """
    index = index_at(at, 0)
    bad = first_bad(index, numbers, False)
    if bad >= 0:
        return bad
    if index.expected_used + len(numbers) > index.expected_limit:
        return -2
    for i in range(len(numbers)):
        _expect_one(index, p, np.int64(numbers[i]))
    return -1


@compiled
def bring(at, p, hashes, known, numbers):
    """`intern` the hashes of a chain, then `expect` them on instance p; how many got a number, written to `numbers`.

    `known`: numbers of the leading ones, as found of late. -2 if the table of pairs must grow first.
    """
    index = index_at(at, 0)
    count = len(hashes)
    if index.expected_used + count > index.expected_limit:
        return np.int64(-2)
    for i in range(len(known), min(len(known) + AHEAD, count)):
        prefetch_slot(index, hashes[i])
    before = np.int64(-1)
    for i in range(count):
        number = np.int64(-1)
        if i + AHEAD < len(known):
            _prefetch_pair(index.expected, index.expected_shift, _pair_key(np.int64(known[i + AHEAD]), p))
        if i < len(known):
            number = np.int64(known[i])
            cell = cell_of(index, number)
            if cell.used == 0 or cell.hash != hashes[i]:
                number = np.int64(-1)
        elif i + AHEAD < count:
            prefetch_slot(index, hashes[i + AHEAD])
        if number < 0:
            number = number_of(index, hashes[i], before)
        if number < 0:
            index.exhausted = 0
            return np.int64(i)
        numbers[i] = number
        before = number
        _expect_one(index, p, number)
    index.exhausted = 0
    return np.int64(count)


@compiled
def unexpect(at, p, numbers, until_us):
    """A request that was to bring blocks to instance p is done with them; what nothing refers to then lingers until a
    time, or is given back at once (-1).

    -1, or the place of a number not expected there; the rest is done all the same.
    """
    index = index_at(at, 0)
    bad = first_bad(index, numbers, True)
    if bad >= 0:
        return bad
    return settle(at, p, numbers, until_us)


@compiled
def settle(at, p, numbers, until_us):
    """`unexpect` numbers that are in use for certain."""
    index = index_at(at, 0)
    bad = -1
    index.exhausted = 0
    for i in range(len(numbers) - 1, -1, -1):
        number = np.int64(numbers[i])
        if i >= AHEAD:
            later = np.int64(numbers[i - AHEAD])
            _prefetch_pair(index.expected, index.expected_shift, _pair_key(later, p))
            if until_us < 0 and cell_of(index, later).held == 1:  # it will be given back, unless it is somewhere by now
                prefetch_slot(index, cell_of(index, later).hash)
        place = _search_pair(index.expected, index.expected_mask, index.expected_shift, _pair_key(number, p))
        pair = _pair_at(index.expected, place)
        if pair.key == 0:
            bad = i
            continue
        pair.value -= 1
        if pair.value == 0:
            _vacate_pair(index.expected, index.expected_mask, index.expected_shift, place)
            index.expected_used -= 1
            i8_at(index.blocks)[word_of(index, number, p)] &= ~bit_of(PENDING, p)
        cell = cell_of(index, number)
        cell.held -= 1
        if cell.held == 0:
            if until_us < 0:
                retire(index, number)
            else:
                linger(index, number, until_us)
    return bad


# --- what is only assumed to be somewhere, for a time ---------------------------------------------------------------


@compiled
def _forget_first(index):
    """The oldest route: the block is no longer assumed to be there, unless it was routed there again since."""
    route = _route_at(index.routes, index.route_first & index.route_mask)
    index.route_first += 1
    key = _pair_key(np.int64(route.number), np.int64(route.instance))
    place = _search_pair(index.routed, index.routed_mask, index.routed_shift, key)
    pair = _pair_at(index.routed, place)
    if pair.key != 0:
        if pair.value != route.expires_us:
            return 0
        _vacate_pair(index.routed, index.routed_mask, index.routed_shift, place)
        index.routed_used -= 1
    cell = cell_of(index, np.int64(route.number))
    if cell.used != 0 and cell.hash == route.hash and drop(index, np.int64(route.number), route.instance, ROUTED):
        retire(index, np.int64(route.number))
        return 1
    return 0


@compiled
def forget(at, now_us):
    """Forget what was assumed until `now_us` at the latest; how many blocks."""
    index = index_at(at, 0)
    done = 0
    while (
        index.route_first < index.route_last
        and _route_at(index.routes, index.route_first & index.route_mask).expires_us <= now_us
    ):
        if index.route_first + AHEAD < index.route_last:
            later = _route_at(index.routes, (index.route_first + AHEAD) & index.route_mask)
            key = _pair_key(np.int64(later.number), np.int64(later.instance))
            _prefetch_pair(index.routed, index.routed_shift, key)
        done += _forget_first(index)
    return done


@compiled
def route(at, p, hashes, held, expires_us):
    """A chain of blocks is assumed to be on instance p until a time; how many got in.

    `held`: numbers of the leading ones, which a request holds. Where too much is assumed already, the oldest is
    forgotten before its time. -2 if the ring must grow first, and nothing is done.
    """
    index = index_at(at, 0)
    room = index.route_mask + 1
    if index.route_last - index.route_first + len(hashes) > room and room < index.route_limit:
        return -2
    before = np.int64(-1)
    done = 0
    for i in range(len(hashes)):
        if i + AHEAD < len(held):
            _prefetch_pair(index.routed, index.routed_shift, _pair_key(np.int64(held[i + AHEAD]), p))
        before = np.int64(held[i]) if i < len(held) else number_of(index, hashes[i], before)
        if before < 0:
            break
        done += 1
        put(index, before, p, ROUTED)
        if index.route_last - index.route_first > index.route_mask:
            cell_of(index, before).held += 1  # not to be recycled while the ring makes room
            _forget_first(index)
            cell_of(index, before).held -= 1
            put(index, before, p, ROUTED)  # should the ring have forgotten just this one
        entry = _route_at(index.routes, index.route_last & index.route_mask)
        index.route_last += 1
        entry.hash = hashes[i]
        entry.number = before
        entry.instance = p
        entry.expires_us = expires_us
        key = _pair_key(before, p)
        pair = _pair_at(index.routed, _search_pair(index.routed, index.routed_mask, index.routed_shift, key))
        if pair.key == 0:
            pair.key = key
            index.routed_used += 1
        pair.value = expires_us
    return done


@compiled
def unhold_pairs(at, old, size, renumbered):
    """Blocks expected at instances that are dropped are held once less for each who expected them."""
    index = index_at(at, 0)
    for i in range(size):
        pair = _pair_at(old, i)
        if pair.key != 0 and i8_at(renumbered)[(pair.key - 1) & 0xFFFF] < 0:
            cell_of(index, (pair.key - 1) >> 16).held -= pair.value


@compiled
def renumber_routes(at, renumbered):
    """Renumber the instances in the ring of routes; a dropped one becomes a route of nothing."""
    index = index_at(at, 0)
    for i in range(index.route_first, index.route_last):
        entry = _route_at(index.routes, i & index.route_mask)
        p = i8_at(renumbered)[np.int64(entry.instance)]
        entry.instance = max(p, 0)
        if p < 0:
            entry.hash = ~entry.hash
            entry.expires_us = -1
