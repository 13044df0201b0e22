"""Mooncake Store as the pool of the workers' KV: what one of them prefills comes from there to any other.

A worker lends the store some of its memory, and puts the blocks that it makes there, so they go when it goes, unless
another has replicated them. An object is one KV block, named by the model's fingerprint and the block's chained hash.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from .transfer import TransferError

LIBRARIES = "Debian's libibverbs1, librdmacm1 and libnuma1"  # that Mooncake is linked with
LEAST_BUFFER_BYTES = 16 << 20  # of a worker's own, for what comes and goes
REPLICATE_S = 30.0
POLL_S = 0.2
log = logging.getLogger(__name__)


class Pool:
    """A client of the store.

    Args:
        master: HOST:PORT of the store's master. host: by which other workers reach this one. fingerprint: of the model.
        block_bytes: of a KV block. lent_blocks: so many fit into the memory that is lent; 0: none is.

    Raises:
        ImportError: Mooncake, or a library that it needs, is not installed. OSError: it does not come about.
    """

    def __init__(self, master: str, host: str, fingerprint: int, block_bytes: int, lent_blocks: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig, TaskStatus

        self._status = TaskStatus
        self._prefix = f"{fingerprint:016x}"
        self._block_bytes = block_bytes
        self._store = MooncakeDistributedStore()
        buffer_bytes = max(LEAST_BUFFER_BYTES, 4 * block_bytes)
        # P2PHANDSHAKE: no metadata server, the clients tell each other.
        code = self._store.setup(host, "P2PHANDSHAKE", lent_blocks * block_bytes, buffer_bytes, "tcp", "", master)
        if code:
            raise OSError(f"{master}: no client of a Mooncake Store (error {code})")
        self._own = self._store.get_hostname()
        self._here = ReplicateConfig()
        self._here.preferred_segment = self._own

    def put(self, blocks: Mapping[int, bytes]) -> None:
        """Put blocks, by their hashes, into the memory that this worker lends. What the store has is left alone."""
        keys = self._keys(list(blocks))
        there = self._store.batch_is_exist(keys)
        missing = {key: content for key, content, have in zip(keys, blocks.values(), there, strict=True) if have != 1}
        if missing and (code := self._store.put_batch(list(missing), list(missing.values()), self._here)):
            log.warning("%d blocks did not go to the store (error %d)", len(missing), code)

    async def fetch(self, hashes: Sequence[int]) -> AsyncGenerator[bytes, None]:
        """The leading blocks of some hashes, as many as there are.

        Raises:
            TransferError: one that was there did not come.
        """
        keys = self._keys(hashes)
        there = await asyncio.to_thread(self._store.batch_is_exist, keys)
        for key, have in zip(keys, there, strict=True):
            if have != 1:
                return
            content = await asyncio.to_thread(self._store.get, key)
            if len(content) != self._block_bytes:
                raise TransferError(f"the store: {len(content)} of {self._block_bytes} bytes of a block came")
            yield content

    async def replicate(self, hashes: Sequence[int]) -> int:
        """Have blocks that are in the store copied to the memory that this worker lends; how many are there then."""
        begun = [self._store.create_copy_task(key, [self._own]) for key in self._keys(hashes)]
        tasks = [task for task, code in begun if code == 0]
        copied, deadline = 0, time.monotonic() + REPLICATE_S
        while tasks and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)  # who has a block looks for such tasks once a second
            states = [(task, self._store.query_task(task)[0]) for task in tasks]
            copied += sum(state is not None and state.status == self._status.SUCCESS for _, state in states)
            over = (self._status.SUCCESS, self._status.FAILED)
            tasks = [task for task, state in states if state is not None and state.status not in over]
        if copied < len(hashes):
            log.warning("%d of %d blocks were replicated", copied, len(hashes))
        return copied

    def close(self) -> None:
        """What is lent goes."""
        self._store.close()

    def _keys(self, hashes: Sequence[int]) -> list[str]:
        return [f"{self._prefix}@{value:016x}" for value in hashes]
