"""Engine metrics: old names and new, ranks, rubbish; and the scraper's verdicts on workers that misbehave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.telemetry import EngineMetrics, Parser, Scraper, TelemetryError, mean_between, parse
from runtime.workers import Engine, Role, Worker

from ..waiting import until
from .backends import free_port

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.9
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 4e5
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 6.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 12.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 400.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 5.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:cache_config_info{block_size="16",cache_dtype="a,b \\"c\\" {d}",engine="0",num_gpu_blocks="1000"} 1.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
vllm:nixl_xfer_time_seconds_count{engine="0"} 2
"""

SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 7.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.5
sglang:num_used_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5000.0
sglang:max_total_num_tokens{model_name="m"} 10000.0
sglang:cache_hit_rate{model_name="m"} 0.125
sglang:num_retracted_reqs{model_name="m"} 1.0
sglang:num_prefill_prealloc_queue_reqs{model_name="m"} 1.0
sglang:num_prefill_inflight_queue_reqs{model_name="m"} 2.0
sglang:num_decode_prealloc_queue_reqs{model_name="m"} 3.0
sglang:num_decode_transfer_queue_reqs{model_name="m"} 4.0
sglang:kv_transfer_speed_gb_s{model_name="m"} 2.5
sglang:kv_transfer_latency_ms{model_name="m"} 40.0
sglang:cache_config_info{page_size="64",num_pages="157"} 1.0
sglang:queue_time_seconds_sum{model_name="m"} 3.0
sglang:queue_time_seconds_count{model_name="m"} 6.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_forward"} 8.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_forward"} 4.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="decode_waiting"} 99.0
"""


def test_vllm() -> None:
    metrics = parse(VLLM, Engine.VLLM, at_s=12.0)
    assert metrics.at_s == 12.0
    assert (metrics.running, metrics.waiting) == (3.0, 2.0)
    assert metrics.kv_usage == 0.25  # the new name goes before the old
    assert (metrics.block_tokens, metrics.gpu_blocks, metrics.kv_capacity_tokens) == (16, 1000, 16000.0)
    assert metrics.kv_tokens == 4000.0
    assert (metrics.prefix_queries, metrics.prefix_hits) == (1000.0, 400.0)
    assert metrics.preemptions == 1.0
    assert (metrics.ttft_sum_s, metrics.ttft_count) == (6.5, 10.0)
    assert (metrics.itl_sum_s, metrics.itl_count) == (12.0, 400.0)
    assert (metrics.prefill_sum_s, metrics.prefill_count) == (5.0, 10.0)
    assert (metrics.transfer_sum_s, metrics.transfer_count) == (0.5, 2.0)
    assert metrics.decode_sum_s is None and metrics.prefill_prealloc is None
    assert metrics.skipped == 0


def test_old_vllm() -> None:
    text = (
        'vllm:num_requests_running{model_name="m"} 1\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 8\n'
        'vllm:gpu_prefix_cache_queries{model_name="m"} 32\n'
        'vllm:time_per_output_token_seconds_sum{model_name="m"} 2.5\n'
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1\n'
    )
    metrics = parse(text.encode(), Engine.VLLM)
    assert (metrics.kv_usage, metrics.prefix_hits, metrics.prefix_queries) == (0.75, 8.0, 32.0)
    assert metrics.itl_sum_s == 2.5
    assert metrics.block_tokens == 32 and metrics.gpu_blocks is None and metrics.kv_capacity_tokens is None
    assert metrics.kv_tokens is None


def test_sglang() -> None:
    metrics = parse(SGLANG, Engine.SGLANG)
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (7.0, 4.0, 0.5)
    assert (metrics.used_tokens, metrics.kv_capacity_tokens, metrics.kv_tokens) == (5000.0, 10000.0, 5000.0)
    assert (metrics.block_tokens, metrics.gpu_blocks) == (64, 157)
    assert (metrics.prefill_prealloc, metrics.prefill_inflight) == (1.0, 2.0)
    assert (metrics.decode_prealloc, metrics.decode_transfer) == (3.0, 4.0)
    assert metrics.transfer_bytes_per_s == 2.5e9
    assert metrics.transfer_latency_s == pytest.approx(0.04)
    assert (metrics.prefill_sum_s, metrics.prefill_count) == (8.0, 4.0)
    assert metrics.decode_sum_s is None
    assert (metrics.prefix_hit_rate, metrics.preemptions) == (0.125, 1.0)
    assert parse(SGLANG, Engine.MOONCAKE) == metrics
    assert parse(VLLM, Engine.MOONCAKE) == parse(VLLM, Engine.VLLM)


def test_ranks_of_vllm_add_up_or_one_is_picked() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {i + 1}\n'
        f'vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} {0.25 * i}\n'
        f'vllm:cache_config_info{{engine="{i}",block_size="16",num_gpu_blocks="100"}} 1\n'
        for i in range(3)
    )
    everything = parse(text, Engine.VLLM)
    assert (everything.running, everything.kv_usage, everything.gpu_blocks) == (6.0, 0.25, 300)
    third = parse(text, Engine.VLLM, rank=2)
    assert (third.running, third.kv_usage, third.gpu_blocks) == (3.0, 0.5, 100)
    with pytest.raises(TelemetryError, match="no vllm metrics"):
        parse(text, Engine.VLLM, rank=5)


def test_tensor_ranks_of_sglang_repeat_and_data_ranks_add() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{dp_rank="{tp // 2}",model_name="m",pid="{tp}",tp_rank="{tp}"}} {10 + tp // 2}\n'
        for tp in range(4)
    )
    assert parse(text, Engine.SGLANG).running == 21.0
    assert parse(text, Engine.SGLANG, rank=1).running == 11.0
    # what has no rank counts for every rank
    assert parse(text + "sglang:num_queue_reqs 5\n", Engine.SGLANG, rank=0).waiting == 5.0


@pytest.mark.parametrize(
    "number", ["NaN", "+Inf", "-Inf", "-1", "", "abc", '"3"', "1_0e", "0x10"], ids=lambda number: number or "nothing"
)
def test_numbers_that_are_none_are_skipped_and_counted(number: str) -> None:
    text = f'vllm:num_requests_running{{engine="0"}} 1\nvllm:num_requests_waiting{{engine="0"}} {number}\n'
    metrics = parse(text, Engine.VLLM)
    assert (metrics.running, metrics.waiting, metrics.skipped) == (1.0, None, 1)


def test_rubbish_beside_metrics() -> None:
    text = (
        "\r\nvllm:num_requests_waiting\n{}\nvllm:\nvllm:num_requests_running{engine=\n"
        'vllm:num_requests_running{engine="0"} 4 1700000000\r\n'
        'vllm:kv_cache_usage_perc {engine="0"} 1.5\n'
        'vllm:prompt_tokens_total{engine="0"} 12 # {trace_id="a"} 1\n'
        "vllm:num_preemptions_total 3\n# EOF"
    )
    metrics = parse(text, Engine.VLLM)
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (4.0, None, 1.0)
    assert (metrics.prompt_tokens, metrics.preemptions, metrics.skipped) == (12.0, 3.0, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("<!DOCTYPE html><html>", "HTML"),
        ("hello\nworld", "starts with 'hello'"),
        ("# HELP vllm:num_requests_running x\nsglang:num_running_reqs 1\n", "no vllm metrics"),
        ("vllm:num_requests_running NaN\n", "1 unreadable"),
        (b"\xff\xfe\x00", "not UTF-8 at byte 0"),
    ],
)
def test_what_is_not_metrics_is_one_clear_error(text: str | bytes, expected: str) -> None:
    with pytest.raises(TelemetryError, match=expected):
        parse(text, Engine.VLLM)


@given(st.lists(st.sampled_from([*VLLM.splitlines(), *SGLANG.splitlines(), "{", 'vllm:num_requests_waiting{a="'])))
@settings(max_examples=100, deadline=None)
def test_known_layout_reads_the_same(lines: list[str]) -> None:
    parser = Parser(Engine.MOONCAKE)
    for text in (VLLM, "\n".join(lines), SGLANG, "\n".join(reversed(lines)), VLLM.replace("3.0", "5.0")):
        try:
            expected = parse(text, Engine.MOONCAKE)
        except TelemetryError:
            with pytest.raises(TelemetryError):
                parser.parse(text)
            continue
        assert parser.parse(text) == expected


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_is_metrics_or_the_error(text: str) -> None:
    for engine in Engine:
        for start in ("", "vllm:num_requests_running{", "sglang:token_usage "):
            try:
                metrics = parse(start + text, engine)
            except TelemetryError:
                continue
            assert metrics.running is None or 0.0 <= metrics.running < math.inf
            assert metrics.kv_usage is None or 0.0 <= metrics.kv_usage <= 1.0


def test_what_prometheus_client_writes() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        Gauge(f"vllm:{name}", "x", labels, registry=registry).labels('odd "name" \\ {x}\n', "0").set(0.5)
    Counter("vllm:prefix_cache_queries", "x", labels, registry=registry).labels("m", "0").inc(7)
    histogram = Histogram("vllm:time_to_first_token_seconds", "x", labels, registry=registry)
    histogram.labels("m", "0").observe(2.0)
    metrics = parse(generate_latest(registry), Engine.VLLM)
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0.5, 0.5, 0.5)
    assert (metrics.prefix_queries, metrics.ttft_sum_s, metrics.ttft_count) == (7.0, 2.0, 1.0)


def test_mean_between_scrapes() -> None:
    before = EngineMetrics(itl_sum_s=1.0, itl_count=10.0)
    assert mean_between(before, EngineMetrics(itl_sum_s=2.0, itl_count=30.0), "itl") == pytest.approx(0.05)
    assert mean_between(before, before, "itl") is None
    assert mean_between(before, EngineMetrics(itl_sum_s=0.1, itl_count=2.0), "itl") is None  # restarted
    assert mean_between(before, EngineMetrics(), "itl") is None


# --- scraping -----------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def worker(port: int, name: str = "w", **fields: object) -> Worker:
    return Worker.model_validate({"id": name, "role": Role.DECODE, "address": f"127.0.0.1:{port}"} | fields)


async def good(request: web.Request) -> web.Response:
    return web.Response(text=VLLM)


async def test_scrapes_until_removed() -> None:
    seen: list[tuple[str, EngineMetrics]] = []
    scraper = Scraper(lambda *each: seen.append(each), interval_s=0.02, stale_after=100)
    async with serving(good) as port, scraper:
        scraper.add(worker(port))
        scraper.add(Worker(id="nowhere", role=Role.DECODE))
        await until(lambda: len(seen) >= 3)
        state = scraper["w"]
        assert state.up and not state.stale and state.age_s < 2.0 and state.scrapes >= 3 and state.failures == 0
        assert seen[0][0] == "w" and seen[0][1].running == 3.0
        assert seen[0][1].at_s < seen[1][1].at_s
        nowhere = scraper["nowhere"]
        assert nowhere.up and nowhere.stale and nowhere.age_s == math.inf and nowhere.failures == 0
        assert len(scraper) == 2 and "w" in scraper
        assert scraper.remove("w") and not scraper.remove("w")
        await asyncio.sleep(0.05)
        count = len(seen)
        await asyncio.sleep(0.1)
        assert len(seen) == count
        scraper.add(worker(port, "again"))
        await until(lambda: seen[-1][0] == "again")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_refused_is_down_and_recovers(host: str) -> None:
    verdicts: list[tuple[str, bool]] = []
    port = free_port()
    address = {"metrics": f"http://{host}:{port}/metrics"}
    scraper = Scraper(
        lambda *_: None,
        on_up=lambda *each: verdicts.append(each),
        interval_s=0.02,
        backoff_s=0.05,
        down_after=3,
    )
    async with scraper:
        scraper.add(worker(port, **address))
        await until(lambda: not scraper["w"].up)
        state = scraper["w"]
        assert state.refusals >= 3 and state.stale and state.errors.keys() == {"refused"}
        assert host in state.last_error
        async with serving(good, port):
            await until(lambda: scraper["w"].up)
            assert scraper["w"].last_error == "" and scraper["w"].total_failures >= 3
    assert verdicts == [("w", False), ("w", True)]


async def slow(request: web.Request) -> web.Response:
    await asyncio.sleep(5.0)
    return web.Response(text=VLLM)


async def broken(request: web.Request) -> web.Response:
    return web.Response(status=503, text=VLLM)


async def html(request: web.Request) -> web.Response:
    return web.Response(text="<html>vllm:num_requests_running 3</html>", content_type="text/html")


async def latin(request: web.Request) -> web.Response:
    return web.Response(body=VLLM.encode() + b"\xe9")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"x" * 4096)
    return response


async def bomb(request: web.Request) -> web.Response:
    response = web.Response(body=b"\n" * (1 << 20))
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"vllm:num_requests_running 3\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (slow, "timeout", "no answer within 0.1 s"),
        (broken, "http", "HTTP 503"),
        (html, "not_metrics", "HTML"),
        (latin, "not_metrics", "not UTF-8 at byte"),
        (endless, "too_large", "more than 100000 bytes"),
        (bomb, "too_large", "more than 100000 bytes"),
        (cut, "connection", "ClientPayloadError"),
        (elsewhere, "http", "HTTP 302"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_misbehaviour_is_stale_but_not_down(handler: Handler, kind: str, message: str) -> None:
    seen: list[str] = []
    scraper = Scraper(
        lambda name, _: seen.append(name), interval_s=0.01, timeout_s=0.1, backoff_s=0.02, max_bytes=100_000
    )
    async with serving(handler) as port, scraper:
        scraper.add(worker(port))
        await until(lambda: scraper["w"].failures >= 4)
        state = scraper["w"]
        assert state.up and state.stale and message in state.last_error
        assert state.errors.keys() == {kind}
    assert not seen


async def test_it_was_good_and_is_stale() -> None:
    answer = VLLM

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    async with serving(handler) as port, Scraper(lambda *_: None, interval_s=0.02, backoff_s=0.05) as scraper:
        scraper.add(worker(port))
        await until(lambda: not scraper["w"].stale)
        answer = "?"
        await until(lambda: scraper["w"].stale)
        state = scraper["w"]
        assert state.up and state.metrics is not None and state.age_s > 0.08 and "starts with '?'" in state.last_error


async def test_ranks_behind_one_url_are_fetched_once() -> None:
    requests = 0
    seen: dict[str, EngineMetrics] = {}

    async def handler(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(text="".join(f'vllm:num_requests_running{{engine="{i}"}} {i + 1}\n' for i in range(2)))

    async with serving(handler) as port, Scraper(seen.__setitem__, interval_s=0.05) as scraper:
        scraper.add(worker(port, "a", dp_rank=0))
        scraper.add(worker(port, "b", dp_rank=1))
        await until(lambda: len(seen) == 2)
        assert (seen["a"].running, seen["b"].running) == (1.0, 2.0)
        assert requests <= scraper["a"].scrapes + 1
        scraper.remove("b")
        await until(lambda: seen["a"].running == 3.0)  # alone behind its URL: all of it is its own


async def test_one_bad_worker_and_one_bad_callback_do_not_stop_the_others() -> None:
    seen: list[str] = []

    def on_metrics(name: str, metrics: EngineMetrics) -> None:
        seen.append(name)
        if name == "a":
            raise RuntimeError("callback")

    scraper = Scraper(on_metrics, interval_s=0.02, timeout_s=0.3, concurrency=3)
    async with serving(good) as port, serving(slow) as slow_port, scraper:
        scraper.add(worker(slow_port, "slow"))
        scraper.add(Worker(id="odd", role=Role.DECODE, metrics="http://:::/x"))
        scraper.add(worker(port, "a"))
        scraper.add(worker(port, "b", metrics=f"http://127.0.0.1:{port}/metrics?b"))
        await until(lambda: seen.count("a") >= 3 and seen.count("b") >= 3)
        assert scraper.callback_errors >= 3 and scraper["odd"].errors.keys() == {"connection"}


async def test_many_workers_limited_concurrency_and_close() -> None:
    under_way = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return web.Response(text=VLLM)

    seen: set[str] = set()
    async with serving(handler) as port:
        scraper = Scraper(lambda name, _: seen.add(name), interval_s=0.2, timeout_s=5.0, concurrency=4)
        await scraper.start()
        await scraper.start()
        for i in range(60):
            scraper.add(worker(port, f"w{i}", metrics=f"http://127.0.0.1:{port}/metrics?{i}"))
        await until(lambda: len(seen) == 60)
        assert most <= 4
        await scraper.close()
        await scraper.close()
        count = scraper["w0"].scrapes
        await asyncio.sleep(0.3)
        assert scraper["w0"].scrapes == count
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]


async def test_impossible_settings() -> None:
    with pytest.raises(ValueError, match="interval_s"):
        Scraper(lambda *_: None, interval_s=0.0)
    with pytest.raises(ValueError, match="concurrency"):
        Scraper(lambda *_: None, concurrency=0)
