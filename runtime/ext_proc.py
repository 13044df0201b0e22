"""The endpoint picker (EPP) of Envoy's external processing protocol: one gRPC stream for each HTTP request.

Contract: the Endpoint Picker Protocol 1.0.0 of the Gateway API Inference Extension (docs/proposals/004), with the
headers llm-d gave it. What happens on a stream:

    Envoy                                       here
    request headers, body chunks ..., end  ->   (reads all of it)  Scheduler.schedule
                                           <-   request headers: where it goes;  the body again, in chunks;  trailers
                                                or an immediate response: 400, 413, 429, 503
    response headers, body ...             ->   only with `Options.observe_responses`; else the stream ends with the
                                                answer's last message, and Envoy goes on without asking

A response that Envoy has begun to send here when the stream ends is lost, as Envoy keeps no copy with
FULL_DUPLEX_STREAMED. So the last message and the end leave in one piece; and where responses are not observed, Envoy is
best configured not to send them at all, as deploy/envoy.yaml is.

How the body comes is Envoy's configuration, which its first message tells. FULL_DUPLEX_STREAMED is the protocol's own;
BUFFERED and BUFFERED_PARTIAL answer the headers before the body comes and the decision after. With STREAMED and NONE
the headers must be decided on alone: the prompt's length is guessed from content-length, and nothing is known to be
reusable.

Headers read: x-request-id (made up where missing); x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms (old: x-slo-...),
milliseconds; x-llm-d-inference-fairness-id (old: x-gateway-inference-fairness-id), the tenant; x-request-priority, an
integer, or else x-llm-d-inference-objective, a name that `Options.objectives` gives a priority.

Headers set: x-gateway-destination-endpoint, the decode worker and its fallbacks; x-prefiller-host-port, the prefill
worker where it is another one; x-kv-cache-source-host-port, whom to fetch the prefix from. What a client sends under
such a name is removed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import grpc
import orjson
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envs.state import Source

from . import openai_body, request_headers
from .request import Assignment, Reason, Rejection, Request, RequestError
from .request_headers import DROPPED_REASON, PREFIX_HOLDER, REQUEST_ID
from .workers import Worker

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "envoy.lb"
PREFILLER = "x-prefiller-host-port"
CONTROL_HEADERS = ("x-gateway-", "x-prefiller-", "x-encoder-", "x-data-parallel-", "x-kv-cache-source-")
CHUNK_BYTES = 62_000  # of a body sent back; the protocol's limit is 64 KiB for the whole message

_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  (its stubs have none)
_log = logging.getLogger(__name__)
_OVERWRITE = 2  # HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_MODE = processing_mode_pb2.ProcessingMode
_BY_HEADERS = (_MODE.NONE, _MODE.STREAMED)  # body modes in which the headers must be answered for good
_TOKENS_IN_USAGE = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_TAIL_BYTES = 2048  # of a response, in which its token usage is looked for


class Scheduler(Protocol):
    """Who decides. All calls return at once."""

    def schedule(self, request: Request) -> Assignment | Rejection:
        """Decide, and reserve."""

    def catch_up(self) -> None:
        """Do what is due by now, so that a decision that is about to be asked for has less to do."""

    def release(self, request_id: str) -> None:
        """End a reservation: nothing of the request reached a worker. Unknown ids are ignored."""

    def served(self, request_id: str, address: str) -> None:
        """Which endpoint really served; it may have been a fallback."""

    def finished(
        self, request_id: str, *, output_tokens: int | None, ttft_s: float | None, tbt_s: float | None
    ) -> None:
        """The response has ended, or been cut; what is not known of it is None."""

    def any_decode(self, candidates: frozenset[str] | None = None) -> Worker | None:
        """Some worker for what has no prompt, in turn; None where none of the candidates is up."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, up or not."""

    @property
    def draining(self) -> bool:
        """Whether no new requests are to be taken."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the endpoint picker behaves.

    Args:
        observe_responses: keep streams open for the response, to report what became of requests. Envoy must be
            configured to send response headers. Costs a message for every chunk of a response that is sent.
        response_bodies: of observed responses, look at the bodies too, where Envoy is configured to send them. Else
            it is asked to send the headers only (see `_Stream.wish_for_less`), and the end of a response is unknown.
        fallbacks: how many further endpoints may follow the first. 0, as an ORIGINAL_DST cluster of Envoy takes one
            address and answers 503 to a list; deploy/envoy.yaml has a cluster that takes lists.
        max_body_bytes: larger request bodies are answered with 413.
        max_streams: streams open at the same time; those above are answered with 503.
        max_buffered_bytes: of all bodies that are being read; a body for which there is no room is answered with 503.
        base_models: names that are no LoRA adapter; empty: none is.
        objectives: priorities by the name in x-llm-d-inference-objective.
    """

    observe_responses: bool = False
    response_bodies: bool = True
    fallbacks: int = 0
    max_body_bytes: int = 16 << 20
    max_streams: int = 4096
    max_buffered_bytes: int = 1 << 30
    base_models: frozenset[str] = frozenset()
    objectives: Mapping[str, int] = field(default_factory=dict)


class _Drop(Exception):
    """The request gets an immediate response."""

    def __init__(self, status: int, message: str, reason: Reason | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class _ProtocolError(Exception):
    """Envoy would never say this."""


class _Gone(Exception):
    """The other side has ended the stream."""


class ExternalProcessor:
    """The service, and what it has counted.

    Attributes:
        requests: streams on which request headers came. streams_open, buffered_bytes: now.
        outcomes: how many were `routed` by a decision, `passed` to any worker (no prompt), `invalid` (400, 413),
            dropped (by `Reason`), `cancelled` by their client before the answer, `failed` (500, a fault in here).
        responses: by HTTP status, of those observed.
        protocol_errors: streams ended for what came in no possible order, or could not be read.
        answered, seconds: answers sent, and the time from a request's last byte to its answer, summed.
        on_answer: called with the outcome and those seconds, for a histogram.
    """

    def __init__(self, scheduler: Scheduler, options: Options | None = None) -> None:
        self.scheduler = scheduler
        self.options = options or Options()
        self.requests = 0
        self.outcomes: Counter[str] = Counter()
        self.responses: Counter[str] = Counter()
        self.protocol_errors = 0
        self.streams_open = 0
        self.buffered_bytes = 0
        self.answered = 0
        self.seconds = 0.0
        self.on_answer: Callable[[str, float], None] | None = None

    async def process(self, _: Any, context: Any) -> Any:
        """One stream; returns its last message. Whatever goes wrong on it stays on it."""
        self.streams_open += 1
        try:
            return await _Stream(self, context).run()
        except _ProtocolError as error:
            self.protocol_errors += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except _Gone:
            await context.abort(grpc.StatusCode.CANCELLED, "the stream was closed before its end")
        except Exception:
            self.outcomes["failed"] += 1
            _log.exception("a stream failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the endpoint picker has failed")
        finally:
            self.streams_open -= 1

    def note(self, outcome: str, since: float) -> None:
        """Count an answer that was sent."""
        seconds = time.perf_counter() - since
        self.outcomes[outcome] += 1
        self.answered += 1
        self.seconds += seconds
        if self.on_answer is not None:
            self.on_answer(outcome, seconds)


class _Stream:
    """One HTTP request."""

    def __init__(self, processor: ExternalProcessor, context: Any) -> None:
        self.processor = processor
        self.scheduler = processor.scheduler
        self.options = processor.options
        self.context = context
        self.headers: dict[str, str] = {}
        self.mode = self.response_mode = _MODE.FULL_DUPLEX_STREAMED
        self.candidates: frozenset[str] | None = None
        self.buffered_bytes = 0
        self.request_id = ""
        self.reservation = ""  # its id at the scheduler: the request's, where that was free
        self.reserved = False  # and the answer has not been sent
        self.responded = False  # the response came before the request had ended
        self.last: bytes | None = None  # message of the stream, to be sent with its end
        self.since = time.perf_counter()

    async def run(self) -> bytes:
        """The stream's last message."""
        message = await self.read()
        kind = message.WhichOneof("request")
        if kind != "request_headers":
            raise _ProtocolError(f"the first message must be request_headers, found {kind or 'none'}")
        if message.observability_mode:  # nobody waits for an answer
            while True:
                await self.read()
        self.processor.requests += 1
        try:
            await self.answer(message)
        except _Drop as drop:
            self.processor.note(drop.reason or ("failed" if drop.status == 500 else "invalid"), self.since)
            return _immediate(drop, self.request_id)
        except _Gone:
            self.processor.outcomes["cancelled"] += 1
            raise
        except asyncio.CancelledError:
            self.processor.outcomes["cancelled"] += 1
            raise
        finally:
            self.processor.buffered_bytes -= self.buffered_bytes
            self.buffered_bytes = 0
            if self.reserved:
                self.scheduler.release(self.reservation)
        if self.last is None:
            return await _Response(self).run()
        return self.last

    # ---- request ----

    async def answer(self, message: Any) -> None:
        """Read the request and say where it goes."""
        self.read_headers(message)
        if self.processor.streams_open > self.options.max_streams:
            raise _Drop(503, f"more than {self.options.max_streams} requests at once", Reason.QUEUE_FULL, 1.0)
        if self.scheduler.draining:
            raise _Drop(503, "shutting down", Reason.SHUTTING_DOWN, 1.0)
        path = self.headers.get(":path", "")
        if message.request_headers.end_of_stream:
            await self.end(self.passed("request_headers"))
        elif self.mode in _BY_HEADERS:
            kind = "request_headers"
            inference = openai_body.is_inference(path)
            await self.end(self.decided(kind, self.unread()) if inference else self.passed(kind))
            if self.last is None and self.mode == _MODE.STREAMED:
                await self.echo_request()
        elif self.mode == _MODE.FULL_DUPLEX_STREAMED:
            self.scheduler.catch_up()  # the body is still on its way
            body, whole, trailers = await self.read_body()
            if self.responded:
                return
            await self.write(self.decision(path, body, whole, "request_headers"))
            await self.send_body(body, end=not trailers)
            if trailers:
                await self.end(_continue("request_trailers"))
        elif self.mode in (_MODE.BUFFERED, _MODE.BUFFERED_PARTIAL):
            await self.write(_continue("request_headers") + self.wish_for_less())
            self.scheduler.catch_up()
            message = await self.read()
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                self.give_up()
                return
            if kind != "request_body":
                raise _ProtocolError(f"expected request_body, found {kind or 'none'}")
            self.since = time.perf_counter()
            self.read_metadata(message)
            body = message.request_body.body
            self.make_room(len(body))
            # Trailers may follow a buffered body that is whole, hence only BUFFERED_PARTIAL can cut it.
            whole = message.request_body.end_of_stream or self.mode == _MODE.BUFFERED
            await self.end(self.decision(path, body, whole, "request_body"))
        else:
            raise _ProtocolError(f"request_body_mode {self.mode} is not supported")

    def give_up(self) -> None:
        """Envoy has answered by itself, before the request was there."""
        self.responded = True
        self.last = _continue("response_headers")
        self.processor.outcomes["cancelled"] += 1

    async def end(self, message: bytes) -> None:
        """Send the last message of the answer to a request.

        Where the response is not observed, it is the last of the stream too. It then leaves together with the stream's
        end, as Envoy must not see them apart: a response that comes in between would be streamed here, and be lost.
        """
        if self.reserved and self.context.cancelled():
            raise _Gone
        if self.options.observe_responses and self.reservation:
            await self.write(message)
        else:
            self.last = message
        self.processor.note("routed" if self.reserved else "passed", self.since)
        self.reserved = False

    def read_headers(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self.mode = message.protocol_config.request_body_mode
            self.response_mode = message.protocol_config.response_body_mode
        for header in message.request_headers.headers.headers:
            value = header.raw_value
            self.headers[header.key.lower()] = value.decode("utf-8", "replace") if value else header.value
        self.read_metadata(message)
        self.request_id = self.headers.get(REQUEST_ID) or str(uuid.uuid4())

    def read_metadata(self, message: Any) -> None:
        """The subset hint. Envoy sends it with every message; the first is as good as any."""
        if self.candidates is not None or not message.HasField("metadata_context"):
            return
        hint = message.metadata_context.filter_metadata
        if SUBSET_NAMESPACE not in hint or SUBSET not in hint[SUBSET_NAMESPACE].fields:
            return
        value = hint[SUBSET_NAMESPACE].fields[SUBSET]
        texts = [value.string_value, *(item.string_value for item in value.list_value.values)]
        self.candidates = frozenset(place.strip() for text in texts for place in text.split(",") if place.strip())

    async def read_body(self) -> tuple[bytes, bool, bool]:
        """All of a streamed body; whether it came to its end; whether trailers came after it."""
        chunks: list[bytes] = []
        while True:
            message = await self.read()
            kind = message.WhichOneof("request")
            if kind == "request_body":
                self.read_metadata(message)
                chunk = message.request_body.body
                if chunk:
                    chunks.append(chunk)
                    self.make_room(len(chunk))
                if message.request_body.end_of_stream or message.request_body.end_of_stream_without_message:
                    break
            elif kind == "request_trailers":
                self.since = time.perf_counter()
                return b"".join(chunks), True, True
            elif kind == "response_headers":  # Envoy itself has answered, e.g. because the client was too slow
                self.give_up()
                return b"", False, False
            else:
                raise _ProtocolError(f"expected request_body or request_trailers, found {kind or 'none'}")
        self.since = time.perf_counter()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks), True, False

    @property
    def sees_the_end(self) -> bool:
        """Of a response, if it is observed at all."""
        return self.options.response_bodies and self.response_mode != _MODE.NONE

    def make_room(self, size: int) -> None:
        """For so many bytes more."""
        self.buffered_bytes += size
        self.processor.buffered_bytes += size
        self.check_size(self.buffered_bytes)
        if self.processor.buffered_bytes > self.options.max_buffered_bytes:
            raise _Drop(503, "there is no room for the bodies of so many requests", Reason.QUEUE_FULL, 1.0)

    def check_size(self, size: int) -> None:
        if size > self.options.max_body_bytes:
            raise _Drop(413, f"the body is larger than {self.options.max_body_bytes} bytes")

    async def send_body(self, body: bytes, *, end: bool) -> None:
        """The body again, in chunks; the last says so where no trailers follow."""
        size = len(body)
        for start in range(0, size or end, CHUNK_BYTES):
            stop = start + CHUNK_BYTES
            message = ext_proc.ProcessingResponse()
            streamed = message.request_body.response.body_mutation.streamed_response
            streamed.body = body if size <= CHUNK_BYTES else body[start:stop]
            streamed.end_of_stream = end and stop >= size
            data = message.SerializeToString()
            await (self.end(data) if streamed.end_of_stream else self.write(data))

    async def echo_request(self) -> None:
        """Let the chunks of a STREAMED body through."""
        while True:
            message = await self.read()
            kind = message.WhichOneof("request")
            if kind == "request_body":
                await self.write(_continue(kind))
                if message.request_body.end_of_stream:
                    return
            elif kind == "request_trailers":
                await self.write(_continue(kind))
                return
            elif kind == "response_headers":
                self.last = _continue(kind)
                self.scheduler.release(self.reservation)
                return
            else:
                raise _ProtocolError(f"expected request_body or request_trailers, found {kind or 'none'}")

    # ---- decision ----

    def decision(self, path: str, body: bytes, whole: bool, kind: str) -> bytes:
        """The message that says where a request with this body goes."""
        if not openai_body.is_inference(path):
            return self.passed(kind)
        if not whole or self.headers.get("content-encoding", "identity") != "identity":
            return self.decided(kind, self.request(None, len(body)))
        try:
            asked = openai_body.parse(path, body)
        except RequestError as error:
            raise _Drop(400, str(error)) from None
        return self.decided(kind, self.request(asked, len(body)))

    def unread(self) -> Request:
        """The request as far as its headers tell."""
        length = self.headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0
        self.check_size(size)
        return self.request(None, size)

    def request(self, asked: openai_body.Body | None, size: int) -> Request:
        headers = self.headers
        try:
            made = Request(
                request_id=self.request_id,
                input_tokens=max(1, size // openai_body.BYTES_PER_TOKEN),
                ttft_slo_s=request_headers.ttft_slo_s(headers),
                tbt_slo_s=request_headers.tbt_slo_s(headers),
                tenant=request_headers.tenant(headers),
                priority=request_headers.priority(headers, self.options.objectives),
                candidates=self.candidates,
                reported=self.options.observe_responses and self.sees_the_end,
            )
        except RequestError as error:
            raise _Drop(400, str(error)) from None
        if asked is not None:
            made.input_tokens = asked.input_tokens
            if len(asked.tokens):
                made.tokens = asked.tokens
            base_models = self.options.base_models
            if base_models and asked.model not in base_models:
                made.lora_name = asked.model
            made.cache_salt = asked.cache_salt
            if asked.text:
                made.namespace = f"text:{asked.model}"
        return made

    def decided(self, kind: str, request: Request) -> bytes:
        """The message that says where the scheduler sends a request."""
        if self.candidates is not None and not self.candidates:
            raise _Drop(503, "the subset of endpoints to choose from is empty", Reason.NO_ENDPOINTS)
        answer = self.schedule(request)
        if isinstance(answer, Rejection):
            raise _Drop(answer.reason.http_status, answer.message, answer.reason, answer.retry_after_s)
        self.reserved = True
        self.reservation = request.request_id
        places = [answer.decode.address]
        for _, decode in answer.fallbacks:
            if len(places) > self.options.fallbacks:
                break
            allowed = self.candidates is None or decode.address in self.candidates
            if allowed and decode.address and decode.address not in places:
                places.append(decode.address)
        if not places[0]:
            raise _Drop(503, f"worker {answer.decode.id} has no address", Reason.NO_ENDPOINTS)
        further = []
        if answer.prefill.id != answer.decode.id and answer.prefill.address:
            further.append((PREFILLER, answer.prefill.address))
        if answer.source == Source.FETCH and answer.holder is not None and answer.holder.address:
            further.append((PREFIX_HOLDER, answer.holder.address))
        return self.routing(kind, ",".join(places), further)

    def schedule(self, request: Request) -> Assignment | Rejection:
        """The scheduler's answer. What it refuses to look at is asked again by another name, as a client may well send
        an x-request-id twice: when it tries again what it gave up, while the reservation still lives.
        """
        try:
            try:
                return self.scheduler.schedule(request)
            except RequestError:
                request.request_id = f"{self.request_id}:{uuid.uuid4().hex[:12]}"
                return self.scheduler.schedule(request)
        except RequestError as error:
            raise _Drop(400, str(error)) from None
        except Exception:
            _log.exception("request %s could not be scheduled", self.request_id)
            raise _Drop(500, "the scheduler has failed") from None

    def passed(self, kind: str) -> bytes:
        """The message that sends a request without a prompt to any worker."""
        worker = self.scheduler.any_decode(self.candidates)
        if worker is None:
            raise _Drop(503, "no endpoint is available", Reason.NO_ENDPOINTS)
        return self.routing(kind, worker.address, [])

    def routing(self, kind: str, places: str, further: list[tuple[str, str]]) -> bytes:
        """The message that sends the request somewhere. What is appended to a serialised message is merged into it."""
        routed = _routed(kind, places, tuple(further))
        kept = (DESTINATION, *(name for name, _ in further))
        forged = [name for name in self.headers if name.startswith(CONTROL_HEADERS) and name not in kept]
        named = self.headers.get(REQUEST_ID) == self.request_id
        if forged or not named:
            message = ext_proc.ProcessingResponse()
            mutation = getattr(message, kind).response.header_mutation
            mutation.remove_headers.extend(forged)
            if not named:
                _set(mutation, REQUEST_ID, self.request_id)
            routed += message.SerializeToString()
        return routed + self.wish_for_less() if kind == "request_headers" else routed

    def wish_for_less(self) -> bytes:
        """To be appended to the answer to request headers: of the response, only the headers are wanted.

        Envoy (1.40) heeds it only while it waits for this answer, which it never does with FULL_DUPLEX_STREAMED. There
        its own configuration must say response_body_mode NONE, or bodies come and are let through.
        """
        wanted = self.options.observe_responses and not self.options.response_bodies
        if not wanted or self.mode == _MODE.FULL_DUPLEX_STREAMED:
            return b""
        message = ext_proc.ProcessingResponse()
        message.mode_override.request_body_mode = self.mode
        message.mode_override.response_header_mode = _MODE.SEND
        message.mode_override.response_body_mode = _MODE.NONE
        message.mode_override.response_trailer_mode = _MODE.SKIP
        return bytes(message.SerializeToString())

    # ---- messages ----

    async def read(self) -> Any:
        """The next message.

        Raises:
            _Gone: there is none. _ProtocolError: it is none.
        """
        message = await self.context.read()
        if message is _EOF:
            raise _Gone
        if message is None:
            raise _ProtocolError("not a ProcessingRequest")
        return message

    async def write(self, message: bytes) -> None:
        """Send a serialised message.

        Raises:
            _Gone: the other side has ended the stream.
        """
        try:
            await self.context.write(message)
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise _Gone from error


class _Response:
    """The response to a routed request: let it through, and note what becomes of it."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self.events = 0
        self.tail = b""
        self.first_s: float | None = None
        self.last_s = 0.0
        self.seen = False
        self.refused = False
        self.ended = False

    async def run(self) -> bytes:
        """The last message."""
        try:
            while True:
                answer = self.answer(await self.stream.read())
                if self.ended:
                    return answer
                await self.stream.write(answer)
        finally:
            self.report()

    def answer(self, message: Any) -> bytes:
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            if self.seen:
                raise _ProtocolError("response_headers came twice")
            self.seen = True
            self.read_headers(message)
            self.ended = message.response_headers.end_of_stream
            return _continue(kind)
        elif kind == "response_body":
            chunk = message.response_body.body
            self.look(chunk)
            self.ended = message.response_body.end_of_stream
            if self.stream.response_mode == _MODE.FULL_DUPLEX_STREAMED:
                answer = ext_proc.ProcessingResponse()
                streamed = answer.response_body.response.body_mutation.streamed_response
                streamed.body = chunk
                streamed.end_of_stream = self.ended
                return bytes(answer.SerializeToString())
            return _continue(kind)
        elif kind == "response_trailers":
            self.ended = True
            return _continue(kind)
        elif kind == "request_trailers":  # after a body that was buffered
            return _continue(kind)
        raise _ProtocolError(f"expected a part of the response, found {kind or 'none'}")

    def read_headers(self, message: Any) -> None:
        """Who has served, and whether it has gone well."""
        status = ""
        for header in message.response_headers.headers.headers:
            if header.key == ":status":
                status = header.raw_value.decode("latin-1") or header.value
        self.stream.processor.responses[status[:3]] += 1
        served = _served(message)
        if served:
            self.stream.scheduler.served(self.stream.reservation, served)
        self.refused = status >= "400"

    def look(self, chunk: bytes) -> None:
        if not chunk:
            return
        if self.first_s is None or b"data: [DONE]" not in chunk:  # with the end comes the usage, but no token
            self.last_s = time.perf_counter()
        if self.first_s is None:
            self.first_s = self.last_s
        self.events += chunk.count(b"data:")
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]

    def report(self) -> None:
        if self.refused or not self.seen:  # nothing is generated; the client went away before anything was
            self.stream.scheduler.release(self.stream.reservation)
            return
        if not self.stream.sees_the_end:
            return
        tokens = self.events - self.tail.count(b"data: [DONE]") if self.events else None
        for found in _TOKENS_IN_USAGE.finditer(self.tail):
            tokens = int(found[1])
        ttft = tbt = None
        in_pieces = self.stream.response_mode in (_MODE.FULL_DUPLEX_STREAMED, _MODE.STREAMED)
        if self.events and in_pieces and self.first_s is not None:
            ttft = self.first_s - self.stream.since
            if tokens is not None and tokens > 1:
                tbt = (self.last_s - self.first_s) / (tokens - 1)
        self.stream.scheduler.finished(self.stream.reservation, output_tokens=tokens, ttft_s=ttft, tbt_s=tbt)


def _served(message: Any) -> str:
    """Which endpoint has served: as gateways tell it, or Envoy itself (response_attributes); "" where none does."""
    metadata = message.metadata_context.filter_metadata
    if METADATA_NAMESPACE in metadata and DESTINATION_SERVED in metadata[METADATA_NAMESPACE].fields:
        return str(metadata[METADATA_NAMESPACE].fields[DESTINATION_SERVED].string_value)
    for attributes in message.attributes.values():
        if "upstream.address" in attributes.fields:
            return str(attributes.fields["upstream.address"].string_value)
    return ""


@lru_cache(4096)
def _routed(kind: str, places: str, further: tuple[tuple[str, str], ...]) -> bytes:
    """A serialised message that sends a request somewhere."""
    message = ext_proc.ProcessingResponse()
    common = getattr(message, kind).response
    common.clear_route_cache = True
    _set(common.header_mutation, DESTINATION, places)
    for name, value in further:
        _set(common.header_mutation, name, value)
    message.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields[DESTINATION].string_value = places
    return bytes(message.SerializeToString())


def _set(mutation: Any, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = _OVERWRITE


@cache
def _continue(kind: str) -> bytes:
    """Go on, nothing changes."""
    message = ext_proc.ProcessingResponse()
    getattr(message, kind).SetInParent()
    return bytes(message.SerializeToString())


_ERROR_CODES = {413: "body_too_large", 500: "internal"}
_ERROR_TYPES = {429: "rate_limit_error", 500: "internal_error", 503: "service_unavailable"}


def _immediate(drop: _Drop, request_id: str) -> bytes:
    message = ext_proc.ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = drop.status
    code = drop.reason.value if drop.reason else _ERROR_CODES.get(drop.status, "invalid_request")
    error = {"message": str(drop), "type": _ERROR_TYPES.get(drop.status, "invalid_request_error"), "code": code}
    answer.body = orjson.dumps({"error": error})
    answer.details = code.replace("-", "_")
    _set(answer.headers, "content-type", "application/json")
    if request_id:
        _set(answer.headers, REQUEST_ID, request_id)
    if drop.reason:
        _set(answer.headers, DROPPED_REASON, drop.reason.value)
    if drop.status == 429 or drop.retry_after_s > 0:
        after = drop.retry_after_s if math.isfinite(drop.retry_after_s) else 1.0
        _set(answer.headers, "retry-after", str(max(1, math.ceil(after))))
    return bytes(message.SerializeToString())


# ---- server ----


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: serving unless the scheduler drains; "liveness" always. It is asked, so it never lags behind."""

    POLL_S = 0.2

    def __init__(self, scheduler: Scheduler, services: Iterable[str] = ()) -> None:
        self.scheduler = scheduler
        self.services = {"", "readiness", SERVICE, *services}

    def status(self, service: str) -> int | None:
        if service == "liveness":
            return int(health_pb2.HealthCheckResponse.SERVING)
        if service not in self.services:
            return None
        answer = health_pb2.HealthCheckResponse
        return int(answer.NOT_SERVING if self.scheduler.draining else answer.SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        status = self.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:80]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            draining = self.scheduler.draining  # before the status: it may begin while that is sent
            status = self.status(request.service)
            if status is None:
                status = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if draining:
                return  # an open watch would hold the drain up
            await asyncio.sleep(self.POLL_S)


def add_to_server(
    server: grpc.aio.Server, scheduler: Scheduler, *, options: Options | None = None
) -> ExternalProcessor:
    """Make a server an endpoint picker; it should have been made with `server_options`."""
    for worker in scheduler.workers:
        host = worker.address.rpartition(":")[0].strip("[]")
        try:
            ipaddress.ip_address(host or "127.0.0.1")
        except ValueError:
            _log.warning("worker %s: Envoy takes IP addresses only, and may not find %s", worker.id, worker.address)
    processor = ExternalProcessor(scheduler, options)
    openai_body.parse("/v1/completions", b'{"model": "m", "prompt": [0]}')  # compiles what reads token ids
    # On the wire there is no difference to stream_stream; here, the last message is returned, not written, which makes
    # gRPC send it in one batch with the end of the stream.
    handler = grpc.stream_unary_rpc_method_handler(
        processor.process,
        request_deserializer=_parsed,
        response_serializer=None,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    return processor


def add_health(server: grpc.aio.Server, scheduler: Scheduler, *, services: Iterable[str] = ()) -> Health:
    """Add the health service; `services` are further names that go with readiness."""
    health = Health(scheduler, services)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return health


def server_options(options: Options | None = None) -> list[tuple[str, int]]:
    """gRPC options a server needs to take the largest body in one message, and to find out dead connections."""
    largest = (options or Options()).max_body_bytes + (1 << 20)
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.max_metadata_size", 64 << 10),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.so_reuseport", 0),
    ]


def _parsed(data: bytes) -> Any:
    """A message, or None where it is none: then the stream can say so, instead of failing without a word."""
    try:
        return ext_proc.ProcessingRequest.FromString(data)
    except DecodeError:
        return None
