"""The endpoint picker, asked as Envoy asks; and what it makes of request bodies."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.state import Source
from runtime.conformance.wire import (
    Answer,
    Stream,
    Target,
    body_message,
    headers_message,
    response_body_message,
    response_headers_message,
    trailers_message,
)
from runtime.ext_proc import CHUNK_BYTES, SERVICE, Options, Scheduler
from runtime.openai_body import IMAGE_TOKENS, parse, pseudo_tokens
from runtime.request import Assignment, Reason, Rejection, Request, RequestError
from runtime.workers import Role, Worker

from .envoy import PREFILL, Picker, conductor

MODE = processing_mode_pb2.ProcessingMode
ASKED = b'{"model": "m", "prompt": "Say hello.", "max_tokens": 4}'
PLACES = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"]


class Scripted:
    """A scheduler that takes turns and writes down what it is told; `answer` decides otherwise."""

    def __init__(self, places: list[str] = PLACES, answer: Callable[[Request], Any] | None = None) -> None:
        self.decodes = [Worker(id=f"decode-{i}", role=Role.DECODE, address=place) for i, place in enumerate(places)]
        self.prefill = Worker(id="prefill-0", role=Role.PREFILL, address=PREFILL)
        self.draining = False
        self.answer = answer
        self.requests: list[Request] = []
        self.told: list[tuple[Any, ...]] = []
        self.turn = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.prefill, *self.decodes)

    def catch_up(self) -> None:
        pass

    def any_decode(self, candidates: frozenset[str] | None = None) -> Worker | None:
        may = [worker for worker in self.decodes if candidates is None or worker.address in candidates]
        self.turn += 1
        return may[self.turn % len(may)] if may else None

    def schedule(self, request: Request) -> Assignment | Rejection:
        self.requests.append(request)
        if self.answer is not None:
            answer = self.answer(request)
            if answer is not None:
                return answer
        worker = self.any_decode(request.candidates)
        if worker is None:
            return Rejection(request.request_id, Reason.NO_ENDPOINTS, "none of the candidates is up")
        others = tuple((self.prefill, other) for other in self.decodes if other is not worker)
        return assigned(request, self.prefill, worker, fallbacks=others)

    def release(self, request_id: str) -> None:
        self.told.append(("release", request_id))

    def served(self, request_id: str, address: str) -> None:
        self.told.append(("served", request_id, address))

    def finished(
        self, request_id: str, *, output_tokens: int | None, ttft_s: float | None, tbt_s: float | None
    ) -> None:
        self.told.append(("finished", request_id, output_tokens, ttft_s, tbt_s))


def assigned(request: Request, prefill: Worker, decode: Worker, **more: Any) -> Assignment:
    given: dict[str, Any] = {"source": Source.LOCAL, "holder": None} | more
    return Assignment(
        request.request_id,
        prefill,
        decode,
        given["source"],
        given["holder"],
        input_tokens=request.input_tokens,
        reused_tokens=0,
        predicted_ttft_s=0.1,
        predicted_tbt_s=0.01,
        lease_s=10.0,
        policy="scripted",
        fallbacks=given.get("fallbacks", ()),
    )


@asynccontextmanager
async def asking(scheduler: Scheduler, options: Options | None = None) -> AsyncIterator[tuple[Picker, Target]]:
    async with Picker(scheduler, options) as picker:
        target = Target(picker.address, timeout_s=10.0)
        await target.connect()
        try:
            yield picker, target
        finally:
            await target.close()


async def quiet(picker: Picker) -> None:
    """All streams have come to their end."""
    for _ in range(500):
        if not picker.processor.streams_open:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{picker.processor.streams_open} streams are still open")


# ---- what a request becomes ----


async def test_headers_say_what_is_wanted() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        headers = {
            "x-request-id": "r-1",
            "x-llm-d-slo-ttft-ms": "250",
            "x-slo-tpot-ms": "40.5",
            "x-gateway-inference-fairness-id": "team-a",
            "x-request-priority": "-2",
        }
        answer = await target.post(ASKED, headers=headers, subset=[PLACES[1], "10.9.9.9:1"])
    (request,) = scheduler.requests
    assert request.request_id == "r-1"
    assert request.ttft_slo_s == 0.25 and request.tbt_slo_s == pytest.approx(0.0405)
    assert request.tenant == "team-a" and request.priority == -2
    assert request.candidates == frozenset({PLACES[1], "10.9.9.9:1"})
    assert request.tokens is not None and request.tokens.tobytes().rstrip(b"\0") == b"Say hello."
    assert request.namespace == "text:m" and request.lora_name == "" and not request.reported
    assert answer.places == [PLACES[1]] and answer.metadata == PLACES[1]
    assert answer.headers["x-prefiller-host-port"] == PREFILL
    assert answer.removed == {"x-gateway-inference-fairness-id"}
    assert "x-request-id" not in answer.headers


async def test_missing_request_id_is_made_up() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        answer = await target.post(ASKED)
    assert answer.headers["x-request-id"] == scheduler.requests[0].request_id != ""


async def test_same_request_id_twice() -> None:
    """The reservation of a request that a client gave up may still live when it comes again."""
    real = conductor(PLACES)
    async with asking(real) as (picker, target):
        for _ in range(2):
            answer = await target.post(ASKED, headers={"x-request-id": "again"})
            assert answer.places
        assert picker.processor.outcomes == {"routed": 2}
    assert len(real.state.reservations) == 2


async def test_adapters_salts_and_objectives() -> None:
    scheduler = Scripted()
    options = Options(base_models=frozenset({"base"}), objectives={"batch": -1})
    async with asking(scheduler, options) as (_, target):
        for model in ("base", "adapter"):
            body = json.dumps({"model": model, "prompt": [5, 6, 7], "cache_salt": "s"}).encode()
            await target.post(body, headers={"x-llm-d-inference-objective": "batch"})
    base, adapter = scheduler.requests
    assert (base.lora_name, base.cache_salt, base.namespace, base.priority) == ("", "s", "", -1)
    assert (adapter.lora_name, adapter.cache_salt, adapter.namespace) == ("adapter", "s", "")
    assert adapter.tokens is not None and adapter.tokens.tolist() == [5, 6, 7]


async def test_fallbacks_stay_inside_the_subset() -> None:
    async with asking(Scripted(), Options(fallbacks=5)) as (_, target):
        assert sorted((await target.post(ASKED)).places) == PLACES
        answer = await target.post(ASKED, subset=PLACES[:2])
    assert sorted(answer.places) == PLACES[:2] and answer.metadata == ",".join(answer.places)
    async with asking(Scripted()) as (_, target):
        assert len((await target.post(ASKED)).places) == 1


async def test_coupled_worker_and_holder() -> None:
    both = Worker(id="both", role=Role.BOTH, address="10.0.0.1:80")
    holder = Worker(id="holder", role=Role.PREFILL, address="10.0.0.2:80")
    scheduler = Scripted(answer=lambda request: assigned(request, both, both, source=Source.FETCH, holder=holder))
    async with asking(scheduler) as (_, target):
        answer = await target.post(ASKED, headers={"x-prefiller-host-port": "6.6.6.6:6"})
    assert answer.places == ["10.0.0.1:80"]
    assert answer.headers["x-kv-cache-source-host-port"] == "10.0.0.2:80"
    assert "x-prefiller-host-port" not in answer.headers and "x-prefiller-host-port" in answer.removed


# ---- refusals ----


@pytest.mark.parametrize("reason", list(Reason))
async def test_rejections(reason: Reason) -> None:
    scheduler = Scripted(answer=lambda request: Rejection(request.request_id, reason, "no room", retry_after_s=1.2))
    async with asking(scheduler) as (picker, target):
        answer = await target.post(ASKED)
        assert picker.processor.outcomes == {reason.value: 1}
    assert answer.http_status == reason.http_status and len(answer.messages) == 1
    assert answer.headers["x-llm-d-request-dropped-reason"] == reason.value
    assert answer.headers["retry-after"] == "2"
    assert answer.immediate is not None
    error = json.loads(answer.immediate.body)["error"]
    assert error["message"] == "no room" and error["code"] == reason.value and error["type"]
    assert not scheduler.told


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"{", {}, "not valid JSON"),
        (b"", {}, "not valid JSON"),
        (b"[1]", {}, "must be a JSON object"),
        (b'{"prompt": "x"}', {}, "model: expected"),
        (b'{"model": 3, "prompt": "x"}', {}, "model: expected the name of a model, found 3"),
        (b'{"model": "m"}', {}, "prompt: expected"),
        (b'{"model": "m", "prompt": [1, -1]}', {}, "prompt: expected token ids"),
        (b'{"model": "m", "prompt": [1.5]}', {}, "prompt: expected token ids"),
        (b'{"model": "m", "prompt": "x", "stream": "yes"}', {}, "stream: expected true or false"),
        (b'{"model": "m", "prompt": "x", "max_tokens": "9"}', {}, "max_tokens: expected"),
        (ASKED, {"x-llm-d-slo-ttft-ms": "soon"}, "x-llm-d-slo-ttft-ms: expected a positive number"),
        (ASKED, {"x-slo-tpot-ms": "nan"}, "x-slo-tpot-ms: expected a positive number"),
        (ASKED, {"x-request-priority": "high"}, "x-request-priority: expected an integer"),
    ],
)
async def test_bad_requests(body: bytes, headers: dict[str, str], message: str) -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (picker, target):
        answer = await target.post(body, headers=headers)
        assert picker.processor.outcomes == {"invalid": 1}
    assert answer.http_status == 400 and answer.immediate is not None
    assert message in json.loads(answer.immediate.body)["error"]["message"]
    assert not scheduler.requests and "x-llm-d-request-dropped-reason" not in answer.headers


async def test_body_too_large() -> None:
    async with asking(Scripted(), Options(max_body_bytes=1000)) as (_, target):
        assert (await target.post(b"x" * 1001)).http_status == 413
        answer = await target.post(ASKED[:-1] + b" " * (1000 - len(ASKED)) + b"}")
        assert answer.places


async def test_scheduler_fails() -> None:
    def fail(request: Request) -> None:
        raise ZeroDivisionError

    async with asking(Scripted(answer=fail)) as (picker, target):
        assert (await target.post(ASKED)).http_status == 500
        assert picker.processor.outcomes == {"failed": 1}


async def test_request_that_cannot_be() -> None:
    def refuse(request: Request) -> None:
        raise RequestError("input_tokens: expected fewer")

    async with asking(Scripted(answer=refuse)) as (_, target):
        assert (await target.post(ASKED)).http_status == 400


async def test_no_worker() -> None:
    async with asking(Scripted([])) as (_, target):
        for answer in (await target.post(ASKED), await target.get(), await target.post(b"x", path="/tokenize")):
            assert answer.http_status == 503
            assert answer.headers["x-llm-d-request-dropped-reason"] == Reason.NO_ENDPOINTS


async def test_too_many_streams() -> None:
    async with asking(Scripted(), Options(max_streams=2)) as (picker, target):
        waiting = [target.open() for _ in range(2)]
        for stream in waiting:
            await stream.send(headers_message())
        for _ in range(100):
            if picker.processor.streams_open == 2:
                break
            await asyncio.sleep(0.01)
        answer = await target.post(ASKED)
        assert answer.http_status == 503
        assert answer.headers["x-llm-d-request-dropped-reason"] == Reason.QUEUE_FULL
        for stream in waiting:
            stream.cancel()
        await quiet(picker)
        assert (await target.post(ASKED)).places


async def test_no_room_for_bodies() -> None:
    async with asking(Scripted(), Options(max_buffered_bytes=5000)) as (picker, target):
        waiting = target.open()
        await waiting.send(headers_message())
        await waiting.send(body_message(b" " * 4000, end=False))
        for _ in range(100):
            if picker.processor.buffered_bytes == 4000:
                break
            await asyncio.sleep(0.01)
        answer = await target.post(b" " * 2000)
        assert answer.http_status == 503
        assert answer.headers["x-llm-d-request-dropped-reason"] == Reason.QUEUE_FULL
        waiting.cancel()
        await quiet(picker)
        assert picker.processor.buffered_bytes == 0
        assert (await target.post(ASKED)).places


async def test_draining_and_health() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        health = health_pb2_grpc.HealthStub(target.channel)

        async def status(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        names = ("", "readiness", SERVICE)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == serving
        assert [await status(name) for name in (*names, "liveness")] == [serving] * 4
        scheduler.draining = True
        assert [await status(name) for name in (*names, "liveness")] == [not_serving] * 3 + [serving]
        assert (await watch.read()).status == not_serving
        watch.cancel()
        answer = await target.post(ASKED)
        with pytest.raises(grpc.aio.AioRpcError):
            await status("nobody")
    assert answer.http_status == 503
    assert answer.headers["x-llm-d-request-dropped-reason"] == Reason.SHUTTING_DOWN


# ---- the ways a body comes ----


def headers_in(mode: int, headers: dict[str, str] | None = None, response: int = MODE.NONE) -> Any:
    message = headers_message(headers=headers)
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = response
    return message


@pytest.mark.parametrize("mode", [MODE.BUFFERED, MODE.BUFFERED_PARTIAL])
async def test_buffered(mode: int) -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        stream = target.open()
        await stream.send(headers_in(mode))
        first = await stream.receive()
        assert first is not None and not first.request_headers.response.header_mutation.set_headers
        await stream.send(body_message(ASKED, end=True))
        second = await stream.receive()
        assert second is not None and second.WhichOneof("response") == "request_body"
        assert not second.request_body.response.HasField("body_mutation")
        assert await stream.receive() is None
    answer = stream.answer
    assert answer.status == grpc.StatusCode.OK
    assert answer.places == [answer.metadata] and answer.headers["x-prefiller-host-port"] == PREFILL
    assert scheduler.requests[0].tokens is not None


async def test_trailers_after_a_buffered_body() -> None:
    scheduler = Scripted()
    async with asking(scheduler, Options(observe_responses=True)) as (_, target):
        stream = target.open()
        await stream.send(headers_in(MODE.BUFFERED, response=MODE.BUFFERED))
        await stream.receive()
        messages = [body_message(ASKED, end=False), trailers_message({"x": "y"})]
        messages += [response_headers_message({":status": "200"}), response_body_message(b"{}", end=True)]
        for message in messages:
            await stream.send(message)
            await stream.receive()
        assert await stream.receive() is None
    kinds = ["request_headers", "request_body", "request_trailers", "response_headers", "response_body"]
    assert stream.answer.order == kinds and stream.answer.status == grpc.StatusCode.OK
    assert scheduler.requests[0].tokens is not None and scheduler.told[0][0] == "finished"


async def test_cut_body_counts_by_its_length() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        stream = target.open()
        await stream.send(headers_in(MODE.BUFFERED_PARTIAL))
        await stream.receive()
        await stream.send(body_message(b"x" * 4000, end=False))
        await stream.receive()
    (request,) = scheduler.requests
    assert request.tokens is None and request.input_tokens == 1000
    assert stream.answer.places


@pytest.mark.parametrize("mode", [MODE.STREAMED, MODE.NONE])
async def test_decided_by_headers(mode: int) -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        stream = target.open()
        await stream.send(headers_in(mode, {"content-length": "4000"}))
        assert await stream.receive() is not None
        assert await stream.receive() is None
    (request,) = scheduler.requests
    assert request.tokens is None and request.input_tokens == 1000
    assert stream.answer.places == [stream.answer.metadata]
    assert stream.answer.status == grpc.StatusCode.OK


async def test_compressed_body_counts_by_its_length() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (_, target):
        answer = await target.post(b"\x1f\x8b" + b"\0" * 398, headers={"content-encoding": "gzip"})
    assert answer.places and answer.body == b"\x1f\x8b" + b"\0" * 398
    assert scheduler.requests[0].input_tokens == 100


async def test_pieces_are_as_large_as_may_be() -> None:
    body = ASKED[:-1] + b" " * 200_000 + b"}"
    async with asking(Scripted()) as (_, target):
        answer = await target.post(body)
    assert answer.body == body
    sizes = [len(piece.body) for piece in answer.streamed()]
    assert sizes[:-1] == [CHUNK_BYTES] * (len(sizes) - 1) and len(sizes) == -(-len(body) // CHUNK_BYTES)


@pytest.mark.parametrize("mode", [MODE.FULL_DUPLEX_STREAMED, MODE.BUFFERED])
async def test_envoy_answers_itself(mode: int) -> None:
    """A local reply of Envoy, e.g. a timeout, comes as response headers while the body is still missing."""
    scheduler = Scripted()
    async with asking(scheduler) as (picker, target):
        stream = target.open()
        await stream.send(headers_in(mode))
        if mode == MODE.BUFFERED:
            await stream.receive()
        else:
            await stream.send(body_message(b"{", end=False))
        await stream.send(response_headers_message({":status": "408"}))
        message = await stream.receive()
        assert message is not None and message.WhichOneof("response") == "response_headers"
        assert await stream.receive() is None and stream.answer.status == grpc.StatusCode.OK
        assert picker.processor.outcomes == {"cancelled": 1}
    assert not scheduler.requests


async def test_observability_mode_is_only_watched() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (picker, target):
        message = headers_message(end=True)
        message.observability_mode = True
        stream = target.open()
        await stream.send(message)
        await stream.close()
        assert await stream.receive() is None
        assert not stream.answer.messages and not picker.processor.requests


# ---- clients that go, and messages that cannot be ----


async def test_gone_before_the_answer() -> None:
    """The client goes while the decision is made: its reservation ends."""
    stream: Stream
    scheduler = Scripted(answer=lambda request: stream.cancel())
    async with asking(scheduler) as (picker, target):
        for number in range(5):
            stream = target.open()
            await stream.send(headers_message(headers={"x-request-id": f"r{number}"}))
            await stream.send(body_message(ASKED[:-1] + b" " * 8_000_000 + b"}", end=True))
            await stream.receive()
        await quiet(picker)
        assert picker.processor.outcomes == {"cancelled": 5}
    assert scheduler.told == [("release", f"r{number}") for number in range(5)]


async def test_gone_amid_the_body() -> None:
    scheduler = Scripted()
    async with asking(scheduler) as (picker, target):
        for end in ("cancel", "close"):
            stream = target.open()
            await stream.send(headers_message())
            await stream.send(body_message(b"{", end=False))
            await asyncio.sleep(0.05)
            if end == "cancel":
                stream.cancel()
            else:
                await stream.close()
                assert await stream.receive() is None
        await quiet(picker)
        assert picker.processor.outcomes == {"cancelled": 2}
    assert not scheduler.requests and not scheduler.told


@pytest.mark.parametrize(
    "messages",
    [
        [body_message(b"{}", end=True)],
        [trailers_message({})],
        [headers_message(), headers_message()],
        [b""],
        [headers_message(), b""],
        [headers_message(), response_body_message(b"", end=True)],
        [b"\xff\xff"],
        [headers_message(), b"\x12\x7f"],
        [headers_in(MODE.GRPC)],
    ],
)
async def test_protocol_errors(messages: list[Any]) -> None:
    async with asking(Scripted()) as (picker, target):
        stream = target.open()
        for message in messages:
            await stream.send(message)
        assert await stream.receive() is None
        assert stream.answer.status == grpc.StatusCode.INVALID_ARGUMENT and stream.answer.details
        assert picker.processor.protocol_errors == 1
        await quiet(picker)
        assert (await target.post(ASKED)).places


# ---- responses ----


async def ask_and_hear(target: Target, messages: list[Any], headers: dict[str, str] | None = None) -> Answer:
    """A request, then these messages of its response, each answered before the next is sent."""
    stream = target.open()
    await stream.request([headers_message(headers=headers), body_message(ASKED, end=True)], has_body=True)
    for message in messages:
        await stream.send(message)
        await stream.receive()
    await stream.receive()
    return stream.answer


async def test_observed_events() -> None:
    scheduler = Scripted()
    async with asking(scheduler, Options(observe_responses=True)) as (picker, target):
        parts = [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\ndata: {"a": 3}\n\n', b"data: [DONE]\n\n"]
        messages = [response_headers_message({":status": "200"}, served=PLACES[2])]
        messages += [response_body_message(part, end=i == 2) for i, part in enumerate(parts)]
        answer = await ask_and_hear(target, messages, {"x-request-id": "r"})
        assert answer.status == grpc.StatusCode.OK
        assert [piece.body for piece in answer.streamed("response_body")] == parts
        assert [piece.end_of_stream for piece in answer.streamed("response_body")] == [False, False, True]
        assert picker.processor.responses == {"200": 1}
    assert scheduler.requests[0].reported
    served, finished = scheduler.told
    assert served == ("served", "r", PLACES[2])
    assert finished[:3] == ("finished", "r", 3) and finished[3] > 0 and finished[4] >= 0


async def test_observed_usage() -> None:
    scheduler = Scripted()
    async with asking(scheduler, Options(observe_responses=True)) as (_, target):
        messages = [
            response_headers_message({":status": "200"}),
            response_body_message(b'{"choices": [], "usage": {"completion_tokens": 12}}', end=True),
        ]
        await ask_and_hear(target, messages, {"x-request-id": "r"})
    assert scheduler.told == [("finished", "r", 12, None, None)]


async def test_observed_refusals_and_cuts() -> None:
    """Nothing is generated where the worker refuses, or the client goes before the response."""
    scheduler = Scripted()
    async with asking(scheduler, Options(observe_responses=True)) as (picker, target):
        refusal = response_headers_message({":status": "503"}, end=True)
        await ask_and_hear(target, [refusal], {"x-request-id": "refused"})
        stream = target.open()
        messages = [headers_message(headers={"x-request-id": "cut"}), body_message(ASKED, end=True)]
        await stream.request(messages, has_body=True)
        stream.cancel()
        await quiet(picker)
    assert scheduler.told == [("release", "refused"), ("release", "cut")]


async def test_headers_alone_do_not_tell_the_end() -> None:
    scheduler = Scripted()
    async with asking(scheduler, Options(observe_responses=True)) as (_, target):
        stream = target.open()
        message = headers_in(MODE.FULL_DUPLEX_STREAMED, {"x-request-id": "r"}, response=MODE.NONE)
        await stream.request([message, body_message(ASKED, end=True)], has_body=True)
        await stream.send(response_headers_message({":status": "200"}, served=PLACES[0]))
        await stream.receive()
        await stream.close()
        assert await stream.receive() is None
    assert not scheduler.requests[0].reported
    assert scheduler.told == [("served", "r", PLACES[0])]


async def test_bodies_can_be_asked_not_to_come() -> None:
    options = Options(observe_responses=True, response_bodies=False)
    async with asking(Scripted(), options) as (_, target):
        stream = target.open()
        await stream.send(headers_in(MODE.BUFFERED, response=MODE.STREAMED))
        message = await stream.receive()
        stream.cancel()
    assert message is not None
    override = message.mode_override
    assert (override.request_body_mode, override.response_body_mode) == (MODE.BUFFERED, MODE.NONE)
    assert override.response_header_mode == MODE.SEND


# ---- bodies ----


def test_equal_beginnings_are_equal_tokens() -> None:
    def chat(*said: str) -> list[int]:
        messages = [{"role": "user", "content": text} for text in said]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        return parse("/v1/chat/completions", body).tokens.tolist()

    first, second = chat("Grüße, wie geht es?"), chat("Grüße, wie geht es?", "Und jetzt?")
    shared = len(first) - 1
    assert first[:shared] == second[:shared] and len(second) > len(first)
    parts = [{"type": "text", "text": "Grüße, "}, {"type": "text", "text": "wie geht es?"}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
    assert parse("/v1/chat/completions", body).tokens.tolist() == first


def test_pseudo_tokens_are_little_endian_groups() -> None:
    assert pseudo_tokens(b"abcdE").tolist() == [int.from_bytes(b"abcd", "little"), ord("E")]
    assert pseudo_tokens(b"").tolist() == []


def test_images_are_told_apart() -> None:
    def image(url: str) -> np.ndarray:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
        return parse("/v1/chat/completions", body).tokens

    one, two = image("http://a/1.png"), image("http://a/2.png")
    assert len(one) == len(two) > IMAGE_TOKENS and one.tolist() == image("http://a/1.png").tolist()
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize(
    ("path", "fields", "tokens", "text"),
    [
        ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]]}, [1, 2], False),
        ("/v1/completions", {"model": "m", "prompt": ["abcd", "x"]}, [0x64636261], True),
        ("/v1/completions?x=1", {"model": "m", "prompt": [7]}, [7], False),
        ("/gateway/v1/completions", {"model": "m", "prompt": [7]}, [7], False),
        ("/v1/embeddings", {"model": "m", "input": [9, 8]}, [9, 8], False),
        ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}}, [1, 2, 3], False),
        ("/generate", {"input_ids": [4]}, [4], False),
        ("/generate", {"text": "abcd"}, [0x64636261], True),
    ],
)
def test_forms(path: str, fields: dict[str, Any], tokens: list[int], text: bool) -> None:
    body = parse(path, json.dumps(fields).encode())
    assert body.tokens.tolist() == tokens and body.text == text and body.input_tokens == len(tokens)


def test_ids_are_taken_only_where_they_are_the_prompt() -> None:
    """However the field looks like and wherever else its name stands."""
    ids = np.random.default_rng(5).integers(0, 2**32, 300).tolist()
    for indent, separators in ((None, (",", ":")), (None, None), (1, None)):
        data = json.dumps({"a": 1, "prompt": ids, "model": "m"}, indent=indent, separators=separators).encode()
        assert parse("/v1/completions", data).tokens.tolist() == ids
    trap = '"prompt": [1, 2, 3]'
    for data, tokens in (
        (json.dumps({"user": trap, "model": "m", "prompt": [7, 8]}), [7, 8]),
        ('{"model": "m", "metadata": {' + trap + '}, "prompt": [7, 8]}', [7, 8]),
        ('{"model": "m", ' + trap + ', "prompt": [7, 8]}', [7, 8]),
        ('{"model": "m", "prompt": [7, 8], "metadata": {' + trap + "}}", [7, 8]),
        ('{"model": "m", "pr\\u006fmpt": [7, 8]}', [7, 8]),
    ):
        assert parse("/v1/completions", data.encode()).tokens.tolist() == tokens, data
    text = parse("/v1/completions", json.dumps({"model": "m", "prompt": trap}).encode())
    assert text.text and text.tokens.tolist() == pseudo_tokens(trap.encode()).tolist()
    for bad in ("[1, -2]", "[1, 4294967296]", "[1, 2.5]", '[1, "2"]', "[1, null]", "[]"):
        with pytest.raises(RequestError, match=r"^prompt: expected "):
            parse("/v1/completions", f'{{"model": "m", "prompt": {bad}}}'.encode())
    for bad in ("[1, 007]", "[1, 2", "[1,, 2]", "[1, 2,]"):
        with pytest.raises(RequestError, match="not valid JSON"):
            parse("/v1/completions", f'{{"model": "m", "prompt": {bad}}}'.encode())


def test_other_fields() -> None:
    fields = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 9, "cache_salt": "s", "user": "u"}
    body = parse("/v1/completions", json.dumps(fields).encode())
    assert (body.model, body.stream, body.max_tokens, body.cache_salt, body.user) == ("m", True, 9, "s", "u")
    for path in ("/v1/responses", "/v1/messages"):
        name = "input" if path == "/v1/responses" else "messages"
        said = {"model": "m", name: [{"role": "user", "content": "x"}], "max_output_tokens": 3}
        assert parse(path, json.dumps(said).encode()).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "m", "messages": []}, "messages: expected a list with at least one message, found an empty list"),
        ({"model": "m", "messages": ["x"]}, "messages.0: expected an object, found 'x'"),
        ({"model": "m", "messages": [{"role": 1}]}, "messages.0.role: expected a string, found 1"),
        ({"model": "m", "messages": [{"role": "user", "content": 1}]}, "messages.0.content: expected a string or"),
        ({"model": "m", "messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0: expected a string"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse("/v1/chat/completions", json.dumps(fields).encode())
    assert str(error.value).startswith(message)


NAMES = ["model", "prompt", "messages", "input", "content", "role", "text", "token_ids", "tools", "max_tokens"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner),
    max_leaves=12,
)
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/generate"]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(NAMES), ANYTHING), st.booleans())
def test_any_json(path: str, fields: dict[str, Any], named: bool) -> None:
    """A body is either understood or refused by a message, whatever it is."""
    data = json.dumps(fields | ({"model": "m"} if named else {})).encode("utf-8", "replace")
    with suppress(RequestError):
        body = parse(path, data)
        assert body.input_tokens >= 1 and body.tokens.dtype == np.uint32


@pytest.mark.parametrize("part", ['"tools": {}', '"messages": [{{"role": "user", "content": [{{"image": {}}}]}}]'])
def test_nested_too_deeply(part: str) -> None:
    deep = "[" * 600 + "]" * 600
    other = '"messages": [{"role": "user", "content": "x"}], ' if "tools" in part else ""
    with pytest.raises(RequestError, match="nested"):
        parse("/v1/chat/completions", f'{{"model": "m", {other}{part.format(deep)}}}'.encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with suppress(RequestError):
        parse("/v1/completions", data)


# ---- fuzz ----


def mutated(rng: random.Random) -> bytes:
    """A message of any kind, and often not quite one."""
    kinds: list[Callable[[], Any]] = [
        lambda: headers_message(rng.choice(["POST", "GET"]), rng.choice(["/v1/completions", "/", "", "/v1/models"])),
        lambda: headers_message(end=True, subset=rng.choice([[], PLACES[:1], "x", [""], None])),
        lambda: headers_in(rng.randrange(8), {"content-length": rng.choice(["", "-1", "9" * 30, "12"])}),
        lambda: headers_message(headers={"x-slo-ttft-ms": rng.choice(["1e400", "-0", "", "\u0663"])}),
        lambda: body_message(rng.choice([ASKED, b"", b"{", rng.randbytes(200), b"[" * 2000]), end=rng.random() < 0.7),
        lambda: trailers_message({"x": "y"}),
        lambda: response_headers_message({":status": rng.choice(["200", "", "x", "503"])}, served="y"),
        lambda: response_body_message(rng.randbytes(50), end=rng.random() < 0.5),
        ext_proc.ProcessingRequest,
    ]
    data = bytearray(rng.choice(kinds)().SerializeToString())
    change = rng.random()
    if change < 0.25 and data:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif change < 0.35:
        del data[rng.randrange(len(data) + 1) :]
    elif change < 0.4:
        data += rng.randbytes(rng.randrange(20))
    elif change < 0.45:
        data = bytearray(rng.randbytes(rng.randrange(100)))
    return bytes(data)


@pytest.mark.parametrize("observe", [False, True])
async def test_fuzz(observe: bool) -> None:
    """5,000 messages, mutated and in any order, on 500 streams each way: the server lives, and keeps nothing."""
    rng = random.Random(int(observe))
    options = Options(observe_responses=observe)
    async with asking(conductor(PLACES), options) as (picker, target):

        async def abuse(seed: int) -> None:
            mine = random.Random(seed)
            stream = target.open()
            for _ in range(10):
                await stream.send(mutated(mine))
            end = mine.random()
            if end < 0.3:
                stream.cancel()
            else:
                await stream.close()
                while await stream.receive() is not None:
                    pass
                assert not stream.answer.late
                assert stream.answer.left or stream.answer.status == grpc.StatusCode.INVALID_ARGUMENT

        process = psutil.Process()
        before = 0
        for batch in range(20):
            await asyncio.gather(*(abuse(rng.randrange(1 << 30)) for _ in range(25)))
            if batch == 4:
                gc.collect()
                before = process.memory_info().rss
        await quiet(picker)
        gc.collect()
        assert process.memory_info().rss - before < 64 << 20
        assert picker.processor.protocol_errors > 100
        assert picker.processor.outcomes["failed"] == 0
        answer = await target.post(ASKED)
        assert answer.places and answer.body == ASKED
