"""The HTTP side of the worker: vLLM's OpenAI server with NixlConnector, as far as docs/workers.md says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from .engine import Engine, Handover, Sequence, Update
from .events import EventPublisher
from .exchange import Exchange
from .openai import (
    Answer,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Limits,
    Refusal,
    TokenizeRequest,
    error_body,
    generation_of,
    prompt_of,
    stop_strings,
    usage_of,
)
from .text import Detokenizer, StopStrings, Text, TextError

MAX_BODY_BYTES = 64 << 20
log = logging.getLogger(__name__)
_encode = msgspec.json.encode
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(slots=True)
class _Piece:
    """What one token adds to an answer."""

    text: str
    tokens: list[int]
    finished: str = ""
    stop_reason: int | str | None = None
    handed_over: list[int] | None = None


@dataclass(slots=True)
class Server:
    """Answers requests with an engine.

    Args:
        name: of the model. limits: what requests may ask. transfer_host, transfer_port: where others pull KV from.
    """

    engine: Engine
    exchange: Exchange
    publisher: EventPublisher | None
    text: Text
    name: str
    limits: Limits
    transfer_host: str
    transfer_port: int
    in_flight: int = 0
    draining: bool = False
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def application(self) -> web.Application:
        """To be run with `handler_cancellation`, so that a client that hangs up ends its request."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completion),
                web.post("/v1/chat/completions", self._completion),
                web.post("/v1/completions/render", self._render),
                web.post("/v1/chat/completions/render", self._render),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return application

    # --- what there is to see ---

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive and not self.draining else 503)

    async def _load(self, _: web.Request) -> web.Response:
        return _json({"server_load": self.in_flight})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.engine.metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        return _json({} if self.publisher is None else {"0": self.publisher.source()})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "owned_by": "conductor-gym", "max_model_len": self.limits.context}
        return _json({"object": "list", "data": [model]})

    async def _reset(self, _: web.Request) -> web.Response:
        if not await asyncio.wrap_future(self.engine.call(self.engine.cache.clear)):
            raise Refusal("blocks are in use", status=503)
        return web.Response()

    # --- text ---

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = _decoded(TokenizeRequest, await request.read())
        self._check_model(asked.model)
        if asked.messages is not None:
            tokens = self.text.chat_tokens(asked.messages, asked.add_generation_prompt)
        elif asked.prompt is not None:
            tokens = self.text.tokens(asked.prompt, asked.add_special_tokens)
        else:
            raise Refusal("expected a prompt or messages", "prompt")
        return _json({"count": len(tokens), "max_model_len": self.limits.context, "tokens": tokens})

    async def _render(self, request: web.Request) -> web.Response:
        asked, tokens = await self._read(request)
        generation_of(asked, tokens, self.limits)
        rendered = {"request_id": _request_id(request), "model": self.name, "token_ids": tokens}
        return _json(rendered if isinstance(asked, ChatRequest) else [rendered])

    async def _read(self, request: web.Request) -> tuple[CommonRequest, list[int]]:
        """The body of a completion, and its prompt in token ids."""
        body = await request.read()
        asked: CompletionRequest | ChatRequest
        if "/chat/" in request.path:
            asked = _decoded(ChatRequest, body)
            tokens = self.text.chat_tokens(asked.messages, asked.add_generation_prompt)
        else:
            asked = _decoded(CompletionRequest, body)
            prompt = prompt_of(asked)
            tokens = self.text.tokens(prompt) if isinstance(prompt, str) else prompt
        self._check_model(asked.model)
        return asked, tokens

    def _check_model(self, name: str | None) -> None:
        if name and name != self.name:
            raise Refusal(f"the model {name!r} does not exist, this worker has {self.name!r}", "model", 404)

    # --- completions ---

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        if self.draining:
            raise Refusal("the worker is shutting down", status=503)
        asked, prompt = await self._read(request)
        generation = generation_of(asked, prompt, self.limits)
        answer = Answer.begin(_request_id(request), self.name, asked, prompt)
        self.in_flight += 1
        try:
            updates: asyncio.Queue[Update] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            sequence = self.engine.submit(
                generation, lambda update: loop.call_soon_threadsafe(updates.put_nowait, update)
            )
            pieces = self._pieces(sequence, updates, stop_strings(asked))
            async with contextlib.aclosing(pieces):
                if asked.stream:
                    usage = asked.stream_options is not None and asked.stream_options.include_usage
                    return await self._stream(request, answer, sequence, pieces, usage)
                return await self._whole(answer, sequence, pieces)
        finally:
            self.in_flight -= 1

    async def _pieces(
        self, sequence: Sequence, updates: asyncio.Queue[Update], stops: list[str]
    ) -> AsyncGenerator[_Piece, None]:
        """The answer token by token. A sequence that is left before its end is given up."""
        words, stop, ended = Detokenizer(self.text), StopStrings(stops), False
        try:
            while not ended:
                update = await updates.get()
                if update.error:
                    ended = True
                    raise Refusal(update.error, status=500)
                assert update.token is not None
                text = words.add(update.token)
                if update.finished:
                    ended = True
                    text += words.rest()
                piece = _Piece(stop.add(text), [update.token], update.finished, update.stop_reason, update.handed_over)
                if stop.found is not None:
                    piece.finished, piece.stop_reason = "stop", stop.found
                    yield piece
                    return
                if ended:
                    piece.text += stop.rest()
                yield piece
        finally:
            if not ended:
                self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        self.engine.abort(sequence)
        origin = sequence.asked.origin
        if isinstance(origin, Handover) and not sequence.first_s:
            task = asyncio.get_running_loop().create_task(self.exchange.let_go(origin))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _whole(self, answer: Answer, sequence: Sequence, pieces: AsyncIterator[_Piece]) -> web.Response:
        text, tokens, piece = "", [], None
        async for piece in pieces:
            text += piece.text
            tokens += piece.tokens
        assert piece is not None
        usage = _usage(sequence, len(tokens))
        transfer = self._transfer_params(sequence, piece)
        return _json(answer.whole(text, tokens, piece.finished, piece.stop_reason, usage, transfer))

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        sequence: Sequence,
        pieces: AsyncIterator[_Piece],
        with_usage: bool,
    ) -> web.StreamResponse:
        # The status is told with the first token: what fails before is answered with an error.
        piece = await anext(pieces)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["Cache-Control"] = "no-cache"
        await response.prepare(request)
        tokens = 0
        try:
            while True:
                body = answer.chunk(piece.text, piece.tokens, piece.finished, piece.stop_reason, first=not tokens)
                tokens += len(piece.tokens)
                if piece.handed_over is not None:
                    body["kv_transfer_params"] = self._transfer_params(sequence, piece)
                await response.write(b"data: " + _encode(body) + b"\n\n")
                piece = await anext(pieces)
        except StopAsyncIteration:
            if with_usage:
                await response.write(b"data: " + _encode(answer.usage_chunk(_usage(sequence, tokens))) + b"\n\n")
        except Refusal as refusal:
            await response.write(b"data: " + _encode(error_body(str(refusal), refusal.status)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _transfer_params(self, sequence: Sequence, piece: _Piece) -> dict[str, Any] | None:
        """What is to go unchanged into the decode worker's request."""
        if piece.handed_over is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [piece.handed_over],
            "remote_engine_id": self.engine.id,
            "remote_request_id": sequence.id,
            "remote_host": self.transfer_host,
            "remote_port": self.transfer_port,
            "tp_size": 1,
            "remote_num_tokens": sequence.computed,
        }

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Errors in OpenAI's form."""
        try:
            return await handler(request)
        except Refusal as refusal:
            return _error(str(refusal), refusal.status, refusal.param)
        except TextError as error:
            return _error(str(error), 400)
        except web.HTTPException as error:
            return _error(error.text or error.reason, error.status)
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return _error(f"{type(error).__name__}: {error}", 500)


def _decoded(kind: type[R], body: bytes) -> R:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        raise Refusal(message, where.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is not valid JSON: {error}") from None


def _usage(sequence: Sequence, tokens: int) -> dict[str, Any]:
    return usage_of(sequence.prompt_tokens, tokens, sequence.local_tokens + sequence.external_tokens)


def _request_id(request: web.Request) -> str:
    return request.headers.get("X-Request-Id") or uuid.uuid4().hex


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


def _error(message: str, status: int, param: str | None = None) -> web.Response:
    return _json(error_body(message, status, param), status)
