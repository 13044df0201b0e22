"""Traces of decisions: what is in a span, whose child it is, and that nothing is paid for where there are none."""

from __future__ import annotations

import base64
import gzip
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import grpc
import pytest

from envs.state import Source
from runtime.request import Assignment, Reason, Rejection
from runtime.tracing import NAME, Tracer, TracingError, otlp, tracer
from runtime.workers import Role, Worker

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PREFILL, DECODE = Worker(id="p0", role=Role.PREFILL), Worker(id="d0", role=Role.DECODE)
ASSIGNED = Assignment("r1", PREFILL, DECODE, Source.FETCH, PREFILL, 1000, 512, 0.5, 0.05, 60.0, "conductor")
REJECTED = Rejection("r2", Reason.SATURATED, "full", policy="conductor", fell_back="deadline")


class Memory:
    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = tracer("127.0.0.1:4317", exporter=self.exporter, **options)

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.tracer._provider.force_flush()  # type: ignore[attr-defined]
        return self.exporter.get_finished_spans()


@pytest.fixture
def memory() -> Iterator[Memory]:
    each = Memory()
    yield each
    each.tracer.close()


def test_an_assignment(memory: Memory) -> None:
    with memory.tracer.decision() as span:
        span.answered(ASSIGNED)
    (found,) = memory.spans()
    assert found.name == NAME and found.parent is None
    assert dict(found.attributes or {}) == {
        "conductor.request_id": "r1",
        "conductor.policy": "conductor",
        "conductor.predicted_ttft_s": 0.5,
        "conductor.predicted_tbt_s": 0.05,
        "conductor.outcome": "assigned",
        "conductor.prefill": "p0",
        "conductor.decode": "d0",
        "conductor.source": "fetch",
        "conductor.holder": "p0",
        "conductor.input_tokens": 1000,
        "conductor.reused_tokens": 512,
    }
    assert found.resource.attributes["service.name"] == "conductor"


def test_a_rejection(memory: Memory) -> None:
    with memory.tracer.decision() as span:
        span.answered(REJECTED)
    (found,) = memory.spans()
    assert dict(found.attributes or {}) == {
        "conductor.request_id": "r2",
        "conductor.policy": "conductor",
        "conductor.fell_back": "deadline",
        "conductor.outcome": "rejected",
        "conductor.reason": "rejected-saturated",
    }


@pytest.mark.parametrize(
    "carrier",
    [
        {"traceparent": PARENT, "tracestate": "a=1"},
        (("user-agent", "x"), ("traceparent", PARENT), ("tracestate", "a=1"), ("bin-bin", b"\xff")),
        [("Traceparent", PARENT.encode()), ("TraceState", b"a=1")],
    ],
    ids=["mapping", "grpc metadata", "header bytes"],
)
def test_joins_the_trace_of_the_request(memory: Memory, carrier: Any) -> None:
    with memory.tracer.decision(carrier) as span:
        header = span.traceparent()
    (found,) = memory.spans()
    assert found.parent is not None and found.parent.is_remote
    assert f"{found.parent.trace_id:032x}-{found.parent.span_id:016x}" == PARENT[3:-3]
    assert found.parent.trace_state.get("a") == "1"
    assert header == f"00-{PARENT[3:35]}-{found.context.span_id:016x}-01" and header != PARENT


@pytest.mark.parametrize("value", ["", "garbage", PARENT[:-1], "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "\xff"])
def test_a_broken_traceparent_starts_a_trace(memory: Memory, value: str) -> None:
    with memory.tracer.decision({"traceparent": value}):
        pass
    (found,) = memory.spans()
    assert found.parent is None


def test_what_the_request_does_not_sample_is_not_sampled(memory: Memory) -> None:
    with memory.tracer.decision({"traceparent": PARENT[:-2] + "00"}) as span:
        span.answered(ASSIGNED)
        assert span.traceparent().endswith("-00")
    assert memory.spans() == ()


def test_sampling() -> None:
    none = Memory(sample_share=0.0)
    with none.tracer.decision():
        pass
    with none.tracer.decision({"traceparent": PARENT}):
        pass
    assert len(none.spans()) == 1  # in a trace that is sampled
    none.tracer.close()
    with pytest.raises(TracingError, match="sample_share"):
        tracer("127.0.0.1:4317", sample_share=2.0)


def test_an_error_is_recorded_and_goes_on(memory: Memory) -> None:
    with pytest.raises(ValueError, match="bad"), memory.tracer.decision():
        raise ValueError("bad request")
    (found,) = memory.spans()
    assert found.status.description == "ValueError: bad request"
    assert found.events[0].name == "exception"


def test_nothing_without_an_endpoint() -> None:
    for nothing in (None, ""):
        no_tracer = tracer(nothing)
        assert not no_tracer.enabled and type(no_tracer) is Tracer
        with no_tracer.decision({"traceparent": PARENT}) as span:
            span.answered(ASSIGNED)
            assert span.traceparent() == ""
        no_tracer.close()
    with pytest.raises(ValueError, match="bad"), tracer(None).decision():
        raise ValueError("bad")


def test_nothing_costs_nothing() -> None:
    no_tracer, metadata = tracer(None), (("traceparent", PARENT),)
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(1000):
            with no_tracer.decision(metadata) as span:
                span.answered(ASSIGNED)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 2e-6  # 0.3 us; the limit allows for a busy machine


def test_nothing_is_imported_without_an_endpoint() -> None:
    code = "import sys, runtime.tracing as t; t.tracer(None); assert not [m for m in sys.modules if 'telemetry.' in m]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_packages_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tracing.find_spec", lambda name: None)
    with pytest.raises(TracingError, match=r"'127.0.0.1:4318'.*sdk is not installed.*'conductor-gym\[otel\]'"):
        tracer("127.0.0.1:4318")
    assert not tracer(None).enabled


def test_a_missing_or_overwritten_exporter_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TracingError, match=r"exporter-otlp-proto-grpc is not installed.*'conductor-gym\[otel\]'"):
        tracer("127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # what is to be imported from it is not there
    with pytest.raises(TracingError, match="xds-protos has overwritten"):
        tracer("http://127.0.0.1:4317")
    assert tracer("http://127.0.0.1:4318").enabled  # needs neither


@pytest.mark.parametrize(
    "endpoint", ["collector", "127.0.0.1:", ":4317", "ftp://127.0.0.1:4317", "127.0.0.1:http", "http://["]
)
def test_endpoints_that_cannot_be(endpoint: str) -> None:
    with pytest.raises(TracingError, match="expected host:port"):
        tracer(endpoint)


class HttpCollector(BaseHTTPRequestHandler):
    received: list[tuple[str, dict[str, Any]]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.received.append((self.path, json.loads(gzip.decompress(body))))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def http_collector(status: int = 200) -> Iterator[tuple[int, list[tuple[str, dict[str, Any]]]]]:
    received: list[tuple[str, dict[str, Any]]] = []
    handler = type("Handler", (HttpCollector,), {"received": received, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port, received
        server.shutdown()


def test_a_collector_over_http() -> None:
    with http_collector() as (port, received):
        for path in ("", "/own/path"):
            real = tracer(f"http://127.0.0.1:{port}{path}")
            with real.decision({"traceparent": PARENT}) as span:
                span.answered(ASSIGNED)
            with pytest.raises(ValueError, match="bad"), real.decision():
                raise ValueError("bad")
            real.close(timeout_s=10.0)
    assert [path for path, _ in received] == ["/v1/traces", "/own/path"]
    (resource,) = received[0][1]["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "conductor"}} in resource["resource"]["attributes"]
    first, second = resource["scopeSpans"][0]["spans"]
    assert (first["traceId"], first["parentSpanId"]) == (PARENT[3:35], PARENT[36:52])
    assert (first["name"], first["kind"], first["status"]["code"]) == (NAME, 2, 0)
    assert int(first["startTimeUnixNano"]) <= int(first["endTimeUnixNano"])
    attributes = {row["key"]: row["value"] for row in first["attributes"]}
    assert attributes["conductor.input_tokens"] == {"intValue": "1000"}
    assert attributes["conductor.predicted_ttft_s"] == {"doubleValue": 0.5}
    assert attributes["conductor.decode"] == {"stringValue": "d0"}
    assert "parentSpanId" not in second
    assert second["status"] == {"code": 2, "message": "ValueError: bad"} and second["events"][0]["name"] == "exception"


def test_the_json_is_that_of_the_protocol(memory: Memory) -> None:
    """The field names and forms are those of opentelemetry-proto, whichever of its files are installed."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    trace_pb2 = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    with memory.tracer.decision({"traceparent": PARENT, "tracestate": "a=1"}) as span:
        span.answered(ASSIGNED)
    row = otlp(memory.spans())["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    # protobuf's JSON has ids in base64, OTLP's in hexadecimal
    for name in ("traceId", "spanId", "parentSpanId"):
        row[name] = base64.b64encode(bytes.fromhex(row[name])).decode()
    if "flags" not in trace_pb2.Span.DESCRIPTOR.fields_by_name:
        del row["flags"]  # the older files
    parsed = json_format.ParseDict(row, trace_pb2.Span())
    assert parsed.name == NAME and parsed.trace_state == "a=1" and len(parsed.attributes) == 11
    assert parsed.parent_span_id.hex() == PARENT[36:52]


def test_a_collector_that_refuses_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with http_collector(status=503) as (port, received):
        real = tracer(f"http://127.0.0.1:{port}")
        for _ in range(2):
            with real.decision():
                pass
            real._provider.force_flush()  # type: ignore[attr-defined]
        real.close()
    assert len(received) == 2
    assert sum("cannot be sent" in record.message and "HTTP 503" in record.message for record in caplog.records) == 1


def test_a_collector_over_grpc() -> None:
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        tracer("127.0.0.1:4317").close()
    except (ImportError, TracingError) as error:
        pytest.skip(str(error))
    names: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    names.extend(span.name for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for scheme in ("", "grpc://"):
            real = tracer(f"{scheme}127.0.0.1:{port}")
            with real.decision({"traceparent": PARENT}) as span:
                span.answered(ASSIGNED)
            real.close(timeout_s=10.0)
    finally:
        server.stop(None)
    assert names == [NAME] * 2


def test_no_collector_delays_nobody() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = tracer(f"http://127.0.0.1:{port}")
    start = time.perf_counter()
    for _ in range(5000):  # more than are kept to be sent
        with alone.decision() as span:
            span.answered(ASSIGNED)
    assert time.perf_counter() - start < 10.0
    start = time.perf_counter()
    alone.close(timeout_s=0.2)
    assert time.perf_counter() - start < 10.0
