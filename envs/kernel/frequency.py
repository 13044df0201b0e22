"""What goes first where blocks are evicted by frequency: a heap per tier (docs/physics.md, "Tiers").

A tier's heap has every block there that may go, the first on top. A block that is kept may be missing: it comes back
when it is released. A release only makes a block go later.
"""

from __future__ import annotations

from ..state import TIERS, EvictionRule
from .compile import compiled
from .memory import check, engine_of, eviction_of, i4_at, use_of

LENGTH_AWARE = int(EvictionRule.LENGTH_AWARE)


@compiled
def _index(world, p, tier, i):
    return ((check(p, world.prefills) * TIERS) + check(tier, TIERS)) * world.use_capacity + check(i, world.use_capacity)


@compiled
def _before(world, p, a, b):
    """Whether block a goes before block b."""
    x = use_of(world, p, a)
    y = use_of(world, p, b)
    if x.count != y.count:
        return x.count < y.count
    if engine_of(world).eviction == LENGTH_AWARE and x.depth != y.depth:
        return x.depth > y.depth
    if x.release != y.release:
        return x.release < y.release
    return x.depth > y.depth


@compiled
def _put(world, p, tier, i, block):
    i4_at(world.heaps)[_index(world, p, tier, i)] = block
    i4_at(world.places)[_index(world, p, tier, block)] = i + 1


@compiled
def _at(world, p, tier, i):
    return i4_at(world.heaps)[_index(world, p, tier, i)]


@compiled
def _rise(world, p, tier, i, block):
    while i > 0:
        above = _at(world, p, tier, (i - 1) >> 1)
        if not _before(world, p, block, above):
            break
        _put(world, p, tier, i, above)
        i = (i - 1) >> 1
    _put(world, p, tier, i, block)


@compiled
def _sink(world, p, tier, i, block):
    size = eviction_of(world, p, tier).size
    while 2 * i + 1 < size:
        below = 2 * i + 1
        if below + 1 < size and _before(world, p, _at(world, p, tier, below + 1), _at(world, p, tier, below)):
            below += 1
        other = _at(world, p, tier, below)
        if not _before(world, p, other, block):
            break
        _put(world, p, tier, i, other)
        i = below
    _put(world, p, tier, i, block)


@compiled
def offer(world, p, tier, block):
    """A block of a tier may go, or may go later than before."""
    place = i4_at(world.places)[_index(world, p, tier, block)]
    if place > 0:
        _sink(world, p, tier, place - 1, block)
    else:
        heap = eviction_of(world, p, tier)
        heap.size += 1
        _rise(world, p, tier, heap.size - 1, block)


@compiled
def withdraw(world, p, tier, block):
    """A block is in a tier's heap no more, if it was."""
    at = i4_at(world.places)[_index(world, p, tier, block)] - 1
    if at < 0:
        return
    i4_at(world.places)[_index(world, p, tier, block)] = 0
    heap = eviction_of(world, p, tier)
    heap.size -= 1
    if at < heap.size:  # the last one takes its place
        last = _at(world, p, tier, heap.size)
        if at > 0 and _before(world, p, last, _at(world, p, tier, (at - 1) >> 1)):
            _rise(world, p, tier, at, last)
        else:
            _sink(world, p, tier, at, last)


@compiled
def take_first(world, p, tier):
    """The block of a tier that goes first, out of the heap; -1 if that is empty."""
    if eviction_of(world, p, tier).size == 0:
        return -1
    block = _at(world, p, tier, 0)
    withdraw(world, p, tier, block)
    return block


@compiled
def forget(world, p, block, run):
    """Nothing is known yet of a block of a run on an instance."""
    use = use_of(world, p, block)
    use.run = run
    use.count = 0
    for tier in range(TIERS):
        i4_at(world.places)[_index(world, p, tier, block)] = 0
