"""Scanned KV events into the table of known blocks, a whole batch in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import record_at

from .block_table import clear, drop, index_at, instance_of, look_up, number_of, put, retire
from .engine_hashes import engine_own, forget_engine, prefetch_engine, remember, tag_of
from .event_scan import CLEARED, REMOVED, STORED, event_at
from .xxh3 import next_hash, u8_at

APPLY = np.dtype(
    [
        # given
        *((name, "i8") for name in ("index", "instance", "events_at", "hashes_at", "tokens_at", "extras_at", "count")),
        # found, added to by every call
        ("stored", "i8"),  # blocks that were not there before
        ("removed", "i8"),
        ("cleared", "i8"),  # events
        ("orphans", "i8"),  # stored blocks whose own hash cannot be known
        ("unknown", "i8"),  # removed blocks that were not known
        ("other_groups", "i8"),
        ("mismatched", "i8"),  # stored events of another block size
        ("full", "i8"),  # stored blocks there was no room for
    ]
)
_apply_at: Any = record_at(APPLY)
_AHEAD = 8


@compiled
def _stored(index, work, event, hashes):
    """Blocks are on a medium: their own hashes by tokens, or by what the instance called them before."""
    p = work.instance
    tag = tag_of(index, p)
    medium = np.int64(event.medium)
    tokens = np.int64(event.tokens)
    size = np.int64(event.block_tokens)
    if tokens > 0 and (size != index.block_tokens or tokens > event.hashes * size):
        work.mismatched += 1
        return
    whole = tokens // index.block_tokens
    address = work.tokens_at + 4 * event.first_token
    bytes_per_block = 4 * index.block_tokens
    before = np.int64(-1)
    above = np.uint64(0)
    known = False
    trusted = tokens == 0 and event.standard != 0  # the hashes themselves are own hashes
    if event.rooted == 0:
        known, above, before = engine_own(index, tag, event.parent)
        if not known and trusted:
            before = look_up(index, event.parent, -1)
    for i in range(event.hashes):
        engine = hashes[event.first_hash + i]
        starts = i == 0 and event.rooted != 0
        own = engine
        if i < whole and (known or starts):
            extra = u8_at(work.extras_at)[event.first_extra + i] if event.first_extra >= 0 else np.uint64(0)
            if starts:
                extra += event.root_extra
            own = next_hash(above, starts, address + i * bytes_per_block, bytes_per_block, extra, event.seed)
        else:
            named, other, _ = engine_own(index, tag, engine)
            if named:
                own = other
            elif not trusted:
                work.orphans += 1
                known = False
                before = np.int64(-1)
                continue
        known = True
        above = own
        before = number_of(index, own, before)
        if before < 0:
            work.full += event.hashes - i
            return  # what follows would be of no use without it
        if put(index, before, p, medium):
            work.stored += 1
        remember(index, p, tag, engine, own, before)


@compiled
def _removed(index, work, event, hashes):
    """Blocks are no longer on a medium. From the end, so that a chain that nothing else keeps goes whole."""
    p = work.instance
    tag = tag_of(index, p)
    medium = np.int64(event.medium)
    for i in range(event.hashes - 1, -1, -1):
        engine = hashes[event.first_hash + i]
        known, dropped = forget_engine(index, p, tag, engine, medium)
        if not known and event.standard != 0:
            number = look_up(index, engine, -1)
            if number >= 0:
                known = True
                dropped = drop(index, number, p, medium)
                if dropped:
                    retire(index, number)
        if dropped:
            work.removed += 1
        elif not known:
            work.unknown += 1


@compiled
def apply_events(at, first, budget):
    """Apply events from `first` on until `budget` blocks were looked at; the next event to apply.

    -next - 1 where the table of the engines' hashes must grow before the next event.
    """
    work = _apply_at(at, 0)
    index = index_at(work.index, 0)
    hashes = u8_at(work.hashes_at)
    place = instance_of(index, work.instance)
    tag = tag_of(index, work.instance)
    for e in range(first, work.count):
        event = event_at(work.events_at, e)
        if budget <= 0:
            return e
        budget -= event.hashes + 1
        if e + _AHEAD < work.count:
            later = event_at(work.events_at, e + _AHEAD)
            if later.hashes > 0:
                prefetch_engine(index, hashes[later.first_hash], tag)
        group = np.int64(event.group)
        if event.kind == STORED:
            if event.full != 0 and place.group < 0:
                place.group = max(group, 0)
            if (event.full != 0 and max(group, 0) != place.group) or (
                event.full == 0 and group >= 0 and group != max(place.group, 0)
            ):
                work.other_groups += 1
                continue
            if index.engine_used + event.hashes > index.engine_limit:
                return -e - 1
            _stored(index, work, event, hashes)
        elif event.kind == REMOVED:
            if group >= 0 and group != max(place.group, 0):
                work.other_groups += 1
                continue
            _removed(index, work, event, hashes)
        elif event.kind == CLEARED:
            clear(work.index, work.instance, np.int64(event.medium))
            tag = tag_of(index, work.instance)
            work.cleared += 1
    return work.count
