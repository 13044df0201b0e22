"""The Python client against a real server."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from runtime.client import Client, Refused, Unavailable
from runtime.conductor import Conductor
from runtime.proto import conductor_pb2_grpc
from runtime.server import ConductorService
from runtime.workers import load_live_cluster


@pytest.fixture
async def sidecar(cluster_file):
    """A conductor, and the address it is served at."""
    conductor = Conductor(load_live_cluster(cluster_file()), blocks=4096)
    server = grpc.aio.server()
    conductor_pb2_grpc.add_ConductorServicer_to_server(ConductorService(conductor), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield conductor, f"127.0.0.1:{port}"
    await server.stop(None)


async def settled(conductor: Conductor) -> None:
    for _ in range(200):
        if not conductor.state.reservations:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a reservation is left")


async def test_a_request_from_end_to_end(sidecar):
    conductor, address = sidecar
    async with Client(address, timeout_s=60.0) as client:
        async with await client.schedule(tokens=list(range(1000))) as placed:
            assert not placed.rejected
            assert placed.prefill.address and placed.decode.address
            assert len(conductor.state.reservations) == 1
            placed.prefill_done(prefill_s=0.05)
            placed.first_token()
            placed.finished(output_tokens=20, tbt_s=0.01)
        await settled(conductor)
    assert conductor.state.clock["good"] == 1
    assert conductor.state.clock["violated"] == 0


async def test_what_is_given_up_holds_nothing(sidecar):
    conductor, address = sidecar
    ends = []
    conductor.on_ended.append(lambda reservation: ends.append(reservation.end))
    async with Client(address, timeout_s=60.0) as client:
        with pytest.raises(ZeroDivisionError):
            async with await client.schedule(tokens=[1, 2, 3]):
                raise ZeroDivisionError
        async with await client.schedule(input_tokens=50) as placed:
            placed.prefill_done()
        await settled(conductor)
    assert ends == ["prefill", "decode"]


async def test_reports_that_wait_are_sent_at_the_end(sidecar):
    conductor, address = sidecar
    async with Client(address, timeout_s=60.0) as client:
        placed = await client.schedule(input_tokens=50)
        placed.finished(output_tokens=1)
    await settled(conductor)


async def test_a_rejection_says_when_to_come_back(sidecar):
    conductor, address = sidecar
    async with Client(address, timeout_s=60.0) as client:
        placed = await client.schedule(input_tokens=100, candidates=["127.0.0.1:9"])
    assert placed.rejected
    assert placed.reason == "rejected-no-endpoints"
    assert placed.retry_after_s >= 1
    assert not conductor.state.reservations


async def test_wrong_fields_are_named_and_a_missing_sidecar_is_said(sidecar):
    _, address = sidecar
    async with Client(address, timeout_s=60.0) as client:
        with pytest.raises(Refused, match="input_tokens"):
            await client.schedule()
        with pytest.raises(Refused, match="ttft_slo_s"):
            await client.schedule(input_tokens=5, ttft_slo_s=-1.0)
    async with Client("127.0.0.1:9", timeout_s=0.2) as client:
        with pytest.raises(Unavailable):
            await client.schedule(input_tokens=5)


async def test_what_is_reported_before_closing_arrives(sidecar) -> None:
    conductor, address = sidecar
    for pause_s in (0.0, 0.0005, 0.001, 0.002):  # the sender has not begun, or is in the middle
        async with Client(address) as client:
            placed = [await client.schedule(input_tokens=100) for _ in range(20)]
            for each in placed:
                each.first_token()
                each.finished(output_tokens=3)
            await asyncio.sleep(pause_s)
        assert not conductor.state.reservations
