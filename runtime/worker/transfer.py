"""KV blocks from worker to worker over TCP: one plain protocol, pull only.

Every frame is its length (4 bytes, big-endian) and so many bytes. The one that pulls connects and sends a request
(msgpack, a map with "type"): `pull` the blocks that a prefill left for a decode, `prefix` the leading blocks of some
hashes, or `release` what was left without pulling. The holder answers with a `Have` (msgpack), then, unless it was a
release, one frame for each block: the bytes of `BlockStore`. The blocks are in use at the holder meanwhile. After a
pull, a `done` frame says that all has arrived, and only then are they free; if it does not come, they can be pulled
again until their time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

MAX_REQUEST_BYTES = 4 << 20
_LENGTH = 4
_AT_A_TIME = 64  # blocks read from the holder's store at once
log = logging.getLogger(__name__)


class TransferError(Exception):
    """KV that did not come; the message says from where and why."""


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """`block_ids` of those that `request_id` left at `engine_id`, in this order.

    `prompt_digest` is the hash of the first `prompt_tokens` tokens: they must be those that were computed there.
    """

    fingerprint: int
    engine_id: str
    request_id: str
    block_ids: list[int]
    prompt_tokens: int
    prompt_digest: int


class Prefix(msgspec.Struct, tag="prefix", frozen=True):
    """As many leading blocks of `hashes` as there are."""

    fingerprint: int
    hashes: list[int]


class Release(msgspec.Struct, tag="release", frozen=True):
    """What `request_id` left is not needed."""

    engine_id: str
    request_id: str


class Have(msgspec.Struct, frozen=True):
    """So many blocks follow, or why there are none."""

    blocks: int = 0
    error: str = ""


Request = Pull | Prefix | Release
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_have = msgspec.msgpack.Decoder(Have).decode
_DONE = b"done"


class Lent(Protocol):
    """Blocks of a holder that stay until they are given back."""

    def __len__(self) -> int: ...

    async def read(self, first: int, last: int) -> list[bytes]:
        """The content of some of them."""

    async def give_back(self, arrived: bool) -> None:
        """They are no longer read. `arrived`: the other side has them all."""


Lend = Callable[[Request], Awaitable[Lent]]


class TransferServer:
    """The side that has the blocks.

    Args:
        lend: answers a request; raises TransferError to refuse. timeout_s: for each read and write.
    """

    def __init__(self, lend: Lend, timeout_s: float) -> None:
        self._lend = lend
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; the port.

        Raises:
            OSError: it cannot be bound.
        """
        self._server = await asyncio.start_server(self._connected, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning("a transfer ended early: %s", str(error) or type(error).__name__)
        except TransferError as error:
            log.warning("a transfer was refused: %s", error)
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            frame = await self._receive(reader, MAX_REQUEST_BYTES)
            request = _decode_request(frame)
            lent = await self._lend(request)
        except (msgspec.MsgspecError, TransferError) as error:
            writer.write(_frame(msgspec.msgpack.encode(Have(error=str(error)))))
            await self._drain(writer)
            raise TransferError(str(error)) from None
        arrived = False
        try:
            writer.write(_frame(msgspec.msgpack.encode(Have(len(lent)))))
            await self._drain(writer)
            for first in range(0, len(lent), _AT_A_TIME):
                for content in await lent.read(first, min(first + _AT_A_TIME, len(lent))):
                    writer.write(_frame(content))
                    await self._drain(writer)
            if isinstance(request, Pull):
                arrived = await self._receive(reader, len(_DONE)) == _DONE
        finally:
            await asyncio.shield(lent.give_back(arrived))

    async def _receive(self, reader: asyncio.StreamReader, most: int) -> bytes:
        async with asyncio.timeout(self._timeout_s):
            return await _receive(reader, most)

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._timeout_s):
            await writer.drain()


async def fetch(
    host: str, port: int, request: Pull | Prefix, block_bytes: int, most: int, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """Blocks from a holder, one after the other. When the last has been taken, the holder is told.

    Args:
        block_bytes: size of a block. most: blocks at most. timeout_s: for connecting, and for each frame.

    Raises:
        TransferError: it is not there, refuses, is too slow or sends nonsense.
    """
    async with _talking(host, port, timeout_s) as (reader, writer):
        have = await _ask(reader, writer, request, timeout_s)
        if not 0 <= have.blocks <= most:
            raise TransferError(f"expected at most {most} blocks, {have.blocks} were announced")
        for _ in range(have.blocks):
            async with asyncio.timeout(timeout_s):
                content = await _receive(reader, block_bytes)
            if len(content) != block_bytes:
                raise TransferError(f"expected blocks of {block_bytes} bytes, found one of {len(content)}")
            yield content
        if isinstance(request, Pull):
            writer.write(_frame(_DONE))
            await writer.drain()


async def release(host: str, port: int, request: Release, timeout_s: float) -> None:
    """Tell a holder that what a request left there is not needed.

    Raises:
        TransferError: as for `fetch`.
    """
    async with _talking(host, port, timeout_s) as (reader, writer):
        await _ask(reader, writer, request, timeout_s)


@contextlib.asynccontextmanager
async def _talking(
    host: str, port: int, timeout_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise TransferError(f"{where}: {str(error) or 'no connection in time'}") from None
    try:
        yield reader, writer
    except TransferError as error:
        raise TransferError(f"{where}: {error}") from None
    except TimeoutError:
        raise TransferError(f"{where}: nothing came for {timeout_s:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise TransferError(f"{where}: the connection was lost ({type(error).__name__})") from None
    finally:
        writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, timeout_s: float) -> Have:
    writer.write(_frame(msgspec.msgpack.encode(request)))
    async with asyncio.timeout(timeout_s):
        await writer.drain()
        answer = await _receive(reader, MAX_REQUEST_BYTES)
    try:
        have = _decode_have(answer)
    except msgspec.MsgspecError as error:
        raise TransferError(f"what answers is no worker: {error}") from None
    if have.error:
        raise TransferError(f"refused: {have.error}")
    return have


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH, "big") + content


async def _receive(reader: asyncio.StreamReader, most: int) -> bytes:
    """A frame of at most `most` bytes."""
    length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if length > most:
        raise TransferError(f"expected a frame of at most {most} bytes, {length} were announced")
    return await reader.readexactly(length)
