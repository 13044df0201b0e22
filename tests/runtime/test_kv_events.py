"""KV events: all forms decoded, damaged ones refused, and a worker's stream followed through what can happen to it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from runtime.block_hash import Namespace, extra_key, hash_blocks, namespace
from runtime.kv_events import (
    EventBatch,
    EventError,
    KvEventSubscriber,
    StreamNamespace,
    decode,
    prepare,
    stream_namespace,
)
from runtime.prefix_index import Medium, PrefixIndex, Tally

from ..waiting import until
from .reference_prefix_index import check

pack = msgspec.msgpack.encode
SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Nothing is compiled while a test watches the clock."""
    prepare()


def new_index(capacity: int = 1000, instances: int = 3) -> PrefixIndex:
    return PrefixIndex(np.zeros((capacity, 1), np.int64), SIZE, instances=instances)


def tokens_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + SIZE * blocks))


def stored_array(hashes: list[Any], tokens: list[int], parent: Any = None, *tail: Any) -> list[Any]:
    return ["BlockStored", hashes, parent, tokens, SIZE, *tail]


def stored_map(hashes: list[Any], tokens: list[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        **more,
    }


def apply(index: PrefixIndex, events: list[Any], stream: StreamNamespace | None = None) -> tuple[EventBatch, Tally]:
    batch = decode(pack([1.5, events, 0]), stream or StreamNamespace())
    tally = Tally()
    assert index.apply(0, batch, tally) == batch.count
    check(index)
    return batch, tally


def known(index: PrefixIndex, tokens: list[int], where: Namespace | None = None, extras: Any = ()) -> int:
    return len(index.find_tokens(tokens, where or namespace(), np.array(extras, np.uint64))[0])


# --- forms ----------------------------------------------------------------------------------------------------------

THREE = tokens_of(3)
FORMS: dict[str, Any] = {
    "vllm array": stored_array([1, 2, 3], THREE, None, None, "GPU", None, None, 0, "full_attention", None),
    "vllm old array": stored_array([1, 2, 3], THREE, None, None),
    "sglang without lora": stored_array([1, 2, 3], THREE),
    "sglang with medium": stored_array([1, 2, 3], THREE, None, None, "GPU"),
    "signed hashes": stored_array([-(2**63), -1, 2**63 - 1], THREE),
    "unsigned hashes": stored_array([2**64 - 1, 2**63, 0], THREE),
    "bytes": stored_array([b"a" * 32, b"b" * 32, b"c" * 20], THREE),
    "dynamo infos": stored_array([1, 2, 3], THREE, None, None, "GPU", None, None, [None, None, None], 0),
    "vllm map": stored_map([1, 2, 3], THREE, medium="GPU", lora_name=None, extra_keys=None, group_idx=0),
    "sglang map": stored_map([1, 2, 3], THREE),
    "map of the future": {**stored_map([1, 2, 3], THREE), "something": {"new": [1, 2, {"x": 1.5}]}, "more": b"x"},
    "mooncake with tokens": {
        "event_id": 42,
        "timestamp": 1739145600000,
        "event_type": "stored",
        "model_name": "llama",
        "block_size": SIZE,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "worker-0",
        "medium": "gpu",
        "dp_rank": 0,
        "seq_hashes": [1, 2, 3],
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": THREE,
    },
    "mooncake standard hashes": {
        "event_type": "stored",
        "block_size": SIZE,
        "medium": "gpu",
        "seq_hashes": hash_blocks(THREE, SIZE).tolist(),
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
    },
    "mooncake with vllm's names beside": {
        "event_type": "stored",
        "type": "BlockStored",
        "seq_hashes": hash_blocks(THREE, SIZE).tolist(),
        "block_hashes": [],
        "token_ids": [],
        "medium": None,
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outer", ["array", "short", "map", "more"])
def test_stored_then_removed(form: str, outer: str) -> None:
    event = FORMS[form]
    hashes = event[1] if isinstance(event, list) else event.get("block_hashes") or event["seq_hashes"]

    def payload(one: Any) -> bytes:
        if outer == "map":
            return pack({"ts": 2.5, "events": [one], "data_parallel_rank": 3})
        return pack({"array": [2.5, [one], 3], "short": [2.5, [one]], "more": [2, [one], None, "later"]}[outer])

    index, tally = new_index(), Tally()
    batch = decode(payload(event))
    assert batch.ts == (2 if outer == "more" else 2.5)
    assert batch.dp_rank == (3 if outer in ("array", "map") else -1)
    index.apply(0, batch, tally)
    check(index)
    assert (tally["stored"], known(index, THREE), index.device_used[0]) == (3, 3, 3)
    if isinstance(event, list):
        gone: Any = ["BlockRemoved", hashes[1:], None][: 3 if "vllm" in form else 2]
    elif "event_type" in event:
        gone = {"event_type": "removed", "seq_hashes": hashes[1:], "medium": "gpu"}
    else:
        gone = {"type": "BlockRemoved", "block_hashes": hashes[1:], "medium": "GPU"}
    index.apply(0, decode(payload(gone)), tally)
    assert (tally["removed"], known(index, THREE)) == (2, 1)
    cleared: Any = {"event_type": "cleared"} if isinstance(event, dict) else ["AllBlocksCleared"]
    index.apply(0, decode(payload(cleared)), tally)
    check(index)
    assert (tally["cleared"], index.used) == (1, 0)


def test_sglang_golden_payloads() -> None:
    """Encoded by SGLang's own definitions (kvcache-ai/Mooncake, mooncake-conductor/tests/fixtures)."""
    whole = bytes.fromhex(
        "93cb40290000000000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392ff02b1706172656e745f626c"
        "6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da34750"
        "5583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391ffa66d656469756da347505581a474797065b0416c"
        "6c426c6f636b73436c656172656404"
    )
    batch = decode(whole)
    assert (batch.count, batch.ts, batch.dp_rank) == (3, 12.5, 4)
    assert batch.events["kind"][:3].tolist() == [0, 1, 2]
    assert batch.hashes[:3].tolist() == [2**64 - 1, 2, 2**64 - 1]
    assert batch.tokens[:4].tolist() == [1, 2, 3, 4]


def test_an_event_alone() -> None:
    index = new_index()
    index.apply(0, decode(pack(FORMS["mooncake with tokens"])), Tally())
    assert known(index, THREE) == 3


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Medium.GPU),
        ("GPU", Medium.GPU),
        ("npu", Medium.GPU),
        ("CPU", Medium.CPU),
        ("CPU_PINNED", Medium.CPU),
        ("CPU_TIER2", Medium.CPU),
        ("cpu", Medium.CPU),
        ("DISK", Medium.DISK),
        ("SSD", Medium.DISK),
        ("EXTERNAL", None),
        ("", None),
        ("x" * 300, None),
    ],
)
def test_media(medium: str | None, tier: Medium | None) -> None:
    for event in (stored_array([1], tokens_of(1), None, None, medium), stored_map([1], tokens_of(1), medium=medium)):
        index = new_index()
        batch, _ = apply(index, [event])
        assert batch.unknown_media == (tier is None)
        for each in (Medium.GPU, Medium.CPU, Medium.DISK):
            assert index.resident(0, each) == (each == tier)
        apply(index, [["BlockRemoved", [1], medium]])
        assert index.used == 0


def test_offloaded_blocks_are_known_by_their_hashes() -> None:
    """vLLM's offloading says of CPU blocks neither tokens nor parent."""
    index = new_index()
    apply(index, [stored_array([1, 2, 3], THREE)])
    offloaded = ["BlockStored", [2, 3, 9], None, [], 0, None, "CPU", None]
    _, tally = apply(index, [offloaded, ["BlockRemoved", [1, 2, 3], "GPU"]])
    assert (tally["stored"], tally["orphans"], tally["removed"]) == (2, 1, 3)
    assert (index.host_used[0], index.device_used[0]) == (2, 0)
    _, tally = apply(index, [stored_array([1], tokens_of(1))])
    assert known(index, THREE) == 3


def test_groups() -> None:
    def event(name: int, group: int | None, kind: str | None) -> list[Any]:
        return stored_array([name], tokens_of(1, name), None, None, "GPU", None, None, group, kind, None)

    index = new_index()
    batch, tally = apply(
        index,
        [
            event(1, 0, "sliding_window"),
            event(1, 1, "full_attention"),
            event(2, 2, "full_attention"),  # another full group says nothing new
            ["BlockRemoved", [1], "GPU", 0],  # of the sliding window's group
            ["BlockRemoved", [7], "GPU", 1],
        ],
    )
    assert (batch.other_groups, tally["other_groups"], tally["stored"], tally["unknown"]) == (1, 2, 1, 1)
    assert known(index, tokens_of(1, 1)) == 1
    _, tally = apply(index, [["BlockRemoved", [1], "GPU", 1]])
    assert tally["removed"] == 1
    index = new_index()
    batch, tally = apply(index, [event(1, 0, None), event(2, 1, None), event(3, 0, "mamba"), event(4, None, None)])
    assert (batch.other_groups, tally["stored"]) == (2, 2)


def test_remote_and_unknown_events() -> None:
    index = new_index()
    batch, tally = apply(
        index,
        [
            stored_map([1], tokens_of(1), locality="REMOTE"),
            stored_map([2], tokens_of(1), locality="LOCAL"),
            ["SomethingNew", 1, [2]],
            {"type": "SomethingNew", "block_hashes": [1]},
        ],
    )
    assert (batch.remote, batch.unknown_events, tally["stored"]) == (1, 2, 1)


def test_block_sizes() -> None:
    index = new_index()
    bad = ["BlockStored", [1], None, tokens_of(2), 2 * SIZE, None]
    more = stored_array([1], tokens_of(2))
    part = stored_array([5, 6], [*tokens_of(1), 7])
    _, tally = apply(index, [bad, more, part])
    assert (tally["mismatched"], tally["stored"], tally["orphans"]) == (2, 1, 1)


def test_namespaces() -> None:
    index = new_index(10_000)
    tokens = tokens_of(2)
    keys = [["image", "salt"], ["image2"]]
    apply(
        index,
        [
            stored_array([1, 2], tokens, None, None, "GPU", "sql", [["sql"], ["sql"]]),
            stored_array([3, 4], tokens, None, 7, "GPU", None),
            stored_array([5, 6], tokens, None, None, "GPU", None, [["salt"], None]),
            stored_map([7, 8], tokens, cache_salt="other"),
            stored_map([9, 10], tokens, extra_keys=keys),
            stored_map([11, 12], tokens, cache_namespace="w8a8"),
            stored_map([13, 14], tokens, tenant_id="acme"),
            stored_array([15], tokens_of(1, 50), 5, None, "GPU", None, [None]),
        ],
    )
    assert index.used == 15
    assert known(index, tokens) == 0
    assert known(index, tokens, namespace(lora_name="sql")) == 2
    assert known(index, tokens, namespace(lora_id=7)) == 2
    assert known(index, tokens, namespace(cache_salt="salt")) == 2
    assert known(index, tokens[:SIZE] + tokens_of(1, 50), namespace(cache_salt="salt")) == 2
    assert known(index, tokens, namespace(cache_salt="other")) == 2
    image = [extra_key("image"), extra_key("image2")]
    assert known(index, tokens, namespace(cache_salt="salt"), image) == 2
    assert known(index, tokens, namespace(), image) == 0
    assert known(index, tokens, namespace(salt="w8a8")) == 2
    assert known(index, tokens, namespace(tenant="acme")) == 2


def test_stream_namespace_is_what_requests_use() -> None:
    for words in ({"model": "m"}, {"model": "m", "lora_name": "l"}, {"salt": "s", "tenant": "t"}, {"cache_salt": "c"}):
        index = new_index()
        apply(index, [stored_array([1], tokens_of(1))], stream_namespace(**words))
        assert known(index, tokens_of(1), namespace(**words)) == 1
        assert known(index, tokens_of(1)) == 0
    index = new_index()
    apply(index, [stored_array([1], tokens_of(1), None, None, None, "l")], stream_namespace("m"))
    assert known(index, tokens_of(1), namespace("m", "l")) == 1


def test_missed_parent() -> None:
    index = new_index()
    _, tally = apply(index, [stored_array([2, 3], tokens_of(2, 4), 1)])
    assert (tally["orphans"], index.used) == (2, 0)
    _, tally = apply(index, [stored_array([1], tokens_of(1)), stored_array([2, 3], tokens_of(2, 4), 1)])
    assert (tally["orphans"], known(index, THREE)) == (0, 3)


def test_apply_in_slices() -> None:
    index, tally = new_index(), Tally()
    events = [stored_array([10 * i + j for j in range(1, 4)], tokens_of(3, 100 * i)) for i in range(50)]
    batch = decode(pack([1.0, events]))
    at, steps = 0, 0
    while at < batch.count:
        at = index.apply(0, batch, tally, at, 20)
        steps += 1
    assert tally["stored"] == 150 and steps >= 10


# --- damaged payloads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "a batch"),
        ([], "a batch"),
        ([1.0], "a batch"),
        ({}, "a batch"),
        (["x", []], "a timestamp"),
        ([1.0, 5], "an array of events"),
        ([1.0, [5]], "an event"),
        ([1.0, [[]]], "an event"),
        ([1.0, [[5]]], "an event"),
        ([1.0, [{"block_hashes": [1]}]], "an event"),
        ([1.0, [{"type": 3}]], "an event"),
        ([1.0, [{5: 3}]], "key of a map"),
        ([1.0, [["BlockStored", "abc", None, [], 4]]], "block hashes"),
        ([1.0, [["BlockStored", [1.5], None, [], 4]]], "block hashes"),
        ([1.0, [["BlockStored", [1], None, [-1], 4]]], "token ids"),
        ([1.0, [["BlockStored", [1], None, [2**32], 4]]], "token ids"),
        ([1.0, [["BlockStored", [1], None, ["a"], 4]]], "token ids"),
        ([1.0, [["BlockStored", [1], None, [1], 0]]], "block_size"),
        ([1.0, [["BlockStored", [1], None, [1], -4]]], "block_size"),
        ([1.0, [["BlockStored", [1], 1.5, [1], 4]]], "parent hash"),
        ([1.0, [["BlockStored", [1], None, [1], 4, "x"]]], "an integer or nil"),
        ([1.0, [["BlockStored", [1], None, [1], 4, None, 5]]], "a string or nil"),
        ([1.0, [["BlockStored", [1], None, [1], 4, None, None, None, 5]]], "extra keys"),
        ([1.0, [["BlockStored", [1], None, [1], 4, None, None, None, [5]]]], "extra keys"),
        ([1.0, [["BlockStored", [1], None, [1], 4, None, None, None, [None, None]]]], "extra keys"),
        ([1.0, [["BlockRemoved", [1], "GPU", "x"]]], "an integer or nil"),
        ([1.0, [], "x"], "an integer or nil"),
    ],
)
def test_malformed(value: Any, message: str) -> None:
    with pytest.raises(EventError, match=message):
        decode(pack(value))


def test_empty_cut_and_overlong() -> None:
    good = pack([1.0, [FORMS["vllm array"], FORMS["vllm map"], FORMS["mooncake with tokens"]], 0])
    for cut in range(len(good)):
        with pytest.raises(EventError):
            decode(good[:cut])
    with pytest.raises(EventError, match="nothing after the batch"):
        decode(good + b"\x00")


def test_ten_thousand_mutants() -> None:
    """Whatever comes, it is decoded or refused; and what is decoded is applied without harm to the tables."""
    rng = random.Random(0)
    seeds = [pack([1.0, [event, ["BlockRemoved", [1, 2], "GPU"], ["AllBlocksCleared"]], 0]) for event in FORMS.values()]
    seeds.append(pack({"ts": 1.0, "events": list(FORMS.values()), "data_parallel_rank": 1}))
    index, tally, into = new_index(60), Tally(), None
    refused = 0
    for i in range(10_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.random()
            if kind < 0.6:
                data[at] = rng.randrange(256)
            elif kind < 0.8:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            else:
                del data[at : at + rng.randint(1, 4)]
            if not data:
                data = bytearray(b"\x00")
        try:
            into = decode(bytes(data), into=into)
        except EventError:
            refused += 1
            into = None if i % 2 else into
            continue
        index.apply(i % 3, into, tally)
    check(index)
    assert 1000 < refused < 9900


# --- a publisher as engines have it ---------------------------------------------------------------------------------


class Publisher:
    """PUB and a ROUTER for replays, with the frames of vLLM's publisher."""

    def __init__(self, replay: bool = True, buffer_steps: int = 1000, port: int = 0, replay_port: int = 0) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.port = self._bind(self.pub, port)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.replay_port = self._bind(self.router, replay_port) if replay else 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.seq = 0
        self.asked: list[int] = []
        self.mute = False
        self.task = asyncio.create_task(self._serve()) if replay else None

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        return socket.bind_to_random_port("tcp://127.0.0.1")

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str | None:
        return f"tcp://127.0.0.1:{self.replay_port}" if self.replay_port else None

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            if self.mute:
                continue
            for seq, payload in list(self.buffer):
                if seq >= self.asked[-1]:
                    await self.router.send_multipart([client, b"", seq.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def send(self, seq: int, payload: bytes) -> None:
        await self.pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    async def publish(self, *events: Any, lose: bool = False, at: int | None = None) -> None:
        payload = pack([time.time(), list(events), 0])
        seq = self.seq if at is None else at
        self.seq = seq + 1
        self.buffer.append((seq, payload))
        if not lose:
            await self.send(seq, payload)

    def close(self) -> None:
        if self.task:
            self.task.cancel()
        self.pub.close(0)
        self.router.close(0)
        self.context.destroy(0)


@asynccontextmanager
async def following(publisher: Publisher, index: PrefixIndex, **more: Any) -> AsyncIterator[KvEventSubscriber]:
    """A subscriber that hears the publisher: a first batch is out and applied."""
    context = zmq.asyncio.Context()
    made = KvEventSubscriber(
        index, 0, publisher.endpoint, publisher.replay_endpoint, context=context, replay_timeout_s=0.5, **more
    )
    try:
        async with made:
            first = made.last_seq
            for _ in range(200):  # a PUB socket drops what it sends before it knows of the subscriber
                if made.last_seq > first and made.synced:
                    break
                await publisher.publish()
                await asyncio.sleep(0.05)
            await until(lambda: made.last_seq == publisher.seq - 1)
            yield made
    finally:
        context.destroy(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test as a coroutine, on a loop of its own."""

    def wrapped() -> None:
        asyncio.run(asyncio.wait_for(test(), 15))

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


def block(i: int, parent: int | None = None) -> list[Any]:
    return stored_array([i + 1], tokens_of(1, SIZE * i), parent)


async def caught_up(publisher: Publisher, subscriber: KvEventSubscriber) -> None:
    await until(lambda: subscriber.last_seq == publisher.seq - 1 and subscriber.synced)


@run
async def test_follows() -> None:
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        for i in range(20):
            await publisher.publish(block(i, i or None))
        await publisher.publish(["BlockRemoved", [20, 19]])
        await caught_up(publisher, subscriber)
        assert (subscriber.blocks_stored, subscriber.blocks_removed, index.host_used[0]) == (20, 2, 18)
        assert (subscriber.gaps, subscriber.restarts, subscriber.orphans, subscriber.lag) == (0, 0, 0, 0)
        assert 0 <= subscriber.lag_s < 30
        assert known(index, tokens_of(20)) == 18
    assert not subscriber.synced
    publisher.close()


@run
async def test_late_joiner_asks_for_all() -> None:
    publisher, index = Publisher(), new_index()
    for i in range(30):
        await publisher.publish(block(i, i or None))
    async with following(publisher, index) as subscriber:
        assert publisher.asked[0] == 0
        assert known(index, tokens_of(30)) == 30
        assert subscriber.losses == 0
    publisher.close()


@run
async def test_gap_is_filled_by_a_replay() -> None:
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await caught_up(publisher, subscriber)
        last = subscriber.last_seq
        replays = subscriber.replays
        await publisher.publish(block(1, 1), lose=True)
        await publisher.publish(block(2, 2), lose=True)
        await publisher.publish(block(3, 3))
        await caught_up(publisher, subscriber)
        assert publisher.asked[-1] == last  # the last one again, to see that it is the same
        assert (subscriber.gaps, subscriber.replays - replays, subscriber.losses) == (1, 1, 0)
        assert (known(index, tokens_of(4)), subscriber.orphans) == (4, 0)
    publisher.close()


@run
async def test_buffer_moved_on() -> None:
    publisher, index = Publisher(buffer_steps=3), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await caught_up(publisher, subscriber)
        for i in range(1, 8):
            await publisher.publish(block(i, i), lose=True)
        await publisher.publish(block(50))
        await caught_up(publisher, subscriber)
        assert (subscriber.gaps, subscriber.losses, subscriber.orphans) == (1, 1, 2)
        assert known(index, tokens_of(1)) == 0
        assert index.host_used[0] == 1
    publisher.close()


@run
async def test_gap_without_replays() -> None:
    publisher, index = Publisher(replay=False), new_index()
    index.store(1, Medium.GPU, hash_blocks(tokens_of(1), SIZE))
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await publisher.publish(block(1, 1), lose=True)
        await publisher.publish(block(9))
        await caught_up(publisher, subscriber)
        assert (subscriber.gaps, subscriber.losses, subscriber.replays) == (1, 1, 0)
        assert index.host_used.tolist() == [1, 1, 0]  # of the others nothing is forgotten
    publisher.close()


@run
async def test_replay_that_does_not_answer() -> None:
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await caught_up(publisher, subscriber)
        publisher.mute = True
        await publisher.publish(block(1, 1), lose=True)
        await publisher.publish(block(9))
        await caught_up(publisher, subscriber)
        assert (subscriber.gaps, subscriber.losses, index.host_used[0]) == (1, 1, 1)
    publisher.close()


async def restarted(replay: bool, numbers: Callable[[int], int]) -> None:
    publisher, index = Publisher(replay=replay), new_index()
    async with following(publisher, index) as subscriber:
        for i in range(3):
            await publisher.publish(block(i, i or None))
        await caught_up(publisher, subscriber)
        assert index.host_used[0] == 3
        publisher.buffer.clear()
        publisher.seq = numbers(publisher.seq)
        for seq in range(publisher.seq):
            publisher.buffer.append((seq, pack([time.time(), [block(100 + seq)], 0])))
        await publisher.publish(block(50))
        await publisher.publish(block(51))
        await until(lambda: subscriber.restarts > 0)
        await caught_up(publisher, subscriber)
        assert subscriber.restarts == 1
        assert known(index, tokens_of(1)) == 0
        assert known(index, tokens_of(1, 50 * SIZE)) == 1
        assert index.host_used[0] == (publisher.seq if replay else 2)
    publisher.close()


@pytest.mark.parametrize("replay", [True, False])
def test_restart(replay: bool) -> None:
    asyncio.run(asyncio.wait_for(restarted(replay, lambda _: 0), 15))


def test_restart_seen_late() -> None:
    asyncio.run(asyncio.wait_for(restarted(True, lambda _: 2), 15))


def test_restart_that_is_already_further() -> None:
    """Seen only by that the last batch known is now another."""
    asyncio.run(asyncio.wait_for(restarted(True, lambda seq: seq + 5), 15))


@run
async def test_another_process_at_the_same_place() -> None:
    """The numbers go on without a gap; that the connection was lost gives it away."""
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await caught_up(publisher, subscriber)
        seq, ports = publisher.seq, (publisher.port, publisher.replay_port)
        publisher.close()
        other = Publisher(port=ports[0], replay_port=ports[1])
        for _ in range(seq):
            await other.publish(block(70), lose=True)
        for _ in range(200):
            if subscriber.restarts:
                break
            await other.publish(block(80))
            await asyncio.sleep(0.05)
        await caught_up(other, subscriber)
        assert subscriber.restarts == 1
        assert known(index, tokens_of(1)) == 0
        assert index.host_used[0] == 2
        other.close()


@pytest.mark.parametrize("same", [True, False])
def test_warm_restart(same: bool) -> None:
    """A new subscriber goes on where another was; it sees if the publisher is another one now."""

    async def test() -> None:
        publisher, index = Publisher(), new_index()
        async with following(publisher, index) as subscriber:
            await publisher.publish(block(0))
            await caught_up(publisher, subscriber)
            last, mark = subscriber.last_seq, subscriber.last_mark
        if not same:
            publisher.buffer = deque((seq, pack([2.0, [block(30 + seq)]])) for seq in range(last + 1))
        await publisher.publish(block(1, 1) if same else block(90))
        copy = new_index()
        copy.restore(index.snapshot())
        context = zmq.asyncio.Context()
        other = KvEventSubscriber(copy, 0, publisher.endpoint, publisher.replay_endpoint, context=context)
        other.resume(last, mark)
        asked = len(publisher.asked)
        async with other:
            await caught_up(publisher, other)
        assert publisher.asked[asked:] == ([last] if same else [last, 0])
        assert other.restarts == (not same)
        assert known(copy, tokens_of(2)) == (2 if same else 0)
        publisher.close()
        context.destroy(0)

    asyncio.run(asyncio.wait_for(test(), 15))


@run
async def test_twice_and_out_of_order() -> None:
    for replay in (True, False):
        publisher, index = Publisher(replay=replay), new_index()
        async with following(publisher, index) as subscriber:
            await publisher.publish(block(0))
            again = publisher.buffer[-1]
            await publisher.send(*again)
            await publisher.send(*again)
            await caught_up(publisher, subscriber)
            await publisher.publish(block(1, 1), lose=True)
            late = publisher.buffer[-1]
            await publisher.publish(block(5))
            await publisher.send(*late)
            await publisher.publish(block(6))
            await caught_up(publisher, subscriber)
            await until(lambda: subscriber.duplicates >= 3)
            assert (subscriber.restarts, subscriber.gaps) == (0, 1)
            assert index.host_used[0] == (4 if replay else 2)
        publisher.close()


@run
async def test_a_publisher_that_started_anew_and_has_less_to_tell() -> None:
    """While the subscriber was away: the replay does not get as far as what is known already."""
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        for i in range(3):
            await publisher.publish(block(i))
        await caught_up(publisher, subscriber)
        last, mark = subscriber.last_seq, subscriber.last_mark
    publisher.buffer, publisher.seq = deque(), 0
    await publisher.publish(block(50), lose=True)
    context = zmq.asyncio.Context()
    fresh = KvEventSubscriber(index, 0, publisher.endpoint, publisher.replay_endpoint, context=context)
    fresh.resume(last, mark)
    async with fresh:
        await until(lambda: fresh.synced)
        assert (fresh.restarts, fresh.last_seq) == (1, 0)
        assert index.host_used[0] == 1
    publisher.close()
    context.destroy(0)


@run
async def test_a_number_on_something_unreadable_takes_nothing_away() -> None:
    publisher, index = Publisher(replay=False), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.publish(block(0))
        await caught_up(publisher, subscriber)
        await publisher.send(1 << 62, b"\xc1\xff")
        await until(lambda: subscriber.decode_errors == 1)
        await publisher.publish(block(1, 1))
        await until(lambda: index.host_used[0] == 2)
        assert (subscriber.gaps, subscriber.losses) == (0, 0)
    publisher.close()


@run
async def test_bad_messages_are_counted() -> None:
    publisher, index = Publisher(), new_index()
    async with following(publisher, index) as subscriber:
        await publisher.pub.send_multipart([b"kv", b"short", b""])
        await publisher.pub.send_multipart([b"only one"])
        await publisher.send(publisher.seq, b"\x01\x02")
        publisher.seq += 1
        await publisher.publish(["BlockStored", [1], None, tokens_of(2), 2 * SIZE, None])
        await publisher.publish(["New"], stored_map([1], tokens_of(1), medium="EXTERNAL"), block(0))
        await caught_up(publisher, subscriber)
        await until(lambda: subscriber.decode_errors == 3)
        ignored = subscriber.ignored
        assert (ignored["block_size"], ignored["unknown_event"], ignored["unknown_medium"]) == (1, 1, 1)
        assert index.host_used[0] == 1
    publisher.close()


@run
async def test_others_have_their_turn() -> None:
    """While a long history is applied, the loop is not kept for long from anything else."""
    publisher, index = Publisher(), new_index(50_000)
    for i in range(20):
        events = [stored_array([i * 2000 + j + 1], [i, j, 1, 2]) for j in range(2000)]
        await publisher.publish(*events)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    async with following(publisher, index, slice_s=0.0005) as subscriber:
        assert subscriber.blocks_stored == 40_000
    counter.cancel()
    assert turns > 20
    publisher.close()


@run
async def test_endpoint_comes_later_and_close_is_clean() -> None:
    first = Publisher()
    ports = (first.port, first.replay_port)
    first.close()
    context = zmq.asyncio.Context()
    index = new_index()
    subscriber = KvEventSubscriber(
        index, 0, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", context=context, replay_timeout_s=0.2
    )
    subscriber.start()
    await asyncio.sleep(0.4)
    publisher = Publisher(port=ports[0], replay_port=ports[1])
    for _ in range(100):
        await publisher.publish(block(0))
        await asyncio.sleep(0.05)
        if subscriber.batches:
            break
    await caught_up(publisher, subscriber)
    assert index.host_used[0] == 1
    await subscriber.close()
    await subscriber.close()
    publisher.close()
    context.destroy(0)
