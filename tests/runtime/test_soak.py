"""Half of what the sidecar can take, for long, with all that goes wrong meanwhile: nothing is left, nothing grows."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter, deque
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from runtime.proto import conductor_pb2 as pb
from runtime.proto import conductor_pb2_grpc

from ..waiting import eventually
from .live_workers import Publisher
from .test_server import metric

LEASE_S = 2.0
DRIVERS = 3


class Driver:
    """Clients: requests at a rate (0: as fast as they are answered) that end well, fail, or fall silent."""

    def __init__(self, address: str, seed: int) -> None:
        self.address = address
        self.random = random.Random(seed)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.number = 0

    def drive(self, until_s: float, rate: float) -> None:
        self.channel = grpc.insecure_channel(self.address)
        stub = conductor_pb2_grpc.ConductorStub(self.channel)
        under_way: deque[str] = deque()
        next_s = time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            if rate:
                next_s = max(next_s + self.random.expovariate(rate), now_s - 1.0)
                time.sleep(max(0.0, next_s - now_s))
            try:
                self.one(stub, under_way)
            except grpc.RpcError as error:
                self.unexpected.append(f"{error.code()}: {error.details()}")
        self.channel.close()

    def one(self, stub: Any, under_way: deque[str]) -> None:
        self.number += 1
        name = f"{self.seed}-{self.number}"
        length, first = self.random.randrange(16, 600), 1000 * self.random.randrange(200)
        tokens = np.arange(first, first + length, dtype="<u4").tobytes()
        asked = pb.ScheduleRequest(request_id=name, tokens=tokens, tenant=f"t{self.number % 300}")
        fate = self.random.random()
        if fate < 0.01:  # a client that dies on its stream
            stream = stub.ScheduleStream(iter([asked]))
            next(stream)
            stream.cancel()
            self.counts["died"] += 1
            return
        answer = stub.Schedule(asked, timeout=60)
        if answer.HasField("rejection"):
            self.counts[answer.rejection.reason] += 1
            return
        self.counts["assigned"] += 1
        if fate < 0.05:  # one that is never heard of again
            self.counts["silent"] += 1
            return
        under_way.append(name)
        if len(under_way) < 8:
            return
        done, events = under_way.popleft(), []
        if fate < 0.1:
            events = [
                pb.Event(request_id=done, failed=pb.Failed(stage=self.random.choice(("client", "prefill", "decode"))))
            ]
        else:
            events = [
                pb.Event(request_id=done, prefill_done=pb.PrefillDone(prefill_s=0.01, ttft_s=0.02)),
                pb.Event(request_id=done, first_token=pb.FirstToken()),
                pb.Event(request_id=done, finished=pb.Finished(output_tokens=20, tbt_s=0.01)),
            ]
        stub.Report(pb.ReportRequest(events=events), timeout=60)


def churn(stub: Any, publisher: Publisher, until_s: float) -> None:
    """Workers come and go; one of them publishes what it caches."""
    chance = random.Random(0)
    first = 0
    while time.monotonic() < until_s:
        for role in ("prefill", "decode"):
            worker = pb.Worker(id=f"{role}-extra", role=role, address="127.0.0.1:1")
            stub.Register(pb.RegisterRequest(worker=worker), timeout=60)
        for _ in range(10):
            first += 1000
            publisher.prompt(chance.randrange(16, 900), first)
            if len(publisher.resident) > 5000:
                publisher.publish(removed=chance.sample(sorted(publisher.resident), 1000))
            time.sleep(0.1)
        for role in ("prefill", "decode"):
            stub.Deregister(pb.DeregisterRequest(id=f"{role}-extra"), timeout=60)


def together(drivers: list[Driver], seconds: float, rate: float) -> float:
    """Requests per second."""
    before = sum(driver.number for driver in drivers)
    started_s = time.monotonic()
    until_s = started_s + seconds
    threads = [threading.Thread(target=driver.drive, args=(until_s, rate / len(drivers))) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (sum(driver.number for driver in drivers) - before) / (time.monotonic() - started_s)


def soak(serve, cluster_file, seconds: float, measured_s: float, slack_bytes: float) -> None:
    publisher = Publisher()
    workers = [{"id": f"p{i}", "role": "prefill", "address": f"127.0.0.1:{2000 + i}"} for i in range(4)]
    workers += [{"id": f"d{i}", "role": "decode", "address": f"127.0.0.1:{2100 + i}"} for i in range(4)]
    workers[0] |= publisher.endpoints
    flags = ["--lease-s", str(LEASE_S), "--blocks", "65536", "--in-flight", "8192", "--approximate-ttl-s", "5"]
    flags += ["--scrape-interval-s", "1000"]
    process = serve("--cluster", str(cluster_file(workers=workers)), *flags, "--policy", "conductor+predictive")
    stub = process.stub()
    resources = psutil.Process(process.process.pid)
    drivers = [Driver(f"127.0.0.1:{process.ports['grpc']}", seed) for seed in range(DRIVERS)]
    capacity = together(drivers, measured_s, 0.0)
    memory: list[int] = []
    until_s = time.monotonic() + seconds
    changes = threading.Thread(target=churn, args=(process.stub(), publisher, until_s))
    changes.start()
    halted = threading.Event()

    def watch() -> None:
        while not halted.wait(seconds / 200):
            memory.append(resources.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    rate = together(drivers, seconds, capacity / 2)
    halted.set()
    watcher.join()
    changes.join()
    counts = sum((driver.counts for driver in drivers), Counter())
    unexpected = [error for driver in drivers for error in driver.unexpected]
    fifth = len(memory) // 5
    early, late = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    print(
        f"{capacity:.0f} requests/s at most, {rate:.0f}/s for {seconds:g} s: {dict(counts)}; "
        f"RSS {early / 1e6:.1f} MB in the second fifth, {late / 1e6:.1f} MB in the last"
    )
    assert not unexpected, unexpected[:5]
    assert counts["assigned"] > 0
    assert late - early < max(0.1 * early, slack_bytes), [m >> 20 for m in memory[::5]]

    def state() -> Any:
        return stub.GetState(pb.GetStateRequest(), timeout=60)

    eventually(lambda: state().in_flight == 0, 60)
    for shown in state().workers:
        assert (shown.batch, shown.pending_requests, shown.queue_requests) == (0, 0, 0), shown
        assert (shown.queue_s, shown.kv_tokens) == (0.0, 0.0), shown
    assert state().blocks <= 65536
    held = len(publisher.resident)
    eventually(
        lambda: next(w for w in state().workers if w.worker.id == "p0").device_blocks == held,
        what=lambda: (state().workers[0], held),
    )
    assert metric(process, "conductor_metrics_errors_total") == 0
    traced = [i for i, line in enumerate(process.log) if "Traceback" in line]
    assert not traced, "".join(process.log[max(0, traced[0] - 5) : traced[0] + 60])
    publisher.close()
    assert process.stop() == 0


def test_a_quarter_of_a_minute_at_half_load(serve, cluster_file):
    soak(serve, cluster_file, 15.0, 4.0, 24e6)


@pytest.mark.slow
def test_ten_minutes_at_half_load(serve, cluster_file):
    soak(serve, cluster_file, 600.0, 10.0, 0.0)
