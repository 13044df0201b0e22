"""What an engine lends to other workers, and what it fetches from them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from ..block_hash import token_array, xxh3_64
from .engine import Engine, Handover, Holder, Pooled, Sequence
from .kvcache import Block
from .pool import Pool
from .transfer import Lent, Prefix, Pull, Release, Request, TransferError, fetch, release

log = logging.getLogger(__name__)
T = TypeVar("T")


class Exchange:
    """Joins an engine and the transfers of its process, on the running event loop.

    Args:
        timeout_s: for connecting to another worker, and for each block. pool: where blocks may come from, if any.
    """

    def __init__(self, engine: Engine, timeout_s: float, pool: Pool | None = None) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.pool = pool
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        engine.begin_pull = self._begin_pull

    async def lend(self, request: Request) -> Lent:
        """Blocks for another worker.

        Raises:
            TransferError: they are not here, or the other runs another model.
        """
        return await self._call(lambda: self._lend(request))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, what: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.engine.call(what))

    # --- on the engine's thread ---

    def _lend(self, request: Request) -> Lent:
        engine = self.engine
        if not isinstance(request, Release) and request.fingerprint != engine.model.fingerprint:
            raise TransferError("the workers' models or block sizes differ")
        if isinstance(request, Prefix):
            return _Blocks(engine, engine.cache.pin(request.hashes))
        kept = engine.kept.get(request.request_id)
        if request.engine_id != engine.id or kept is None:
            raise TransferError(f"nothing is kept here of request {request.request_id!r}")
        if isinstance(request, Release):
            engine.drop_kept(request.request_id)
            return _Blocks(engine, [])
        if _digest(kept.tokens[: request.prompt_tokens]) != request.prompt_digest:
            raise TransferError(f"what request {request.request_id!r} left is of another prompt")
        by_slot = {block.slot: block for block in kept.blocks}
        if not by_slot.keys() >= set(request.block_ids):
            raise TransferError(f"not all of these blocks are of request {request.request_id!r}")
        blocks = [by_slot[slot] for slot in request.block_ids]
        engine.cache.hold(blocks)
        return _Blocks(engine, blocks, request.request_id)

    def _begin_pull(self, sequence: Sequence) -> None:
        running: list[asyncio.Task[tuple[int, str]]] = []

        def begin() -> None:
            task = self._loop.create_task(self._pull(sequence))
            running.append(task)
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._pulled(sequence, task))

        sequence.cancel_pull = lambda: self._loop.call_soon_threadsafe(lambda: running[0].cancel())
        self._loop.call_soon_threadsafe(begin)

    # --- on the event loop ---

    def _pulled(self, sequence: Sequence, task: asyncio.Task[tuple[int, str]]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            tokens, error = 0, "the worker stops"
        elif (failure := task.exception()) is not None:
            log.error("the pull of request %s failed", sequence.id, exc_info=failure)
            tokens, error = 0, f"{type(failure).__name__}: {failure}"
        else:
            tokens, error = task.result()
        self.engine.post(lambda: self.engine.pulled(sequence, tokens, error))

    async def _pull(self, sequence: Sequence) -> tuple[int, str]:
        """Fetch what another worker has of a sequence into its blocks. KV that was handed over must come; a prefix is a
        help, and what does not come of it is computed.

        Returns:
            How many tokens' KV is there now, and what went wrong.
        """
        origin, engine, block_tokens = sequence.asked.origin, self.engine, self.engine.model.block_tokens
        assert origin is not None
        have = sequence.local_tokens // block_tokens
        blocks, hashes = sequence.blocks[have:], sequence.hashes[have : len(sequence.blocks)]
        if isinstance(origin, Pooled):
            assert self.pool is not None
            stream = self.pool.fetch(hashes)
        elif isinstance(origin, Handover):
            ids = origin.block_ids[have : len(sequence.blocks)]
            prompt = sequence.asked.prompt
            left = Pull(
                engine.model.fingerprint, origin.engine_id, origin.request_id, ids, len(prompt), _digest(prompt)
            )
            stream = self._fetch(origin, left, len(blocks))
        else:
            stream = self._fetch(origin, Prefix(engine.model.fingerprint, hashes), len(blocks))
        arrived, error, begun_s = 0, "", time.monotonic()
        try:
            async with contextlib.aclosing(stream):
                async for content in stream:
                    engine.store.write(blocks[arrived].slot, content)
                    arrived += 1
            if isinstance(origin, Handover) and arrived < len(blocks):
                raise TransferError(f"{origin.host}:{origin.port}: {arrived} of {len(blocks)} blocks came")
            engine.metrics.transfer_s.observe(time.monotonic() - begun_s)
        except TransferError as failure:
            log.warning("the KV of request %s did not come: %s", sequence.id, failure)
            engine.metrics.failed_transfers.inc()
            error = str(failure) if isinstance(origin, Handover) else ""
        if isinstance(origin, Pooled) and origin.replicate and arrived:
            self._later(self._replicate(hashes[:arrived]))
        engine.metrics.transfer_bytes.inc(arrived * engine.store.block_bytes)
        return min((have + arrived) * block_tokens, sequence.prompt_tokens), error

    def _fetch(self, origin: Handover | Holder, asked: Pull | Prefix, blocks: int) -> AsyncGenerator[bytes, None]:
        return fetch(origin.host, origin.port, asked, self.engine.store.block_bytes, blocks, self.timeout_s)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replicate(self, hashes: list[int]) -> None:
        assert self.pool is not None
        self.engine.metrics.replicated_blocks.inc(await self.pool.replicate(hashes))

    async def let_go(self, origin: Handover) -> None:
        """Tell a prefill worker that what it keeps is not needed: the request will not come to it."""
        request = Release(origin.engine_id, origin.request_id)
        try:
            await release(origin.host, origin.port, request, self.timeout_s)
        except TransferError as failure:
            log.info("a prefill worker will have to wait for its time-out: %s", failure)


def _digest(tokens: list[int]) -> int:
    return xxh3_64(token_array(tokens).tobytes())


class _Blocks:
    """Blocks of an engine in use by a transfer."""

    def __init__(self, engine: Engine, blocks: list[Block], request_id: str = "") -> None:
        self._engine = engine
        self._blocks = blocks
        self._request_id = request_id

    def __len__(self) -> int:
        return len(self._blocks)

    async def read(self, first: int, last: int) -> list[bytes]:
        # On the engine's thread: a block that is not on the device may be promoted between two steps.
        store, blocks = self._engine.store, self._blocks[first:last]
        future = self._engine.call(lambda: [store.read(block.tier, block.slot) for block in blocks])
        return await asyncio.wrap_future(future)

    async def give_back(self, arrived: bool) -> None:
        def give_back() -> None:
            self._engine.cache.release(self._blocks)
            if arrived:
                self._engine.drop_kept(self._request_id)

        await asyncio.wrap_future(self._engine.call(give_back))
