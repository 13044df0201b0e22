"""What the engines say of themselves: their Prometheus metrics, scraped and parsed.

`parse` reads the few series a scheduler needs out of an engine's whole exposition. `Scraper` fetches them from every
registered worker, says how old what it knows is, and whether a worker is there at all. A slow worker, or one that
answers nonsense, is *stale*; only one that refuses connections is *down*.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp

from .workers import Engine, Worker

MAX_RESPONSE_BYTES = 8 << 20
log = logging.getLogger(__name__)


class TelemetryError(ValueError):
    """An answer that is not an engine's metrics; the message says what was found."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One scrape of one worker. Sums and counts are since the engine started; None: not exported.

    `kv_usage` is a share, 0..1. `block_tokens` tokens make a KV block, of which there are `gpu_blocks`.
    `skipped` counts series that had no usable value (NaN, infinite, negative, or no number at all).
    """

    at_s: float = 0.0
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    block_tokens: int | None = None
    gpu_blocks: int | None = None
    kv_capacity_tokens: float | None = None
    used_tokens: float | None = None
    prefix_queries: float | None = None  # tokens looked up in the prefix cache
    prefix_hits: float | None = None
    prefix_hit_rate: float | None = None  # SGLang exports the rate alone
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    generation_tokens_per_s: float | None = None
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    itl_sum_s: float | None = None
    itl_count: float | None = None
    queue_sum_s: float | None = None
    queue_count: float | None = None
    prefill_sum_s: float | None = None
    prefill_count: float | None = None
    decode_sum_s: float | None = None
    decode_count: float | None = None
    e2e_sum_s: float | None = None
    e2e_count: float | None = None
    transfer_sum_s: float | None = None
    transfer_count: float | None = None
    transfer_bytes_sum: float | None = None
    transfer_failures: float | None = None
    transfer_bytes_per_s: float | None = None
    transfer_latency_s: float | None = None
    # queues of SGLang's disaggregated workers
    prefill_prealloc: float | None = None
    prefill_inflight: float | None = None
    decode_prealloc: float | None = None
    decode_transfer: float | None = None
    series: int = 0
    skipped: int = 0

    @property
    def kv_tokens(self) -> float | None:
        """Tokens whose KV is held."""
        if self.used_tokens is not None:
            return self.used_tokens
        if self.kv_usage is None or self.kv_capacity_tokens is None:
            return None
        return self.kv_usage * self.kv_capacity_tokens


def mean_between(before: EngineMetrics, after: EngineMetrics, what: str) -> float | None:
    """Mean seconds of `what` (ttft, itl, queue, prefill, decode, e2e, transfer) between two scrapes of one worker.

    None where nothing happened in between, it is not exported, or the engine restarted.
    """
    first, last = (getattr(metrics, f"{what}_count") for metrics in (before, after))
    early, late = (getattr(metrics, f"{what}_sum_s") for metrics in (before, after))
    if first is None or last is None or early is None or late is None or last <= first or late < early:
        return None
    return float((late - early) / (last - first))


# --- parsing -----------------------------------------------------------------------------------------------------

# How the label sets of one series become one number. Data-parallel ranks are told apart by `engine` or `dp_rank`;
# tensor- and pipeline-parallel ranks of one replica repeat the same gauge and must not be added up.
_ADD, _MEAN, _REPEATED, _REPEATED_MEAN, _LARGEST = range(5)

# field -> (how, its names, the preferred first)
_VLLM: dict[str, tuple[int, tuple[str, ...]]] = {
    "waiting": (_ADD, ("num_requests_waiting",)),
    "running": (_ADD, ("num_requests_running",)),
    "kv_usage": (_MEAN, ("kv_cache_usage_perc", "gpu_cache_usage_perc")),
    "prefix_queries": (
        _ADD,
        (
            "prefix_cache_queries_total",
            "prefix_cache_queries",
            "gpu_prefix_cache_queries_total",
            "gpu_prefix_cache_queries",
        ),
    ),
    "prefix_hits": (
        _ADD,
        ("prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"),
    ),
    "prefix_hit_rate": (_MEAN, ("gpu_prefix_cache_hit_rate",)),
    "preemptions": (_ADD, ("num_preemptions_total", "num_preemptions")),
    "prompt_tokens": (_ADD, ("prompt_tokens_total", "prompt_tokens")),
    "generation_tokens": (_ADD, ("generation_tokens_total", "generation_tokens")),
    "ttft_sum_s": (_ADD, ("time_to_first_token_seconds_sum",)),
    "ttft_count": (_ADD, ("time_to_first_token_seconds_count",)),
    "itl_sum_s": (_ADD, ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum")),
    "itl_count": (_ADD, ("inter_token_latency_seconds_count", "time_per_output_token_seconds_count")),
    "queue_sum_s": (_ADD, ("request_queue_time_seconds_sum",)),
    "queue_count": (_ADD, ("request_queue_time_seconds_count",)),
    "prefill_sum_s": (_ADD, ("request_prefill_time_seconds_sum",)),
    "prefill_count": (_ADD, ("request_prefill_time_seconds_count",)),
    "decode_sum_s": (_ADD, ("request_decode_time_seconds_sum",)),
    "decode_count": (_ADD, ("request_decode_time_seconds_count",)),
    "e2e_sum_s": (_ADD, ("e2e_request_latency_seconds_sum",)),
    "e2e_count": (_ADD, ("e2e_request_latency_seconds_count",)),
    "transfer_sum_s": (_ADD, ("nixl_xfer_time_seconds_sum",)),
    "transfer_count": (_ADD, ("nixl_xfer_time_seconds_count",)),
    "transfer_bytes_sum": (_ADD, ("nixl_bytes_transferred_sum", "nixl_bytes_transferred_total")),
    "transfer_failures": (_ADD, ("nixl_num_failed_transfers_total", "nixl_num_failed_transfers")),
}
_SGLANG: dict[str, tuple[int, tuple[str, ...]]] = {
    "waiting": (_REPEATED, ("num_queue_reqs",)),
    "running": (_REPEATED, ("num_running_reqs",)),
    "kv_usage": (_REPEATED_MEAN, ("token_usage",)),
    "used_tokens": (_REPEATED, ("num_used_tokens",)),
    "kv_capacity_tokens": (_REPEATED, ("max_total_num_tokens",)),
    "prefix_hit_rate": (_REPEATED_MEAN, ("cache_hit_rate",)),
    "preemptions": (_REPEATED, ("num_retracted_reqs", "total_retracted_reqs")),
    "prompt_tokens": (_ADD, ("prompt_tokens_total",)),
    "generation_tokens": (_ADD, ("generation_tokens_total",)),
    "generation_tokens_per_s": (_REPEATED, ("gen_throughput",)),
    "ttft_sum_s": (_ADD, ("time_to_first_token_seconds_sum",)),
    "ttft_count": (_ADD, ("time_to_first_token_seconds_count",)),
    "itl_sum_s": (_ADD, ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum")),
    "itl_count": (_ADD, ("inter_token_latency_seconds_count", "time_per_output_token_seconds_count")),
    "queue_sum_s": (_ADD, ("queue_time_seconds_sum",)),
    "queue_count": (_ADD, ("queue_time_seconds_count",)),
    "e2e_sum_s": (_ADD, ("e2e_request_latency_seconds_sum",)),
    "e2e_count": (_ADD, ("e2e_request_latency_seconds_count",)),
    "transfer_failures": (_REPEATED, ("num_transfer_failed_reqs_total", "num_transfer_failed_reqs")),
    "transfer_bytes_per_s": (_LARGEST, ("kv_transfer_speed_gb_s",)),
    "transfer_latency_s": (_LARGEST, ("kv_transfer_latency_ms",)),
    "prefill_prealloc": (_REPEATED, ("num_prefill_prealloc_queue_reqs",)),
    "prefill_inflight": (_REPEATED, ("num_prefill_inflight_queue_reqs",)),
    "decode_prealloc": (_REPEATED, ("num_decode_prealloc_queue_reqs",)),
    "decode_transfer": (_REPEATED, ("num_decode_transfer_queue_reqs",)),
}
_UNITS = {"transfer_bytes_per_s": 1e9, "transfer_latency_s": 1e-3}  # gb_s, ms
_STAGES = {"prefill_forward": "prefill", "decode_forward": "decode"}  # of SGLang's per-stage times
_STAGE_NAMES = ("per_stage_req_latency_seconds_sum", "per_stage_req_latency_seconds_count")
_CONFIG = "cache_config_info"
_RANK = re.compile(r'(?:^|,)\s*(?:engine|dp_rank)="([^"]*)"')
_REPEATS = re.compile(r'(?:tp_rank|pp_rank|pid|moe_ep_rank)="[^"]*",?')
_STAGE = re.compile(r'(?:^|,)\s*stage="([^"]*)"')
_BLOCK = re.compile(r'(?:^|,)\s*(?:block_size|page_size)="(\d+)"')
_BLOCKS = re.compile(r'(?:^|,)\s*(?:num_gpu_blocks|num_pages)="(\d+)"')


class _Dialect:
    """An engine's names, and the expression that reads one of its lines."""

    def __init__(self, prefix: str, table: dict[str, tuple[int, tuple[str, ...]]], extra: tuple[str, ...]) -> None:
        self.prefix = prefix
        self.table = table
        self.names = {f"{prefix}:{name}" for _, names in table.values() for name in names}
        self.names.update(f"{prefix}:{name}" for name in extra)


_DIALECTS = {
    Engine.VLLM: _Dialect("vllm", _VLLM, (_CONFIG,)),
    Engine.SGLANG: _Dialect("sglang", _SGLANG, (_CONFIG, *_STAGE_NAMES)),
}
_LABELS = re.compile(r"[ \t]*\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\}[ \t]*")


def parse(text: str | bytes, engine: Engine, *, at_s: float = 0.0, rank: int | None = None) -> EngineMetrics:
    """The metrics of an engine, old names and new.

    Args:
        text: a Prometheus or OpenMetrics exposition.
        engine: whose names to look for; MOONCAKE: whichever of the other two is there.
        at_s: when it was fetched.
        rank: take only this data-parallel rank (label `engine` or `dp_rank`); None: all, added up. Series without
            such a label are taken either way.

    Raises:
        TelemetryError: not text, or nothing of the engine in it.
    """
    return Parser(engine).parse(text, at_s=at_s, rank=rank)


class Parser:
    """Parses one worker's expositions, one after the other.

    An exposition has the same series on the same lines as the one before, as a rule. Where the interesting lines were
    last time they are looked for first; only when one of them is elsewhere is the whole text read again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lines = -1  # of the exposition whose layout is known
        self._dialect = _DIALECTS[Engine.VLLM]
        self._layout: list[tuple[int, str, str, str]] = []  # (line, all before the number, name, labels)

    def parse(self, text: str | bytes, *, at_s: float = 0.0, rank: int | None = None) -> EngineMetrics:
        """See `parse`."""
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise TelemetryError(f"not UTF-8 at byte {error.start}") from None
        lines = text.split("\n")
        numbers = self._numbers(lines) if len(lines) == self._lines else None
        if numbers is None:
            self._read_layout(text, lines)
            numbers = self._numbers(lines)
            assert numbers is not None
        return self._metrics(text, numbers, at_s, rank)

    def _numbers(self, lines: list[str]) -> list[str] | None:
        """What stands after each interesting series; None where one of them is not where it was."""
        numbers = []
        for at, start, _, _ in self._layout:
            line = lines[at]
            if not line.startswith(start):
                return None
            numbers.append(line[len(start) :])
        return numbers

    def _read_layout(self, text: str, lines: list[str]) -> None:
        engine = self.engine
        if engine is Engine.MOONCAKE:
            engine = Engine.SGLANG if "\nsglang:" in text or text.startswith("sglang:") else Engine.VLLM
        dialect = self._dialect = _DIALECTS[engine]
        names, prefix = dialect.names, dialect.prefix + ":"
        self._lines = len(lines)
        self._layout = layout = []
        for at, line in enumerate(lines):
            if not line.startswith(prefix):
                continue
            end = line.find("{")
            if end >= 0:
                name = line[:end].rstrip()
                if name not in names:
                    continue
                match = _LABELS.match(line, end)
                if match is None:
                    layout.append((at, line, name, ""))  # garbage: no number
                    continue
                start, labels = line[: match.end()], match[1]
            else:
                name, labels = line.split(None, 1)[0], ""
                if name not in names:
                    continue
                start = line[: len(name) + 1]
            layout.append((at, start, name[len(prefix) :], labels))

    def _metrics(self, text: str, numbers: list[str], at_s: float, rank: int | None) -> EngineMetrics:
        found: dict[str, list[tuple[str, float]]] = {}
        configs: list[str] = []
        skipped = 0
        wanted = None if rank is None else str(rank)
        for (_, _, name, labels), number in zip(self._layout, numbers, strict=True):
            if wanted is not None:
                ranked = _RANK.search(labels)
                if ranked is not None and ranked[1] != wanted:
                    continue
            if name == _CONFIG:
                configs.append(labels)
                continue
            try:
                value = float(number)
            except ValueError:
                try:
                    value = float(number.split(None, 1)[0])  # a timestamp follows
                except (ValueError, IndexError):
                    skipped += 1
                    continue
            if not 0.0 <= value < math.inf:
                skipped += 1
                continue
            found.setdefault(name, []).append((labels, value))
        if not found and not configs:
            what = f"{skipped} unreadable values" if skipped else _first_line(text)
            raise TelemetryError(f"no {self._dialect.prefix} metrics: {what}")

        values: dict[str, Any] = {}
        for key, (how, names) in self._dialect.table.items():
            for name in names:
                samples = found.get(name)
                if samples:
                    values[key] = _combined(samples, how) * _UNITS.get(key, 1.0)
                    break
        if self._dialect is _DIALECTS[Engine.SGLANG]:
            for name in _STAGE_NAMES:
                for labels, value in found.get(name, ()):
                    stage = _STAGE.search(labels)
                    if stage is not None and stage[1] in _STAGES:
                        key = _STAGES[stage[1]] + ("_sum_s" if name.endswith("_sum") else "_count")
                        values[key] = values.get(key, 0.0) + value
        if configs:
            _configured(values, configs)
        usage = values.get("kv_usage")
        if usage is not None and usage > 1.0:
            values["kv_usage"] = 1.0
        series = sum(map(len, found.values())) + len(configs)
        return EngineMetrics(at_s=at_s, series=series, skipped=skipped, **values)


def _combined(samples: list[tuple[str, float]], how: int) -> float:
    if len(samples) == 1:
        return samples[0][1]
    if how == _ADD:
        return sum(value for _, value in samples)
    if how == _LARGEST:
        return max(value for _, value in samples)
    if how == _MEAN:
        return sum(value for _, value in samples) / len(samples)
    replicas: dict[str, float] = {}
    for labels, value in samples:
        replica = _REPEATS.sub("", labels).strip(",")
        replicas[replica] = max(value, replicas.get(replica, 0.0))
    total = sum(replicas.values())
    return total / len(replicas) if how == _REPEATED_MEAN else total


def _configured(values: dict[str, Any], configs: list[str]) -> None:
    """Block size and count out of the labels of `cache_config_info`."""
    blocks = 0
    for labels in dict.fromkeys(_REPEATS.sub("", labels) for labels in configs):
        block = _BLOCK.search(labels)
        count = _BLOCKS.search(labels)
        if block is not None and int(block[1]) > 0:
            values["block_tokens"] = int(block[1])
        if count is not None:
            blocks += int(count[1])
    if blocks:
        values["gpu_blocks"] = blocks
        if "block_tokens" in values:
            values.setdefault("kv_capacity_tokens", float(blocks * values["block_tokens"]))


def _first_line(text: str) -> str:
    start = text.lstrip()[:200]
    if not start:
        return "the answer is empty"
    if start[:1] == "<":
        return "the answer is HTML"
    return f"the answer starts with {start.splitlines()[0][:60]!r}"


# --- scraping -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WorkerTelemetry:
    """What is known of one worker.

    Args:
        metrics: the last scrape that worked.
        failures: scrapes that failed since then. total_failures: since the worker was added.
        up: False once it has refused connections several times in a row; True again when it answers anything.
        stale: nothing good was heard for several intervals (or ever).
        errors: how often each kind of error occurred: refused, dns, connection, timeout, http, too_large, not_metrics.
    """

    worker: Worker
    metrics: EngineMetrics | None = None
    scrapes: int = 0
    failures: int = 0
    total_failures: int = 0
    refusals: int = 0
    last_error: str = ""
    up: bool = True
    stale: bool = True
    age_s: float = math.inf
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Target:
    """One URL, and the workers behind it (data-parallel ranks share a server)."""

    url: str
    failures: int = 0
    workers: dict[str, WorkerTelemetry] = field(default_factory=dict)
    parsers: dict[Engine, Parser] = field(default_factory=dict)


_GONE = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


class Scraper:
    """Scrapes the registered workers, and nothing else: redirects are not followed.

    Everything is called from, and calls back on, the event loop it was started in.

    Args:
        on_metrics: called with (worker id, metrics) after each scrape that worked.
        on_up: called with (worker id, up) when the verdict changes.
        interval_s: between two scrapes of a worker; each wait is up to 10 % shorter or longer.
        timeout_s: of one scrape, connection included.
        concurrency: scrapes under way at once.
        stale_after: intervals without a good scrape until a worker counts as stale.
        down_after: refused connections in a row until it counts as down.
        backoff_s: the longest wait; after each failure the wait doubles.
        clock: seconds, monotonic; also what `EngineMetrics.at_s` is in.
    """

    def __init__(
        self,
        on_metrics: Callable[[str, EngineMetrics], None],
        *,
        on_up: Callable[[str, bool], None] | None = None,
        interval_s: float = 0.25,
        timeout_s: float = 1.0,
        concurrency: int = 32,
        stale_after: float = 4.0,
        down_after: int = 3,
        backoff_s: float = 5.0,
        max_bytes: int = MAX_RESPONSE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        for name, number in (("interval_s", interval_s), ("timeout_s", timeout_s), ("stale_after", stale_after)):
            if not 0.0 < number < math.inf:
                raise ValueError(f"{name}: expected a positive number of seconds or intervals, found {number!r}")
        for name, count in (("concurrency", concurrency), ("down_after", down_after), ("max_bytes", max_bytes)):
            if count < 1:
                raise ValueError(f"{name}: expected at least 1, found {count!r}")
        self._on_metrics = on_metrics
        self._on_up = on_up
        self.interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._concurrency = concurrency
        self._stale_s = stale_after * interval_s
        self._down_after = down_after
        self._backoff_s = max(backoff_s, interval_s)
        self._max_bytes = max_bytes
        self._clock = clock
        self._random = random.Random(seed)
        self._workers: dict[str, WorkerTelemetry] = {}
        self._targets: dict[str, _Target] = {}
        self._due: list[tuple[float, int, _Target]] = []  # a heap; an entry of a removed target is passed over
        self._entries = 0
        self._wake = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self.callback_errors = 0

    # --- who is scraped

    def add(self, worker: Worker) -> None:
        """Scrape a worker from now on, or in another way when it is known already."""
        known = self._workers.get(worker.id)
        if known is not None and known.worker.metrics_url == worker.metrics_url:
            known.worker = worker
            return
        self.remove(worker.id)
        telemetry = WorkerTelemetry(worker)
        self._workers[worker.id] = telemetry
        url = worker.metrics_url
        if not url:
            return
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = _Target(url)
            # spread over an interval, so that many workers added at once are not scraped at once
            self._schedule(target, self._random.uniform(0.0, self.interval_s))
        target.workers[worker.id] = telemetry

    def remove(self, worker_id: str) -> bool:
        """Stop scraping a worker and forget it; False: it was not known."""
        telemetry = self._workers.pop(worker_id, None)
        if telemetry is None:
            return False
        target = self._targets.get(telemetry.worker.metrics_url)
        if target is not None:
            target.workers.pop(worker_id, None)
            if not target.workers:
                del self._targets[target.url]
        return True

    def __getitem__(self, worker_id: str) -> WorkerTelemetry:
        """What is known of a worker, its age brought up to now."""
        return self._aged(self._workers[worker_id], self._clock())

    def __iter__(self) -> Iterator[WorkerTelemetry]:
        now = self._clock()
        return iter([self._aged(telemetry, now) for telemetry in self._workers.values()])

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def _aged(self, telemetry: WorkerTelemetry, now: float) -> WorkerTelemetry:
        telemetry.age_s = math.inf if telemetry.metrics is None else max(0.0, now - telemetry.metrics.at_s)
        telemetry.stale = telemetry.age_s > self._stale_s
        return telemetry

    # --- the loop

    async def start(self) -> None:
        """Begin to scrape; does nothing when it has begun."""
        if self._task is None:
            connector = aiohttp.TCPConnector(limit=self._concurrency, limit_per_host=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "text/plain;version=0.0.4"},
            )
            self._task = asyncio.create_task(self._run(), name="scraper")

    async def close(self) -> None:
        """Stop; scrapes under way are dropped."""
        tasks = [task for task in (self._task, *self._under_way) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._under_way.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Scraper:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _schedule(self, target: _Target, wait_s: float) -> None:
        self._entries += 1
        heapq.heappush(self._due, (self._clock() + wait_s, self._entries, target))
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            while self._due and self._targets.get(self._due[0][2].url) is not self._due[0][2]:
                heapq.heappop(self._due)
            wait_s: float | None = None
            if self._due and len(self._under_way) < self._concurrency:
                wait_s = self._due[0][0] - self._clock()
                if wait_s <= 0.0:
                    target = heapq.heappop(self._due)[2]
                    task = asyncio.create_task(self._scrape(target))
                    self._under_way.add(task)
                    task.add_done_callback(self._scraped)
                    continue
            timer = None if wait_s is None else loop.call_later(wait_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _scraped(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._wake.set()

    async def _scrape(self, target: _Target) -> None:
        try:
            text = await self._fetch(target.url)
        except _ScrapeError as error:
            target.failures += 1
            for telemetry in list(target.workers.values()):
                self._failed(telemetry, error)
        except Exception as error:
            # not expected; but one target must not stop the others
            log.exception("scrape of %s", target.url)
            target.failures += 1
            for telemetry in list(target.workers.values()):
                self._failed(telemetry, _ScrapeError("connection", f"{type(error).__name__}: {error}"))
        else:
            self._parsed(target, text)
        if self._targets.get(target.url) is target:
            wait_s = min(self._backoff_s, self.interval_s * 2.0 ** min(target.failures, 30))
            self._schedule(target, wait_s * self._random.uniform(0.9, 1.1))

    async def _fetch(self, url: str) -> str:
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise _ScrapeError("http", f"HTTP {response.status}", answered=True)
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise _ScrapeError("too_large", f"more than {self._max_bytes} bytes", answered=True)
        except TimeoutError:
            raise _ScrapeError("timeout", f"no answer within {self._timeout.total} s") from None
        except aiohttp.ClientConnectorDNSError as error:
            raise _ScrapeError("dns", str(error)) from None
        except aiohttp.ClientConnectorError as error:
            gone = error.os_error.errno in _GONE or _all_gone(error.os_error)
            raise _ScrapeError("refused" if gone else "connection", str(error), refused=gone) from None
        except (aiohttp.ClientError, aiohttp.InvalidURL, OSError, ValueError) as error:
            raise _ScrapeError("connection", f"{type(error).__name__}: {error}") from None
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise _ScrapeError("not_metrics", f"not UTF-8 at byte {error.start}", answered=True) from None

    def _parsed(self, target: _Target, text: str) -> None:
        now = self._clock()
        shared = len(target.workers) > 1
        failed = False
        for telemetry in list(target.workers.values()):
            worker = telemetry.worker
            try:
                parser = target.parsers.get(worker.engine)
                if parser is None:
                    parser = target.parsers[worker.engine] = Parser(worker.engine)
                metrics = parser.parse(text, at_s=now, rank=worker.dp_rank if shared else None)
            except TelemetryError as error:
                failed = True
                self._failed(telemetry, _ScrapeError("not_metrics", str(error), answered=True))
                continue
            telemetry.metrics = metrics
            telemetry.scrapes += 1
            telemetry.failures = telemetry.refusals = 0
            telemetry.last_error = ""
            self._verdict(telemetry, True)
            try:
                self._on_metrics(worker.id, metrics)
            except Exception:
                self.callback_errors += 1
                log.exception("on_metrics of %s", worker.id)
        target.failures = target.failures + 1 if failed else 0

    def _failed(self, telemetry: WorkerTelemetry, error: _ScrapeError) -> None:
        telemetry.failures += 1
        telemetry.total_failures += 1
        telemetry.last_error = str(error)
        telemetry.errors[error.kind] = telemetry.errors.get(error.kind, 0) + 1
        if error.refused:
            telemetry.refusals += 1
            if telemetry.refusals >= self._down_after:
                self._verdict(telemetry, False)
        else:
            telemetry.refusals = 0
            if error.answered:
                self._verdict(telemetry, True)

    def _verdict(self, telemetry: WorkerTelemetry, up: bool) -> None:
        if telemetry.up == up:
            return
        telemetry.up = up
        worker = telemetry.worker.id
        log.warning("worker %s is %s%s", worker, "up" if up else "down: ", "" if up else telemetry.last_error)
        if self._on_up is not None:
            try:
                self._on_up(worker, up)
            except Exception:
                self.callback_errors += 1
                log.exception("on_up of %s", worker)


class _ScrapeError(Exception):
    """A scrape that failed. `answered`: something listens there; `refused`: nothing does."""

    def __init__(self, kind: str, message: str, *, answered: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.answered = answered
        self.refused = refused


def _all_gone(error: OSError) -> bool:
    """Whether every address of a host refused: asyncio then names no one errno."""
    causes = getattr(error, "exceptions", ())
    return bool(causes) and all(isinstance(cause, OSError) and cause.errno in _GONE for cause in causes)


_missing = ({*_VLLM, *_SGLANG}) - {each.name for each in fields(EngineMetrics)}
assert not _missing, f"no such fields: {_missing}"
