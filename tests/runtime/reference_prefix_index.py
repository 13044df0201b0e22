"""The prefix index, slow and obvious: dictionaries and sets, no capacity. And what must hold of the fast one."""

from __future__ import annotations

import numpy as np

from envs.state import DEVICE, DISK, HOST, PENDING, ROW_BITS
from runtime.block_hash import BASE, Namespace, hash_blocks
from runtime.prefix_index import Medium, PrefixIndex


class Block:
    """What is known of a block."""

    def __init__(self, before: int | None) -> None:
        self.before = before
        self.held = 0
        self.places: set[tuple[int, int]] = set()  # (instance, medium)
        self.expected: dict[int, int] = {}  # by instance, how many requests
        self.pending: set[int] = set()
        self.lingers = False


class ReferenceIndex:
    """`PrefixIndex` without numbers: operations take hashes."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, Block] = {}
        self.engine: dict[tuple[int, int], int] = {}
        self.until: dict[tuple[int, int], float] = {}  # (hash, instance): end of an assumption
        self.lingering: list[tuple[float, int]] = []  # until when, hash

    # --- keeping blocks ---

    def _know(self, own: int, before: int | None) -> Block:
        if own not in self.blocks:
            self.blocks[own] = Block(before)
        return self.blocks[own]

    def _is_idle(self, own: int) -> bool:
        block = self.blocks.get(own)
        if block is None or block.held or block.places or block.pending:
            return False
        return not any(other.before == own for other in self.blocks.values())

    def _retire(self, own: int | None) -> None:
        while own is not None and self._is_idle(own):
            own = self.blocks.pop(own).before

    def _put(self, own: int, before: int | None, instance: int, medium: int) -> bool:
        block = self._know(own, before)
        fresh = (instance, medium) not in block.places
        block.places.add((instance, medium))
        block.pending.discard(instance)
        return fresh

    def _drop(self, own: int, instance: int, medium: int) -> bool:
        block = self.blocks.get(own)
        if block is None or (instance, medium) not in block.places:
            return False
        block.places.discard((instance, medium))
        return True

    def _resident(self, own: int, instance: int) -> bool:
        return own in self.blocks and any(p == instance for p, _ in self.blocks[own].places)

    # --- operations ---

    def find(self, hashes: list[int]) -> int:
        known = 0
        while known < len(hashes) and hashes[known] in self.blocks:
            known += 1
        return known

    def acquire(self, hashes: list[int]) -> None:
        before = None
        for own in hashes:
            self._know(own, before).held += 1
            before = own

    def release(self, hashes: list[int]) -> None:
        for own in reversed(hashes):
            self.blocks[own].held -= 1
            self._retire(own)

    def expect(self, instance: int, hashes: list[int]) -> None:
        for own in hashes:
            block = self.blocks[own]
            block.held += 1
            block.expected[instance] = block.expected.get(instance, 0) + 1
            if not self._resident(own, instance):
                block.pending.add(instance)

    def unexpect(self, instance: int, hashes: list[int], until_s: float | None = None) -> None:
        for own in reversed(hashes):
            block = self.blocks[own]
            block.held -= 1
            block.expected[instance] -= 1
            if not block.expected[instance]:
                del block.expected[instance]
                block.pending.discard(instance)
            if until_s is None:
                self._retire(own)
            elif self._is_idle(own) and not block.lingers:
                block.lingers = True
                self.lingering.append((until_s, own))

    def store(self, instance: int, medium: int, hashes: list[int], parent: int | None = None) -> None:
        before = parent if parent in self.blocks else None
        for own in hashes:
            self._put(own, before, instance, medium)
            before = own

    def remove(self, instance: int, medium: int, hashes: list[int]) -> int:
        done = 0
        for own in reversed(hashes):
            if self._drop(own, instance, medium):
                done += 1
                self._retire(own)
        return done

    def clear(self, instance: int) -> None:
        for own in list(self.blocks):
            if own in self.blocks:
                block = self.blocks[own]
                gone = {place for place in block.places if place[0] == instance}
                block.places -= gone
                if gone:
                    self._retire(own)
        self.engine = {key: own for key, own in self.engine.items() if key[0] != instance}

    def assume(self, instance: int, hashes: list[int], until_s: float) -> None:
        self.store(instance, Medium.ROUTED, hashes)
        for own in hashes:
            self.until[own, instance] = until_s

    def expire(self, now_s: float) -> None:
        while self.lingering and self.lingering[0][0] <= now_s:
            _, own = self.lingering.pop(0)
            if own in self.blocks:
                self.blocks[own].lingers = False
                self._retire(own)
        for (own, instance), until_s in list(self.until.items()):
            if until_s <= now_s:
                del self.until[own, instance]
                if self._drop(own, instance, Medium.ROUTED):
                    self._retire(own)

    def stored(
        self,
        instance: int,
        medium: int,
        engine: list[int],
        parent: int | None,
        tokens: list[int],
        namespace: Namespace = BASE,
    ) -> int:
        """How many blocks are orphans."""
        orphans = 0
        whole = len(tokens) // self.block_tokens
        above = None if parent is None else self.engine.get((instance, parent))
        known = parent is None or above is not None
        before = above if above in self.blocks else None
        for i, name in enumerate(engine):
            if i < whole and known:
                block = tokens[i * self.block_tokens : (i + 1) * self.block_tokens]
                own = int(hash_blocks(block, self.block_tokens, namespace=namespace, parent=above)[0])
            elif (instance, name) in self.engine:
                own = self.engine[instance, name]
            else:
                orphans += 1
                known, before = False, None
                continue
            known = True
            self._put(own, before, instance, medium)
            old = self.engine.get((instance, name))
            if old is not None and old != own:
                gone = [m for m in Medium if self._drop(old, instance, m)]
                if gone:
                    self._retire(old)
            self.engine[instance, name] = own
            above = before = own
        return orphans

    def removed(self, instance: int, medium: int, engine: list[int]) -> None:
        for name in reversed(engine):
            own = self.engine.get((instance, name))
            if own is None:
                continue
            dropped = self._drop(own, instance, medium)
            if not self._resident(own, instance):
                del self.engine[instance, name]
            if dropped:
                self._retire(own)

    def rebind(self, mapping: list[int]) -> None:
        for block in self.blocks.values():
            for p, count in block.expected.items():
                if mapping[p] < 0:
                    block.held -= count
            block.places = {(mapping[p], m) for p, m in block.places if mapping[p] >= 0}
            block.pending = {mapping[p] for p in block.pending if mapping[p] >= 0}
            block.expected = {mapping[p]: n for p, n in block.expected.items() if mapping[p] >= 0}
        self.engine = {
            (mapping[p], name): own
            for (p, name), own in self.engine.items()
            if mapping[p] >= 0 and self._resident(own, mapping[p])
        }
        self.until = {(own, mapping[p]): t for (own, p), t in self.until.items() if mapping[p] >= 0}
        for own in list(self.blocks):
            self._retire(own if own in self.blocks else None)


# --- the fast one's tables -------------------------------------------------------------------------------------------


def bits(word: int, row: int, count: int) -> set[int]:
    return {p for p in range(count) if word >> (row * ROW_BITS + p) & 1}


def contents(index: PrefixIndex) -> dict[int, tuple[set[tuple[int, int]], set[int], int]]:
    """By hash: (places, pending, held) in the tables of an index."""
    made = {}
    for number in np.flatnonzero(index._cells["used"]):
        cell = index._cells[number]
        places, pending = set(), set()
        for w in range(index.blocks.shape[1]):
            word, media = int(index.blocks[number, w]), int(index._media[number, w])
            for medium in Medium:
                places |= {(16 * w + p, int(medium)) for p in bits(media, medium, 16)}
            pending |= {16 * w + p for p in bits(word, PENDING, 16)}
        made[int(cell["hash"])] = (places, pending, int(cell["held"]))
    return made


def check(index: PrefixIndex) -> None:
    """Assert what must always hold of the tables."""
    cells, slots = index._cells, index._slots
    used = np.flatnonzero(cells["used"])
    free = index._free[: int(index._header["free"][0])]
    assert len(used) == index.used
    assert sorted([*used, *free]) == list(range(index.capacity))
    filled = slots[slots["number"] != 0]
    assert sorted(filled["number"] - 1) == list(used)
    assert (cells["hash"][filled["number"] - 1] == filled["hash"]).all()
    hashes = cells["hash"][used]
    assert index.find(hashes).tolist() == used.tolist()  # each is reached from its home
    followers = np.zeros(index.capacity, int)
    for number in used:
        before = cells["before"][number]
        if before >= 0:
            assert cells["used"][before]
            followers[before] += 1
    assert (followers[used] == cells["followers"][used]).all()
    assert not index.blocks[free].any() and not index._media[free].any()
    counts = np.zeros((index.instances, 6), int)
    for number in used:
        for w in range(index.blocks.shape[1]):
            word, media = int(index.blocks[number, w]), int(index._media[number, w])
            rows = [bits(media, medium, 16) for medium in range(4)]
            host, device = bits(word, HOST, 16), bits(word, DEVICE, 16)
            assert host == rows[0] | rows[1] | rows[2] | rows[3]
            assert device == rows[Medium.GPU] | rows[Medium.ROUTED]
            assert not host & bits(word, PENDING, 16)
            assert not bits(word, DISK, 16)
            for column, row in enumerate([*rows, host, device]):
                for p in row:
                    counts[16 * w + p, column] += 1
    names = ("gpu", "cpu", "disk", "routed", "host", "device")
    for column, name in enumerate(names):
        assert index._places[name].tolist() == counts[:, column].tolist(), name
    entries = index._engine[index._engine["tag"] != 0]
    assert len(entries) == index.engine_hashes
    pairs = index._expected[index._expected["key"] != 0]
    assert len(pairs) == int(index._header["expected_used"][0])
    assert (pairs["value"] > 0).all()
