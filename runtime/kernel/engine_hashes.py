"""What the engines call their blocks: an open-addressing table (instance, the engine's hash) -> own hash.

It survives the recycling of numbers. An entry goes when the instance has the block no longer; those of an instance that
was cleared are known by an old generation in their tag, and are left behind when the table moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import check, i4_at, i8_at, prefetch, record_at
from envs.state import HOST

from .block_table import bit_of, cell_of, drop, drop_all, home, index_at, instance_of, retire, search, slot_of, word_of
from .xxh3 import u8_at

ENGINE = np.dtype([("engine", "u8"), ("own", "u8"), ("number", "i4"), ("tag", "i4")])  # tag 0 is an empty entry
_engine_at: Any = record_at(ENGINE)


@compiled
def entry_of(index, at):
    return _engine_at(index.engine, check(at, index.engine_mask + 1))


@compiled
def tag_of(index, p):
    """What marks the entries of instance p since it was last cleared."""
    return (instance_of(index, p).generation << 16) + p + 1


@compiled
def _engine_key(engine, tag):
    return engine ^ (np.uint64(tag) * np.uint64(0xD6E8FEB86659FD93))


@compiled
def prefetch_engine(index, engine, tag):
    prefetch(index.engine + 24 * home(_engine_key(engine, tag), index.engine_shift))


@compiled
def _search_engine(index, engine, tag):
    at = home(_engine_key(engine, tag), index.engine_shift)
    while True:
        entry = entry_of(index, at)
        if entry.tag == 0 or (entry.engine == engine and entry.tag == tag):
            return at
        at = (at + 1) & index.engine_mask


@compiled
def _vacate_engine(index, at):
    mask = index.engine_mask
    hole = at
    while True:
        at = (at + 1) & mask
        entry = entry_of(index, at)
        if entry.tag == 0:
            break
        start = home(_engine_key(entry.engine, np.int64(entry.tag)), index.engine_shift)
        if ((at - start) & mask) >= ((at - hole) & mask):
            target = entry_of(index, hole)
            target.engine = entry.engine
            target.own = entry.own
            target.number = entry.number
            target.tag = entry.tag
            hole = at
    entry_of(index, hole).tag = 0
    index.engine_used -= 1


@compiled
def _number_of_entry(index, entry):
    """The number of the block an entry stands for, -1 if it has none any more."""
    number = np.int64(entry.number)
    if number >= 0:
        cell = cell_of(index, number)
        if cell.used != 0 and cell.hash == entry.own:
            return number
    slot = slot_of(index, search(index, entry.own))
    return np.int64(slot.number) - 1


@compiled
def _resident(index, number, p):
    return i8_at(index.blocks)[word_of(index, number, p)] & bit_of(HOST, p) != 0


@compiled
def move_engine(at, old, size, renumbered):
    """Copy the entries that still say something from an old table to the present, empty one.

    `renumbered` (int64, by old instance; -1: dropped) holds the new instances. An entry says something if its instance
    was not cleared since and has the block; others are of recycled numbers, and nothing can come of them.
    """
    index = index_at(at, 0)
    index.engine_used = 0
    for i in range(size):
        entry = _engine_at(old, i)
        if entry.tag == 0:
            continue
        p = i8_at(renumbered)[(np.int64(entry.tag) & 0xFFFF) - 1]
        if p < 0:
            continue
        tag = tag_of(index, p)
        if tag >> 16 != np.int64(entry.tag) >> 16:
            continue
        number = _number_of_entry(index, entry)
        if number < 0 or not _resident(index, number, p):
            continue
        target = entry_of(index, _search_engine(index, entry.engine, tag))
        target.engine = entry.engine
        target.own = entry.own
        target.number = number
        target.tag = tag
        index.engine_used += 1


@compiled
def remember(index, p, tag, engine, own, number):
    """Instance p calls a block by the engine's hash. If it called another one so, that one is gone there."""
    entry = entry_of(index, _search_engine(index, engine, tag))
    if entry.tag == 0:
        entry.engine = engine
        entry.tag = tag
        index.engine_used += 1
    elif entry.own != own:
        old = _number_of_entry(index, entry)
        if old >= 0 and drop_all(index, old, p) > 0:
            retire(index, old)
    entry.own = own
    entry.number = number


@compiled
def engine_own(index, tag, engine):
    """(whether the instance is known to call a block by this hash, its own hash, its number or -1)."""
    entry = entry_of(index, _search_engine(index, engine, tag))
    if entry.tag == 0:
        return False, np.uint64(0), np.int64(-1)
    return True, entry.own, _number_of_entry(index, entry)


@compiled
def forget_engine(index, p, tag, engine, medium):
    """The instance no longer has the block of the engine's hash on a medium; (known, whether it was there)."""
    at = _search_engine(index, engine, tag)
    entry = entry_of(index, at)
    if entry.tag == 0:
        return False, False
    number = _number_of_entry(index, entry)
    if number < 0:
        _vacate_engine(index, at)
        return True, False
    dropped = drop(index, number, p, medium)
    if not _resident(index, number, p):
        _vacate_engine(index, at)
    if dropped:
        retire(index, number)
    return True, dropped


@compiled
def restore_engine(at, engine, own, instances, count):
    """Enter what the instances call their blocks; there must be room."""
    index = index_at(at, 0)
    for i in range(count):
        p = np.int64(i4_at(instances)[i])
        number = np.int64(slot_of(index, search(index, u8_at(own)[i])).number) - 1
        remember(index, p, tag_of(index, p), u8_at(engine)[i], u8_at(own)[i], number)
