"""What is asked of an endpoint picker, one function for each requirement.

A case returns when the requirement is met, and raises `Failure` or `Skip` otherwise. Sources: "004" is the Endpoint
Picker Protocol 1.0.0 (Gateway API Inference Extension, docs/proposals/004-endpoint-picker-protocol), "Envoy" what
Envoy's external processing demands of any server, "llm-d" what llm-d's router does where the protocol is silent.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .wire import (
    DESTINATION,
    Answer,
    Failure,
    Skip,
    Target,
    body_message,
    headers_message,
    pieces,
    response_body_message,
    response_headers_message,
    response_trailers_message,
)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
NOWHERE = "203.0.113.1:9"  # of the block that is set aside for documentation
MUST, SHOULD, MAY = "MUST", "SHOULD", "MAY"
LARGEST_MESSAGE = 64 << 10
PARALLEL = 100
UTF8 = "Grüße, 世界! 🙂 "
Run = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A requirement and how to try it. `level`: MUST, SHOULD or MAY, as RFC 2119 has them."""

    name: str
    level: str
    requirement: str
    source: str
    run: Run


CASES: list[Case] = []


def case(level: str, source: str) -> Callable[[Run], Run]:
    """Make a function a case: its name is the case's, its docstring the requirement."""

    def add(function: Run) -> Run:
        text = " ".join((function.__doc__ or "").split())
        CASES.append(Case(function.__name__, level, text, source, function))
        return function

    return add


# ---- what all cases use ----


def prompt(target: Target, size: int = 0, *, text: str = "Say hello.") -> bytes:
    """A body that asks for a completion. `size`: bytes it is filled up to, in a field that engines ignore."""
    fields: dict[str, Any] = {"model": target.model, "prompt": text, "max_tokens": 4}
    short = json.dumps(fields, ensure_ascii=False).encode()
    if size <= len(short):
        return short
    filling = UTF8 * (size // len(UTF8.encode()))
    fields["metadata"] = {"padding": filling}
    missing = size - len(json.dumps(fields, ensure_ascii=False).encode())
    fields["metadata"]["padding"] += "x" * max(0, missing)
    return json.dumps(fields, ensure_ascii=False).encode()


def routed(answer: Answer) -> Answer:
    """The answer, if it names an endpoint.

    Raises:
        Skip: the target sheds load. Failure: anything else.
    """
    if answer.http_status == 429:
        raise Skip("the target sheds load (429); try again when it has room")
    if answer.late:
        raise Failure("an answer in time", answer.describe())
    if answer.immediate is not None or answer.order[:1] != ["request_headers"] or not answer.places:
        raise Failure(f"request_headers that set {DESTINATION}", answer.describe())
    return answer


def intact(answer: Answer, body: bytes) -> Answer:
    """The answer, if the body came back as it went, and ended once."""
    routed(answer)
    if answer.body != body:
        raise Failure(
            f"{len(body)} bytes with SHA-256 {hashlib.sha256(body).hexdigest()[:12]}",
            f"{len(answer.body)} bytes with SHA-256 {hashlib.sha256(answer.body).hexdigest()[:12]}",
        )
    if answer.ends != 1:
        raise Failure("end_of_stream once", f"{answer.ends} times")
    return answer


def refused(answer: Answer, *statuses: int) -> Answer:
    """The answer, if it is an immediate response of one of these statuses, and nothing else."""
    wanted = f"an immediate response {' or '.join(map(str, statuses))}"
    if answer.http_status not in statuses:
        raise Failure(wanted, answer.describe())
    if len(answer.messages) != 1:
        raise Failure(f"{wanted} and nothing before it", " -> ".join(answer.order))
    return answer


async def lives(target: Target) -> None:
    """The target still answers others."""
    answer = await target.post(prompt(target))
    if answer.http_status != 429:
        intact(answer, prompt(target))


async def known_endpoints(target: Target, wanted: int) -> list[str]:
    """Endpoints that the target chooses by itself, at least one."""
    for i in range(8):
        if len(target.endpoints) >= wanted:
            break
        for place in routed(await target.post(prompt(target, text=f"{i} Say hello."))).places:
            if place not in target.endpoints:
                target.endpoints.append(place)
        for place in (await target.get()).places:
            if place not in target.endpoints:
                target.endpoints.append(place)
    return target.endpoints


# ---- where a request goes ----


@case(MUST, "004, Destination Endpoint")
async def destination_header(target: Target) -> None:
    """A request is answered with the header x-gateway-destination-endpoint, whose value is ip:port or a comma-separated
    list of these."""
    for place in routed(await target.post(prompt(target))).places:
        host, _, port = place.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise Failure("ip:port", repr(place)) from None
        if not (port.isdigit() and 0 < int(port) < 65536):
            raise Failure("ip:port", repr(place))


@case(MUST, "004, Destination Endpoint")
async def destination_metadata(target: Target) -> None:
    """dynamic_metadata names, under envoy.lb and x-gateway-destination-endpoint, the same endpoints as the header."""
    answer = routed(await target.post(prompt(target)))
    header = answer.headers[DESTINATION]
    if answer.metadata != header:
        raise Failure(f"{header!r} in dynamic_metadata", repr(answer.metadata))


@case(MUST, "Envoy, HeaderValue")
async def header_value_is_raw(target: Target) -> None:
    """Headers to be set carry their value in raw_value, or in value, and never in both."""
    for option in routed(await target.post(prompt(target))).options:
        if option.header.raw_value and option.header.value:
            raise Failure("raw_value or value", f"both in {option.header.key}")


@case(SHOULD, "llm-d")
async def route_is_chosen_anew(target: Target) -> None:
    """clear_route_cache is set, so that routes which match the new header take effect."""
    answer = routed(await target.post(prompt(target)))
    if not any(
        message.request_headers.response.clear_route_cache
        for message in answer.messages
        if message.WhichOneof("response") == "request_headers"
    ):
        raise Failure("clear_route_cache", "it is not set")


@case(MUST, "004, Destination Endpoint")
async def header_only_request(target: Target) -> None:
    """A request that ends with its headers (GET /v1/models) is sent to some endpoint, and no body is answered."""
    answer = routed(await target.get())
    if answer.order != ["request_headers"]:
        raise Failure("request_headers alone", " -> ".join(answer.order))
    if answer.metadata != answer.headers[DESTINATION]:
        raise Failure(f"{answer.headers[DESTINATION]!r} in dynamic_metadata", repr(answer.metadata))


@case(SHOULD, "llm-d, passthrough parser")
async def unknown_path(target: Target) -> None:
    """A request to a path that is no inference (POST /v1/something) passes to some endpoint, its body as it was."""
    body = b'{"anything": ["at", "all"]}'
    intact(await target.post(body, path="/v1/something"), body)


@case(MUST, "004; Envoy")
async def large_header(target: Target) -> None:
    """A request with 32 KB of headers is dealt with like others."""
    body = prompt(target)
    intact(await target.post(body, headers={f"x-filling-{i}": "v" * 1000 for i in range(32)}), body)


@case(MUST, "llm-d, routing headers of clients are removed")
async def client_cannot_choose(target: Target) -> None:
    """An x-gateway-destination-endpoint that the client sent itself does not come through."""
    answer = routed(await target.post(prompt(target), headers={DESTINATION: NOWHERE}))
    if NOWHERE in answer.places or NOWHERE in (answer.metadata or ""):
        raise Failure("an endpoint of the picker's own", f"{NOWHERE}, as the client said")


@case(SHOULD, "004, Endpoint Subset: a metadata entry, not a header")
async def client_cannot_restrict(target: Target) -> None:
    """A header x-gateway-destination-endpoint-subset that the client sent itself restricts nothing."""
    routed(await target.post(prompt(target), headers={"x-gateway-destination-endpoint-subset": NOWHERE}))


@case(SHOULD, "llm-d, routing headers of clients are removed")
async def client_cannot_name_prefiller(target: Target) -> None:
    """x-prefiller-host-port from a client is removed or overwritten: a worker would connect to it."""
    name = "x-prefiller-host-port"
    answer = routed(await target.post(prompt(target), headers={name: NOWHERE}))
    if name not in answer.removed and answer.headers.get(name, NOWHERE) == NOWHERE:
        raise Failure(f"{name} removed or overwritten", "it comes through")


@case(SHOULD, "llm-d, system-owned headers")
async def proxy_headers_untouched(target: Target) -> None:
    """Headers that belong to the proxy (x-envoy-*, x-forwarded-*, :path, host) are not set."""
    given = {"x-forwarded-for": "10.1.1.1", "x-envoy-attempt-count": "1", "x-forwarded-proto": "http"}
    answer = routed(await target.post(prompt(target), headers=given))
    mine = [name for name in answer.headers if name.startswith(("x-envoy-", "x-forwarded-", ":")) or name == "host"]
    if mine:
        raise Failure("none of the proxy's headers set", ", ".join(mine))


@case(SHOULD, "llm-d, x-request-id")
async def request_id_kept(target: Target) -> None:
    """An x-request-id that came with the request stays as it is."""
    answer = routed(await target.post(prompt(target), headers={"x-request-id": "conformance-1"}))
    if answer.headers.get("x-request-id", "conformance-1") != "conformance-1" or "x-request-id" in answer.removed:
        raise Failure("conformance-1", answer.headers.get("x-request-id", "it is removed"))


# ---- the body ----


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def answer_order(target: Target) -> None:
    """Answers come in the order headers, body, trailers."""
    answer = routed(await target.post(prompt(target), trailers={"x-checksum": "1"}))
    if answer.order != ["request_headers", "request_body", "request_trailers"]:
        raise Failure("request_headers -> request_body -> request_trailers", answer.describe())


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def trailers_end_the_body(target: Target) -> None:
    """Where trailers follow, no piece of the body says end_of_stream, and the body is whole."""
    body = prompt(target, 3000)
    answer = routed(await target.post(body, trailers={"x-checksum": "1"}))
    if answer.body != body or answer.ends:
        raise Failure(f"{len(body)} bytes, no end_of_stream", f"{len(answer.body)} bytes, {answer.ends} end_of_stream")


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def body_of_1_kb(target: Target) -> None:
    """A body of 1 KB comes back byte for byte."""
    body = prompt(target, 1000)
    intact(await target.post(body), body)


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def body_of_500_kb(target: Target) -> None:
    """A body of 500 KB comes back byte for byte."""
    body = prompt(target, 500_000)
    intact(await target.post(body), body)


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def body_split_inside_characters(target: Target) -> None:
    """A body that comes in pieces, cut inside of UTF-8 characters, comes back byte for byte."""
    body = prompt(target, 4000)
    intact(await target.post(body, split=pieces(body, 7)), body)


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def body_ends_with_empty_piece(target: Target) -> None:
    """A body whose end comes by itself, in an empty piece, comes back byte for byte and ends once."""
    body = prompt(target, 1000)
    intact(await target.post(body, split=[body, b""]), body)


@case(MUST, "Envoy, FULL_DUPLEX_STREAMED")
async def body_empty(target: Target) -> None:
    """A POST with an empty body is sent on, with an empty body that ends once, or refused with a 4xx."""
    answer = await target.post(b"")
    if 400 <= answer.http_status < 500:
        refused(answer, answer.http_status)
    else:
        intact(answer, b"")


@case(MUST, "llm-d; gRPC messages of a proxy are limited to 64 KiB")
async def piece_size(target: Target) -> None:
    """No message of a streamed body is larger than 64 KiB."""
    body = prompt(target, 500_000)
    largest = max(len(data) for data in intact(await target.post(body), body).raw)
    if largest > LARGEST_MESSAGE:
        raise Failure(f"at most {LARGEST_MESSAGE} bytes", f"a message of {largest} bytes")


@case(MUST, "HTTP")
async def content_length_agrees(target: Target) -> None:
    """Where the picker sets content-length, it is the length of the body it sends."""
    body = prompt(target, 2000)
    answer = intact(await target.post(body, headers={"content-length": str(len(body))}), body)
    if answer.headers.get("content-length", str(len(body))) != str(len(body)):
        raise Failure(f"content-length {len(body)}", answer.headers["content-length"])


@case(MUST, "Envoy, ProcessingResponse")
async def reserved_fields(target: Target) -> None:
    """Fields 11 and above of ProcessingResponse, whose meaning differs between versions of Envoy, are never set."""
    answers = [
        routed(await target.post(prompt(target))),
        await target.get(),
        await target.post(prompt(target), subset=[NOWHERE]),
    ]
    found = sorted(set().union(*(answer.unknown_fields for answer in answers)))
    if found:
        raise Failure("fields 1 to 10", f"field {', '.join(map(str, found))}")


# ---- the subset ----


async def _chosen_only(target: Target, place: str, subset: list[str] | str) -> None:
    """Asked several times, as a picker that takes turns could choose it by chance."""
    for i in range(4):
        answer = routed(await target.post(prompt(target, text=f"{i} Say hello."), subset=subset))
        if answer.places != [place]:
            raise Failure(place, answer.headers[DESTINATION])


@case(MUST, "004, Endpoint Subset")
async def subset_of_one(target: Target) -> None:
    """With a subset of one endpoint, that endpoint is chosen."""
    for place in (await known_endpoints(target, 2))[:2]:
        await _chosen_only(target, place, [place])


@case(MUST, "004, Endpoint Subset")
async def subset_partly_unknown(target: Target) -> None:
    """Of a subset in which some endpoints do not exist, one that does is chosen, and no other endpoint is named."""
    place = (await known_endpoints(target, 1))[0]
    await _chosen_only(target, place, [NOWHERE, place])


@case(MUST, "004, Endpoint Subset")
async def subset_for_header_only(target: Target) -> None:
    """The subset holds for requests without a body, too."""
    place = (await known_endpoints(target, 1))[0]
    for _ in range(3):
        answer = routed(await target.get(subset=[NOWHERE, place]))
        if answer.places != [place]:
            raise Failure(place, answer.headers[DESTINATION])
    refused(await target.get(subset=[NOWHERE]), 503)


@case(SHOULD, "llm-d, Envoy's own metadata values are strings")
async def subset_as_string(target: Target) -> None:
    """A subset given as one comma-separated string is understood."""
    place = (await known_endpoints(target, 1))[0]
    await _chosen_only(target, place, f"{NOWHERE}, {place}")


@case(MUST, "004, Endpoint Subset")
async def subset_without_endpoint(target: Target) -> None:
    """A subset in which no endpoint exists is answered with 503, and nothing else."""
    refused(await target.post(prompt(target), subset=[NOWHERE]), 503)


@case(MUST, "004, Endpoint Subset")
async def subset_empty(target: Target) -> None:
    """An empty subset is answered with 503."""
    refused(await target.post(prompt(target), subset=[]), 503)


# ---- refusals ----


@case(SHOULD, "llm-d, x-llm-d-request-dropped-reason")
async def dropped_reason(target: Target) -> None:
    """A request that is dropped for want of endpoints is told so in x-llm-d-request-dropped-reason."""
    answer = refused(await target.post(prompt(target), subset=[NOWHERE]), 503)
    if not answer.headers.get("x-llm-d-request-dropped-reason"):
        raise Failure("x-llm-d-request-dropped-reason", "no such header")


@case(SHOULD, "llm-d")
async def invalid_json(target: Target) -> None:
    """A completion whose body is not JSON is answered with 400."""
    refused(await target.post(b'{"model": "test-model", "prompt": '), 400)


@case(SHOULD, "llm-d")
async def missing_model(target: Target) -> None:
    """A completion that names no model is answered with 400."""
    refused(await target.post(b'{"prompt": "Say hello."}'), 400)


@case(MAY, "OpenAI API, errors")
async def error_body(target: Target) -> None:
    """The body of a 400 is JSON of the form {"error": {"message": ..., "type": ..., "code": ...}}."""
    answer = refused(await target.post(b"{"), 400)
    assert answer.immediate is not None
    try:
        fields = json.loads(answer.immediate.body)["error"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failure("an error in OpenAI's form", repr(answer.immediate.body[:80])) from None
    if not {"message", "type", "code"} <= set(fields):
        raise Failure("message, type and code", ", ".join(fields))


@case(MUST, "004, Destination Endpoint: a request that should be dropped")
async def overload(target: Target) -> None:
    """What cannot be served is dropped with 429. Tried by an SLO of a microsecond, then by many requests at once."""
    if not target.provoke:
        raise Skip("only with --provoke")
    answer = await target.post(prompt(target), headers={"x-llm-d-slo-ttft-ms": "0.001", "x-slo-ttft-ms": "0.001"})
    for _ in range(20):
        if answer.immediate is not None:
            break
        answers = await asyncio.gather(*(target.post(prompt(target, text=UTF8 * 4000)) for _ in range(50)))
        answer = next((answer for answer in answers if answer.immediate is not None), answer)
    if answer.immediate is None:
        raise Skip("it has taken all of 1000 long prompts")
    refused(answer, 429)
    if "x-llm-d-request-dropped-reason" not in answer.headers:
        raise Failure("x-llm-d-request-dropped-reason", "no such header")
    after = answer.headers.get("retry-after", "1")
    if not after.isdigit() or int(after) < 1:
        raise Failure("retry-after of at least a second", repr(after))


# ---- what must not break it ----


@case(MUST, "004; Envoy: one stream for each HTTP request")
async def parallel_streams(target: Target) -> None:
    """100 streams at once are all answered, each with its own body."""
    bodies = [prompt(target, 2000 + i, text=f"{i} Say hello.") for i in range(PARALLEL)]
    answers = await asyncio.gather(*(target.post(body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        if answer.http_status not in (429, 503):
            intact(answer, body)
        elif len(answer.messages) != 1:
            refused(answer, answer.http_status)


@case(MUST, "004; Envoy resets the stream when its client goes")
async def client_gone(target: Target) -> None:
    """Streams cancelled in the midst of a body harm no other."""
    for _ in range(20):
        stream = target.open()
        await stream.send(headers_message())
        await stream.send(body_message(b'{"model": "test-', end=False))
        stream.cancel()
    await lives(target)


@case(MUST, "004; gRPC")
async def half_closed(target: Target) -> None:
    """A stream that the proxy closes in the midst of a body is ended, without a decision."""
    stream = target.open()
    await stream.send(headers_message())
    await stream.send(body_message(b'{"model": "test-', end=False))
    await stream.close()
    while await stream.receive() is not None:
        pass
    if stream.answer.late:
        raise Failure("the end of the stream", "it stays open")
    await lives(target)


@case(MUST, "gRPC")
async def garbage(target: Target) -> None:
    """Bytes that are no ProcessingRequest end their stream and harm no other."""
    rng = random.Random(0)
    for data in (b"\xff\xff\xff\xff", rng.randbytes(1000), b"\x12\xff\xff\xff\xff\x0f", b"\x22\x02\x0a\x7f"):
        stream = target.open()
        await stream.send(data)
        while await stream.receive() is not None:
            pass
        if stream.answer.late:
            stream.cancel()
            raise Failure("the end of the stream", "it stays open")
    await lives(target)


@case(MUST, "Envoy")
async def impossible_order(target: Target) -> None:
    """Messages in an order that cannot be (a body first, headers twice, an empty one) harm no other stream."""
    for messages in (
        [body_message(b"{}", end=True)],
        [headers_message(), headers_message()],
        [b""],
        [headers_message(), b""],
        [response_headers_message({":status": "200"})],
        [headers_message(), response_body_message(b"x", end=True)],
    ):
        stream = target.open()
        for message in messages:
            await stream.send(message)
        await stream.receive(min(1.0, target.timeout_s))
        stream.cancel()
    await lives(target)


# ---- the response ----

EVENTS = [
    b'data: {"n": 0}\n\n',
    b'data: {"n": 1}\n\ndata: {"n"',
    b": 2}\n\n",
    'data: {"text": "\N{SNOWMAN}"}\n\n'.encode(),
    b"data: [DONE]\n\n",
]


async def _response(target: Target, parts: list[bytes], *, trailers: bool) -> None:
    """A request, then its response; the server may have closed the stream, or must let the response through."""
    body = prompt(target)
    stream = target.open()
    answer = await stream.request(
        [headers_message(), body_message(body, end=True)],
        has_body=True,
    )
    intact(answer, body)
    if await stream.heard(0.1):  # it ends the stream, or says more than it was asked
        message = await stream.receive()
        if message is None and answer.left:
            return  # it does not want responses
        raise Failure("silence until response_headers, or the stream closed with OK", answer.describe())
    await stream.send(
        response_headers_message({":status": "200", "content-type": "text/event-stream"}, served=answer.places[0])
    )
    if await stream.receive() is None:
        if answer.left:
            return
        raise Failure("an answer to response_headers, or the stream closed with OK", stream.answer.describe())
    for i, part in enumerate(parts):
        await stream.send(response_body_message(part, end=not trailers and i == len(parts) - 1))
    if trailers:
        await stream.send(response_trailers_message({"x-usage": "1"}))
    kinds = [""]
    while kinds[-1] != "response_trailers":
        if not trailers and any(piece.end_of_stream for piece in answer.streamed("response_body")):
            break
        message = await stream.receive()
        if message is None:
            if not answer.left:
                raise Failure("the whole response", stream.answer.describe())
            break
        kinds.append(message.WhichOneof("response") or "nothing")
    stream.cancel()
    came = answer.streamed("response_body")
    back = b"".join(piece.body for piece in came)
    if back != b"".join(parts):
        raise Failure(f"{b''.join(parts)!r}", repr(back))
    ends = sum(piece.end_of_stream for piece in came)
    if ends != (not trailers):
        raise Failure(f"end_of_stream {int(not trailers)} times", f"{ends} times")


@case(MUST, "Envoy: a closed stream ends processing; FULL_DUPLEX_STREAMED otherwise")
async def response_events(target: Target) -> None:
    """The stream is closed with OK after the request, or the response's headers are answered and its events come back
    as they were."""
    await _response(target, EVENTS, trailers=False)


@case(MUST, "Envoy: a closed stream ends processing; FULL_DUPLEX_STREAMED otherwise")
async def response_trailers(target: Target) -> None:
    """The same for a response that ends with trailers."""
    await _response(target, [b'{"choices": []}'], trailers=True)


# ---- the server ----


async def _health(target: Target, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(target.channel)
    return await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=target.timeout_s)


async def _serving(target: Target, service: str) -> None:
    try:
        answer = await _health(target, service)
    except grpc.aio.AioRpcError as error:
        raise Failure(f"SERVING for {service!r}", f"gRPC status {error.code().name}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Failure(f"SERVING for {service!r}", health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@case(MUST, "004, Health Checking")
async def health_liveness(target: Target) -> None:
    """grpc.health.v1 says SERVING for "liveness"."""
    await _serving(target, "liveness")


@case(MUST, "004, Health Checking")
async def health_readiness(target: Target) -> None:
    """grpc.health.v1 says SERVING for "readiness" while requests are taken."""
    await _serving(target, "readiness")


@case(MUST, "004, Health Checking")
async def health_service(target: Target) -> None:
    """grpc.health.v1 says SERVING for envoy.service.ext_proc.v3.ExternalProcessor while requests are taken."""
    await _serving(target, SERVICE)


@case(SHOULD, "gRPC health checking protocol")
async def health_overall(target: Target) -> None:
    """grpc.health.v1 says SERVING for the empty name."""
    await _serving(target, "")


@case(SHOULD, "gRPC health checking protocol")
async def health_unknown(target: Target) -> None:
    """grpc.health.v1 answers NOT_FOUND for a service that does not exist."""
    try:
        answer = await _health(target, "no.such.Service")
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return
        raise Failure("NOT_FOUND", error.code().name) from None
    raise Failure("NOT_FOUND", health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@case(MAY, "gRPC server reflection")
async def reflection(target: Target) -> None:
    """Reflection lists envoy.service.ext_proc.v3.ExternalProcessor."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(target.channel)
    call = stub.ServerReflectionInfo(timeout=target.timeout_s)
    try:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = [service.name for service in answer.list_services_response.service]
        call.cancel()
    except grpc.aio.AioRpcError as error:
        raise Skip(f"no reflection ({error.code().name})") from None
    if SERVICE not in names:
        raise Failure(SERVICE, ", ".join(names) or "no services")
