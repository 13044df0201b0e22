"""The gRPC face: `conductor.v1.Conductor` on a `Conductor` (protos in runtime/proto)."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from functools import lru_cache
from itertools import count, groupby
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pydantic import ValidationError

from envs.spec import SpecError
from envs.state import Source

from . import workers as _workers
from .conductor import LONGEST_PROMPT, Conductor, Explained
from .live_state import Reservation
from .proto import conductor_pb2 as pb
from .proto import conductor_pb2_grpc
from .request import Assignment, Rejection, Request, RequestError
from .snapshot import encode
from .tracing import Tracer

log = logging.getLogger(__name__)

TEXT_BYTES_PER_TOKEN = 4
SNAPSHOT_CHUNK = 1 << 20
LONGEST_S = 1e9  # of a time that is reported
UNREADABLE = "the message cannot be read: it is not protobuf of its type"
STAGES = ("", "prefill", "transfer", "decode", "recheck", "client")
_SECONDS = {
    "prefill_started": ("expected_end_s",),
    "prefill_done": ("prefill_s", "ttft_s"),
    "first_token": ("stall_s",),
    "finished": ("ttft_s", "tbt_s", "decode_s"),
}
_TOKEN = np.dtype("<u4")
_RUN, _unnamed = uuid.uuid4().hex, count()  # ids for requests without
_LOADS = ("at_s", "prefill_end_s", "kv_tokens", "tx_bytes_per_s", "rx_bytes_per_s", "tx_backlog_bytes")
_WORKER_FIELDS = (
    *("id", "role", "address", "engine", "kv_events", "kv_replay", "metrics", "bootstrap", "dp_rank"),
    "connector",
)


def request_of(message: pb.ScheduleRequest) -> Request:
    """A request from its message.

    Raises:
        RequestError: a field cannot be; the message names it.
    """
    request = Request(message.request_id or f"{_RUN}-{next(_unnamed)}")
    kind = message.WhichOneof("prompt")
    if kind == "tokens":
        tokens = message.tokens  # a copy each time
        if len(tokens) % 4:
            raise RequestError(f"tokens: expected little-endian uint32, found {len(tokens)} bytes")
        request.tokens = np.frombuffer(tokens, _TOKEN)
    elif kind == "block_hashes":
        if len(message.block_hashes.hashes) % 8:
            size = len(message.block_hashes.hashes)
            raise RequestError(f"block_hashes.hashes: expected little-endian uint64, found {size} bytes")
        request.hashes = np.frombuffer(message.block_hashes.hashes, "<u8")
        request.input_tokens = message.block_hashes.input_tokens
    elif kind == "input_tokens":
        request.input_tokens = message.input_tokens
    elif kind == "text_bytes":
        request.input_tokens = -(-message.text_bytes // TEXT_BYTES_PER_TOKEN)
    else:
        raise RequestError("prompt: expected one of tokens, block_hashes, input_tokens, text_bytes")
    request.lora_name, request.cache_salt = message.lora_name, message.cache_salt
    request.ttft_slo_s = message.ttft_slo_s or None
    request.tbt_slo_s = message.tbt_slo_s or None
    request.tenant = message.tenant
    request.priority = message.priority
    if message.candidates:
        request.candidates = frozenset(message.candidates)
    request.arrival_s = message.arrival_s
    request.lease_s = message.lease_s or None
    request.reported = not message.unreported
    request.dry_run = message.dry_run
    return request


@lru_cache(4096)
def _place(worker_id: str, address: str) -> pb.Endpoint:
    return pb.Endpoint(id=worker_id, address=address)


@lru_cache(4096)
def _chosen(prefill: str, prefill_address: str, decode: str, decode_address: str) -> bytes:
    """A serialised answer with the chosen pair; to make messages in messages takes longer than to read them."""
    chosen = pb.Assignment(prefill=_place(prefill, prefill_address), decode=_place(decode, decode_address))
    return pb.ScheduleResponse(assignment=chosen).SerializeToString()


@lru_cache(4096)
def _fallback(prefill: str, prefill_address: str, decode: str, decode_address: str) -> bytes:
    """A serialised answer with one more fallback."""
    pair = pb.Pair(prefill=_place(prefill, prefill_address), decode=_place(decode, decode_address))
    return pb.ScheduleResponse(assignment=pb.Assignment(fallbacks=[pair])).SerializeToString()


def _check_report(report: pb.ReportRequest) -> None:
    """No number in it may be one that predictions would not recover from.

    Raises:
        RequestError: naming the field.
    """
    for i, event in enumerate(report.events):
        kind = event.WhichOneof("what")
        what: Any = getattr(event, kind) if kind else event
        for name in _SECONDS.get(kind or "", ()):
            seconds = getattr(what, name)
            if not 0.0 <= seconds <= LONGEST_S:
                raise RequestError(f"events[{i}].{kind}.{name}: expected 0 .. {LONGEST_S:g} seconds, found {seconds}")
        if kind == "finished" and what.output_tokens > LONGEST_PROMPT:
            most = f"at most {LONGEST_PROMPT}, found {what.output_tokens}"
            raise RequestError(f"events[{i}].finished.output_tokens: expected {most}")
        if kind == "failed" and what.stage not in STAGES:
            raise RequestError(
                f"events[{i}].failed.stage: expected one of {', '.join(STAGES[1:])}, found {what.stage!r}"
            )
    for i, load in enumerate(report.loads):
        for name in _LOADS:
            number = getattr(load, name)
            if not 0.0 <= number < math.inf:
                raise RequestError(f"loads[{i}].{name}: expected a number that is not negative, found {number}")


def response_of(answer: Assignment | Rejection) -> pb.ScheduleResponse:
    """The message for an answer."""
    if isinstance(answer, Assignment):
        p, d = answer.prefill, answer.decode
        named = [_chosen(p.id, p.address, d.id, d.address)]
        for p, d in answer.fallbacks:
            named.append(_fallback(p.id, p.address, d.id, d.address))
        response = pb.ScheduleResponse.FromString(b"".join(named))  # messages end to end are one, merged
        response.request_id = answer.request_id
        response.policy = answer.policy
        response.fell_back = answer.fell_back
        assignment = response.assignment
        assignment.source = int(answer.source)  # type: ignore[assignment]
        if answer.holder is not None:
            assignment.holder.CopyFrom(_place(answer.holder.id, answer.holder.address))
        assignment.input_tokens = answer.input_tokens
        assignment.reused_tokens = answer.reused_tokens
        assignment.predicted_ttft_s = answer.predicted_ttft_s
        assignment.predicted_tbt_s = answer.predicted_tbt_s
        assignment.lease_s = answer.lease_s
        return response
    return pb.ScheduleResponse(
        request_id=answer.request_id,
        policy=answer.policy,
        fell_back=answer.fell_back,
        rejection=pb.Rejection(
            reason=answer.reason.value,
            message=answer.message,
            retry_after_s=answer.retry_after_s,
            predicted_ttft_s=answer.predicted_ttft_s,
            predicted_tbt_s=answer.predicted_tbt_s,
            http_status=answer.reason.http_status,
        ),
    )


def explanation_of(explained: Explained) -> pb.Explanation:
    """Why a request went where it went: what every instance had to offer."""
    observation, answer = explained.observation, explained.answer
    prefills, decodes = ([w.id for w in pool] for pool in (explained.cluster.prefills, explained.cluster.decodes))
    p, d = -1, -1
    if explained.action:
        p, d = divmod((explained.action - 1) // 3, observation.decode.shape[1])
    request, cluster = observation.request[0, 0], observation.cluster[0, 0]
    if isinstance(answer, Rejection):
        verdict = f"{answer.reason.value}: {answer.message}"
    else:
        source = {Source.LOCAL: "its own cache", Source.RECOMPUTE: "no cache"}.get(answer.source, "")
        source = source or f"the cache of {answer.holder.id if answer.holder else 'another'}"
        verdict = (
            f"prefill on {answer.prefill.id}, {answer.reused_tokens} of {answer.input_tokens} tokens from {source}; "
            f"decode on {answer.decode.id}: TTFT {answer.predicted_ttft_s:.3g} s, "
            f"TBT {answer.predicted_tbt_s * 1e3:.3g} ms predicted"
        )
    return pb.Explanation(
        request_id=answer.request_id,
        policy=answer.policy,
        fell_back=answer.fell_back,
        verdict=verdict,
        prefills=[
            pb.PrefillView(
                id=prefills[i],
                up=bool(observation.prefill_mask[0, i, 0]),
                chosen=i == p,
                **{
                    name: float(row[name])
                    for name in (
                        "queue_s",
                        "local_tokens",
                        "fetch_tokens",
                        "fetch_s",
                        "ttft_local_s",
                        "ttft_fetch_s",
                        "ttft_recompute_s",
                    )
                },
            )
            for i, row in enumerate(observation.prefill[0])
        ],
        decodes=[
            pb.DecodeView(
                id=decodes[i],
                up=bool(observation.decode_mask[0, i]),
                chosen=i == d,
                **{
                    name: float(row[name])
                    for name in ("batch", "kv_tokens", "free_tokens", "tbt_now_s", "tbt_assigned_s", "tbt_at_join_s")
                },
            )
            for i, row in enumerate(observation.decode[0])
        ],
        prefill_load=float(cluster["prefill_load"]),
        decode_load_now=float(cluster["decode_load_now"]),
        decode_load_forecast=float(cluster["decode_load_forecast"]),
        ttft_slo_s=float(request["ttft_slo_s"]),
        tbt_slo_s=float(request["tbt_slo_s"]),
        input_tokens=int(request["input_tokens"]),
    )


_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  (its stubs have none)
_UNREADABLE: Any = object()


def add_to_server(service: ConductorService, server: grpc.aio.Server) -> None:
    """Like the generated `add_ConductorServicer_to_server`, but what is no message is answered INVALID_ARGUMENT."""
    described = pb.DESCRIPTOR.services_by_name["Conductor"]
    handlers = {}
    for method in described.methods:
        call = getattr(service, method.name)
        read, write = _reader(GetMessageClass(method.input_type)), GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(call, read, write)
        elif method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_called_if_read(call), read, write)
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_called_if_read(call), read, write)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(described.full_name, handlers),))


def _reader(kind: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return _UNREADABLE

    return read


def _called_if_read(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def checked(request: Any, context: Any) -> Any:
        if request is _UNREADABLE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
        return await call(request, context)

    return checked


async def _sent(writing: Awaitable[None]) -> bool:
    """Whether a message has gone out. Where not, its client has gone, and nobody needs to be told."""
    try:
        await writing
    except (grpc.aio.BaseError, asyncio.InvalidStateError):
        return False
    return True


class ConductorService(conductor_pb2_grpc.ConductorServicer):
    """The servicer.

    Args:
        conductor: who decides. note: of a worker, what is wrong with it ("" where nothing is), for `GetState`.
        kv_cursor: of a worker, the last KV event applied and whether the index is in step with it.
        snapshot: what is in a snapshot (`runtime.snapshot.capture`), for a replica that starts.
    """

    def __init__(
        self,
        conductor: Conductor,
        *,
        note: Callable[[str], str] = lambda worker_id: "",
        kv_cursor: Callable[[str], tuple[int, bool]] = lambda worker_id: (-1, False),
        snapshot: Callable[[], dict[str, Any]] | None = None,
        membership: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        self.conductor = conductor
        self.note = note
        self.kv_cursor = kv_cursor
        self.snapshot = snapshot
        self.membership = membership  # called when workers come or go
        self.tracer = tracer or Tracer()
        self.unknown_reports = 0

    def _schedule(self, message: pb.ScheduleRequest, context: Any) -> pb.ScheduleResponse:
        with self.tracer.decision(context.invocation_metadata() if self.tracer.enabled else None) as span:
            answer = self.conductor.schedule(request_of(message))
            span.answered(answer)
        response = response_of(answer)
        if message.explain:
            explained = self.conductor.explained(answer.request_id)
            if explained is not None:
                response.explanation.CopyFrom(explanation_of(explained))
        return response

    async def Schedule(self, request: pb.ScheduleRequest, context: Any) -> pb.ScheduleResponse:
        try:
            return self._schedule(request, context)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def ScheduleStream(self, request_iterator: Any, context: Any) -> None:
        """Decide in order. While a request is decided, the next one comes in and the answer before it goes out: each
        of the two takes a turn through gRPC's threads, which is no shorter than a decision.
        """
        reading: asyncio.Future[Any] | None = None
        writing: asyncio.Future[Any] | None = None
        try:
            asked = await context.read()
            while asked is not _EOF:
                reading = asyncio.ensure_future(context.read())
                await asyncio.sleep(0)  # now gRPC has been asked for it
                answer, refusal = None, UNREADABLE
                if asked is not _UNREADABLE:
                    try:
                        answer = self._schedule(asked, context)
                    except RequestError as error:
                        refusal = f"{asked.request_id}: {error}"
                if writing is not None and not await _sent(writing):
                    return
                if answer is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
                writing = asyncio.ensure_future(context.write(answer))
                asked = await reading
            if writing is not None:
                await _sent(writing)
        finally:  # with the call they end, too, and how is of no interest
            for left in (reading, writing):
                if left is not None:
                    left.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        conductor = self.conductor
        unknown = 0
        try:
            _check_report(request)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for (kind, _, at_s), events in groupby(request.events, key=self._together):
            held = []
            for event in events:
                reservation = conductor.state.reservations.get(event.request_id)
                if reservation is None:
                    unknown += 1
                else:
                    held.append((reservation, event))
            if held:
                now_s = conductor.clock.now(at_s)
                conductor.state.advance(now_s)
                self._apply(kind, held, now_s)
        for load in request.loads:
            if load.HasField("kv_tokens") and conductor.clock.external:
                conductor.clock.now()
            try:
                conductor.state.engine_load(load.worker_id, load)
            except KeyError:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"loads: no worker is called {load.worker_id!r}")
        self.unknown_reports += unknown
        return pb.ReportResponse(unknown=unknown)

    def _together(self, event: pb.Event) -> tuple[str | None, int | str, float]:
        """Events that count as one: those that join a batch at the same time."""
        kind = event.WhichOneof("what")
        if kind == "first_token":
            reservation = self.conductor.state.reservations.get(event.request_id)
            if reservation is not None:
                return kind, reservation.decode, event.at_s
        return kind, event.request_id, event.at_s

    def _apply(self, kind: str | None, held: list[tuple[Reservation, pb.Event]], now_s: float) -> None:
        state = self.conductor.state
        reservation, event = held[0]
        for each, _ in held:
            if each.reported:
                state.renew(each, now_s)
        if kind == "prefill_started":
            state.prefill_started(reservation, now_s, event.prefill_started.expected_end_s)
        elif kind == "fetch_landed":
            state.fetch_landed(reservation)
        elif kind == "prefill_done":
            done = event.prefill_done
            if done.ttft_s:
                reservation.ttft_s = done.ttft_s
            if done.prefill_s:
                reservation.prefill_s = done.prefill_s
                reservation.prefill_reported = True
            if done.reused_tokens:
                reservation.reused_tokens = min(done.reused_tokens, reservation.input_tokens - 1)
            state.prefill_done(reservation, now_s)
        elif kind == "kv_ready":
            state.kv_ready(reservation)
        elif kind == "first_token":
            state.joined([each for each, _ in held], now_s, event.first_token.stall_s or None)
        elif kind == "finished":
            done_ = event.finished
            state.finished(
                reservation,
                now_s,
                output_tokens=done_.output_tokens,
                ttft_s=done_.ttft_s or math.nan,
                tbt_s=done_.tbt_s or math.nan,
                decode_s=done_.decode_s or math.nan,
            )
        elif kind == "failed":
            state.end(reservation, event.failed.stage or "failed", now_s)

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        fields = {name: getattr(request.worker, name) for name in _WORKER_FIELDS}
        try:
            worker = _workers.Worker.model_validate({name: value for name, value in fields.items() if value != ""})
            added = self.conductor.register(worker)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker.{where}: {problem['msg']}")
            raise
        except (SpecError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        self.membership()
        return pb.RegisterResponse(added=added)

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        try:
            removed = self.conductor.deregister(request.id)
        except SpecError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        self.membership()
        return pb.DeregisterResponse(removed=removed)

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        conductor = self.conductor
        state = conductor.state
        conductor.catch_up()
        state.count_blocks()
        response = pb.GetStateResponse(
            now_s=float(state.clock["now_s"]),
            policy=conductor.policy.name,
            cluster=state.spec.name,
            in_flight=len(state.flying),
            blocks=state.index.used,
        )
        for worker in conductor.workers:
            p, d = state.prefill_of.get(worker.id), state.decode_of.get(worker.id)
            sequence, synced = self.kv_cursor(worker.id)
            shown = response.workers.add(note=self.note(worker.id), kv_sequence=sequence, kv_synced=synced)
            shown.worker.MergeFrom(pb.Worker(**{name: getattr(worker, name) for name in _WORKER_FIELDS}))
            if p is not None:
                row = state.prefill[p]
                shown.up = bool(row["up"])
                running_s = max(0.0, float(row["running_end_s"] - state.clock["now_s"])) if row["running"] else 0.0
                shown.queue_s = running_s + float(row["queued_s"])
                shown.queue_requests = int(row["queue_requests"])
                shown.host_blocks, shown.device_blocks = int(row["host_used"]), int(row["device_used"])
            if d is not None:
                row = state.decode[d]
                shown.up = bool(row["up"])
                shown.batch, shown.kv_tokens = int(row["batch"]), float(row["kv_tokens"])
                shown.pending_requests = int(row["pending_requests"])
        return response

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.Explanation:
        explained = self.conductor.explained(request.request_id)
        if explained is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"request_id {request.request_id!r}: not among the decisions remembered"
            )
            raise KeyError(request.request_id)
        return explanation_of(explained)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> None:
        if self.snapshot is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this sidecar keeps no snapshots")
            return
        data = await asyncio.to_thread(encode, self.snapshot())
        for start in range(0, len(data), SNAPSHOT_CHUNK):
            if not await _sent(context.write(pb.SnapshotChunk(data=data[start : start + SNAPSHOT_CHUNK]))):
                return
            await asyncio.sleep(0)
