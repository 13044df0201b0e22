"""The legs of each connector, held to its engine's contract by workers that serve nothing else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from runtime.legs import LegFailed, legs_of
from runtime.legs.prefill_only import prefill_only
from runtime.workers import Connector, Worker

from ..engines import Engine, Fabric
from ..gateways import ASKED, STREAMED, Front, worker


async def pair(stack: AsyncExitStack, connector: str, **fields: Any) -> tuple[Engine, Engine]:
    fabric = Fabric()
    kinds = (connector, connector)
    if connector in ("sglang", "store"):
        kinds = (f"{connector}-prefill", f"{connector}-decode")
    first, second = [await stack.enter_async_context(Engine(fabric, kind, **fields)) for kind in kinds]
    return first, second


async def front(stack: AsyncExitStack, p0: Engine, d0: Engine, **options: Any) -> Front:
    return await stack.enter_async_context(Front(p0=p0, d0=d0, bootstraps={"p0": p0.address}, **options))


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang", "store"])
@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "streamed"])
async def test_both_workers_serve_a_request(connector, asked):
    """The engines themselves check what they are sent, and that KV of just this prompt has come."""
    async with AsyncExitStack() as stack:
        prefill, decode = await pair(stack, connector)
        gateway = await front(stack, prefill, decode)
        for i in range(3):
            status, answer, response = await gateway.post(asked | {"prompt": [i, *range(40)], "stop": ["x"]})
            assert status == 200, answer
            assert response.headers["x-conductor-pair"] == "p0,d0"
            text = answer["choices"][0]["text"] if isinstance(answer, dict) else answer[-1]
            assert text == (f"{decode.port}" if isinstance(answer, dict) else "[DONE]")
        assert len(prefill.bodies) == len(decode.bodies) == 3
        assert all(body["prompt"][0] == i and body["stop"] == ["x"] for i, body in enumerate(decode.bodies))
        assert [reservation.end for reservation in gateway.ended] == ["finished"] * 3
        assert all(reservation.output_tokens == 6 for reservation in gateway.ended)
        if connector == "mooncake":
            assert prefill.asked["query"] == 1, "the engine behind a bootstrap server is asked for once"


async def test_one_worker_does_both():
    async with Engine(Fabric(), "nixl") as engine, Front(b0=engine) as gateway:
        status, _, response = await gateway.post(STREAMED)
        assert status == 200 and response.headers["x-conductor-pair"] == "b0,b0"
        status, _, _ = await gateway.post(ASKED | {"n": 2})  # and can do more than a pair
        assert status == 200
        assert len(engine.bodies) == 2 and all("kv_transfer_params" not in body for body in engine.bodies)


@pytest.mark.parametrize("connector", ["mooncake", "sglang"])
async def test_legs_that_run_together_end_together(connector):
    """One that fails leaves the other with nothing to do."""
    async with AsyncExitStack() as stack:
        prefill, decode = await pair(stack, connector)
        gateway = await front(stack, prefill, decode)
        prefill.status = 500
        decode.hang = True
        status, answer, _ = await gateway.post(ASKED)
        assert status == 502 and answer["error"]["code"] == "worker_failed"
        for _ in range(100):
            if decode.gone:
                break
            await asyncio.sleep(0.02)
        assert decode.gone == 1 and decode.running == 0


async def test_a_bootstrap_server_that_starts_anew_is_asked_anew():
    async with AsyncExitStack() as stack:
        prefill, decode = await pair(stack, "mooncake")
        gateway = await front(stack, prefill, decode)
        assert (await gateway.post(ASKED))[0] == 200
        prefill.status = 500
        assert (await gateway.post(ASKED))[0] == 502
        prefill.status = 200
        assert (await gateway.post(ASKED))[0] == 200
        assert prefill.asked["query"] == 2


async def test_a_prefill_worker_without_its_connector_is_named():
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        prefill = await stack.enter_async_context(Engine(fabric, "none"))
        decode = await stack.enter_async_context(Engine(fabric, "nixl"))
        prefill.connector = "nixl"
        gateway = Front(p0=prefill, d0=decode)
        prefill.connector = "none"
        async with gateway:
            status, answer, _ = await gateway.post(ASKED)
        assert status == 502 and "p0" in answer["error"]["message"] and "NixlConnector" in answer["error"]["message"]


def test_kv_does_not_move_between_connectors():
    fabric = Fabric()
    prefill = worker("p0", Engine(fabric, "nixl"))
    decode = worker("d0", Engine(fabric, "mooncake"))
    with pytest.raises(LegFailed, match="connector is nixl, that of decode worker d0 is mooncake"):
        legs_of(prefill, decode)


@pytest.mark.parametrize(
    ("engine", "connector"), [("vllm", Connector.NIXL), ("sglang", Connector.SGLANG), ("mooncake", Connector.MOONCAKE)]
)
def test_the_connector_is_that_of_the_engine_unless_it_is_said(engine, connector):
    assert Worker.model_validate({"id": "p", "role": "prefill", "engine": engine}).kv_connector == connector
    said = Worker.model_validate({"id": "p", "role": "prefill", "engine": engine, "connector": "store"})
    assert said.kv_connector == Connector.STORE


def test_only_the_prefill_is_asked_for():
    fields = {"prompt": [1], "stream": True, "stream_options": {}, "stop": "a", "n": 1, "max_completion_tokens": 9}
    kept = prefill_only(fields | {"temperature": 0.5})
    assert kept == {"prompt": [1], "temperature": 0.5, "stream": False, "max_tokens": 1, "min_tokens": 1}
