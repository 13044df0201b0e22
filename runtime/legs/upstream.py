"""Requests to workers over HTTP, and how they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientResponse, ClientTimeout

from ..request_headers import PREFIX_HOLDER, REQUEST_ID
from ..workers import Worker

log = logging.getLogger(__name__)

MOST_ERROR_BYTES = 64 << 10  # of an error that is passed on
Prefilled = Callable[[dict[str, Any]], None]
"""Called with the reply of the prefill worker as soon as that is there; what it raises ends the legs."""
RETRIED = frozenset({0, 408, 425, 429, 500, 502, 503, 504})  # 0: no answer at all


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a leg may take. `decode_s`: between two pieces of a stream, or for a whole answer that is not one."""

    connect_s: float = 3.0
    prefill_s: float = 300.0
    decode_s: float = 300.0

    @property
    def longest_s(self) -> float:
        """After so long without news, a request has ended."""
        return self.connect_s + self.prefill_s + self.decode_s


@dataclass(slots=True)
class Call:
    """What a client asked for.

    Args:
        path: of the endpoint, e.g. /v1/completions. fields: the body, as JSON has it; token ids may be an array.
        headers: for both workers. holder: who has a prefix that the prefill worker should fetch; None: nobody need.
    """

    request_id: str
    path: str
    fields: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    holder: Worker | None = None

    def holder_for(self, worker: Worker) -> Worker | None:
        """Whom a worker is to fetch the prefix from, if anybody; it fetches nothing from itself."""
        return None if self.holder is None or self.holder.id == worker.id else self.holder


class LegFailed(Exception):
    """A leg failed.

    Args:
        stage: prefill or decode. status, body: of the worker's answer; 0 and empty where there was none.
        refused: nothing listens there.
    """

    def __init__(
        self, stage: str, worker: Worker, message: str, *, status: int = 0, body: bytes = b"", refused: bool = False
    ) -> None:
        super().__init__(f"{stage} worker {worker.id}: {message}")
        self.stage = stage
        self.worker = worker
        self.status = status
        self.body = body
        self.refused = refused

    @property
    def elsewhere(self) -> bool:
        """Whether another worker may do better: what is wrong with a request is wrong everywhere."""
        return self.status in RETRIED


class Upstream:
    """Connections to the workers. Attribute `engines`: of bootstrap servers, what they said of their engine."""

    def __init__(self, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self.engines: dict[str, str] = {}
        self._session = aiohttp.ClientSession(
            # vLLM closes connections that idle for 5 s: one of that age must not be taken for a request.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._background: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Drop what is under way."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._session.close()

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def prefill(self, call: Call, worker: Worker, fields: dict[str, Any], **headers: str) -> dict[str, Any]:
        """Send the prefill leg; its reply, in whole.

        Raises:
            LegFailed: no reply, an error, or none that can be read.
        """
        if holder := call.holder_for(worker):
            headers[PREFIX_HOLDER] = holder.address
        limit = ClientTimeout(total=self.timeouts.prefill_s, sock_connect=self.timeouts.connect_s)
        async with await self._post("prefill", call, worker, fields, limit, headers) as response:
            try:
                reply = orjson.loads(await response.read())
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise _no_answer("prefill", worker, error) from None
            except orjson.JSONDecodeError:
                raise LegFailed("prefill", worker, "its reply is not JSON", status=502) from None
        if not isinstance(reply, dict):
            raise LegFailed("prefill", worker, "its reply is no JSON object", status=502)
        return reply

    async def decode(self, call: Call, worker: Worker, fields: dict[str, Any], **headers: str) -> ClientResponse:
        """Send the decode leg; its response, of which nothing was read.

        Raises:
            LegFailed: no response, or an error.
        """
        limit = ClientTimeout(total=None, sock_connect=self.timeouts.connect_s, sock_read=self.timeouts.decode_s)
        return await self._post("decode", call, worker, fields, limit, headers)

    async def get(self, url: str, timeout_s: float) -> Any:
        """What a GET answers, as JSON; None for an empty answer.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError, ValueError: it does not, or with something else.
        """
        async with self._session.get(url, timeout=ClientTimeout(total=timeout_s), raise_for_status=True) as response:
            data = await response.read()
            return orjson.loads(data) if data else None

    async def pass_on(self, method: str, worker: Worker, path: str, data: bytes = b"") -> tuple[int, bytes]:
        """Status and body of a request that is no generation.

        Raises:
            LegFailed: no answer.
        """
        url = f"http://{worker.address}{path}"
        limit = ClientTimeout(total=30.0, sock_connect=self.timeouts.connect_s)
        headers = {"content-type": "application/json"} if data else {}
        try:
            async with self._session.request(method, url, data=data or None, headers=headers, timeout=limit) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _no_answer("decode", worker, error) from None

    async def _post(
        self,
        stage: str,
        call: Call,
        worker: Worker,
        fields: dict[str, Any],
        limit: ClientTimeout,
        headers: Mapping[str, str],
    ) -> ClientResponse:
        if not worker.address:
            raise LegFailed(stage, worker, "it has no address", refused=True)
        url = f"http://{worker.address}{call.path}"
        sent = {**call.headers, "content-type": "application/json", REQUEST_ID: call.request_id, **headers}
        data = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            response = await self._session.post(url, data=data, headers=sent, timeout=limit)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _no_answer(stage, worker, error) from None
        if response.status == 200:
            return response
        try:
            body = await response.content.read(MOST_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""
        finally:
            response.close()
        raise LegFailed(stage, worker, f"HTTP {response.status}: {said(body)}", status=response.status, body=body)


def said(body: bytes) -> str:
    """The message of an error in one of the forms that engines have, or the beginning of whatever it is."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace") or "no message"


def _no_answer(stage: str, worker: Worker, error: BaseException) -> LegFailed:
    if isinstance(error, aiohttp.ClientConnectorError):
        return LegFailed(stage, worker, f"cannot be reached: {error.strerror or error}", refused=True)
    if isinstance(error, TimeoutError):
        return LegFailed(stage, worker, "no answer in time", status=504)
    return LegFailed(stage, worker, f"{type(error).__name__}: {error}")
