"""The compiled prefix index against the slow one, and at its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from envs.state import DEVICE, HOST, PENDING
from runtime.block_hash import hash_blocks, namespace
from runtime.prefix_index import MOST_LINGERING, Medium, PrefixIndex, Tally

from .reference_prefix_index import ReferenceIndex, check, contents

SIZE = 2  # tokens of a block
INSTANCES = 18  # two words
PLACES = st.sampled_from([0, 5, 17])
MEDIA = st.sampled_from([Medium.GPU, Medium.CPU, Medium.DISK])
# Prompts of up to five blocks out of few, so that they share prefixes.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
LORA = namespace(lora_name="sql")


def tokens_of(prompt: list[int]) -> list[int]:
    return [t for block in prompt for t in (block, block + 7)]


def chain(prompt: list[int]) -> list[int]:
    return hash_blocks(tokens_of(prompt), SIZE).tolist()  # type: ignore[no-any-return]


def array(hashes: list[int]) -> np.ndarray:
    return np.array(hashes, np.uint64)


def new_index(capacity: int, instances: int = INSTANCES, block_tokens: int = SIZE) -> PrefixIndex:
    return PrefixIndex(np.zeros((capacity, -(-instances // 16)), np.int64), block_tokens, instances=instances)


class Machine(RuleBasedStateMachine):
    """Both indexes go through the same; with little capacity the fast one may know less, but never something else."""

    capacity = 4000

    def __init__(self) -> None:
        super().__init__()
        self.index = new_index(self.capacity)
        self.slow = ReferenceIndex(SIZE)
        self.held: list[tuple[list[int], np.ndarray]] = []
        self.expected: list[tuple[int, list[int], np.ndarray]] = []
        self.now_s = 0.0
        self.exact = True

    @initialize(prompts=st.lists(PROMPTS, max_size=4), p=PLACES)
    def begin(self, prompts: list[list[int]], p: int) -> None:
        for prompt in prompts:
            self.store(prompt, p, Medium.GPU, 0)

    @rule(prompt=PROMPTS, p=PLACES, medium=MEDIA, start=st.integers(0, 3))
    def store(self, prompt: list[int], p: int, medium: Medium, start: int) -> None:
        hashes = chain(prompt)
        parent = hashes[start - 1] if 0 < start < len(hashes) else None
        part = hashes[start:]
        self.exact &= self.index.store(p, medium, array(part), parent=parent) == len(part)
        self.slow.store(p, medium, part, parent)

    @rule(prompt=PROMPTS, p=PLACES, medium=MEDIA, start=st.integers(0, 4))
    def remove(self, prompt: list[int], p: int, medium: Medium, start: int) -> None:
        part = chain(prompt)[start:]
        done = self.index.remove(p, medium, array(part))
        expected = self.slow.remove(p, medium, part)
        assert done == expected or not self.is_exact()

    @rule(p=PLACES)
    def clear(self, p: int) -> None:
        self.index.clear(p)
        self.slow.clear(p)

    @rule(prompt=PROMPTS)
    def acquire(self, prompt: list[int]) -> None:
        hashes = chain(prompt)
        numbers = self.index.intern(array(hashes), hold=True)
        part = hashes[: len(numbers)]
        self.exact &= len(part) == len(hashes)
        self.slow.acquire(part)
        self.held.append((part, numbers))
        assert self.index.find(array(hashes))[: len(numbers)].tolist() == numbers.tolist()

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if self.held:
            hashes, numbers = self.held.pop(which % len(self.held))
            self.index.release(numbers)
            self.slow.release(hashes)

    @rule(which=st.integers(0, 9), p=PLACES)
    def expect(self, which: int, p: int) -> None:
        if self.held:
            hashes, numbers = self.held[which % len(self.held)]
            self.index.expect(p, numbers)
            self.slow.expect(p, hashes)
            self.expected.append((p, hashes, numbers))

    @rule(which=st.integers(0, 9), for_s=st.sampled_from([None, 1, 3]))
    def unexpect(self, which: int, for_s: int | None) -> None:
        if self.expected:
            p, hashes, numbers = self.expected.pop(which % len(self.expected))
            until_s = None if for_s is None else self.now_s + for_s
            self.index.unexpect(p, numbers, until_s=until_s)
            self.slow.unexpect(p, hashes, until_s)

    @rule(
        prompt=PROMPTS,
        p=PLACES,
        medium=MEDIA,
        start=st.integers(0, 3),
        bare=st.booleans(),
        lora=st.booleans(),
        odd=st.booleans(),
    )
    def stored(self, prompt: list[int], p: int, medium: Medium, start: int, bare: bool, lora: bool, odd: bool) -> None:
        names = [hash((p, lora, tuple(prompt[: i + 1]))) % 2**64 for i in range(len(prompt))]
        if odd and not start:
            names[0] = 1  # an engine's hash that comes to mean another block
        parent = names[start - 1] if 0 < start < len(prompt) else None
        start = start if parent is not None else 0
        tokens = [] if bare else tokens_of(prompt)[SIZE * start :]
        where = LORA if lora else namespace()
        tally = self.index.stored(p, medium, array(names[start:]), parent, tokens, where)
        orphans = self.slow.stored(p, medium, names[start:], parent, tokens, where)
        self.exact &= tally["full"] == 0
        assert tally["orphans"] == orphans or not self.is_exact()

    @rule(prompt=PROMPTS, p=PLACES, medium=MEDIA, lora=st.booleans(), odd=st.booleans())
    def removed(self, prompt: list[int], p: int, medium: Medium, lora: bool, odd: bool) -> None:
        names = [hash((p, lora, tuple(prompt[: i + 1]))) % 2**64 for i in range(len(prompt))]
        if odd:
            names[0] = 1
        self.index.removed(p, medium, array(names))
        self.slow.removed(p, medium, names)

    @rule(prompt=PROMPTS, p=PLACES, ttl_s=st.integers(2, 3))
    def assume(self, prompt: list[int], p: int, ttl_s: int) -> None:
        hashes = chain(prompt)
        self.exact &= self.index.assume(p, array(hashes), until_s=self.now_s + 3) == len(hashes)
        self.slow.assume(p, hashes, self.now_s + 3)

    @rule()
    def expire(self) -> None:
        self.now_s += 1
        self.index.expire(self.now_s)
        self.slow.expire(self.now_s)

    @rule(mapping=st.sampled_from([{0: 5, 5: 0, 17: 17}, {0: 17, 5: -1, 17: 0}, {0: 0, 5: 5, 17: 17}]))
    def rebind(self, mapping: dict[int, int]) -> None:
        whole = [mapping.get(p, -1) for p in range(INSTANCES)]
        self.index.rebind(np.ones_like(self.index.blocks), whole, instances=INSTANCES)
        self.slow.rebind(whole)
        self.expected = [(whole[p], h, n) for p, h, n in self.expected if whole[p] >= 0]

    @rule()
    def restart(self) -> None:
        """A snapshot and what is made of it hold the same of instances."""
        fresh = new_index(self.capacity)
        fresh.restore(self.index.snapshot())
        check(fresh)
        expected = {
            h: {x for x in places if x[1] != Medium.ROUTED} for h, (places, _, _) in contents(self.index).items()
        }
        found = {h: places for h, (places, _, _) in contents(fresh).items()}
        for own in set(expected) | set(found):
            assert expected.get(own, set()) == found.get(own, set())

    def is_exact(self) -> bool:
        return self.exact and self.index.evicted == 0 and self.capacity > 1000

    @invariant()
    def same(self) -> None:
        check(self.index)
        fast = contents(self.index)
        for own, (places, pending, held) in fast.items():
            block = self.slow.blocks.get(own)
            if block is None:
                assert not places and not pending and not held
                continue
            assert places <= block.places
            assert held == block.held
            assert pending == block.pending or not self.is_exact()
        if self.is_exact():
            assert set(fast) == set(self.slow.blocks)
            assert all(fast[own][0] == block.places for own, block in self.slow.blocks.items())


class SmallMachine(Machine):
    capacity = 12


SETTINGS = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("machine", [Machine, SmallMachine])
def test_against_reference(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_rows() -> None:
    index = new_index(8, 3)
    h = array(chain([0, 1]))
    index.store(1, Medium.CPU, h)
    numbers = index.find(h)
    assert (index.blocks[numbers, 0] == 1 << (16 * HOST + 1)).all()
    index.store(1, Medium.GPU, h[:1])
    assert index.blocks[numbers[0], 0] == 1 << (16 * HOST + 1) | 1 << (16 * DEVICE + 1)
    assert (index.host_used.tolist(), index.device_used.tolist()) == ([0, 2, 0], [0, 1, 0])
    assert index.resident(1, Medium.CPU) == 2 and index.resident(1, Medium.DISK) == 0
    index.expect(2, numbers)
    assert index.blocks[numbers[1], 0] == 1 << (16 * HOST + 1) | 1 << (16 * PENDING + 2)
    index.store(2, Medium.DISK, h)
    assert not (index.blocks >> (16 * PENDING) & 0xFFFF).any()
    index.unexpect(2, numbers)
    check(index)


def test_pending_until_the_last_is_done() -> None:
    index = new_index(8, 3)
    numbers = index.intern(array(chain([0])), hold=True)
    index.expect(0, numbers)
    index.expect(0, numbers)
    index.release(numbers)
    index.unexpect(0, numbers)
    assert index.blocks[numbers[0], 0] == 1 << (16 * PENDING)
    index.unexpect(0, numbers)
    assert index.blocks[numbers[0], 0] == 0 and index.used == 0


def test_the_blocks_of_a_prefill_that_is_done_linger() -> None:
    """They keep their numbers until events say where they are, for a time, and while nothing else needs room."""
    index = new_index(8, 3)

    def prefilled(prompt: list[int]) -> np.ndarray:
        numbers = index.intern(array(chain(prompt)), hold=True)
        index.expect(0, numbers)
        index.release(numbers)
        index.unexpect(0, numbers, until_s=10.0)
        return numbers

    told, untold = prefilled([0, 1]), prefilled([0, 2, 3])
    index.expire(9.9)
    assert index.used == 4 and not index.blocks.any()
    index.store(0, Medium.GPU, array(chain([0, 1])))
    assert index.find(array(chain([0, 1]))).tolist() == told.tolist()
    assert index.find(array(chain([0, 2, 3]))).tolist() == untold.tolist()
    index.expire(10.0)
    check(index)
    assert index.used == 2 and len(index.find(array(chain([0, 2, 3])))) == 1
    prefilled([0, 2, 3])
    assert index.store(1, Medium.GPU, array(chain([1, 1, 1, 1, 1, 1]))) == 6, "what lingers goes before what is cached"
    check(index)
    assert index.evicted == 0 and len(index.find(array(chain([0, 1])))) == 2


def test_more_linger_than_there_is_room_for() -> None:
    index = new_index(4 * MOST_LINGERING, 3)
    for own in range(1, MOST_LINGERING + 3):
        numbers = index.intern(array([own]), hold=True)
        index.expect(0, numbers)
        index.release(numbers)
        index.unexpect(0, numbers, until_s=10.0)
    assert index.used == MOST_LINGERING and len(index.find(array([1]))) == 0 and len(index.find(array([3]))) == 1


def test_many_expected() -> None:
    """More pairs than the table has at first."""
    index = new_index(5000, 3)
    numbers = index.intern(np.arange(1, 3000, dtype=np.uint64), hold=True)
    for p in range(3):
        index.expect(p, numbers)
    check(index)
    for p in range(3):
        index.unexpect(p, numbers)
    index.release(numbers)
    check(index)
    assert index.used == 0


def test_find_tokens() -> None:
    index = new_index(100, 2, 16)
    tokens = np.arange(1000, dtype=np.uint32)
    hashes = hash_blocks(tokens, 16)
    index.store(0, Medium.GPU, hashes[:40])
    for where, known in ((namespace(), 40), (namespace("other"), 0), (namespace(cache_salt="s"), 0)):
        numbers, made = index.find_tokens(tokens, where)
        assert len(numbers) == known
        assert made.tolist() == hash_blocks(tokens, 16, namespace=where).tolist()
    numbers, made = index.find_tokens(tokens.tobytes() and np.frombuffer(tokens.tobytes(), np.uint32))
    assert numbers.tolist() == index.find(hashes).tolist() and len(made) == 62
    assert len(index.find_tokens([1, 2])[1]) == 0


def test_least_recently_used_goes_first_and_from_the_end() -> None:
    index = new_index(30, 2)
    old, new = np.arange(100, 110, dtype=np.uint64), np.arange(200, 210, dtype=np.uint64)
    index.store(0, Medium.GPU, old)
    index.store(0, Medium.GPU, new)
    index.store(0, Medium.GPU, np.arange(300, 310, dtype=np.uint64))
    index.store(1, Medium.GPU, np.arange(400, 401, dtype=np.uint64))  # one has to go; all are untouched now
    assert index.evicted == 1
    index.store(0, Medium.GPU, new)
    for i in range(9):
        assert len(index.find(new)) == 10  # asked for every time
        index.store(1, Medium.GPU, np.array([500 + i], np.uint64))
    assert len(index.find(new)) == 10
    left = [i for i in range(10) if len(index.find(old[i : i + 1]))]
    assert left == list(range(len(left)))  # what is left of a chain is its beginning
    check(index)


def test_what_is_held_stays() -> None:
    index = new_index(10, 2)
    kept = index.intern(np.arange(1, 9, dtype=np.uint64), hold=True)
    index.store(0, Medium.GPU, np.arange(50, 90, dtype=np.uint64))
    assert index.find(np.arange(1, 9, dtype=np.uint64)).tolist() == kept.tolist()
    more = index.intern(np.arange(100, 110, dtype=np.uint64), hold=True)
    assert len(more) == 2
    assert len(index.intern(np.arange(120, 125, dtype=np.uint64))) == 0
    assert index.store(0, Medium.GPU, np.arange(50, 90, dtype=np.uint64)) == 0
    index.release(kept)
    assert index.store(0, Medium.GPU, np.arange(50, 58, dtype=np.uint64)) == 8
    check(index)


def test_assumptions_are_bounded() -> None:
    index = new_index(40, 2)
    for i in range(500):
        index.assume(i % 2, np.arange(i, i + 20, dtype=np.uint64), until_s=100.0 + i)
    check(index)
    assert index.used <= 40
    index.expire(99.0)
    assert index.host_used.sum() > 0
    index.expire(1000.0)
    check(index)
    assert index.used == 0


def test_assumption_is_prolonged() -> None:
    index = new_index(40, 2)
    h = array(chain([1, 2]))
    index.assume(0, h, until_s=10.0)
    index.assume(0, h, until_s=20.0)
    assert index.expire(15.0) == 0 and index.host_used[0] == 2
    assert index.expire(20.0) == 2 and index.used == 0


def test_engine_hashes_survive_recycled_numbers() -> None:
    """After a block's number is recycled, removing it must not touch the number's new block."""
    index = new_index(4, 2)
    index.stored(0, Medium.GPU, array([11, 12]), None, tokens_of([0, 1]))
    for i in range(20):
        index.store(1, Medium.GPU, array([1000 + i, 2000 + i, 3000 + i, 4000 + i]))
    before = contents(index)
    index.removed(0, Medium.GPU, array([11, 12]))
    assert contents(index) == before
    tally = index.stored(0, Medium.GPU, array([13]), 12, tokens_of([2]))
    assert tally["orphans"] == 1


def test_engine_table_grows() -> None:
    index = PrefixIndex(np.zeros((20000, 1), np.int64), SIZE, instances=16)
    tally = Tally()
    tokens = tokens_of(list(range(1000)))
    for p in range(16):
        for i in range(10):
            base = p * 100_000 + i * 1000 + 1
            shifted = [t + 10_000 * i for t in tokens]
            index.stored(p, Medium.GPU, np.arange(base, base + 1000, dtype=np.uint64), None, shifted, tally=tally)
    assert tally["stored"] == 160_000 and index.used == 10_000 and index.engine_hashes == 160_000
    for p in range(16):
        index.removed(p, Medium.GPU, np.arange(p * 100_000 + 1, p * 100_000 + 10_001, dtype=np.uint64), tally=tally)
    assert tally["removed"] == 160_000 and index.used == 0 and index.engine_hashes == 0


def test_engine_table_has_an_end() -> None:
    index = PrefixIndex(np.zeros((2000, 1), np.int64), 1, instances=2, engine_capacity=10)
    tally = Tally()
    for i in range(100):
        index.stored(0, Medium.GPU, array([i + 1]), None, [i], tally=tally)
    assert tally["stored"] + tally["full"] == 100 and tally["full"] > 50
    assert index.engine_hashes <= 40


def test_cleared_many_times() -> None:
    """Generations of an instance come round."""
    index = new_index(4, 1)
    h = array(chain([0]))
    index.stored(0, Medium.GPU, array([7]), None, tokens_of([0]))
    for _ in range(2 * 32768 + 3):
        index.clear(0)
        assert index.stored(0, Medium.GPU, array([8]), 7, tokens_of([1]))["orphans"] == 1 if _ % 9000 == 0 else True
    assert len(index.find(h)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: i.hold(np.array([3], np.int32)), "not in use"),
        (lambda i: i.hold(np.array([-1], np.int32)), "not in use"),
        (lambda i: i.hold(np.array([99], np.int32)), "not in use"),
        (lambda i: i.release(i.intern(array([1]))), "not held"),
        (lambda i: i.unexpect(0, i.intern(array([1]), hold=True)), "not expected"),
        (lambda i: i.store(2, Medium.GPU, array([1])), "instance must be in 0 .. 1"),
        (lambda i: i.clear(-1), "instance must be"),
        (lambda i: i.rebind(np.zeros((7, 1), np.int64), [0, 1]), "8 blocks"),
        (lambda i: i.rebind(np.zeros((8, 1), np.int64), [0]), "2 entries"),
        (lambda i: i.rebind(np.zeros((8, 1), np.int64), [0, 0]), "different"),
        (lambda i: i.find_tokens([-1]), "token ids"),
        (lambda i: i.restore({}), "snapshot has no"),
        (lambda i: i.restore(new_index(99, 2, 3).snapshot()), "tokens"),
        (lambda i: i.restore(new_index(99, 9).snapshot()), "instances"),
        (lambda i: PrefixIndex(np.zeros((4, 1), np.int32), 1), "int64"),  # type: ignore[arg-type]
        (lambda i: PrefixIndex(np.zeros((4, 1), np.int64), 1, instances=17), "columns"),
        (lambda i: PrefixIndex(np.zeros((4, 1), np.int64), 0), "block_tokens"),
    ],
)
def test_bad_use(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(new_index(8, 2))


def test_restore_refuses_nonsense() -> None:
    source = new_index(8, 2)
    source.store(0, Medium.GPU, array([5, 6]))
    good = source.snapshot()
    for name, value in (
        ("numbers", np.array([0, 0], np.int32)),
        ("numbers", np.array([0, 8], np.int32)),
        ("before", np.array([-1, 4], np.int32)),
        ("hashes", np.array([5, 5], np.uint64)),
        ("hashes", np.array([5], np.uint64)),
        ("media", np.zeros((2, 1), np.int32)),
    ):
        with pytest.raises(ValueError, match="snapshot"):
            new_index(8, 2).restore({**good, name: value})
    with pytest.raises(ValueError, match="empty"):
        source.restore(good)
