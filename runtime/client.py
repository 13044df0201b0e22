"""A client of the sidecar, for gateways written in Python.

    async with Client("127.0.0.1:50051") as conductor:
        placed = await conductor.schedule(tokens=token_ids)
        if placed.rejected:
            return Response(429, headers={"Retry-After": str(placed.retry_after_s)})
        async with placed:                                   # ends the reservation, whatever happens
            ... send it to placed.prefill.address
            placed.prefill_done()
            ... stream from placed.decode.address
            placed.first_token()
            placed.finished(output_tokens=n)

Reports are sent in the background, in order, several to a message; none of them is waited for. Where the sidecar cannot
be reached, `schedule` raises `Unavailable`: a gateway then does what it would do without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from .proto import conductor_pb2 as pb
from .proto import conductor_pb2_grpc

MOST_PENDING = 10_000  # reports that wait while the sidecar cannot be reached; the oldest are dropped beyond
RETRY_S = 0.2


class Unavailable(RuntimeError):
    """The sidecar did not answer in time, or cannot be reached."""


class Refused(ValueError):
    """The sidecar does not take the request as it is; the message names the field."""


@dataclass(slots=True)
class Placed:
    """Where a request goes, or that it goes nowhere (`rejected`)."""

    client: Client
    response: pb.ScheduleResponse
    scheduled_s: float = field(default_factory=time.monotonic)
    _prefilled_s: float = math.nan
    _ended: bool = False

    @property
    def request_id(self) -> str:
        """Given, or made by the sidecar."""
        return str(self.response.request_id)

    @property
    def rejected(self) -> bool:
        """It is to be answered with 429 or what `reason` says."""
        return bool(self.response.HasField("rejection"))

    @property
    def reason(self) -> str:
        """Why it was rejected, e.g. rejected-saturated; "" where it was not."""
        return str(self.response.rejection.reason)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which it is worth trying again."""
        return max(1, math.ceil(self.response.rejection.retry_after_s))

    @property
    def prefill(self) -> pb.Endpoint:
        """The prefill worker: `id`, `address`."""
        return self.response.assignment.prefill

    @property
    def decode(self) -> pb.Endpoint:
        """The decode worker: `id`, `address`."""
        return self.response.assignment.decode

    @property
    def assignment(self) -> pb.Assignment:
        """All of the decision: source, holder, fallbacks, predictions."""
        return self.response.assignment

    async def __aenter__(self) -> Placed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended and not self.rejected:
            stage = "prefill" if math.isnan(self._prefilled_s) else "decode"
            self.failed("client" if kind is asyncio.CancelledError else stage, str(error or ""))

    def prefill_done(self, *, prefill_s: float = 0.0, reused_tokens: int = 0) -> None:
        """The prefill worker has answered. `prefill_s`: what it took, waiting excluded, where that is known."""
        self._prefilled_s = time.monotonic()
        done = pb.PrefillDone(
            prefill_s=prefill_s, ttft_s=self._prefilled_s - self.scheduled_s, reused_tokens=reused_tokens
        )
        self._report(prefill_done=done)

    def kv_ready(self) -> None:
        """Its KV is on the decode worker."""
        self._report(kv_ready=pb.KvReady())

    def first_token(self) -> None:
        """The decode worker streams."""
        self._report(first_token=pb.FirstToken())

    def alive(self) -> None:
        """Still at work: the lease starts anew."""
        self._report(alive=pb.Alive())

    def finished(self, output_tokens: int, *, ttft_s: float = 0.0, tbt_s: float = 0.0, decode_s: float = 0.0) -> None:
        """The last token is out. Times that are 0 are not known."""
        self._ended = True
        last = pb.Finished(output_tokens=output_tokens, ttft_s=ttft_s, tbt_s=tbt_s, decode_s=decode_s)
        self._report(finished=last)

    def failed(self, stage: str, message: str = "") -> None:
        """It will not be finished. `stage`: prefill, transfer, decode, recheck, client."""
        self._ended = True
        self._report(failed=pb.Failed(stage=stage, message=message[:200]))

    def _report(self, **what: Any) -> None:
        self.client.report(pb.Event(request_id=self.request_id, **what))


class Client:
    """A connection to a sidecar.

    Args:
        target: host:port.
        credentials: for TLS (`grpc.ssl_channel_credentials`).
        timeout_s: longest wait for a decision.
    """

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, timeout_s: float = 1.0
    ) -> None:
        options = [("grpc.max_send_message_length", 64 << 20)]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)
        self.timeout_s = timeout_s
        self.dropped_reports = 0
        self._pending: list[pb.Event] = []
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is still to be reported, and disconnect."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while self._pending or self._sending.locked():  # nor may what is on its way be cut
                await self._send()
        if self._sender is not None:
            self._sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sender
        await self._channel.close(None)

    async def schedule(
        self,
        *,
        tokens: NDArray[np.uint32] | Sequence[int] | None = None,
        block_hashes: NDArray[np.uint64] | None = None,
        input_tokens: int = 0,
        **fields: Any,
    ) -> Placed:
        """Ask where a request goes.

        Args:
            tokens: the prompt's token ids; or block_hashes of it with input_tokens; or input_tokens alone.
            fields: further fields of `ScheduleRequest`: request_id, lora_name, cache_salt, ttft_slo_s, tbt_slo_s,
                tenant, priority, candidates, lease_s, unreported, dry_run, explain.

        Raises:
            Unavailable: no answer. Refused: a field is wrong.
        """
        request = pb.ScheduleRequest(**fields)
        if tokens is not None:
            request.tokens = np.asarray(tokens, "<u4").tobytes()
        elif block_hashes is not None:
            request.block_hashes.hashes = np.asarray(block_hashes, "<u8").tobytes()
            request.block_hashes.input_tokens = input_tokens
        else:
            request.input_tokens = input_tokens
        try:
            response = await self.stub.Schedule(request, timeout=self.timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise Refused(error.details()) from None
            raise Unavailable(f"{error.code().name}: {error.details()}") from None
        return Placed(self, response)

    def report(self, event: pb.Event) -> None:
        """Report an event soon."""
        self._pending.append(event)
        if len(self._pending) > MOST_PENDING:
            del self._pending[0]
            self.dropped_reports += 1
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                try:
                    await self._send()
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(RETRY_S)

    async def _send(self) -> None:
        async with self._sending:
            events = self._pending[:500]
            if not events:
                return
            del self._pending[: len(events)]
            try:
                await self.stub.Report(pb.ReportRequest(events=events), timeout=5.0)
            except grpc.aio.AioRpcError:
                self._pending[:0] = events
                raise
