"""`PrefixIndex`: which instance has which KV block where, by the hash of the block and all before it.

Every known block has a dense number, so that residency is a table of bits (`ClusterState.blocks`) which `observe` and
policies read as it is. All operations take whole arrays and are compiled (runtime/kernel/block_table.py).

Memory is bounded. There are `capacity` numbers; when all are in use, a block that nobody holds or expects is evicted,
by second chance (an approximation of least recently used), chains from their end. A number to which nothing refers any
more is free at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.state import ROW_BITS, Records

from .block_hash import BASE, NO_EXTRAS, Hashes, Namespace, address, signed, token_array
from .kernel import block_table as table
from .kernel import engine_hashes, expectations
from .kernel.event_apply import APPLY, apply_events
from .kernel.event_scan import EVENT, REMOVED, STORED

Numbers = NDArray[np.int32]

_APPLY_WORDS = {name: i for i, name in enumerate(APPLY.names or ())}
_GIVEN = _APPLY_WORDS["stored"]  # words before it are set by the caller
_NO_NUMBERS: Numbers = np.zeros(0, np.int32)
MOST_LINGERING = 1 << 14  # ends of chains that stay known for a time; beyond, the oldest go
_LOAD = 0.6  # share of a growing hash table that may be in use


class Medium(IntEnum):
    """Where an instance has a block. ROUTED is an assumption: a request that computes it was sent there."""

    GPU = table.GPU
    CPU = table.CPU
    DISK = table.DISK
    ROUTED = table.ROUTED


@dataclass(slots=True)
class EventArrays:
    """A batch of KV events, decoded: `events` (EVENT) refer to ranges of the other arrays."""

    events: Records
    hashes: Hashes
    tokens: NDArray[np.uint32]
    extras: Hashes
    count: int
    places: tuple[int, int, int, int] | None = None  # where these four arrays are, if known already

    def found(self) -> tuple[int, int, int, int]:
        """The addresses of the four arrays."""
        if self.places is None:
            return address(self.events), address(self.hashes), address(self.tokens), address(self.extras)
        return self.places


@dataclass(slots=True)
class Tally:
    """What became of applied events; every application adds to it."""

    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_APPLY_WORDS), np.int64))  # of an APPLY
    at: int = 0

    def __post_init__(self) -> None:
        self.at = address(self.words)

    def __getitem__(self, name: str) -> int:
        """stored, removed: blocks. cleared: events. orphans: stored blocks whose parent was missed. unknown: removed
        blocks that were not known. other_groups, mismatched: events passed over for their KV-cache group or block size.
        full: stored blocks for which there was no room."""
        return int(self.words[_APPLY_WORDS[name]])

    def counts(self) -> dict[str, int]:
        """All of it."""
        return {name: self[name] for name in list(_APPLY_WORDS)[_GIVEN:]}


def _power(size: float) -> int:
    """The least power of two that is at least `size`, and at least 16."""
    return 1 << max(4, int(np.ceil(size)) - 1).bit_length() if size > 16 else 16


def _shift(size: int) -> int:
    return 64 - (size.bit_length() - 1)


class PrefixIndex:
    """Known blocks, their numbers, and their residency, kept in a given `blocks` table.

    Args:
        blocks: int64 [capacity, words] of a `ClusterState`, contiguous and all zero; written to from now on, rows HOST
            (on any medium: engines read their own disks and serve from them), DEVICE (on GPU) and PENDING (expected).
        block_tokens: tokens of a block.
        instances: how many there are; by default as many as `blocks` has columns for.
        engine_capacity: how many of the engines' own hashes may be remembered at most, in all.

    Raises:
        ValueError: a table of another shape, or more instances than it has columns for.
    """

    def __init__(
        self,
        blocks: NDArray[np.int64],
        block_tokens: int,
        *,
        instances: int | None = None,
        engine_capacity: int | None = None,
    ) -> None:
        count = _checked_blocks(blocks, instances)
        capacity, words = blocks.shape
        if block_tokens < 1 or not 1 <= capacity < 1 << 30:
            raise ValueError(f"need block_tokens >= 1 and 1 .. 2**30 - 1 blocks, found {block_tokens} and {capacity}")
        self.block_tokens = block_tokens
        self.capacity = capacity
        self.instances = count
        self.blocks = blocks
        # As many as there can be blocks with a place, for the map is of use only for these.
        self.engine_capacity = capacity * max(4, count) if engine_capacity is None else engine_capacity
        slots = _power(2 * capacity)
        self._slots = np.zeros(slots, table.SLOT)
        self._cells = np.zeros(capacity, table.CELL)
        self._cells["before"] = -1
        self._media = np.zeros((capacity, words), np.int64)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._places = np.zeros(count, table.INSTANCE)
        self._places["group"] = -1
        self._engine = np.zeros(_power(2 * min(capacity, self.engine_capacity) / _LOAD), engine_hashes.ENGINE)
        self._expected = np.zeros(1024, expectations.PAIR)
        self._lingering = np.zeros(MOST_LINGERING, table.LINGER)
        self._routes = np.zeros(0, expectations.ROUTE)
        self._routed = np.zeros(0, expectations.PAIR)
        self._header = np.zeros(1, table.INDEX)
        self._at = address(self._header)
        self._set(capacity=capacity, words=words, instances=count, block_tokens=block_tokens, free=capacity)
        self._set(slots=address(self._slots), slot_mask=slots - 1, slot_shift=_shift(slots), next_victim=-1)
        self._set(cells=address(self._cells), blocks=address(blocks), media=address(self._media))
        self._set(free_list=address(self._free), places=address(self._places))
        self._use_engine(self._engine)
        self._use_expected(self._expected)
        self._set(lingering=address(self._lingering), linger_mask=MOST_LINGERING - 1)
        self._set(route_mask=-1, route_limit=_power(capacity))

    # --- what there is ---

    @property
    def address(self) -> int:
        """Where the header (`block_table.INDEX`) is."""
        return self._at

    @property
    def used(self) -> int:
        """How many numbers are in use."""
        return int(self._header["used"][0])

    @property
    def evicted(self) -> int:
        """How many resident blocks were evicted for want of numbers since the start. If it grows, the index forgets
        what instances still have."""
        return int(self._header["evicted"][0])

    @property
    def engine_hashes(self) -> int:
        """How many of the engines' hashes are remembered."""
        return int(self._header["engine_used"][0])

    @property
    def host_used(self) -> NDArray[np.int64]:
        """Blocks each instance has on any medium, int64 [instances]; a view that stays current until `rebind`."""
        view: NDArray[np.int64] = self._places["host"]
        return view

    @property
    def device_used(self) -> NDArray[np.int64]:
        """Blocks each instance has on GPU, int64 [instances]; a view that stays current until `rebind`."""
        view: NDArray[np.int64] = self._places["device"]
        return view

    def resident(self, instance: int, medium: Medium) -> int:
        """How many blocks an instance has on a medium."""
        return int(self._places[Medium(medium).name.lower()][self._checked(instance)])

    # --- look-up ---

    def find(self, hashes: Hashes) -> Numbers:
        """Numbers of the leading known blocks, up to the first unknown. They count as used just now."""
        given = _hash_array(hashes)
        numbers = np.empty(len(given), np.int32)
        return numbers[: table.find(self._at, given, numbers)]

    def find_tokens(
        self, tokens: ArrayLike, namespace: Namespace = BASE, extras: Hashes = NO_EXTRAS
    ) -> tuple[Numbers, Hashes]:
        """(numbers of the leading known blocks, hashes of all full blocks) of a prompt: `hash_blocks`, `find` in one.

        Raises:
            ValueError: tokens that are no uint32.
        """
        ids = token_array(tokens)
        count = len(ids) // self.block_tokens
        hashes = np.empty(count, np.uint64)
        numbers = np.empty(count, np.int32)
        known = table.find_tokens(
            self._at,
            ids,
            signed(namespace.seed),
            signed(namespace.root_extra),
            extras,
            hashes,
            numbers,
        )
        return numbers[:known], hashes

    # --- numbers of requests in flight ---

    def intern(self, hashes: Hashes, *, hold: bool = False) -> Numbers:
        """Numbers of a prompt's blocks, new ones for the unknown; with `hold`, as by `hold`.

        The result is shorter than `hashes` where everything else is held too. Without `hold`, a new number nothing
        refers to is good until something else needs room.
        """
        given = _hash_array(hashes)
        numbers = np.empty(len(given), np.int32)
        return numbers[: table.intern(self._at, given, numbers, int(hold))]

    def hold(self, numbers: Numbers) -> None:
        """One more request refers to the numbers: none is recycled until as many `release` them.

        Raises:
            ValueError: a number that is not in use.
        """
        ids = _number_array(numbers)
        _checked_number(ids, table.hold(self._at, ids), "in use")

    def release(self, numbers: Numbers) -> None:
        """A request no longer refers to the numbers.

        Raises:
            ValueError: a number that is not held.
        """
        ids = _number_array(numbers)
        _checked_number(ids, table.release(self._at, ids), "held")

    def expect(self, instance: int, numbers: Numbers) -> None:
        """A request will bring the blocks to an instance: they are held, and PENDING there where not resident.

        They stay PENDING until they are stored there, or until as many requests are done (`unexpect`) as were to bring
        them.

        Raises:
            ValueError: a number that is not in use, or an instance out of range.
        """
        ids = _number_array(numbers)
        where = self._checked(instance)
        bad = expectations.expect(self._at, where, ids)
        if bad == -2:
            self.grow_expected(len(ids))
            bad = expectations.expect(self._at, where, ids)
        _checked_number(ids, bad, "in use")

    def unexpect(self, instance: int, numbers: Numbers, *, until_s: float | None = None) -> None:
        """A request that was to bring blocks to an instance is done, or will not come.

        Blocks that nothing refers to then are forgotten; with `until_s` not before `expire` comes to that time, or
        something else needs room.

        Raises:
            ValueError: a number that was not expected there, or an instance out of range. The others are done with.
        """
        ids = _number_array(numbers)
        until_us = -1 if until_s is None else round(until_s * 1e6)
        bad = expectations.unexpect(self._at, self._checked(instance), ids, until_us)
        _checked_number(ids, bad, f"expected at instance {instance}")

    # --- residency by own hash ---

    def store(self, instance: int, medium: Medium, hashes: Hashes, *, parent: int | None = None) -> int:
        """A chain of blocks, after the one of the hash `parent` if given, is on a medium; how many got in.

        Fewer than all get in only where every other block is held.
        """
        given = _hash_array(hashes)
        above = signed(parent or 0)
        where = self._checked(instance)
        follows = int(parent is not None)
        return int(table.store(self._at, where, int(medium), given, above, follows))

    def remove(self, instance: int, medium: Medium, hashes: Hashes) -> int:
        """Blocks are no longer on a medium; how many were. Unknown ones are passed over."""
        given = _hash_array(hashes)
        return int(table.remove(self._at, self._checked(instance), int(medium), given))

    def clear(self, instance: int, medium: Medium | None = None) -> int:
        """An instance has nothing on a medium, or on any; how many (block, medium) there were. Expectations stay."""
        where = self._checked(instance)
        done = table.clear(self._at, where, -1 if medium is None else int(medium))
        if medium is None and self._places["generation"][where] == 0:  # come round: no old entry may look current
            self._move_engine(len(self._engine), stale_only=where)
        return int(done)

    def assume(self, instance: int, hashes: Hashes, *, until_s: float) -> int:
        """A chain of blocks is taken to be on an instance (ROUTED: rows HOST and DEVICE) until a time; how many got in.

        For instances without KV events. A later `assume` prolongs it, `expire` ends it. At most about `capacity` such
        assumptions are kept; beyond, the oldest end early.
        """
        given = _hash_array(hashes)
        until_us = round(until_s * 1e6)
        where = self._checked(instance)
        done = expectations.route(self._at, where, given, _NO_NUMBERS, until_us)
        if done == -2:
            self.grow_routes(len(given))
            done = expectations.route(self._at, where, given, _NO_NUMBERS, until_us)
        return int(done)

    def expire(self, now_s: float) -> int:
        """End assumptions whose time has come, in the order they were made; how many blocks are gone by it. And forget
        what was not to be forgotten before (`unexpect`)."""
        now_us = round(now_s * 1e6)
        table.dismiss(self._at, now_us)
        return int(expectations.forget(self._at, now_us))

    # --- residency by the engines' events ---

    def apply(self, instance: int, batch: EventArrays, tally: Tally, first: int = 0, budget: int = 1 << 60) -> int:
        """Apply events of a batch from `first` on, until about `budget` blocks were looked at; the next to apply.

        Events name blocks by hashes of the engine's own, which mean something on that instance only. A stored block's
        own hash follows from its tokens and the own hash of its parent. Where the parent is not known (its event was
        missed) that cannot be had: such blocks are counted as orphans and not entered, unless the instance's hash for
        one of them is known already. Storing or removing twice changes nothing; if an engine gives a hash to
        another block, the block it named before is gone there.
        """
        events, hashes, tokens, extras = batch.found()
        work, at = tally.words, tally.at
        work[:_GIVEN] = (self._at, self._checked(instance), events, hashes, tokens, extras, batch.count)
        following = int(apply_events(at, first, budget))
        while following < 0:
            blocked = -following - 1
            need = int(batch.events["hashes"][blocked])
            if self._grow_engine(need):
                following = int(apply_events(at, blocked, budget))
            else:
                work[_APPLY_WORDS["full"]] += need
                following = int(apply_events(at, blocked + 1, budget))
        return following

    def stored(
        self,
        instance: int,
        medium: Medium,
        engine_hashes: Hashes,
        parent_engine_hash: int | None,
        tokens: ArrayLike,
        namespace: Namespace = BASE,
        tally: Tally | None = None,
    ) -> Tally:
        """One event: consecutive blocks are on a medium, by the engine's hashes; see `apply`.

        Args:
            engine_hashes: uint64 [k]. parent_engine_hash: of the block before, None at the start of a prompt.
            tokens: uint32 [k * block_tokens]; none, for blocks known by these hashes.
        """
        ids = token_array(tokens)
        event = np.zeros(1, EVENT)
        event["kind"] = STORED
        event["medium"] = int(medium)
        event["hashes"] = len(engine_hashes)
        event["tokens"] = len(ids)
        event["block_tokens"] = self.block_tokens
        event["rooted"] = parent_engine_hash is None
        event["parent"] = 0 if parent_engine_hash is None else parent_engine_hash % 2**64
        event["seed"] = namespace.seed
        event["root_extra"] = namespace.root_extra
        event["first_extra"] = event["group"] = -1
        return self._apply_one(instance, event, engine_hashes, ids, tally)

    def removed(self, instance: int, medium: Medium, engine_hashes: Hashes, tally: Tally | None = None) -> Tally:
        """One event: blocks are no longer on a medium, by the engine's hashes; see `apply`."""
        event = np.zeros(1, EVENT)
        event["kind"] = REMOVED
        event["medium"] = int(medium)
        event["hashes"] = len(engine_hashes)
        event["group"] = -1
        return self._apply_one(instance, event, engine_hashes, np.zeros(0, np.uint32), tally)

    def _apply_one(
        self, instance: int, event: Records, hashes: Hashes, tokens: NDArray[np.uint32], tally: Tally | None
    ) -> Tally:
        used = Tally() if tally is None else tally
        self.apply(instance, EventArrays(event, _hash_array(hashes), tokens, NO_EXTRAS, 1), used)
        return used

    # --- instances come and go; the process too ---

    def rebind(self, blocks: NDArray[np.int64], mapping: Sequence[int], *, instances: int | None = None) -> None:
        """Keep residency in another table, for another set of instances.

        Args:
            blocks: int64 [capacity, words]; overwritten. It may be the present one.
            mapping: by old instance, the new one, or -1 for one that is gone. New instances may be more.
            instances: how many there are now; by default as many as `blocks` has columns for.

        Raises:
            ValueError: a table of another capacity, or a mapping that names an instance twice or out of range.
        """
        count = _checked_blocks(blocks, instances)
        renumbered = np.ascontiguousarray(mapping, np.int64)
        kept = renumbered[renumbered >= 0]
        if len(blocks) != self.capacity:
            raise ValueError(f"the table must have {self.capacity} blocks, has {len(blocks)}")
        if renumbered.shape != (self.instances,):
            raise ValueError(f"the mapping must have {self.instances} entries, has {renumbered.size}")
        if len(set(kept.tolist())) != len(kept) or (len(kept) and kept.max() >= count):
            raise ValueError(f"the mapping must name different instances below {count}, found {list(mapping)}")
        old = self.blocks.copy()
        self._set(blocks=address(old))
        blocks[:] = 0
        media = np.zeros_like(blocks)
        places = np.zeros(count, table.INSTANCE)
        places["group"] = -1
        to = address(renumbered)
        expectations.unhold_pairs(self._at, address(self._expected), len(self._expected), to)
        table.renumber(self._at, blocks.shape[1], count, address(blocks), address(media), address(places), to)
        self.blocks, self._media, self._places, self.instances = blocks, media, places, count
        self._move_expected(len(self._expected), renumbered)
        if len(self._routes):
            expectations.renumber_routes(self._at, to)
            routed = np.zeros_like(self._routed)
            mask, shift = len(routed) - 1, _shift(len(routed))
            used = expectations.move_pairs(address(self._routed), len(routed), address(routed), mask, shift, to)
            self._routed = routed
            self._set(routed=address(routed), routed_used=used)
        self._move_engine(len(self._engine), renumbered)
        table.retire_all(self._at)

    def snapshot(self) -> dict[str, np.ndarray]:
        """All that is known of instances, for a warm restart. What requests in flight hold or expect is not in it, nor
        what is only assumed."""
        numbers = np.flatnonzero(self._cells["used"]).astype(np.int32)
        cells = self._cells[numbers]
        media = self._media[numbers] & np.int64(0x0000FFFFFFFFFFFF)
        tags = self._engine["tag"].astype(np.int64)
        places = (tags & 0xFFFF) - 1
        current = (tags > 0) & (tags >> 16 == self._places["generation"][np.maximum(places, 0)])
        return {
            "shape": np.array([self.capacity, self.instances, self.block_tokens], np.int64),
            "numbers": numbers,
            "hashes": cells["hash"],
            "before": cells["before"],
            "media": media,
            "engine": self._engine["engine"][current],
            "engine_own": self._engine["own"][current],
            "engine_instance": places[current].astype(np.int32),
            "groups": self._places["group"].copy(),
        }

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        """Become what a snapshot was taken of. The index must be empty, with room for it.

        Raises:
            ValueError: the index is not empty or too small, or the snapshot is none or of another block size.
        """
        if self.used:
            raise ValueError("a snapshot can only be restored into an empty index")
        s = _checked_snapshot(snapshot, self.capacity, self.instances, self.block_tokens)
        media = np.zeros((len(s["numbers"]), self.blocks.shape[1]), np.int64)
        given = s["media"]
        media[:, : given.shape[1]] = given[:, : media.shape[1]]
        numbers, hashes, before = (address(s[name]) for name in ("numbers", "hashes", "before"))
        if not table.restore_blocks(self._at, numbers, hashes, before, address(media), len(media)):
            raise ValueError("the snapshot has a number or a hash twice, or a block after one it does not have")
        self._places["group"][: len(s["groups"])] = s["groups"]
        entries = min(len(s["engine"]), self.engine_capacity)
        self._grow_engine(entries)
        engine, own, where = (address(s[name]) for name in ("engine", "engine_own", "engine_instance"))
        engine_hashes.restore_engine(self._at, engine, own, where, entries)
        table.retire_all(self._at)

    # --- tables that grow ---

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._header[name] = value

    def _use_engine(self, entries: Records) -> None:
        self._engine = entries
        self._set(engine=address(entries), engine_mask=len(entries) - 1, engine_shift=_shift(len(entries)))
        self._set(engine_limit=int(len(entries) * _LOAD))

    def _move_engine(self, size: int, renumbered: NDArray[np.int64] | None = None, *, stale_only: int = -1) -> None:
        """Move the engines' hashes that still mean something to a table of a size."""
        old = self._engine
        if renumbered is None:
            renumbered = np.arange(max(self.instances, 1), dtype=np.int64)
        if stale_only >= 0:
            renumbered[stale_only] = -1
        self._use_engine(np.zeros(size, engine_hashes.ENGINE))
        engine_hashes.move_engine(self._at, address(old), len(old), address(renumbered))

    def _grow_engine(self, more: int) -> bool:
        """Room for so many more of the engines' hashes; False if that would be too many in all."""
        self._move_engine(len(self._engine))
        needed = self.engine_hashes + more
        if needed <= self.engine_capacity and needed > 0.7 * self._header["engine_limit"][0]:
            self._move_engine(_power(2 * needed / _LOAD))
        return bool(needed <= self._header["engine_limit"][0])

    def _use_expected(self, pairs: Records) -> None:
        self._expected = pairs
        self._set(expected=address(pairs), expected_mask=len(pairs) - 1, expected_shift=_shift(len(pairs)))
        self._set(expected_limit=int(len(pairs) * _LOAD))

    def _move_expected(self, size: int, renumbered: NDArray[np.int64]) -> None:
        old = self._expected
        self._use_expected(np.zeros(size, expectations.PAIR))
        mask, shift = size - 1, _shift(size)
        to = address(renumbered)
        used = expectations.move_pairs(address(old), len(old), address(self._expected), mask, shift, to)
        self._set(expected_used=used)

    def grow_expected(self, more: int) -> None:
        """Room to expect so many more blocks."""
        size = _power(2 * (int(self._header["expected_used"][0]) + more) / _LOAD)
        self._move_expected(size, np.arange(self.instances, dtype=np.int64))

    def grow_routes(self, more: int) -> None:
        """Room to assume so many more blocks to be somewhere, within the limit."""
        old, first, last = self._routes, int(self._header["route_first"][0]), int(self._header["route_last"][0])
        size = min(_power(max(1024, 2 * (last - first + more))), int(self._header["route_limit"][0]))
        self._routes = np.zeros(size, expectations.ROUTE)
        if last > first:
            places = np.arange(first, last)
            self._routes[places % size] = old[places % len(old)]
        self._set(routes=address(self._routes), route_mask=size - 1)
        pairs, mask = self._routed, _power(2 * size + 2) - 1
        self._routed = np.zeros(mask + 1, expectations.PAIR)
        self._set(routed=address(self._routed), routed_mask=mask, routed_shift=_shift(mask + 1))
        kept = np.arange(max(self.instances, 1), dtype=np.int64)
        shift = _shift(mask + 1)
        expectations.move_pairs(address(pairs), len(pairs), address(self._routed), mask, shift, address(kept))

    # --- checks ---

    def _checked(self, instance: int) -> int:
        if not 0 <= instance < self.instances:
            raise ValueError(f"instance must be in 0 .. {self.instances - 1}, found {instance}")
        return instance


def _hash_array(hashes: Any) -> Hashes:
    """Hashes as the one kind of array that kernels are compiled for."""
    given = np.ascontiguousarray(hashes, np.uint64)
    return given if given.flags.writeable else given.copy()


def _number_array(numbers: Any) -> Numbers:
    given = np.ascontiguousarray(numbers, np.int32)
    return given if given.flags.writeable else given.copy()


def _checked_number(numbers: Numbers, bad: int, what: str) -> None:
    if bad >= 0:
        raise ValueError(f"block number {numbers[bad]} is not {what}")


def _checked_blocks(blocks: NDArray[np.int64], instances: int | None) -> int:
    """How many instances a table of blocks is for."""
    if blocks.dtype != np.int64 or blocks.ndim != 2 or not blocks.flags.c_contiguous or not blocks.flags.writeable:
        raise ValueError(f"blocks must be a contiguous int64 [blocks, words], is {blocks.dtype} {blocks.shape}")
    columns = blocks.shape[1] * ROW_BITS
    count = columns if instances is None else instances
    if not 0 <= count <= min(columns, 0xFFFE):
        raise ValueError(f"the table has columns for {columns} instances, {instances} were asked for")
    return count


_SNAPSHOT = {
    "shape": np.int64,
    "numbers": np.int32,
    "hashes": np.uint64,
    "before": np.int32,
    "media": np.int64,
    "engine": np.uint64,
    "engine_own": np.uint64,
    "engine_instance": np.int32,
    "groups": np.int64,
}


def _checked_snapshot(
    snapshot: dict[str, np.ndarray], capacity: int, instances: int, block_tokens: int
) -> dict[str, np.ndarray]:
    try:
        s = {name: np.ascontiguousarray(snapshot[name]) for name in _SNAPSHOT}
    except KeyError as error:
        raise ValueError(f"the snapshot has no {error}") from error
    for name, kind in _SNAPSHOT.items():
        if s[name].dtype != kind:
            raise ValueError(f"{name} of a snapshot must be {np.dtype(kind)}, is {s[name].dtype}")
    count, entries = len(s["numbers"]), len(s["engine"])
    if (
        s["shape"].shape != (3,)
        or any(len(s[name]) != count for name in ("hashes", "before", "media"))
        or any(len(s[name]) != entries for name in ("engine_own", "engine_instance"))
        or s["media"].ndim != 2
    ):
        raise ValueError("the arrays of the snapshot do not go together")
    if s["shape"][2] != block_tokens:
        raise ValueError(f"the snapshot has blocks of {s['shape'][2]} tokens, this index of {block_tokens}")
    if s["shape"][1] > instances or len(s["groups"]) > instances:
        raise ValueError(f"the snapshot has {s['shape'][1]} instances, this index {instances}")
    limits = (("numbers", 0, capacity), ("before", -1, capacity), ("engine_instance", 0, instances))
    for name, low, high in limits:
        if len(s[name]) and not (s[name].min() >= low and s[name].max() < high):
            raise ValueError(f"{name} of the snapshot must be in {low} .. {high - 1}: is this index large enough?")
    return s
