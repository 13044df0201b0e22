"""Speaking to an endpoint picker as Envoy does: messages, one stream for each HTTP request, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
KNOWN_FIELDS = range(1, 11)  # of ProcessingResponse; the meaning of 11 and above depends on a proxy's version
PIECE_BYTES = 16 << 10  # in which Envoy hands on what it reads
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  (its stubs have none)


class Failure(Exception):
    """A case found something else than it expected."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected = expected
        self.found = found


class Skip(Exception):
    """A case cannot be tried on this target; the message says why."""


# ---- messages ----


def headers_message(
    method: str = "POST",
    path: str = "/v1/completions",
    headers: Mapping[str, str] | None = None,
    *,
    end: bool = False,
    subset: Sequence[str] | str | None = None,
) -> Any:
    """Request headers, the first message of a stream."""
    message = ext_proc.ProcessingRequest()
    given = {":method": method, ":path": path, ":scheme": "http", ":authority": "model.test"}
    if method == "POST":
        given["content-type"] = "application/json"
    _fill(message.request_headers.headers, given | dict(headers or {}))
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = FULL_DUPLEX
    message.protocol_config.response_body_mode = FULL_DUPLEX
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[SUBSET]
        if isinstance(subset, str):
            hint.string_value = subset
        else:
            hint.list_value.SetInParent()
            for place in subset:
                hint.list_value.values.add().string_value = place
    return message


def body_message(data: bytes, *, end: bool) -> Any:
    """A piece of a request body."""
    message = ext_proc.ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = end
    return message


def trailers_message(trailers: Mapping[str, str]) -> Any:
    """Request trailers."""
    message = ext_proc.ProcessingRequest()
    _fill(message.request_trailers.trailers, trailers)
    return message


def response_headers_message(headers: Mapping[str, str], *, served: str = "", end: bool = False) -> Any:
    """Response headers, with the endpoint that served."""
    message = ext_proc.ProcessingRequest()
    _fill(message.response_headers.headers, headers)
    message.response_headers.end_of_stream = end
    if served:
        metadata = message.metadata_context.filter_metadata["envoy.lb"]
        metadata.fields["x-gateway-destination-endpoint-served"].string_value = served
    return message


def response_body_message(data: bytes, *, end: bool) -> Any:
    """A piece of a response body."""
    message = ext_proc.ProcessingRequest()
    message.response_body.body = data
    message.response_body.end_of_stream = end
    return message


def response_trailers_message(trailers: Mapping[str, str]) -> Any:
    """Response trailers."""
    message = ext_proc.ProcessingRequest()
    _fill(message.response_trailers.trailers, trailers)
    return message


def pieces(data: bytes, size: int = PIECE_BYTES) -> list[bytes]:
    """A body as it is read from a socket; an empty one is one empty piece."""
    return [data[i : i + size] for i in range(0, len(data), size)] or [b""]


def _fill(header_map: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        header = header_map.headers.add()
        header.key = name
        header.raw_value = value.encode()


# ---- what comes back ----


@dataclass
class Answer:
    """All that a picker has said on one stream.

    Args:
        messages: as they came. raw: the same, as bytes.
        status: the gRPC status where the server ended the stream; None while it is open.
        late: the server said nothing for as long as was waited.
    """

    messages: list[Any] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    details: str = ""
    late: bool = False

    @property
    def order(self) -> list[str]:
        """Kinds of the messages, repetitions left out."""
        kinds = [message.WhichOneof("response") or "nothing" for message in self.messages]
        return [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]

    @property
    def immediate(self) -> Any | None:
        """The immediate response, where there is one."""
        found = (m.immediate_response for m in self.messages if m.WhichOneof("response") == "immediate_response")
        return next(found, None)

    @property
    def http_status(self) -> int:
        """Of the immediate response; 0 where there is none."""
        return int(self.immediate.status.code) if self.immediate is not None else 0

    @property
    def options(self) -> list[Any]:
        """Headers to be set, as the proxy is told."""
        found: list[Any] = []
        for message in self.messages:
            kind = message.WhichOneof("response")
            if kind in ("request_headers", "request_body"):
                found.extend(getattr(message, kind).response.header_mutation.set_headers)
            elif kind == "immediate_response":
                found.extend(message.immediate_response.headers.set_headers)
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Headers to be set."""
        return {
            option.header.key.lower(): option.header.raw_value.decode("utf-8", "replace") or option.header.value
            for option in self.options
        }

    @property
    def removed(self) -> set[str]:
        """Headers to be removed."""
        return {
            name.lower()
            for message in self.messages
            if message.WhichOneof("response") == "request_headers"
            for name in message.request_headers.response.header_mutation.remove_headers
        }

    @property
    def places(self) -> list[str]:
        """Endpoints named in the header."""
        return [place.strip() for place in self.headers.get(DESTINATION, "").split(",") if place.strip()]

    @property
    def metadata(self) -> str | None:
        """Endpoints named in the dynamic metadata."""
        for message in self.messages:
            spaces = message.dynamic_metadata.fields
            if "envoy.lb" in spaces and DESTINATION in spaces["envoy.lb"].struct_value.fields:
                return str(spaces["envoy.lb"].struct_value.fields[DESTINATION].string_value)
        return None

    def streamed(self, kind: str = "request_body") -> list[Any]:
        """The pieces of a body that came back."""
        return [
            getattr(message, kind).response.body_mutation.streamed_response
            for message in self.messages
            if message.WhichOneof("response") == kind
        ]

    @property
    def body(self) -> bytes:
        """The request body that came back."""
        return b"".join(piece.body for piece in self.streamed())

    @property
    def ends(self) -> int:
        """How often the end of the request body was declared."""
        return sum(piece.end_of_stream for piece in self.streamed())

    @property
    def unknown_fields(self) -> set[int]:
        """Numbers of fields of ProcessingResponse that are set and should never be."""
        return {number for data in self.raw for number in _top_fields(data) if number not in KNOWN_FIELDS}

    @property
    def left(self) -> bool:
        """Whether the server has ended the stream, and not with an error.

        Its status is lost where it came while a message was on its way out: gRPC then tells of that message only.
        """
        return self.status == grpc.StatusCode.OK or self.details == "Internal error from Core"

    def describe(self) -> str:
        """A few words on what was answered."""
        if self.immediate is not None:
            return f"an immediate response {self.http_status}"
        said = " -> ".join(self.order) or "no answer"
        if self.status is not None and self.status != grpc.StatusCode.OK:
            return f"{said}, then gRPC status {self.status.name} ({self.details[:80]})"
        return f"{said}{', then silence' if self.late else ''}"


def _top_fields(data: bytes) -> list[int]:
    """Field numbers of a message, in order."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        found.append(tag >> 3)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 2:
            length, at = _varint(data, at)
            at += length
        elif kind == 5:
            at += 4
        else:
            break
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at


# ---- streams ----


class Stream:
    """One stream to the picker, as Envoy opens one for each HTTP request."""

    def __init__(self, call: Any, timeout_s: float) -> None:
        self.call = call
        self.timeout_s = timeout_s
        self.answer = Answer()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the stream is over
        # Always reading: a message that came before a failed write would be lost otherwise.
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while (data := await self.call.read()) is not _EOF:
                self._arrived.put_nowait(data)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        self._arrived.put_nowait(None)

    async def send(self, message: Any) -> None:
        """Send a message, or bytes as they are. Nothing happens where the server has ended the stream."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        try:
            await asyncio.wait_for(self.call.write(data), self.timeout_s)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except TimeoutError:
            self.answer.late = True

    async def close(self) -> None:
        """Say that nothing more will be sent."""
        await self.call.done_writing()

    async def heard(self, timeout_s: float) -> bool:
        """Wait for a message or the end of the stream; whether one has come."""
        until = asyncio.get_running_loop().time() + timeout_s
        while self._arrived.empty() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.002)
        return not self._arrived.empty()

    async def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next message; None where the stream is over or nothing comes in time (see `answer`)."""
        try:
            data = await asyncio.wait_for(self._arrived.get(), timeout_s or self.timeout_s)
        except TimeoutError:
            self.answer.late = True
            return None
        if data is None:
            self._arrived.put_nowait(None)
            self.answer.status = await self.call.code()
            self.answer.details = await self.call.details() or ""
            return None
        try:
            message = ext_proc.ProcessingResponse.FromString(data)
        except DecodeError:
            raise Failure("ProcessingResponse messages", "bytes that are none") from None
        self.answer.messages.append(message)
        self.answer.raw.append(data)
        return message

    async def request(self, messages: Iterable[Any], *, has_body: bool, trailers: bool = False) -> Answer:
        """Send a whole request, not waiting for answers, then read until it has been dealt with."""
        for message in messages:
            await self.send(message)
        headers_done, body_done, trailers_done = False, not has_body, not trailers
        while not (headers_done and body_done and trailers_done):
            message = await self.receive()
            if message is None:
                break
            kind = message.WhichOneof("response")
            if kind == "immediate_response":
                break
            if kind == "request_headers":
                headers_done = True
            elif kind == "request_body":
                # with trailers to come, no piece is the last
                body_done = trailers or message.request_body.response.body_mutation.streamed_response.end_of_stream
            elif kind == "request_trailers":
                trailers_done = body_done = True
        return self.answer

    def cancel(self) -> None:
        """As when the client has gone."""
        self.call.cancel()
        self._reading.cancel()


class Target:
    """The endpoint picker under test.

    Args:
        address: host:port. timeout_s: how long an answer may take.
        endpoints: addresses it may choose from, as far as known; the more are found out.
        model: a name it serves. provoke: whether it may be brought to refuse requests.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        endpoints: Sequence[str] = (),
        model: str = "test-model",
        provoke: bool = False,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.endpoints = list(endpoints)
        self.model = model
        self.provoke = provoke
        self.channel: Any = None

    async def connect(self) -> None:
        """Reach it, in the event loop that is to use it.

        Raises:
            ConnectionError: it cannot be reached.
        """
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(self.address, options=options)
        try:
            await asyncio.wait_for(self.channel.channel_ready(), self.timeout_s)
        except TimeoutError:
            await self.close()
            raise ConnectionError(f"{self.address}: nobody answers there within {self.timeout_s:g} s") from None

    async def close(self) -> None:
        await self.channel.close()

    def open(self) -> Stream:
        """A new stream."""
        return Stream(self.channel.stream_stream(METHOD)(), self.timeout_s)

    async def post(
        self,
        body: bytes,
        *,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        subset: Sequence[str] | str | None = None,
        split: Sequence[bytes] | None = None,
        trailers: Mapping[str, str] | None = None,
    ) -> Answer:
        """A request with a body. `split`: the pieces it comes in."""
        given = list(split) if split is not None else pieces(body)
        messages = [headers_message("POST", path, headers, subset=subset)]
        messages += [body_message(piece, end=trailers is None and i == len(given) - 1) for i, piece in enumerate(given)]
        if trailers is not None:
            messages.append(trailers_message(trailers))
        stream = self.open()
        answer = await stream.request(messages, has_body=True, trailers=trailers is not None)
        stream.cancel()
        return answer

    async def get(self, path: str = "/v1/models", *, subset: Sequence[str] | str | None = None) -> Answer:
        """A request without a body."""
        stream = self.open()
        answer = await stream.request([headers_message("GET", path, end=True, subset=subset)], has_body=False)
        stream.cancel()
        return answer
