"""A gateway in this process, in front of `tests.runtime.engines`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import aiohttp

from envs.spec import load_cluster
from runtime.conductor import Conductor
from runtime.gateway import Gateway, Options
from runtime.live_state import Reservation
from runtime.metrics import SidecarMetrics
from runtime.workers import Role, Worker, resized

from .engines import Engine

ASKED = {"model": "m", "prompt": list(range(40)), "max_tokens": 6}
STREAMED = ASKED | {"stream": True}


def worker(name: str, engine: Engine, **fields: Any) -> Worker:
    """p..: prefills, d..: decodes, b..: does both."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
    connector = {} if role == Role.BOTH else {"connector": engine.connector.partition("-")[0]}
    return Worker.model_validate({"id": name, "role": role, "address": engine.address, **connector, **fields})


class Front:
    """`async with Front(p0=engine, d0=engine) as front`: a gateway at `front.url`.

    Attributes:
        ended: reservations that are no more, in the order in which they ended.
    """

    def __init__(
        self,
        options: Options | None = None,
        policy: str = "conductor",
        spec: dict[str, Any] | None = None,
        bootstraps: dict[str, str] | None = None,
        **engines: Engine,
    ) -> None:
        workers = tuple(
            worker(name, engine, **({"bootstrap": bootstraps[name]} if bootstraps and name in bootstraps else {}))
            for name, engine in engines.items()
        )
        base = load_cluster("2p2d")
        base = base.model_validate(base.model_dump() | {"block_tokens": 16} | (spec or {}))
        self.conductor = Conductor(resized(base, workers), policy, blocks=4096, in_flight=256, deadline_s=60.0)
        self.ended: list[Reservation] = []
        self.conductor.on_ended.append(self.ended.append)
        self.metrics = SidecarMetrics()
        self.options = options

    async def __aenter__(self) -> Front:
        self.gateway = Gateway(self.conductor, self.metrics, self.options)
        self.url = f"http://127.0.0.1:{await self.gateway.start('127.0.0.1', 0)}"
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()
        await self.gateway.close()

    async def post(
        self, body: Any = ASKED, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, what came (JSON, or the list of events' data) and the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(f"{self.url}{path}", data=data, headers=named) as response:
            text = (await response.read()).decode()
            if response.content_type == "text/event-stream":
                return response.status, list(said(text)), response
            return response.status, json.loads(text), response

    def count(self, name: str, *labels: str) -> float:
        """A counter of the metrics."""
        return self.metrics.snapshot()[name].get(labels, 0.0)


def said(text: str) -> Iterator[Any]:
    """What the events of a stream say."""
    for event in text.split("\n\n"):
        if event:
            assert event.startswith("data: "), event
            data = event.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
