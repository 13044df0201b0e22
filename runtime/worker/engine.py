"""Continuous batching on a thread of its own: every step runs one token of each sequence that decodes, and then, as far
as there is room in the step, chunks of prompts in the order of admission.

A sequence is admitted when all the blocks it may come to need can be promised, so none is ever preempted: the rule of
docs/physics.md for decode instances. Those whose KV comes from another worker wait for it in blocks of their own,
outside the steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..block_hash import Namespace, hash_blocks, namespace
from .blocks import BlockStore
from .events import EventPublisher
from .kvcache import Block, Event, KvCache, Stored, Tier
from .metrics import WorkerMetrics
from .model import PagedModel, Part, sample
from .pool import Pool

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Handover:
    """Where a prefill left the KV of a request: `block_ids` there, in order."""

    host: str
    port: int
    engine_id: str
    request_id: str
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that may have the first blocks of a request."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pool may have the first blocks of a request. `replicate`: those that come are to be copied to this node."""

    replicate: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked for. `hand_over`: the KV is kept for another worker. `origin`: where KV is to come from."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str = ""
    hand_over: bool = False
    origin: Handover | Holder | Pooled | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """News of a sequence. `finished`: stop, length or error, "" while it goes on. `stop_reason`: the id that ended it.

    `handed_over` names the blocks kept for another worker.
    """

    token: int | None = None
    finished: str = ""
    stop_reason: int | None = None
    error: str = ""
    handed_over: list[int] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `computed`: tokens whose KV is in its blocks; of the prompt's, `local_tokens` were cached
    here and `external_tokens` came from another worker."""

    asked: Generation
    emit: Callable[[Update], object]
    id: str
    hashes: list[int]
    tokens: list[int]
    arrived_s: float
    generator: torch.Generator | None = None
    blocks: list[Block] = field(default_factory=list)
    promised: int = 0
    computed: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    admitted_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    aborted: bool = False
    cancel_pull: Callable[[], object] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.asked.prompt)


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks of a request that has ended, for the worker that will pull them. `tokens`: what their KV is of."""

    blocks: list[Block]
    tokens: list[int]
    until_s: float


class Engine:
    """Runs sequences on a model.

    Attributes:
        id: names this process to others. cache, waiting, running, pulling, kept: its books, changed by its thread only;
            `call` runs something there.
        begin_pull: called on the thread with a sequence whose KV is to be fetched; `pulled` is to follow.
        pool: where new blocks go; None: nowhere.

    Args:
        max_sequences: admitted at a time. step_tokens: most rows of a step. keep_s: how long KV waits to be pulled.
    """

    def __init__(
        self,
        model: PagedModel,
        store: BlockStore,
        capacities: tuple[int, int, int],
        metrics: WorkerMetrics,
        publisher: EventPublisher | None,
        *,
        max_sequences: int,
        step_tokens: int,
        keep_s: float,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.model = model
        self.store = store
        self.metrics = metrics
        self.cache = KvCache(capacities, store.move, self._record)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pulling: set[Sequence] = set()
        self.kept: dict[str, Kept] = {}
        self.begin_pull: Callable[[Sequence], None] = _no_pull
        self.pool: Pool | None = None
        self._publisher = publisher
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._keep_s = keep_s
        self._events: list[Event] = []
        self._news: list[tuple[Sequence, Update]] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread ---

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, after the step it is in."""
        self._calls.put(None)
        self._thread.join()

    def call(self, what: Callable[[], T]) -> Future[T]:
        """Run something on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(what())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def post(self, what: Callable[[], None]) -> None:
        """As `call`, without an answer."""
        self._calls.put(what)

    def submit(self, asked: Generation, emit: Callable[[Update], object]) -> Sequence:
        """Put a request in the queue; `emit` is called on the engine's thread.

        One that needs more blocks than the device has would wait for ever: `Limits.context` keeps it out.
        """
        block = self.model.block_tokens
        hashes = hash_blocks(asked.prompt, block, namespace=_namespace(asked)).tolist()
        sequence = Sequence(asked, emit, uuid.uuid4().hex, hashes, list(asked.prompt), time.monotonic())
        if asked.seed is not None:
            sequence.generator = torch.Generator().manual_seed(asked.seed)
        self.post(lambda: self.waiting.append(sequence))
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Give a request up, wherever it is; nothing is emitted any more."""
        self.post(lambda: self._abort(sequence))

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.model.block_tokens)

    def blocks_needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks a request may come to need: the last token's KV is never computed."""
        return self.blocks_of(prompt_tokens + max(max_tokens, 1) - 1)

    # --- on the engine's thread ---

    def keep(self, sequence: Sequence) -> None:
        """Keep a finished sequence's blocks for the worker that will pull them."""
        self.kept[sequence.id] = Kept(
            sequence.blocks, sequence.tokens[: sequence.computed], time.monotonic() + self._keep_s
        )

    def drop_kept(self, request_id: str) -> None:
        """What was kept of a request is not needed any more; nothing where it has gone already."""
        kept = self.kept.pop(request_id, None)
        if kept is not None:
            self.cache.release(kept.blocks)

    def pulled(self, sequence: Sequence, tokens: int, error: str = "") -> None:
        """A pull is over: KV of the first `tokens` tokens is there, or what went wrong with KV that must come."""
        self.pulling.discard(sequence)
        if sequence.aborted:
            self._leave(sequence)
        elif error:
            self._fail(sequence, error)
        else:
            sequence.external_tokens = max(0, tokens - sequence.local_tokens)
            # The last prompt token is run again: its logits are the first output's.
            sequence.computed = max(sequence.computed, min(tokens, sequence.prompt_tokens - 1))
            self.metrics.external_hits.inc(sequence.external_tokens)
            self._commit(sequence)
            self.running.append(sequence)

    def _run(self) -> None:
        stepped = False
        while True:
            try:
                if not self._run_calls(wait=not stepped):
                    break
                self._expire()
                self._admit()
                stepped = self._step()
            except Exception as error:  # nothing that one step does may end the worker
                log.exception("a step failed")
                stepped = True  # room was made
                for sequence in list(self.running):
                    self.running.remove(sequence)
                    self._fail(sequence, f"{type(error).__name__}: {error}")
            self._tell()

    def _run_calls(self, wait: bool) -> bool:
        """What other threads asked for, which may be awaited. False: it is time to stop."""
        wait_s: float | None = 0.0
        if wait:  # sequences that are not admitted for want of room get it by a call or by an expiry
            deadline = min((kept.until_s for kept in self.kept.values()), default=None)
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        while True:
            try:
                call = self._calls.get(block=wait_s is None or wait_s > 0.0, timeout=wait_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait_s = 0.0

    def _expire(self) -> None:
        now_s = time.monotonic()
        for request_id in [each for each, kept in self.kept.items() if kept.until_s <= now_s]:
            log.warning("the KV of request %s was not pulled in time", request_id)
            self.metrics.expired_handovers.inc()
            self.drop_kept(request_id)

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.pulling) < self._max_sequences:
            sequence = self.waiting[0]
            asked, prompt_tokens = sequence.asked, sequence.prompt_tokens
            needed = self.blocks_needed(prompt_tokens, asked.max_tokens)
            reusable = (prompt_tokens - 1) // self.model.block_tokens  # one token is always computed
            hits = self.cache.admit(sequence.hashes[:reusable], needed)
            if hits is None:
                return
            self.waiting.popleft()
            sequence.blocks = hits
            sequence.promised = needed - len(hits)
            sequence.computed = sequence.local_tokens = len(hits) * self.model.block_tokens
            sequence.admitted_s = time.monotonic()
            self.metrics.queue_s.observe(sequence.admitted_s - sequence.arrived_s)
            self.metrics.prefix_queries.inc(prompt_tokens)
            self.metrics.prefix_hits.inc(sequence.local_tokens)
            wanted = self.blocks_of(prompt_tokens) if isinstance(asked.origin, Handover) else reusable
            if asked.origin is None or (not isinstance(asked.origin, Handover) and wanted <= len(hits)):
                self.running.append(sequence)
                continue
            self.metrics.external_queries.inc(prompt_tokens - sequence.local_tokens)
            self._grow(sequence, wanted)
            self.pulling.add(sequence)
            self.begin_pull(sequence)

    def _step(self) -> bool:
        """One step of the model; False: there was nothing to do."""
        room = self._step_tokens
        chosen: list[tuple[Sequence, int]] = []
        for sequence in sorted(self.running, key=lambda each: len(each.tokens) - each.computed > 1):  # decodes first
            count = min(len(sequence.tokens) - sequence.computed, room)
            if count == 0:
                break
            room -= count
            self._grow(sequence, self.blocks_of(sequence.computed + count))
            chosen.append((sequence, count))
        if not chosen:
            return False
        parts = []
        for sequence, count in chosen:
            end = sequence.computed + count
            slots = [block.slot for block in sequence.blocks[: self.blocks_of(end)]]
            parts.append(Part(sequence.tokens[sequence.computed : end], sequence.computed, slots))
        logits = self.model.step(parts, self.store)
        for (sequence, count), row in zip(chosen, logits, strict=True):
            sequence.computed += count
            self._commit(sequence)
            if sequence.computed == len(sequence.tokens):
                self._extend(sequence, row)
        return True

    def _extend(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """The next token of a sequence, and whether it is the last."""
        asked = sequence.asked
        made = len(sequence.tokens) - sequence.prompt_tokens
        ends = asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids | self.model.eos
        if made < asked.min_tokens:
            logits = logits.index_fill(0, torch.tensor(sorted(ends), dtype=torch.long), float("-inf"))
        token = sample(logits, asked.temperature, asked.top_k, asked.top_p, sequence.generator)
        sequence.tokens.append(token)
        self._time(sequence, first=made == 0)
        if token in ends:
            self._finish(sequence, token, "stop", token if token in asked.stop_token_ids else None)
        elif made + 1 >= asked.max_tokens:
            self._finish(sequence, token, "length", None)
        else:
            self._news.append((sequence, Update(token)))

    def _time(self, sequence: Sequence, first: bool) -> None:
        metrics, now_s = self.metrics, time.monotonic()
        if first:
            sequence.first_s = now_s
            local, external = sequence.local_tokens, sequence.external_tokens
            metrics.ttft_s.observe(now_s - sequence.arrived_s)
            metrics.prefill_s.observe(now_s - sequence.admitted_s)
            metrics.prompt_tokens.inc(sequence.prompt_tokens)
            metrics.by_source["local_cache_hit"].inc(local)
            metrics.by_source["external_kv_transfer"].inc(external)
            metrics.by_source["local_compute"].inc(sequence.prompt_tokens - local - external)
        else:
            metrics.itl_s.observe(now_s - sequence.last_s)
        metrics.generation_tokens.inc()
        sequence.last_s = now_s

    def _finish(self, sequence: Sequence, token: int, reason: str, stop_reason: int | None) -> None:
        self.running.remove(sequence)
        self.metrics.decode_s.observe(sequence.last_s - sequence.first_s)
        self.metrics.e2e_s.observe(sequence.last_s - sequence.arrived_s)
        self.metrics.finished(reason)
        slots = None
        if sequence.asked.hand_over:
            slots = [block.slot for block in sequence.blocks]
            self.keep(sequence)
            self.cache.release([], sequence.promised)
        else:
            self.cache.release(sequence.blocks, sequence.promised)
        self._news.append((sequence, Update(token, reason, stop_reason, handed_over=slots)))

    def _fail(self, sequence: Sequence, error: str) -> None:
        self.cache.release(sequence.blocks, sequence.promised)
        self.metrics.finished("error")
        self._news.append((sequence, Update(finished="error", error=error)))

    def _abort(self, sequence: Sequence) -> None:
        sequence.aborted = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.metrics.finished("abort")
        elif sequence in self.pulling:
            if sequence.cancel_pull is not None:
                sequence.cancel_pull()  # `pulled` comes when nobody writes into its blocks any more
        elif sequence in self.running:
            self.running.remove(sequence)
            self._leave(sequence)
        else:  # it has ended; the one it was kept for will not hear of it
            self.drop_kept(sequence.id)

    def _leave(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks, sequence.promised)
        self.metrics.finished("abort")

    def _grow(self, sequence: Sequence, blocks: int) -> None:
        while len(sequence.blocks) < blocks:
            sequence.blocks.append(self.cache.grow())
            sequence.promised -= 1

    def _commit(self, sequence: Sequence) -> None:
        """Enter the sequence's full blocks in the cache."""
        block = self.model.block_tokens
        for i in range(sequence.computed // block):
            if sequence.blocks[i].hash is not None:
                continue
            tokens = sequence.tokens[i * block : (i + 1) * block]
            parent = sequence.hashes[i - 1] if i else None
            if i == len(sequence.hashes):
                more = hash_blocks(tokens, block, namespace=_namespace(sequence.asked), parent=parent)
                sequence.hashes.append(int(more[0]))
            extra = "" if i else sequence.asked.cache_salt
            sequence.blocks[i] = self.cache.commit(sequence.blocks[i], sequence.hashes[i], parent, tuple(tokens), extra)

    def _new_blocks(self) -> dict[int, bytes]:
        """Blocks that came to the device since the last news, by their hashes."""
        came = [event.block for event in self._events if isinstance(event, Stored) and event.tier == Tier.DEVICE]
        return {
            block.hash: self.store.read(block.tier, block.slot)
            for block in came
            if block.hash is not None and self.cache.committed.get(block.hash) is block  # it may have gone again
        }

    def _record(self, event: Event) -> None:
        self._events.append(event)

    def _tell(self) -> None:
        """The pool, then events, then answers: who has the answer may ask for the blocks."""
        if self.pool is not None and (new := self._new_blocks()):
            self.pool.put(new)
        if self._publisher is not None:
            self._publisher.publish(self._events)
        self._events.clear()
        for sequence, update in self._news:
            sequence.emit(update)
        self._news.clear()


def _namespace(asked: Generation) -> Namespace:
    return namespace(cache_salt=asked.cache_salt)


def _no_pull(sequence: Any) -> None:
    raise NotImplementedError("nobody pulls")
