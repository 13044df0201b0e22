"""The books of the KV cache hold whatever is done to them, and the bytes are where the books say."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.worker.kvcache import Block, Cleared, Event, KvCache, Removed, Stored, Tier

BLOCK = 2


class Cached:
    """A cache, the content of its slots, and what a listener of its events believes."""

    def __init__(self, capacities: tuple[int, int, int]) -> None:
        self.content: dict[tuple[Tier, int], int | None] = {}
        self.believed: dict[int, set[Tier]] = {}
        self.cache = KvCache(capacities, self._move, self._record)

    def _move(self, source: Tier, slot: int, target: Tier, target_slot: int) -> None:
        self.content[target, target_slot] = self.content[source, slot]

    def _record(self, event: Event) -> None:
        if isinstance(event, Stored):
            assert event.block.hash is not None
            assert event.tier not in self.believed.setdefault(event.block.hash, set()), "stored twice"
            self.believed[event.block.hash].add(event.tier)
        elif isinstance(event, Removed):
            self.believed[event.hash].remove(event.tier)
        else:
            assert isinstance(event, Cleared)
            self.believed.clear()

    def fill(self, blocks: list[Block], hashes: list[int]) -> None:
        """What a sequence does when it has computed its blocks."""
        for i, value in enumerate(hashes):
            if i == len(blocks):
                blocks.append(self.cache.grow())
            if blocks[i].hash is None:
                self.content[Tier.DEVICE, blocks[i].slot] = value
                blocks[i] = self.cache.commit(blocks[i], value, hashes[i - 1] if i else None, (value, value))

    def check(self) -> None:
        cache = self.cache
        assert 0 <= cache.promised <= len(cache.free[0]) + len(cache.idle[0])
        for tier in Tier:
            idle = [block.slot for block in cache.idle[tier]]
            places = [*cache.free[tier], *idle]
            assert len(set(places)) == len(places) <= cache.capacities[tier]
            assert all(block.uses == 0 and block.tier == tier for block in cache.idle[tier])
        places = [(block.tier, block.slot) for block in cache.committed.values()]
        assert len(set(places)) == len(places)
        for value, block in cache.committed.items():
            assert block.hash == value and block.slot not in cache.free[block.tier]
            assert (block.uses == 0) == (block in cache.idle[block.tier])
            assert self.content[block.tier, block.slot] == value, "another block's bytes"
        assert {value: tiers for value, tiers in self.believed.items() if tiers} == {
            value: {block.tier} for value, block in cache.committed.items()
        }


def chain(path: list[int]) -> list[int]:
    """Hashes that name a block and all before it."""
    hashes, before = [], 0
    for step in path:
        before = hash((before, step))
        hashes.append(before)
    return hashes


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(chain)


class Machine(RuleBasedStateMachine):
    """Sequences come, compute, end; transfers pin."""

    @initialize(device=st.integers(4, 10), host=st.integers(0, 4), disk=st.integers(0, 4))
    def begin(self, device: int, host: int, disk: int) -> None:
        self.cached = Cached((device, host, disk))
        self.sequences: list[dict[str, Any]] = []
        self.pins: list[list[Block]] = []

    @rule(hashes=paths, more=st.integers(0, 3))
    def admit(self, hashes: list[int], more: int) -> None:
        cache = self.cached.cache
        hits, room, needed = cache.match(hashes), cache.available, len(hashes) + more
        blocks = cache.admit(hashes, needed)
        if blocks is None:
            on_device = [block for block in hits if block.tier == Tier.DEVICE]
            assert needed - sum(block.uses > 0 for block in on_device) > room
            return
        assert blocks == hits and all(block.tier == Tier.DEVICE for block in blocks)
        self.sequences.append({"hashes": hashes, "blocks": blocks, "needed": needed})

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        count = data.draw(st.integers(0, len(sequence["hashes"])))
        self.cached.fill(sequence["blocks"], sequence["hashes"][:count])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def grow_all(self, data: st.DataObject) -> None:
        """What was promised is there."""
        sequence = data.draw(st.sampled_from(self.sequences))
        while len(sequence["blocks"]) < sequence["needed"]:
            block = self.cached.cache.grow()
            self.cached.content[Tier.DEVICE, block.slot] = None
            sequence["blocks"].append(block)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.cached.cache.release(sequence["blocks"], sequence["needed"] - len(sequence["blocks"]))

    @rule(hashes=paths)
    def pin(self, hashes: list[int]) -> None:
        self.pins.append(self.cached.cache.pin(hashes))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.cached.cache.release(self.pins.pop())

    @rule()
    def clear(self) -> None:
        busy = any(self.pins) or any(sequence["blocks"] for sequence in self.sequences)
        assert self.cached.cache.clear() or busy

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cached"):
            self.cached.check()
            used = {id(block) for sequence in self.sequences for block in sequence["blocks"]}
            used |= {id(block) for pins in self.pins for block in pins}
            assert len(used) == sum(self.cached.cache.in_use(tier) for tier in Tier)

    def teardown(self) -> None:
        if not hasattr(self, "cached"):
            return
        for sequence in self.sequences:
            self.cached.cache.release(sequence["blocks"], sequence["needed"] - len(sequence["blocks"]))
        for pins in self.pins:
            self.cached.cache.release(pins)
        assert self.cached.cache.promised == 0 and self.cached.cache.clear()
        self.cached.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(cached: Cached, path: list[int]) -> list[int]:
    """A sequence came, computed and went."""
    hashes = chain(path)
    blocks = cached.cache.admit(hashes, len(hashes))
    assert blocks is not None
    cached.fill(blocks, hashes)
    cached.cache.release(blocks)
    return hashes


def tiers(cached: Cached, hashes: list[int]) -> list[Tier | None]:
    found = [cached.cache.committed.get(value) for value in hashes]
    return [None if block is None else block.tier for block in found]


def test_the_least_recently_used_goes_down_and_a_hit_comes_back() -> None:
    cached = Cached((4, 2, 2))
    first, second = filled(cached, [1, 1, 1]), filled(cached, [2, 2, 2])
    # Of the first, the deepest went first; its first block found a place on the device.
    assert tiers(cached, first) == [Tier.DEVICE, Tier.HOST, Tier.HOST]
    third = filled(cached, [3, 3, 3])
    assert tiers(cached, third) == [Tier.DEVICE] * 3
    assert tiers(cached, second) == [Tier.DEVICE, Tier.HOST, Tier.HOST]
    assert tiers(cached, first) == [Tier.DISK, Tier.DISK, None]
    again = cached.cache.admit(first, 3)
    assert again is not None and len(again) == 2
    assert tiers(cached, first) == [Tier.DEVICE, Tier.DEVICE, None]
    cached.cache.release(again, 1)
    cached.check()


def test_a_sequence_is_not_admitted_to_room_that_was_promised() -> None:
    cached = Cached((4, 0, 0))
    first = cached.cache.admit(chain([1, 1]), 3)
    assert first == [] and cached.cache.available == 1
    assert cached.cache.admit(chain([2]), 2) is None
    cached.cache.release(first, 3)
    assert cached.cache.admit(chain([2]), 2) == []


def test_what_two_compute_is_kept_once() -> None:
    cached = Cached((6, 0, 0))
    hashes = chain([1, 1])
    one, two = cached.cache.admit(hashes, 2), cached.cache.admit(hashes, 2)
    assert one is not None and two is not None
    cached.fill(one, hashes)
    cached.fill(two, hashes)
    assert one == two and all(block.uses == 2 for block in one)
    assert cached.cache.in_use() == 2
    cached.cache.release(one)
    cached.cache.release(two)
    cached.check()


def test_a_block_that_is_sent_from_the_host_is_not_taken_from_under_it() -> None:
    cached = Cached((2, 2, 0))
    hashes = filled(cached, [1, 1])
    filled(cached, [2, 2])
    assert tiers(cached, hashes) == [Tier.HOST, Tier.HOST]
    pinned = cached.cache.pin(hashes)
    filled(cached, [3, 3])  # [2, 2] finds no place on the host
    assert tiers(cached, hashes) == [Tier.HOST, Tier.HOST]
    cached.cache.release(pinned)
    cached.check()
