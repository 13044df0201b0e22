"""The worker's KV blocks: which are where, what they hold, who uses them, and which goes when room is needed.

A block is *private* while its sequence fills it; when it is full it is *committed* under its chained hash and may be
shared. A block in use stays where it is. One that nobody uses is kept until its tier needs the room; then the least
recently used goes one tier down (device, host, disk), and from the last one it is gone. A hit brings it back to the
device. A block is on one tier at a time. Of one sequence the deepest blocks go first, so what is left can be reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(slots=True, eq=False)
class Block:
    """A block and its place. `hash` is None while it is private; `parent` is the hash before it, None at the start.

    `extra` is the extra key of the block's hash, "" for none. `uses` counts the sequences and transfers that need it.
    """

    tier: Tier
    slot: int
    uses: int = 1
    hash: int | None = None
    parent: int | None = None
    tokens: tuple[int, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    block: Block
    tier: Tier


@dataclass(frozen=True, slots=True)
class Removed:
    hash: int
    tier: Tier


class Cleared:
    """All of the cache is gone."""


Event = Stored | Removed | Cleared


class KvCache:
    """The books of all tiers; the bytes are moved by `move`.

    Args:
        capacities: blocks of device, host and disk. move: (from tier, slot, to tier, slot) copies a block's content.
        record: told what came to and left a tier, in order.
    """

    def __init__(
        self,
        capacities: tuple[int, int, int],
        move: Callable[[Tier, int, Tier, int], None],
        record: Callable[[Event], None],
    ) -> None:
        self.capacities = capacities
        self.committed: dict[int, Block] = {}
        self.free = tuple(list(range(size - 1, -1, -1)) for size in capacities)
        self.idle: tuple[OrderedDict[Block, None], ...] = tuple(OrderedDict() for _ in Tier)  # oldest first
        self.promised = 0  # device blocks that admitted sequences may still take
        self._move = move
        self._record = record

    @property
    def available(self) -> int:
        """Device blocks that can still be promised."""
        return len(self.free[Tier.DEVICE]) + len(self.idle[Tier.DEVICE]) - self.promised

    def in_use(self, tier: Tier = Tier.DEVICE) -> int:
        """Blocks of a tier that somebody uses."""
        return self.capacities[tier] - len(self.free[tier]) - len(self.idle[tier])

    def match(self, hashes: Sequence[int]) -> list[Block]:
        """The leading blocks that are cached, on whatever tier."""
        found = []
        for value in hashes:
            block = self.committed.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, hashes: Sequence[int], blocks: int) -> list[Block] | None:
        """Room for a sequence of `blocks` blocks: its cached prefix, on the device and in use, and a promise of the
        rest, to be had by `grow`. None where there is no room now.
        """
        hits = self.match(hashes)
        on_device = [block for block in hits if block.tier == Tier.DEVICE]
        if blocks - len(on_device) + sum(not block.uses for block in on_device) > self.available:
            return None
        for block in hits:
            self._use(block)
        for block in hits:
            if block.tier != Tier.DEVICE:
                slot = self._room(Tier.DEVICE)
                assert slot is not None, "the room was counted"
                self._place(block, Tier.DEVICE, slot)
        self.promised += blocks - len(hits)
        return hits

    def grow(self) -> Block:
        """A private block of those promised."""
        assert self.promised > 0
        self.promised -= 1
        slot = self._room(Tier.DEVICE)
        assert slot is not None, "the room was promised"
        return Block(Tier.DEVICE, slot)

    def commit(self, block: Block, value: int, parent: int | None, tokens: tuple[int, ...], extra: str = "") -> Block:
        """A private block is full: from now on it can be found by its hash. What was computed twice is kept once: the
        block to go on with is returned."""
        twin = self.committed.get(value)
        if twin is not None and twin.tier == Tier.DEVICE:
            self._use(twin)
            self.free[Tier.DEVICE].append(block.slot)
            return twin
        if twin is not None:
            if twin.uses:  # being sent to another worker: this one stays private
                return block
            del self.idle[twin.tier][twin]
            self._forget(twin)
        block.hash, block.parent, block.tokens, block.extra = value, parent, tokens, extra
        self.committed[value] = block
        self._record(Stored(block, Tier.DEVICE))
        return block

    def pin(self, hashes: Sequence[int]) -> list[Block]:
        """The leading cached blocks, in use but where they are; fewer where sequences were promised their room."""
        pinned = []
        for block in self.match(hashes):
            if not block.uses and block.tier == Tier.DEVICE and self.available < 1:
                break
            self._use(block)
            pinned.append(block)
        return pinned

    def hold(self, blocks: Sequence[Block]) -> None:
        """One use more of blocks that are in use."""
        for block in blocks:
            assert block.uses > 0
            block.uses += 1

    def release(self, blocks: Sequence[Block], promised: int = 0) -> None:
        """One use less of each, and `promised` blocks less that are promised. The deepest is the first to go."""
        self.promised -= promised
        for block in reversed(blocks):
            assert block.uses > 0
            block.uses -= 1
            if block.uses == 0:
                if block.hash is None:
                    self.free[block.tier].append(block.slot)
                else:
                    self.idle[block.tier][block] = None

    def clear(self) -> bool:
        """Forget all, where nothing is in use; whether it was done."""
        if any(self.in_use(tier) for tier in Tier):
            return False
        for tier in Tier:
            self.free[tier].extend(block.slot for block in self.idle[tier])
            self.idle[tier].clear()
        self.committed.clear()
        self._record(Cleared())
        return True

    def _use(self, block: Block) -> None:
        if block.uses == 0:
            del self.idle[block.tier][block]
        block.uses += 1

    def _room(self, tier: Tier) -> int | None:
        """A free slot, for which the oldest idle block goes down; None where all are in use or the tier has none."""
        if self.free[tier]:
            return self.free[tier].pop()
        if not self.idle[tier]:
            return None
        oldest, _ = self.idle[tier].popitem(last=False)
        for lower in list(Tier)[tier + 1 :]:
            room = self._room(lower)
            if room is not None:
                self._place(oldest, lower, room)
                self.idle[lower][oldest] = None
                break
        else:
            self._forget(oldest)
        return self.free[tier].pop()

    def _place(self, block: Block, tier: Tier, slot: int) -> None:
        assert block.hash is not None
        self._move(block.tier, block.slot, tier, slot)
        self._record(Stored(block, tier))  # first: a listener must not think that it is nowhere
        self._record(Removed(block.hash, block.tier))
        self.free[block.tier].append(block.slot)
        block.tier, block.slot = tier, slot

    def _forget(self, block: Block) -> None:
        assert block.hash is not None
        del self.committed[block.hash]
        self._record(Removed(block.hash, block.tier))
        self.free[block.tier].append(block.slot)
