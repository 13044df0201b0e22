"""The gateway: an OpenAI-compatible HTTP front that has the conductor decide and runs the legs itself.

A request is decided on, its legs are sent (`runtime.legs`), and the decode worker's answer is passed on as it comes.
Until the first piece of it is there, a worker that fails is replaced by another of the decision's fallbacks; from then
on a failure ends the stream with an error event. Errors have OpenAI's form. docs/gateway.md has what a client sees.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import ClientResponse, web

from envs.state import Source

from . import openai_body, request_headers
from .answer_events import AnswerEvents, Says, error_in
from .circuit import Circuit
from .conductor import Conductor
from .legs import Call, LegFailed, Timeouts, Upstream, legs_of
from .metrics import SidecarMetrics
from .prompt_tokens import PromptTokens
from .request import Assignment, Reason, Rejection, Request, RequestError
from .request_headers import DROPPED_REASON, PAIR, REQUEST_ID
from .sse import EventError, data_of, events
from .workers import Role, Worker

log = logging.getLogger(__name__)

PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED_ON = ("authorization", "traceparent", "tracestate")  # headers of a client that workers get
GONE = 499  # what is counted of a client that went away, as nginx has it
_FIELD = re.compile(r"([A-Za-z_][\w.]*): ")
_TYPES = {429: "rate_limit_error", 503: "service_unavailable", 404: "not_found_error"}


@dataclass(frozen=True, slots=True)
class Options:
    """How the gateway behaves.

    Args:
        base_models: names that are no LoRA adapter; empty: none is. objectives: priorities by name.
        tokenizer: see `PromptTokens`. max_body_bytes: larger bodies are answered with 413.
    """

    base_models: frozenset[str] = frozenset()
    objectives: dict[str, int] = field(default_factory=dict)
    tokenizer: str = ""
    max_body_bytes: int = 16 << 20
    timeouts: Timeouts = field(default_factory=Timeouts)


class ApiError(Exception):
    """What a client gets instead of an answer."""

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """In OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}
        return orjson.dumps({"error": said})

    def response(self) -> web.Response:
        """The HTTP response."""
        headers = {}
        if self.status == 429 or self.retry_after_s > 0:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.code in _REASONS:
            headers[DROPPED_REASON] = self.code
        return web.Response(status=self.status, body=self.body, content_type="application/json", headers=headers)


_REASONS = frozenset(str(reason) for reason in Reason)


class _Refused(Exception):
    """The re-check after the prefill has turned the request away."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class Gateway:
    """The front and its connections to the workers.

    Args:
        conductor: who decides. metrics: where it counts. mark: told which worker may be chosen.

    Raises:
        TokenizerError: `Options.tokenizer` cannot be used.
    """

    def __init__(
        self,
        conductor: Conductor,
        metrics: SidecarMetrics,
        options: Options | None = None,
        *,
        mark: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.conductor = conductor
        self.metrics = metrics
        self.options = options or Options()
        self.upstream = Upstream(self.options.timeouts)
        self.tokens = PromptTokens(self.upstream, self.options.tokenizer)
        self.circuit = Circuit(
            self.upstream, mark or conductor.state.mark, known=lambda worker: worker in conductor.workers
        )
        self.open = 0
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve; the port that was bound.

        Raises:
            OSError: it cannot be bound.
        """
        app = web.Application(client_max_size=self.options.max_body_bytes, middlewares=[self._answered])
        for path in PATHS:
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        # A client that goes away cancels its handler, which closes what it has open at the workers.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def drain(self, seconds: float) -> None:
        """Let requests under way end, for so long."""
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop to serve; what is under way is cut."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self.upstream.close()

    def failed(self, failure: LegFailed) -> None:
        """A request to a worker has failed."""
        self.circuit.failed(failure)
        if failure.elsewhere:
            self.metrics.count("conductor_gateway_leg_failures_total", failure.worker.id, failure.stage)

    # --- endpoints ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Whatever goes wrong is answered in OpenAI's form, and counted."""
        status = GONE
        self.open += 1
        try:
            answer = await handler(request)
            status = answer.status
        except ApiError as error:
            status, answer = error.status, error.response()
        except RequestError as error:
            named = _FIELD.match(str(error))
            status, answer = 400, ApiError(400, str(error), param=named[1] if named else None).response()
        except web.HTTPException as error:  # no such path, method, or a body that is too large
            status, answer = error.status, ApiError(error.status, error.reason).response()
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("a request failed")
            status, answer = 500, ApiError(500, "the gateway has failed").response()
        finally:
            self.open -= 1
            self.metrics.count("conductor_gateway_requests_total", str(status))
        return answer

    async def _health(self, http: web.Request) -> web.Response:
        if self.conductor.draining:
            raise ApiError(503, "shutting down", code=Reason.SHUTTING_DOWN)
        if self.conductor.any_decode() is None or self.conductor.state.panic:
            raise ApiError(503, "no worker is up", code=Reason.NO_ENDPOINTS)
        return web.Response()

    async def _models(self, http: web.Request) -> web.Response:
        worker = self.conductor.any_decode()
        if worker is None:
            raise ApiError(503, "no worker is up", code=Reason.NO_ENDPOINTS)
        try:
            status, body = await self.upstream.pass_on("GET", worker, "/v1/models")
        except LegFailed as failure:
            self.failed(failure)
            raise ApiError(503, str(failure)) from None
        return web.Response(status=status, body=body, content_type="application/json")

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        arrival_s = time.monotonic()
        if self.conductor.draining:
            raise ApiError(503, "shutting down", code=Reason.SHUTTING_DOWN, retry_after_s=1.0)
        body = openai_body.parse(http.path, await http.read())
        request = await self._request(http, body)
        call = Call(request.request_id, http.path, body.fields, _passed_on(http))
        return await _Serving(self, http, body, request, call, arrival_s).run()

    async def _request(self, http: web.Request, body: openai_body.Body) -> Request:
        headers = http.headers
        fields = body.fields
        split = any(worker.role != Role.BOTH for worker in self.conductor.workers)
        if split:
            _check_single(fields)
        request_id = headers.get(REQUEST_ID) or str(uuid.uuid4())
        if request_id in self.conductor.state.reservations:  # a client may well send the same twice
            request_id = f"{request_id}:{uuid.uuid4().hex[:12]}"
        request = Request(
            request_id,
            input_tokens=body.input_tokens,
            ttft_slo_s=request_headers.ttft_slo_s(headers),
            tbt_slo_s=request_headers.tbt_slo_s(headers),
            tenant=request_headers.tenant(headers),
            priority=request_headers.priority(headers, self.options.objectives),
            cache_salt=body.cache_salt,
            lease_s=self.options.timeouts.longest_s,
            # of an answer in one piece, a worker that does both does not say when its first token was there
            reported=body.stream or all(worker.role != Role.BOTH for worker in self.conductor.workers),
        )
        if self.options.base_models and body.model not in self.options.base_models:
            request.lora_name = body.model
        if len(body.tokens):
            request.tokens = body.tokens
        if body.text:
            ids = await self.tokens.of(http.path, fields, self.conductor.any_decode())
            if ids is None:
                request.namespace = f"text:{body.model}"
            else:
                request.tokens, request.input_tokens = ids, len(ids)
                if isinstance(fields.get("prompt"), str):
                    fields["prompt"] = ids  # the workers need not do it again
        return request


class _Serving:
    """One request on its way through the workers."""

    def __init__(
        self,
        gateway: Gateway,
        http: web.Request,
        body: openai_body.Body,
        request: Request,
        call: Call,
        arrival_s: float,
    ) -> None:
        self.gateway = gateway
        self.conductor = gateway.conductor
        self.http = http
        self.request = request
        self.call = call
        self.arrival_s = arrival_s
        self.told = AnswerEvents(arrival_s)
        self.stream = body.stream
        self.prefilled_s = math.nan
        self.stage = "prefill"  # at which it is, for the books
        self.pair: tuple[Worker, Worker]
        options = call.fields.get("stream_options")
        self.usage_wanted = isinstance(options, dict) and bool(options.get("include_usage"))
        if self.stream:  # tells exactly how many tokens there were; events may have several
            call.fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}

    async def run(self) -> web.StreamResponse:
        """The answer.

        Raises:
            ApiError, RequestError: there is none.
        """
        conductor, request_id = self.conductor, self.request.request_id
        answer = conductor.schedule(self.request)
        try:
            if isinstance(answer, Rejection):
                raise _rejected(answer)
            response = await self.legs(answer)
            try:
                return await self.pass_events() if self.stream else self.pass_whole()
            finally:
                response.close()
        except _Refused as refused:
            raise _rejected(refused.rejection) from None
        except LegFailed as failure:
            raise _failed(failure) from None
        except (asyncio.CancelledError, ConnectionError):
            self.stage = "client"
            raise
        finally:
            conductor.release(request_id, self.stage)

    # --- until the first piece ---------------------------------------------------------------------------------------

    async def legs(self, answer: Assignment) -> ClientResponse:
        """Run the legs on the decided pair, or on another where a worker fails; the first piece is there then.

        Raises:
            LegFailed: there is no other. _Refused: by the re-check.
        """
        gateway = self.gateway
        self.pair = answer.prefill, answer.decode
        if answer.source == Source.FETCH:
            self.call.holder = answer.holder
        failed: set[str] = set()
        while True:
            try:
                response = await self.attempt()
            except LegFailed as failure:
                gateway.failed(failure)
                self.conductor.release(self.request.request_id, failure.stage)
                if not failure.elsewhere:
                    raise
                failed.add(failure.worker.id)
                other = _another(self.pair, answer.fallbacks, failed)
                if other is None and failure.stage == "decode" and not failure.refused:
                    # it may have been the KV that did not come: once more, from elsewhere
                    failed.add(self.pair[0].id)
                    other = _another(self.pair, answer.fallbacks, failed - {failure.worker.id})
                if other is None:
                    raise
                log.warning("request %s: %s; goes on with %s and %s", self.request.request_id, failure, *_ids(other))
                gateway.metrics.count("conductor_gateway_retries_total", failure.stage)
                self.go_on_with(other)
            else:
                for worker in self.pair:
                    gateway.circuit.worked(worker)
                return response

    async def attempt(self) -> ClientResponse:
        """One attempt on the present pair."""
        self.stage, self.prefilled_s = "prefill", math.nan
        response = await legs_of(*self.pair)(self.gateway.upstream, self.call, *self.pair, self.prefilled)
        self.stage = "decode"
        try:
            await self.begin(response)
        except BaseException:
            response.close()
            raise
        return response

    async def begin(self, response: ClientResponse) -> None:
        """Have the first piece there, so that a worker that fails at once can be replaced."""
        try:
            if not self.stream:
                self.whole = await response.read()
                return
            self.events = events(response)
            self.first = await anext(self.events)
        except StopAsyncIteration:
            raise LegFailed("decode", self.pair[1], "its stream is empty") from None
        except (aiohttp.ClientError, OSError, TimeoutError, EventError) as error:
            raise self.broken(error) from None
        told = error_in(data_of(self.first))
        if told is not None:
            code = told.get("code")
            status = code if isinstance(code, int) else 500
            raise LegFailed("decode", self.pair[1], str(told.get("message")), status=status, body=data_of(self.first))

    def prefilled(self, reply: dict[str, Any]) -> None:
        """The prefill worker has replied."""
        self.stage = "decode"
        self.prefilled_s = time.monotonic()
        self.gateway.circuit.worked(self.pair[0])
        self.conductor.prefilled(self.request.request_id, reused_tokens=_cached(reply))
        refused = self.conductor.recheck(self.request.request_id)
        if refused is not None:
            raise _Refused(refused)
        if not self.stream:  # nothing will tell when it joins
            self.conductor.first_token(self.request.request_id)

    def go_on_with(self, pair: tuple[Worker, Worker]) -> None:
        """Enter another pair in the books."""
        self.pair = pair
        self.call.holder = None
        answer = self.conductor.schedule(replace(self.request, pair=_ids(pair), arrival_s=None))
        if isinstance(answer, Rejection):
            raise _rejected(answer)

    # --- the answer ---------------------------------------------------------------------------------------------------

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID: self.request.request_id, PAIR: ",".join(_ids(self.pair))}

    def pass_whole(self) -> web.Response:
        """An answer in one piece."""
        try:
            reply = orjson.loads(self.whole)
            tokens = int(reply["usage"]["completion_tokens"])
        except (ValueError, LookupError, TypeError):
            tokens = 0
        now_s = time.monotonic()
        ttft_s = tbt_s = None
        if not math.isnan(self.prefilled_s):
            ttft_s = self.prefilled_s - self.arrival_s
            if tokens > 1:
                tbt_s = (now_s - self.prefilled_s) / tokens
        self.conductor.finished(self.request.request_id, output_tokens=tokens, ttft_s=ttft_s, tbt_s=tbt_s)
        return web.Response(body=self.whole, content_type="application/json", headers=self.headers)

    async def pass_events(self) -> web.StreamResponse:
        """An answer as server-sent events; the last is an error where it breaks off."""
        out = web.StreamResponse(
            headers=self.headers | {"content-type": "text/event-stream", "cache-control": "no-cache"}
        )
        await out.prepare(self.http)
        told = self.told
        failure = None
        try:
            async for event in self.all_events():
                says = told.note(data_of(event), time.monotonic())
                if says is Says.TOKENS:
                    self.progress()
                if says is not Says.USAGE or self.usage_wanted:
                    await out.write(event)
            if told.error is not None:
                failure = LegFailed("decode", self.pair[1], str(told.error.get("message")), status=500)
            elif not told.done:
                failure = LegFailed("decode", self.pair[1], "its stream ended before its answer")
        except LegFailed as error:
            failure = error
        if failure is not None:
            self.gateway.failed(failure)
            log.warning("request %s breaks off: %s", self.request.request_id, failure)
            if told.error is None:
                await out.write(b"data: " + _failed(failure).body + b"\n\n")
        else:
            share = self.conductor.state.spec.slo.tbt_tail_share
            self.conductor.finished(
                self.request.request_id,
                output_tokens=told.output_tokens,
                ttft_s=told.times.ttft_s,
                tbt_s=told.times.tbt_s(share) if told.output_tokens > 1 else None,
            )
        await out.write_eof()
        return out

    def progress(self) -> None:
        """A token has come."""
        if not self.told.times.intervals:
            self.conductor.first_token(self.request.request_id)
        else:
            self.conductor.alive(self.request.request_id)

    async def all_events(self) -> AsyncIterator[bytes]:
        """The first event and those after it.

        Raises:
            LegFailed: they break off.
        """
        yield self.first
        try:
            async for event in self.events:
                yield event
        except (aiohttp.ClientError, OSError, TimeoutError, EventError) as error:
            raise self.broken(error) from None

    def broken(self, error: Exception) -> LegFailed:
        """The decode worker's answer has broken off."""
        what = "nothing came in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return LegFailed("decode", self.pair[1], what, status=504 if isinstance(error, TimeoutError) else 0)


def _cached(reply: dict[str, Any]) -> int | None:
    """Prompt tokens that a worker had cached, where its reply tells."""
    try:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return None


def _another(
    pair: tuple[Worker, Worker], fallbacks: tuple[tuple[Worker, Worker], ...], failed: set[str]
) -> tuple[Worker, Worker] | None:
    """The next pair without a worker that has failed; who has not is kept."""
    for fallback in fallbacks:
        coupled = any(prefill.id == decode.id for prefill, decode in (pair, fallback))
        other = fallback
        if not coupled:
            other = (
                fallback[0] if pair[0].id in failed else pair[0],
                fallback[1] if pair[1].id in failed else pair[1],
            )
        if failed.isdisjoint(_ids(other)):
            return other
    return None


def _ids(pair: tuple[Worker, Worker]) -> tuple[str, str]:
    return pair[0].id, pair[1].id


def _passed_on(http: web.Request) -> dict[str, str]:
    return {name: http.headers[name] for name in PASSED_ON if name in http.headers}


def _check_single(fields: dict[str, Any]) -> None:
    """KV of a prompt moves to one decode request.

    Raises:
        RequestError: the body asks for several answers.
    """
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            raise RequestError(f"{name}: expected 1 where prefill and decode are apart, found {fields[name]!r:.40}")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise RequestError(f"prompt: expected one where prefill and decode are apart, found {len(prompt)}")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        fields["prompt"] = prompt[0] if isinstance(prompt[0], str) else np.array(prompt[0], np.uint32)


def _rejected(rejection: Rejection) -> ApiError:
    return ApiError(
        rejection.reason.http_status,
        rejection.message,
        code=rejection.reason.value,
        retry_after_s=rejection.retry_after_s,
    )


def _failed(failure: LegFailed) -> ApiError:
    """What a client is told of a leg that failed: of its own fault what the worker says, else that a worker failed."""
    error = error_in(failure.body)
    if not failure.elsewhere and 400 <= failure.status < 500:
        told = error or {}
        message = str(told.get("message") or failure)
        return ApiError(failure.status, message, code=str(told.get("code") or ""), param=told.get("param"))
    return ApiError(504 if failure.status == 504 else 502, str(failure), code="worker_failed")
