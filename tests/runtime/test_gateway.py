"""The gateway from a client's side: answers, errors, failing workers, clients that go away, the re-check."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from runtime.gateway import Options
from runtime.legs import Timeouts
from runtime.live_state import Stage
from runtime.request import Reason

from ..waiting import until
from .backends import free_port
from .conftest import ROOT
from .engines import Engine, Fabric
from .gateways import ASKED, STREAMED, Front
from .test_server import metric

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


async def engines(stack: AsyncExitStack, *names: str, **fields: Any) -> dict[str, Engine]:
    """NIXL workers of these names, connected."""
    fabric = Fabric()
    return {name: await stack.enter_async_context(Engine(fabric, "nixl", **fields)) for name in names}


def ends(front: Front) -> list[str]:
    return [reservation.end for reservation in front.ended]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_an_answer_is_measured_and_entered_in_the_books():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", prefill_s=0.2, gap_s=0.05, cached_tokens=16)
        front = await stack.enter_async_context(Front(**workers))
        status, events, _ = await front.post(STREAMED)
        assert status == 200 and [event["choices"][0]["text"] for event in events[:-1]] == [
            "0",
            "1",
            "2",
            "3",
            "4",
            "5",
        ]
        assert events[-1] == "[DONE]", "a client that did not ask for the usage does not get it"
        (ended,) = front.ended
        assert ended.end == "finished" and ended.output_tokens == 6 and ended.reused_tokens == 16
        assert 0.2 <= ended.prefill_s <= ended.ttft_s < 5 and ended.prefill_reported
        assert 0.05 <= ended.tbt_s < 5 and 0.2 <= ended.decode_s < 5
        status, answer, _ = await front.post(ASKED)
        assert status == 200 and answer["usage"]["completion_tokens"] == 6
        ended = front.ended[-1]
        assert 0.2 <= ended.ttft_s < 5 and 0.05 <= ended.tbt_s < 5 and ended.output_tokens == 6


async def test_usage_for_those_who_ask():
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(Front(**await engines(stack, "p0", "d0")))
        _, events, _ = await front.post(STREAMED | {"stream_options": {"include_usage": True}})
        assert events[-2]["usage"]["completion_tokens"] == 6 and events[-2]["choices"] == []


async def test_events_come_as_they_are_made():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", gap_s=60.0)
        front = await stack.enter_async_context(Front(**workers))
        async with front.session.post(f"{front.url}/v1/completions", json=STREAMED) as response:
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
            assert workers["d0"].running == 1 and front.conductor.state.flying[0].stage == Stage.DECODE


async def test_conversations_and_what_is_passed_on():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(**workers))
        status, _, response = await front.post(
            CHAT, "/v1/chat/completions", x_request_id="mine", authorization="Bearer k"
        )
        assert status == 200 and response.headers["x-request-id"] == "mine"
        for engine in workers.values():
            assert engine.headers[0]["authorization"] == "Bearer k" and engine.headers[0]["x-request-id"] == "mine"
            assert engine.bodies[0]["messages"] == CHAT["messages"]


async def test_text_becomes_tokens_where_the_engine_can_tell():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", renders=True)
        front = await stack.enter_async_context(Front(**workers))
        text = "a text of some length, that two requests begin with"
        await front.post(ASKED | {"prompt": text})
        assert workers["p0"].bodies[0]["prompt"] == [ord(letter) for letter in text]
        assert front.ended[0].input_tokens == len(text)
        _, _, _ = await front.post(ASKED | {"prompt": [ord(letter) for letter in text]})
        made = front.conductor.explained(front.ended[1].request_id)
        assert made is not None and made.observation.prefill["local_tokens"][0, 0] == 48, (
            "text and its ids are the same"
        )


async def test_text_goes_by_its_length_where_it_cannot():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(**workers))
        assert (await front.post(ASKED | {"prompt": "x" * 400}))[0] == 200
        assert front.ended[0].input_tokens == 100
        assert workers["p0"].bodies[0]["prompt"] == "x" * 400


async def test_text_becomes_tokens_by_a_tokenizer_at_hand(tmp_path):
    pytest.importorskip("tokenizers")
    from runtime.tiny_model import write_model

    write_model(tmp_path)
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(Options(tokenizer=str(tmp_path)), **workers))
        await front.post(ASKED | {"prompt": "Grüße"})
        assert workers["p0"].bodies[0]["prompt"] == list("Grüße".encode())


async def test_models_and_health():
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(Front(**await engines(stack, "p0", "d0")))
        async with front.session.get(f"{front.url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "m"
        async with front.session.get(f"{front.url}/health") as response:
            assert response.status == 200
        front.conductor.draining = True
        async with front.session.get(f"{front.url}/health") as response:
            assert response.status == 503
        status, answer, response = await front.post()
        assert status == 503 and answer["error"]["code"] == Reason.SHUTTING_DOWN and response.headers["retry-after"]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "not valid JSON"),
        ({"model": "m", "prompt": []}, "prompt", "token ids"),
        ({"prompt": [1]}, "model", "name of a model"),
        (ASKED | {"n": 2}, "n", "expected 1"),
        (ASKED | {"prompt": ["a", "b"]}, "prompt", "found 2"),
        (ASKED | {"max_tokens": -1}, "max_tokens", "number of tokens"),
    ],
)
async def test_a_request_that_cannot_be(body, param, message):
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(**workers))
        status, answer, _ = await front.post(body)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["param"] == param
        assert message in answer["error"]["message"]
        assert not workers["p0"].bodies and not front.ended


async def test_other_errors_have_the_same_form():
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(Front(Options(max_body_bytes=1000), **await engines(stack, "p0", "d0")))
        for path, method, status in (
            ("/v1/nothing", "POST", 404),
            ("/v1/completions", "GET", 405),
        ):
            async with front.session.request(method, f"{front.url}{path}") as response:
                assert response.status == status and set((await response.json())["error"]) >= {"message", "type"}
        status, answer, _ = await front.post(ASKED | {"prompt": list(range(1000))})
        assert status == 413 and answer["error"]["type"] == "invalid_request_error"
        status, answer, _ = await front.post(ASKED, x_llm_d_slo_ttft_ms="soon")
        assert (
            status == 400 and answer["error"]["param"] is None and "x-llm-d-slo-ttft-ms" in answer["error"]["message"]
        )


async def test_what_a_worker_says_of_a_request_reaches_its_client():
    """It is the request's fault: nobody else is asked, and nobody is taken out."""
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "p1", "d0", status=400)
        front = await stack.enter_async_context(Front(**workers))
        for _ in range(5):
            status, answer, _ = await front.post(STREAMED)
            assert status == 400
            assert answer["error"]["message"] == "no such thing" and answer["error"]["param"] == "prompt"
        assert len(workers["p0"].bodies) + len(workers["p1"].bodies) == 5
        assert front.conductor.state.up_prefill.all() and set(ends(front)) == {"prefill"}


async def test_early_rejection():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(policy="conductor+slo", **workers))
        status, answer, response = await front.post(STREAMED, x_llm_d_slo_ttft_ms="0.001")
        assert status == 429 and int(response.headers["retry-after"]) >= 1
        assert answer["error"]["type"] == "rate_limit_error" and answer["error"]["code"] == Reason.SATURATED
        assert response.headers["x-llm-d-request-dropped-reason"] == Reason.SATURATED
        assert not workers["p0"].bodies


async def test_the_recheck_after_the_prefill():
    """The batch that its decode worker has by then would miss the TBT SLO: the prefill is wasted, and said to be."""
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", prefill_s=0.3)
        front = await stack.enter_async_context(Front(policy="conductor+slo", **workers))
        state = front.conductor.state
        asked = asyncio.create_task(front.post(STREAMED, x_llm_d_slo_tpot_ms="100"))
        await until(lambda: workers["p0"].running, 5.0)
        state.decode["batch"][0], state.decode["kv_tokens"][0] = 10_000, 1e7
        status, answer, response = await asked
        assert status == 429 and answer["error"]["code"] == Reason.RECHECK and response.headers["retry-after"]
        assert ends(front) == ["recheck"]
        assert state.clock["rejected_at_decode"] == 1 and 0.25 < state.clock["wasted_prefill_s"] < 5
        # the prefill worker is told, through a request that is dropped at once, that nobody wants its KV
        await until(lambda: len(workers["d0"].bodies) == 1 and not workers["p0"].fabric.kept, 5.0)
        await until(lambda: not workers["d0"].running, 5.0)


async def test_no_recheck_where_the_cluster_has_none():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", prefill_s=0.3)
        front = await stack.enter_async_context(Front(spec={"decode_recheck": False}, **workers))
        asked = asyncio.create_task(front.post(STREAMED, x_llm_d_slo_tpot_ms="100"))
        await until(lambda: workers["p0"].running, 5.0)
        front.conductor.state.decode["batch"][0] = 10_000
        assert (await asked)[0] == 200


# --- failing workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("how", ["refused", "500", "503", "hangs"])
@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_worker_that_fails_is_replaced(role, how, asked):
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "p1", "d0", "d1")
        bad = workers[f"{role}0"]
        front = Front(Options(timeouts=Timeouts(prefill_s=0.5, decode_s=0.5)), **workers)
        await stack.enter_async_context(front)
        if how == "refused":
            await bad.stop()
        bad.status, bad.hang = (int(how) if how.isdigit() else 200), how == "hangs"
        pairs = set()
        for i in range(4):
            status, answer, response = await front.post(asked | {"prompt": [i, *range(40)]})
            assert status == 200, answer
            assert isinstance(answer, dict) or answer[-1] == "[DONE]"
            pairs.add(response.headers["x-conductor-pair"])
        assert all(f"{role}1" in pair for pair in pairs)
        stage = "prefill" if role == "p" else "decode"
        retries = front.count("conductor_gateway_retries_total", stage)
        assert retries == front.count("conductor_gateway_leg_failures_total", f"{role}0", stage) >= 1
        assert ends(front).count("finished") == 4 and ends(front).count(stage) == retries
        assert not front.conductor.state.reservations and not front.conductor.state.flying
        state = front.conductor.state
        for table, columns in (
            (state.prefill, ("queued_s", "queue_requests")),
            (state.decode, ("batch", "pending_requests", "pending_tokens", "waiting_requests")),
        ):
            assert all(not table[column].any() for column in columns), "nothing is left in the books"


async def test_a_retry_is_one_decision(tmp_path):
    """Counted once, and its reservation stands for the workers that serve it."""
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "p1", "d0", gap_s=0.1)
        front = await stack.enter_async_context(Front(**workers))
        made: list[Any] = []
        front.conductor.on_made.append(made.append)
        await workers["p0"].stop()
        asked = asyncio.create_task(front.post(STREAMED))
        await until(lambda: workers["d0"].running, 5.0)
        (reservation,) = front.conductor.state.flying
        assert front.conductor.state.prefills[reservation.prefill].id == "p1"
        assert (await asked)[0] == 200 and len(made) == 1


async def test_when_there_is_no_other():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        front = await stack.enter_async_context(Front(**workers))
        await workers["p0"].stop()
        for asked in (ASKED, STREAMED):
            status, answer, _ = await front.post(asked)
            assert status == 502 and answer["error"]["code"] == "worker_failed" and "p0" in answer["error"]["message"]
        assert ends(front) == ["prefill", "prefill"]


async def test_kv_that_does_not_come_is_made_elsewhere():
    """The decode worker fails, and there is no other: it may be the prefill worker that is at fault."""
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "p1", "d0")
        workers["p0"].loses_kv = True
        front = await stack.enter_async_context(Front(policy="round_robin", **workers))
        for i in range(4):
            status, _, response = await front.post(ASKED | {"prompt": [i, *range(40)]})
            assert status == 200 and response.headers["x-conductor-pair"] == "p1,d0"
        assert front.conductor.state.up_decode.all(), "it works in between"
        workers["p1"].loses_kv = True
        assert (await front.post())[0] == 502


async def test_a_worker_is_left_alone_until_it_is_healthy():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "p1", "d0")
        front = await stack.enter_async_context(Front(policy="round_robin", **workers))
        state = front.conductor.state
        workers["p0"].status = 500
        for _ in range(8):
            assert (await front.post())[0] == 200
        assert len(workers["p0"].bodies) == 3, "after three failures in a row it is asked no more"
        assert not state.up_prefill[0]
        workers["p0"].status = 200
        await until(lambda: state.up_prefill[0], 5.0)
        for _ in range(4):
            assert (await front.post())[0] == 200
        assert len(workers["p0"].bodies) > 3


async def test_a_stream_that_breaks_off_ends_with_an_error():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", "d1")
        for engine in (workers["d0"], workers["d1"]):
            engine.cut = 2
        front = await stack.enter_async_context(Front(**workers))
        status, events, _ = await asyncio.wait_for(front.post(STREAMED), 5)
        assert status == 200 and len(events) == 3
        assert events[2]["error"]["code"] == "worker_failed" and set(events[2]["error"]) >= {"message", "type", "param"}
        assert ends(front) == ["decode"]
        assert len(workers["d0"].bodies) + len(workers["d1"].bodies) == 1, "no second answer after bytes of the first"


async def test_a_stream_that_stops_ends_with_an_error():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        workers["d0"].gap_s = 60.0
        front = await stack.enter_async_context(Front(Options(timeouts=Timeouts(decode_s=0.3)), **workers))
        status, events, _ = await asyncio.wait_for(front.post(STREAMED), 5)
        assert status == 200 and events[-1]["error"]["code"] == "worker_failed"
        await until(lambda: not workers["d0"].running, 5.0)


async def test_an_answer_that_breaks_off_before_it_begins_is_made_elsewhere():
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", "d1")
        workers["d0"].cut = 0
        front = await stack.enter_async_context(Front(policy="round_robin", **workers))
        for _ in range(3):
            status, events, response = await front.post(STREAMED)
            assert status == 200 and events[-1] == "[DONE]" and response.headers["x-conductor-pair"] == "p0,d1"


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_client_that_goes_away_frees_both_workers(stage):
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", gap_s=0.05)
        front = await stack.enter_async_context(Front(**workers))
        if stage == "prefill":
            workers["p0"].prefill_s = 60.0
        where = workers["p0" if stage == "prefill" else "d0"]
        request = front.session.post(f"{front.url}/v1/completions", json=STREAMED | {"max_tokens": 1000})
        asked = asyncio.create_task(request.__aenter__())
        await until(lambda: where.running, 5.0)
        if stage == "decode":
            await until(lambda: front.conductor.state.flying[0].stage == Stage.DECODE, 5.0)
            (await asked).close()
        else:
            asked.cancel()
        await until(lambda: not any(engine.running for engine in workers.values()), 5.0)
        await until(lambda: ends(front) == ["client"], 5.0)
        assert where.gone == 1 and not front.conductor.state.flying
        await until(lambda: front.count("conductor_gateway_requests_total", "499") == 1, 5.0)


async def test_kv_that_nobody_fetches_is_let_go():
    """A client that goes away between the legs; the decode worker is asked to have the KV freed."""
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0", prefill_s=0.1)
        workers["d0"].status = 500
        front = await stack.enter_async_context(Front(**workers))
        assert (await front.post())[0] == 502
        await until(lambda: len(workers["d0"].bodies) == 2, 5.0)
        assert workers["d0"].bodies[1]["kv_transfer_params"] == workers["d0"].bodies[0]["kv_transfer_params"]
        assert workers["d0"].bodies[1]["max_tokens"] == 1


# --- as a process ----------------------------------------------------------------------------------------------------


async def test_the_sidecar_serves_it(serve, cluster_file):
    async with AsyncExitStack() as stack:
        workers = await engines(stack, "p0", "d0")
        listed = [
            {"id": "p0", "role": "prefill", "address": workers["p0"].address},
            {"id": "d0", "role": "decode", "address": workers["d0"].address},
        ]
        cluster = str(cluster_file(workers=listed))
        process = await asyncio.to_thread(serve, "--cluster", cluster, "--gateway", "127.0.0.1:0")
        url = f"http://127.0.0.1:{process.ports['gateway']}"
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=STREAMED) as response:
                assert response.status == 200 and (await response.text()).endswith("data: [DONE]\n\n")
            async with session.post(f"{url}/v1/completions", json={}) as response:
                assert response.status == 400 and (await response.json())["error"]["param"] == "model"
        assert await asyncio.to_thread(metric, process, "conductor_gateway_requests_total", status="200") == 1
        assert await asyncio.to_thread(metric, process, "conductor_requests_completed_total") == 1
        assert await asyncio.to_thread(process.stop) == 0


@pytest.mark.parametrize("option", [("--gateway", "nowhere"), ("--gateway", "127.0.0.1:0", "--tokenizer", "/no/file")])
def test_options_that_cannot_be(option, cluster_file):
    done = subprocess.run(
        [
            sys.executable,
            "serve_policy.py",
            "--grpc",
            f"127.0.0.1:{free_port()}",
            "--cluster",
            str(cluster_file()),
            *option,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and option[-2] in done.stderr and "Traceback" not in done.stderr
    assert json.dumps(option[-1])[1:-1] in done.stderr
