"""KV events of the engines: decoding their batches, and following a worker's stream of them.

Three publishers are read, each with the frames [topic, sequence number (8 bytes, big-endian), msgpack payload]:

- vLLM (vllm/distributed/kv_events.py): a batch [ts, events, data_parallel_rank?] or a map of these; events
  BlockStored, BlockRemoved, AllBlocksCleared as arrays with the tag first or as maps with "type".
- SGLang (sglang/srt/disaggregation/kv_events.py): the same with shorter tails, and "cache_salt" in maps.
- Mooncake's standard (kvcache-ai/Mooncake, docs/source/api-reference/http/conductor-indexer.md): maps with
  "event_type" stored, removed or cleared, and "seq_hashes" by the standard hash unless "token_ids" are there.

A batch is scanned into arrays by one compiled pass, and applied to a `PrefixIndex` by another call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from .block_hash import BASE, Hashes, Namespace, address, namespace, xxh3_64
from .kernel.event_scan import EVENT, EXPECTED, FIELDS, SCAN, scan_payload
from .kernel.xxh3 import start_of
from .prefix_index import EventArrays, Medium, PrefixIndex, Tally

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_WORD = 8
_NAMES = list(SCAN.names or ())
_FOUND = slice(_NAMES.index("events"), _NAMES.index("remote") + 1)
_TS = _NAMES.index("ts")


class EventError(ValueError):
    """A payload that is no batch of KV events: what was expected, and where."""


@dataclass(frozen=True, slots=True)
class StreamNamespace:
    """The namespace of what a worker publishes, as far as its events do not say: model, LoRA adapter, salt, tenant.

    Attributes are hashes of the names, 0 for an empty one. Make it with `stream_namespace`.
    """

    model: int = 0
    lora: int = 0
    salt: int = 0
    tenant: int = 0
    namespace: Namespace = BASE


def stream_namespace(
    model: str = "", lora_name: str = "", *, salt: str = "", tenant: str = "", cache_salt: str = ""
) -> StreamNamespace:
    """What `runtime.block_hash.namespace` says to a request, to a stream of events."""
    names = (model, lora_name, salt, "" if tenant == "default" else tenant)
    model_hash, lora, salt_hash, tenant_hash = (xxh3_64(name.encode()) if name else 0 for name in names)
    return StreamNamespace(
        model_hash,
        lora,
        salt_hash,
        tenant_hash,
        namespace(model, lora_name, salt=salt, tenant=tenant, cache_salt=cache_salt),
    )


@dataclass(slots=True)
class EventBatch(EventArrays):
    """A decoded batch. Its arrays are good until it is decoded into again.

    Counted, not recorded: `unknown_events` of no known type, `unknown_media` of no known medium, `other_groups` of a
    KV-cache group that is not of full attention, `remote` not held by the worker itself.
    """

    ts: float = 0.0
    dp_rank: int = -1  # -1: not said
    unknown_events: int = 0
    unknown_media: int = 0
    other_groups: int = 0
    remote: int = 0
    header: np.ndarray = field(default_factory=lambda: np.zeros(1, SCAN), repr=False)
    words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)  # the header again
    times: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)  # and again
    room: np.ndarray = field(default_factory=lambda: np.zeros(FIELDS + 4, np.int64), repr=False)
    at: int = 0  # address of the header
    size: int = 0  # largest payload there is room for
    stream: StreamNamespace | None = None


def new_batch() -> EventBatch:
    """An empty batch, to be decoded into."""
    nothing: Hashes = np.zeros(0, np.uint64)
    return EventBatch(np.zeros(0, EVENT), nothing, np.zeros(0, np.uint32), nothing, 0)


_NO_NAMESPACE = StreamNamespace()


def decode(payload: bytes, stream: StreamNamespace = _NO_NAMESPACE, into: EventBatch | None = None) -> EventBatch:
    """Decode a payload of vLLM, SGLang or Mooncake.

    Args:
        payload: msgpack. stream: the namespace where events do not name another.
        into: a batch whose arrays may be overwritten.

    Raises:
        EventError: it is no batch of KV events. Nothing else is raised.
    """
    batch = new_batch() if into is None else into
    size = len(payload)
    if size > batch.size or batch.stream is not stream:
        _make_room(batch, size, stream)
    code = scan_payload(batch.at, start_of(np.frombuffer(payload, np.uint8)), size) if size else -1
    found = batch.words[_FOUND].tolist()
    if code < 0:
        batch.count = 0
        where = int(batch.header["error_at"][0]) if size else 0
        first = f"0x{payload[where]:02x}" if where < size else "the end"
        raise EventError(f"expected {EXPECTED[-code]} at byte {where} of {size}, found {first}")
    (
        batch.count,
        batch.dp_rank,
        batch.unknown_events,
        batch.unknown_media,
        batch.other_groups,
        batch.remote,
    ) = found
    batch.ts = batch.times.item(_TS)
    return batch


def _make_room(batch: EventBatch, size: int, stream: StreamNamespace) -> None:
    """Arrays of a batch for payloads of `size` bytes: whatever is in one, each hash, token and key takes a byte."""
    if size > batch.size:
        batch.size = max(4096, 1 << (size - 1).bit_length())
        batch.events = np.zeros(batch.size // 8 + 8, EVENT)
        batch.hashes = np.empty(batch.size, np.uint64)
        batch.tokens = np.empty(batch.size, np.uint32)
        batch.extras = np.empty(batch.size, np.uint64)
    batch.stream = stream
    header = batch.header
    batch.words, batch.times = header.view(np.int64), header.view(np.float64)
    batch.at = address(header)
    batch.places = address(batch.events), address(batch.hashes), address(batch.tokens), address(batch.extras)
    for name, value in (
        *zip(("events_at", "hashes_at", "tokens_at", "extras_at"), batch.places, strict=True),
        ("room_at", address(batch.room)),
        ("model", stream.model),
        ("salt", stream.salt),
        ("tenant", stream.tenant),
        ("lora", stream.lora),
        ("seed", stream.namespace.seed),
        ("root_extra", stream.namespace.root_extra),
    ):
        header[name] = value


class KvEventSubscriber:
    """Follows one worker's KV events and keeps its residency in an index.

    Batches are applied in the order of their sequence numbers, each once. A gap is filled by a replay where the worker
    offers one; where it cannot be filled, all the worker was known to have is forgotten, and what comes next is learnt
    anew. So the index may know too little of a worker, but does not go on believing what was taken back unheard.
    A publisher that starts anew is known by a number that was used before for something else.

    Attributes (counters since the start):
        instance: the worker's number in the index; to be set anew when instances are renumbered.
        synced: the stream is followed, with no gap known.
        last_seq: number of the last batch applied, -1 for none. lag: batches known to be out and not yet applied.
        lag_s: age of the last batch when it was applied, by the worker's clock.
        batches, gaps, replays, restarts, duplicates, decode_errors; losses: times all was forgotten for a gap that
            could not be filled.
        blocks_stored, blocks_removed, orphans; ignored: events or blocks passed over, by reason.

    Args:
        index: shared by all subscribers of a sidecar. instance: see above.
        endpoint: the worker's PUB socket, such as tcp://host:5557. replay_endpoint: its ROUTER socket, or None.
        topic: prefix of the topics to follow.
        stream: the namespace of what it publishes.
        slice_s: about how long to work before others on the event loop have their turn.
        replay_timeout_s: how long to wait for each message of a replay.
        context: of ZMQ, by default the process's own.
        name: for log messages, by default the endpoint.
    """

    def __init__(
        self,
        index: PrefixIndex,
        instance: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        stream: StreamNamespace = _NO_NAMESPACE,
        slice_s: float = 0.002,
        replay_timeout_s: float = 5.0,
        context: zmq.asyncio.Context | None = None,
        name: str | None = None,
    ) -> None:
        self.index = index
        self.instance = instance
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint or None
        self.topic = topic
        self.stream = stream
        self.slice_s = slice_s
        self.replay_timeout_s = replay_timeout_s
        self.name = name or endpoint
        self.synced = False
        self.last_seq = -1
        self.seen_seq = -1
        self.lag_s = 0.0
        self.batches = 0
        self.gaps = 0
        self.replays = 0
        self.restarts = 0
        self.losses = 0
        self.duplicates = 0
        self.decode_errors = 0
        self.unknown_events = 0
        self.unknown_media = 0
        self.other_groups = 0
        self.remote = 0
        self.tally = Tally()
        self._batch = new_batch()
        self._context = context
        self._budget = 1000
        self._turn_s = 0.0
        self._marks: dict[int, int] = {}  # hashes of the last payloads, by their numbers
        self._last_ts = 0.0
        self._doubtful = False  # the connection was lost: perhaps another publisher came
        self._told: set[str] = set()
        self._no_replay_until_s = 0.0
        self._sockets: list[zmq.asyncio.Socket] = []
        self._task: asyncio.Task[None] | None = None

    # --- what there is to tell ---

    @property
    def lag(self) -> int:
        """Batches known to be out and not yet applied."""
        return max(0, self.seen_seq - self.last_seq)

    @property
    def blocks_stored(self) -> int:
        return self.tally["stored"]

    @property
    def blocks_removed(self) -> int:
        return self.tally["removed"]

    @property
    def orphans(self) -> int:
        """Blocks stored whose parent's event was missed: they cannot be entered."""
        return self.tally["orphans"]

    @property
    def ignored(self) -> dict[str, int]:
        """Events passed over by reason; unknown_block, index_full: blocks."""
        return {
            "unknown_event": self.unknown_events,
            "unknown_medium": self.unknown_media,
            "other_group": self.other_groups + self.tally["other_groups"],
            "remote": self.remote,
            "block_size": self.tally["mismatched"],
            "unknown_block": self.tally["unknown"],
            "index_full": self.tally["full"],
        }

    # --- life ---

    def start(self) -> None:
        """Begin to follow, on the running event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"kv-events {self.name}")

    def close(self) -> Coroutine[Any, Any, None]:
        """Stop at once; to be awaited for the rest. What is known of the worker stays in the index."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.synced = False
        return self._closed(task)

    async def _closed(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._disconnect()

    @property
    def last_mark(self) -> int:
        """A hash of the last batch applied, 0 if it is not known: with it, `resume` sees if the publisher changed."""
        return self._marks.get(self.last_seq, 0)

    def resume(self, last_seq: int, last_mark: int = 0) -> None:
        """Before `start`: the index already has what was published up to `last_seq`, as after a warm restart.

        What follows is asked for from there. With the `last_mark` of then, a publisher that started anew meanwhile is
        found out by its replay, wherever its numbers have got to.
        """
        self.last_seq = self.seen_seq = last_seq
        if last_mark:
            self._marks[last_seq] = last_mark

    async def __aenter__(self) -> KvEventSubscriber:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        wait_s = 0.1
        while True:
            try:
                await self._follow()
            except asyncio.CancelledError:
                raise
            except Exception:  # whatever it is, the sidecar goes on; nothing is known of the worker meanwhile
                log.exception("KV events of %s: following failed, trying again in %.1f s", self.name, wait_s)
                with contextlib.suppress(ValueError):  # the instance may be gone from the index
                    self._forget()
                self.last_seq = -1
            finally:
                self._disconnect()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 10.0)

    def _connect(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        context = self._context or zmq.asyncio.Context.instance()
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if kind == zmq.SUB:
            socket.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        socket.connect(endpoint)
        return socket

    def _disconnect(self) -> None:
        self.synced = False
        for socket in self._sockets:
            socket.close(0)
        self._sockets.clear()

    async def _follow(self) -> None:
        """Receive for as long as nothing fails. ZMQ connects again by itself."""
        socket = self._connect(zmq.SUB, self.endpoint)
        # The sockets underneath, to take many messages without a task switch for each.
        direct: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        notices = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sockets.append(notices)
        disconnects: zmq.Socket[bytes] = zmq.Socket.shadow(notices.underlying)
        if self.replay_endpoint is not None:  # the worker may have been at work for long
            await self._replay(max(self.last_seq, 0))
        self.synced = True
        while True:
            await socket.poll()
            with contextlib.suppress(zmq.Again):
                while disconnects.recv_multipart(zmq.NOBLOCK):
                    self._doubtful = True
            while True:
                try:
                    frames = direct.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) != 3 or len(frames[1]) != _WORD:
                    self.decode_errors += 1
                    self._tell("frames", "expected frames [topic, 8-byte sequence, payload], found %d", len(frames))
                    continue
                await self._take(int.from_bytes(frames[1], "big"), frames[2])

    # --- the order of batches ---

    async def _take(self, seq: int, payload: bytes) -> None:
        """A batch from the stream."""
        self.seen_seq = max(self.seen_seq, seq)
        if self._doubtful:
            self._doubtful = False
            await self._replay(max(self.last_seq, 0))
        if seq <= self.last_seq:
            if not self._is_new(seq, payload):
                self.duplicates += 1
                return
            await self._restarted(seq)
        elif seq > self.last_seq + 1 and not (self.last_seq < 0 and self.replay_endpoint is None):
            if not self._readable(payload):
                return
            self.gaps += 1
            self.synced = False
            # From the last one known on, to see by it that the publisher is still the same.
            await self._replay(max(self.last_seq, 0))
            if self.last_seq + 1 < seq:
                self._lost(seq)
            self.synced = True
        if seq > self.last_seq:
            await self._apply(seq, payload)
        else:
            self.duplicates += 1  # the replay brought it

    def _readable(self, payload: bytes) -> bool:
        """Whether it is a batch at all: nothing is to be given up for the number on something else."""
        try:
            decode(payload, self.stream, self._batch)
        except EventError as error:
            self.decode_errors += 1
            self._tell("gap", "a batch out of order cannot be read: %s", error)
            return False
        return True

    def _is_new(self, seq: int, payload: bytes) -> bool:
        """Whether a batch with a number already passed is of a publisher that started anew: the number was another
        batch's, or is not remembered and the batch was made after the last one applied. Else it is late, or here twice.
        """
        mark = self._marks.get(seq)
        if mark is not None:
            return mark != xxh3_64(payload)
        try:
            return decode(payload, self.stream, self._batch).ts >= self._last_ts
        except EventError:
            return False

    async def _restarted(self, seq: int) -> None:
        """The publisher counts from 0 again: what the worker had is gone."""
        log.info("KV events of %s: it started anew (%d after %d)", self.name, seq, self.last_seq)
        self.restarts += 1
        self._forget()
        self.last_seq = -1
        self.seen_seq = seq
        if seq > 0:
            await self._replay(0)
            if self.last_seq + 1 < seq:
                self._lost(seq)

    def _lost(self, following: int) -> None:
        """Batches before `following` cannot be had: what is known of the worker may be wrong."""
        if self.last_seq >= 0:
            self.losses += 1
            self._forget()
        self.last_seq = following - 1

    def _forget(self) -> None:
        self._marks.clear()
        self.index.clear(self.instance)

    async def _replay(self, first: int) -> None:
        """Ask for the batches from `first` on, and apply those not applied yet.

        Where the publisher turns out to have started anew, all is forgotten and asked for from 0.
        """
        if self.replay_endpoint is None or time.monotonic() < self._no_replay_until_s:
            return
        for start in (first, 0):
            self.replays += 1
            again = await self._replay_once(start)
            if not again:
                return
            self.restarts += 1
            self._forget()
            self.last_seq = self.seen_seq = -1

    async def _replay_once(self, start: int) -> bool:
        """One replay; whether it shows another publisher: a batch differed from the one known by its number, or the
        last one known is not there and none after it, which a publisher always has."""
        assert self.replay_endpoint is not None
        known, newest = self.last_seq, -1
        socket = self._connect(zmq.DEALER, self.replay_endpoint)
        try:
            await asyncio.wait_for(socket.send_multipart([b"", start.to_bytes(_WORD, "big")]), self.replay_timeout_s)
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), self.replay_timeout_s)
                if frames and frames[0] == b"" and len(frames) > 2:
                    frames = frames[1:]
                if len(frames) < 2 or len(frames[-2]) != _WORD:
                    self.decode_errors += 1
                    self._tell("replay", "expected frames ['', 8-byte sequence, payload] in a replay")
                    continue
                word, payload = frames[-2:]
                if word == _END:
                    return newest < known
                seq = int.from_bytes(word, "big")
                newest = max(newest, seq)
                self.seen_seq = max(self.seen_seq, seq)
                if seq <= self.last_seq:
                    mark = self._marks.get(seq)
                    if mark is not None and mark != xxh3_64(payload):
                        return True
                    continue
                if seq > self.last_seq + 1:
                    self._lost(seq)
                await self._apply(seq, payload)
        except (TimeoutError, zmq.ZMQError) as error:
            self._no_replay_until_s = time.monotonic() + self.replay_timeout_s
            log.warning("KV events of %s: no replay (%s)", self.name, error or "no answer in time")
            return False
        finally:
            socket.close(0)
            if socket in self._sockets:
                self._sockets.remove(socket)

    # --- one batch ---

    async def _apply(self, seq: int, payload: bytes) -> None:
        """Decode and apply a batch, in turns with others on the event loop."""
        self.last_seq = seq
        self._marks[seq] = xxh3_64(payload)
        if len(self._marks) > 20_000:  # twice as many as vLLM and SGLang keep for replays
            for old in list(self._marks)[:10_000]:
                del self._marks[old]
        try:
            batch = decode(payload, self.stream, self._batch)
        except EventError as error:
            self.decode_errors += 1
            self._tell("decode", "%s", error)
            return
        self.unknown_events += batch.unknown_events
        self.unknown_media += batch.unknown_media
        self.other_groups += batch.other_groups
        self.remote += batch.remote
        following = 0
        while True:
            begun_s = time.perf_counter()
            following = self.index.apply(self.instance, batch, self.tally, following, self._budget)
            now_s = time.perf_counter()
            if following >= batch.count:
                break
            self._budget = int(min(1e5, max(50, self._budget * min(2.0, self.slice_s / max(1e-6, now_s - begun_s)))))
            await asyncio.sleep(0)
            self._turn_s = time.perf_counter()
        self.batches += 1
        if batch.ts:
            self._last_ts = batch.ts
            self.lag_s = max(0.0, time.time() - batch.ts)
        if self.tally["mismatched"]:
            self._tell("block_size", "blocks of another size than %d tokens are not indexed", self.index.block_tokens)
        if now_s - self._turn_s > self.slice_s:
            await asyncio.sleep(0)
            self._turn_s = time.perf_counter()

    def _tell(self, what: str, message: str, *arguments: object) -> None:
        """Log a kind of trouble once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("KV events of %s: " + message + " (further ones are only counted)", self.name, *arguments)


def prepare() -> None:
    """Compile all of it now, or load it, and not when the first request or event comes. Takes a minute at most."""
    index = PrefixIndex(np.zeros((64, 1), np.int64), 1, instances=2)
    tokens = np.arange(4, dtype=np.uint32)
    _, hashes = index.find_tokens(tokens)
    index.find_tokens(np.frombuffer(tokens.tobytes(), np.uint32))  # read-only, as from a message
    index.store(0, Medium.GPU, hashes)
    index.find(hashes)
    numbers = index.intern(hashes, hold=True)
    index.expect(1, numbers)
    index.unexpect(1, numbers)
    index.hold(numbers)
    index.release(numbers)
    index.release(numbers)
    index.remove(0, Medium.GPU, hashes)
    index.assume(0, hashes, until_s=1.0)
    index.expire(2.0)
    index.stored(0, Medium.GPU, hashes, None, tokens)
    index.rebind(index.blocks, [0, 1], instances=2)
    PrefixIndex(np.zeros((64, 1), np.int64), 1, instances=2).restore(index.snapshot())
    index.clear(0)
    index.apply(0, decode(b"\x92\x01\x90"), Tally())
