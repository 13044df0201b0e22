"""Traces: one OpenTelemetry span for each decision, in the trace of the request it is about.

    with tracer.decision(metadata) as span:
        span.answered(conductor.schedule(request))

Without an endpoint nothing is imported and all of it costs a fraction of a microsecond.

Spans are sent by OTLP: over HTTP as JSON, which needs the SDK alone, or over gRPC. The latter needs a whole
`opentelemetry-proto`: the package `xds-protos`, which the ext_proc face needs, has older files of the same names, and
which of the two are there depends on the order of installation.
"""

from __future__ import annotations

import gzip
import http.client
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import orjson

from .request import Assignment, Rejection

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

Carrier = Mapping[str, str] | Iterable[tuple[str, str | bytes]]
"""gRPC metadata or HTTP headers, among which `traceparent` and `tracestate` are looked for."""

NAME = "conductor.schedule"
_HEADERS = ("traceparent", "tracestate")


class TracingError(RuntimeError):
    """Traces were asked for and cannot be had; the message says what is missing."""


class DecisionSpan:
    """A span that is none."""

    __slots__ = ()

    def __enter__(self) -> DecisionSpan:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        pass

    def answered(self, answer: Assignment | Rejection) -> None:
        """What was decided."""

    def traceparent(self) -> str:
        """The header by which what follows joins the trace; "" where there is none."""
        return ""


class Tracer:
    """A tracer that does nothing."""

    __slots__ = ()
    enabled = False

    def decision(self, carrier: Carrier | None = None) -> DecisionSpan:
        """A span for a decision, child of the span that the carrier names."""
        return _NO_SPAN

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what has not been sent."""


_NO_SPAN = DecisionSpan()
_NO_TRACER = Tracer()


def tracer(
    endpoint: str | None,
    *,
    sample_share: float = 1.0,
    service: str = "conductor",
    exporter: SpanExporter | None = None,
) -> Tracer:
    """The tracer that sends to an OTLP collector, or one that does nothing.

    Args:
        endpoint: http(s)://host:port[/path] sends JSON (to /v1/traces where no path is given); host:port,
            grpc://host:port, and http(s):// with the gRPC port 4317, send over gRPC; None or "": no traces.
        sample_share: of the decisions whose request is in no trace; the others go by the trace they are in.
        exporter: in place of an OTLP exporter.

    Raises:
        TracingError: the packages are missing, or the endpoint cannot be.
    """
    if not endpoint:
        return _NO_TRACER
    if not 0.0 <= sample_share <= 1.0:
        raise TracingError(f"sample_share: expected 0 to 1, found {sample_share!r}")
    parts = _split(endpoint)
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise TracingError(f"OpenTelemetry endpoint {endpoint!r}: {_INSTALL}")
    if exporter is None:
        scheme, port = parts.scheme, parts.port
        exporter = _grpc_exporter(endpoint, parts) if scheme == "grpc" or port == 4317 else _json_exporter(parts)
    return _OtelTracer(_provider(sample_share, service, exporter))


_INSTALL = "opentelemetry-sdk is not installed: pip install 'conductor-gym[otel]'"
_REPAIR = (
    "xds-protos has overwritten files of opentelemetry-proto: "
    "pip install --force-reinstall --no-deps opentelemetry-proto, or use OTLP over HTTP (http://host:4318)"
)


def _split(endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
        possible = parts.scheme in ("http", "https", "grpc") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        possible = False
    if not possible:
        raise TracingError(f"OpenTelemetry endpoint: expected host:port or http(s)://host:port, found {endpoint!r}")
    return parts


def _provider(sample_share: float, service: str, exporter: SpanExporter) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    try:
        release = version("conductor-gym")
    except PackageNotFoundError:
        release = "unknown"
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_share)),
        resource=Resource.create({"service.name": service, "service.version": release}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _grpc_exporter(endpoint: str, parts: SplitResult) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("opentelemetry.proto")
        why = "opentelemetry-exporter-otlp-proto-grpc is not installed: pip install 'conductor-gym[otel]'"
        raise TracingError(f"OpenTelemetry endpoint {endpoint!r}: {why if missing else _REPAIR}") from error
    made: SpanExporter = OTLPSpanExporter(endpoint=parts.netloc, insecure=parts.scheme != "https", timeout=5)
    return made


def _json_exporter(parts: SplitResult) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class JsonExporter(SpanExporter):
        """OTLP over HTTP, as JSON."""

        def __init__(self) -> None:
            self._path = parts.path.rstrip("/") or "/v1/traces"
            self._failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            secure = parts.scheme == "https"
            connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = connect(parts.hostname or "", parts.port, timeout=5.0)
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            try:
                connection.request("POST", self._path, gzip.compress(orjson.dumps(otlp(spans)), 1), headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status >= 300:
                    raise http.client.HTTPException(f"HTTP {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                if not self._failing:
                    log.warning("traces cannot be sent to %s: %s", parts.geturl(), error)
                self._failing = True
                return SpanExportResult.FAILURE
            finally:
                connection.close()
            self._failing = False
            return SpanExportResult.SUCCESS

    return JsonExporter()


def otlp(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans of one resource as the JSON of OTLP's ExportTraceServiceRequest."""
    rows: list[dict[str, Any]] = []
    for span in spans:
        context = span.context
        if context is None:
            continue
        row: dict[str, Any] = {
            "traceId": f"{context.trace_id:032x}",
            "spanId": f"{context.span_id:016x}",
            "traceState": context.trace_state.to_header(),
            "flags": int(context.trace_flags),
            "name": span.name,
            "kind": span.kind.value + 1,  # OTLP counts from UNSPECIFIED
            "startTimeUnixNano": str(span.start_time),
            "endTimeUnixNano": str(span.end_time),
            "attributes": _attributes(span.attributes),
            "events": [
                {
                    "timeUnixNano": str(event.timestamp),
                    "name": event.name,
                    "attributes": _attributes(event.attributes),
                }
                for event in span.events
            ],
            "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
        }
        if span.parent is not None:
            row["parentSpanId"] = f"{span.parent.span_id:016x}"
        rows.append(row)
    resource = {"attributes": _attributes(spans[0].resource.attributes if spans else None)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "conductor"}, "spans": rows}]}]}


def _attributes(values: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    rows = []
    for name, value in (values or {}).items():
        if isinstance(value, bool):
            kept: dict[str, Any] = {"boolValue": value}
        elif isinstance(value, int):
            kept = {"intValue": str(value)}
        elif isinstance(value, float):
            kept = {"doubleValue": value}
        else:
            kept = {"stringValue": str(value)}
        rows.append({"key": name, "value": kept})
    return rows


class _OtelTracer(Tracer):
    """Sends spans by OpenTelemetry; in batches and from a thread of its own."""

    __slots__ = ("_extract", "_kind", "_provider", "_tracer")
    enabled = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("conductor")
        self._extract = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER

    def decision(self, carrier: Carrier | None = None) -> DecisionSpan:
        return _OtelSpan(self._tracer.start_span(NAME, context=self._parent(carrier), kind=self._kind))

    def _parent(self, carrier: Carrier | None) -> Context:
        from opentelemetry.context import Context

        found: dict[str, str] = {}
        for name, value in carrier.items() if isinstance(carrier, Mapping) else carrier or ():
            name = name.lower()
            if name in _HEADERS:
                found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
        # an empty context: never the one that happens to be current in this thread
        return self._extract(found, context=Context()) if found else Context()

    def close(self, timeout_s: float = 2.0) -> None:
        self._provider.force_flush(int(timeout_s * 1000))
        self._provider.shutdown()


class _OtelSpan(DecisionSpan):
    """A span that is sent when it ends."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()

    def answered(self, answer: Assignment | Rejection) -> None:
        if not self._span.is_recording():
            return
        attributes: dict[str, str | int | float] = {
            "conductor.request_id": answer.request_id,
            "conductor.policy": answer.policy,
            "conductor.fell_back": answer.fell_back,
            "conductor.predicted_ttft_s": answer.predicted_ttft_s,
            "conductor.predicted_tbt_s": answer.predicted_tbt_s,
        }
        if isinstance(answer, Rejection):
            attributes["conductor.outcome"] = "rejected"
            attributes["conductor.reason"] = str(answer.reason)
        else:
            attributes["conductor.outcome"] = "assigned"
            attributes["conductor.prefill"] = answer.prefill.id
            attributes["conductor.decode"] = answer.decode.id
            attributes["conductor.source"] = answer.source.name.lower()
            attributes["conductor.holder"] = answer.holder.id if answer.holder is not None else ""
            attributes["conductor.input_tokens"] = answer.input_tokens
            attributes["conductor.reused_tokens"] = answer.reused_tokens
        self._span.set_attributes(
            {
                name: value
                for name, value in attributes.items()
                if value != "" and not (isinstance(value, float) and not math.isfinite(value))
            }
        )

    def traceparent(self) -> str:
        context = self._span.get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
