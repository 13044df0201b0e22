"""Server-sent events out of an HTTP response."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import ClientResponse

MOST_BYTES = 16 << 20  # of one event
DONE = b"[DONE]"


class EventError(ValueError):
    """What came is no stream of events, or ended within one."""


async def events(response: ClientResponse) -> AsyncIterator[bytes]:
    """The events of a response as they come, each with the empty line that ends it.

    Raises:
        EventError: the stream ends within an event, or one is too large.
        aiohttp.ClientError, TimeoutError: it breaks off.
    """
    rest = b""
    async for piece in response.content.iter_any():
        rest = rest + piece if rest else piece
        while True:
            end = _end(rest)
            if end < 0:
                break
            yield rest[:end]
            rest = rest[end:]
        if len(rest) > MOST_BYTES:
            raise EventError(f"an event of more than {MOST_BYTES} bytes")
    if rest.strip():
        raise EventError("the stream ended within an event")


def data_of(event: bytes) -> bytes:
    """What an event says; b"" for a comment."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def _end(text: bytes) -> int:
    """Where the first event is over; -1 where it is not yet."""
    plain, carriage = text.find(b"\n\n"), text.find(b"\r\n\r\n")
    if carriage >= 0 and (plain < 0 or carriage < plain):
        return carriage + 4
    return plain + 2 if plain >= 0 else -1
