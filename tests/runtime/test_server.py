"""The sidecar as a process: its gRPC service, health, drain, reload, TLS and command line."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from runtime.proto import conductor_pb2 as pb
from runtime.proto import conductor_pb2_grpc
from runtime.sidecar import ConfigError, read_config
from serve_policy import app

from ..waiting import eventually
from .conftest import ROOT, Process

SERVICE = "conductor.v1.Conductor"
LARGEST = 200_000


def get(process: Process, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{process.ports['metrics']}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(process: Process, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    total = 0.0
    for family in text_string_to_metric_families(get(process, "/metrics")[1]):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total


def asked(name: str = "", length: int = 100, **fields: Any) -> pb.ScheduleRequest:
    return pb.ScheduleRequest(request_id=name, tokens=np.arange(length, dtype="<u4").tobytes(), **fields)


def fault(call: Any, *arguments: Any, **named: Any) -> grpc.RpcError:
    """The error a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **({"timeout": 60} | named))
    return caught.value


def in_flight(stub: Any) -> int:
    return int(stub.GetState(pb.GetStateRequest(), timeout=60).in_flight)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One for all tests that leave it as it was; two faces on each address."""
    path = tmp_path_factory.mktemp("sidecar") / "cluster.yaml"
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    workers = [
        {"id": name, "role": role, "address": f"127.0.0.1:{1001 + i}"} for i, (name, role) in enumerate(roles.items())
    ]
    described = {
        "block_tokens": 16,
        "prefill": [{"count": 2, "hardware": "h100-llama3-8b"}],
        "decode": [{"count": 2, "hardware": "h100-llama3-8b"}],
        "workers": workers,
    }
    path.write_text(yaml.safe_dump(described))
    process = Process(
        [
            *("--cluster", str(path), "--ext-proc", "127.0.0.1:0", "--indexer", "127.0.0.1:0"),
            *("--max-message-bytes", str(LARGEST), "--scrape-interval-s", "1000"),
        ]
    )
    yield process
    process.stop(signal.SIGKILL)


# --- the service -----------------------------------------------------------------------------------------------------


def test_two_faces_share_an_address(sidecar):
    assert sidecar.ports["grpc"] == sidecar.ports["ext_proc"]
    assert sidecar.ports["metrics"] == sidecar.ports["indexer"]
    assert get(sidecar, "/services")[0] == 200
    assert get(sidecar, "/healthz") == (200, "ok\n")
    assert get(sidecar, "/readyz")[0] == 200


def test_a_request_from_beginning_to_end(sidecar):
    stub = sidecar.stub()
    answer = stub.Schedule(asked("whole", 3200, explain=True))
    chosen = answer.assignment
    assert chosen.prefill.id in ("p0", "p1")
    assert chosen.decode.address in ("127.0.0.1:1003", "127.0.0.1:1004")
    assert (chosen.input_tokens, chosen.source, chosen.lease_s) == (3200, pb.LOCAL, 120.0)
    assert 0.0 < chosen.predicted_tbt_s < chosen.predicted_ttft_s
    assert len(chosen.fallbacks) == 1
    assert answer.explanation == stub.Explain(pb.ExplainRequest(request_id="whole"))
    assert [view.id for view in answer.explanation.prefills if view.chosen] == [chosen.prefill.id]
    assert [view.id for view in answer.explanation.decodes if view.chosen] == [chosen.decode.id]
    assert chosen.prefill.id in answer.explanation.verdict

    def state() -> Any:
        return stub.GetState(pb.GetStateRequest())

    def worker(which: str) -> Any:
        return next(w for w in state().workers if w.worker.id == which)

    def report(**what: Any) -> None:
        assert stub.Report(pb.ReportRequest(events=[pb.Event(request_id="whole", **what)])).unknown == 0

    assert state().in_flight == 1
    assert worker(chosen.decode.id).pending_requests == 1
    report(prefill_started=pb.PrefillStarted())
    report(prefill_done=pb.PrefillDone(prefill_s=0.1, ttft_s=0.2))
    assert worker(chosen.prefill.id).queue_s == 0.0
    report(kv_ready=pb.KvReady())
    report(first_token=pb.FirstToken())
    assert worker(chosen.decode.id).batch == 1
    assert worker(chosen.decode.id).kv_tokens >= 3200
    report(alive=pb.Alive())
    report(finished=pb.Finished(output_tokens=10, tbt_s=0.01))
    assert state().in_flight == 0
    assert stub.Report(pb.ReportRequest(events=[pb.Event(request_id="whole", alive=pb.Alive())])).unknown == 1
    assert metric(sidecar, "conductor_requests_completed_total") >= 1


def test_events_told_twice_or_out_of_order_change_nothing(sidecar):
    stub = sidecar.stub()
    kinds = ("finished", "first_token", "kv_ready", "prefill_done", "prefill_started", "fetch_landed")
    empty = {"finished": pb.Finished, "first_token": pb.FirstToken, "kv_ready": pb.KvReady}
    empty |= {"prefill_done": pb.PrefillDone, "prefill_started": pb.PrefillStarted, "fetch_landed": pb.FetchLanded}
    for first in kinds[1:]:
        stub.Schedule(asked("twice"))
        events = [pb.Event(request_id="twice", **{kind: empty[kind]()}) for kind in (first, first, *kinds[1:])]
        assert stub.Report(pb.ReportRequest(events=events)).unknown == 0
        workers = stub.GetState(pb.GetStateRequest()).workers
        assert sum(w.batch for w in workers) == 1
        assert sum(w.pending_requests + w.queue_requests for w in workers) == 0
        done = pb.ReportRequest(events=[pb.Event(request_id="twice", finished=pb.Finished())] * 2)
        assert [stub.Report(done).unknown for _ in range(2)] in ([0, 1], [0, 2])
        workers = stub.GetState(pb.GetStateRequest()).workers
        assert sum(w.batch + w.pending_requests + w.queue_requests for w in workers) == 0
        assert sum(w.kv_tokens for w in workers) == 0.0


def test_a_stream_is_answered_in_order(sidecar):
    stub = sidecar.stub()
    names = [f"s{i}" for i in range(50)]
    answers = list(stub.ScheduleStream(iter([asked(name, unreported=True) for name in names])))
    assert [answer.request_id for answer in answers] == names
    stub.Report(pb.ReportRequest(events=[pb.Event(request_id=n, failed=pb.Failed(stage="client")) for n in names]))
    assert in_flight(stub) == 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (asked("bad", lease_s=-1.0).SerializeToString(), "bad: lease_s"),
        (b"\xff\xff", "the message cannot be read"),
    ],
)
def test_what_came_before_a_bad_message_is_answered(sidecar, bad, said):
    with sidecar.channel() as channel:
        call = channel.stream_stream("/conductor.v1.Conductor/ScheduleStream", None, pb.ScheduleResponse.FromString)
        names = [f"good{i}" for i in range(50)]
        given = [asked(name, dry_run=True).SerializeToString() for name in [*names, "never"]]
        answers = call(iter([*given[:-1], bad, given[-1]]))
        assert [next(answers).request_id for _ in names] == names
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(said)


def wrong_lines(log: list[str]) -> list[str]:
    return [line for line in log if "ERROR" in line or "Traceback" in line or "never retrieved" in line]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_stream_that_is_cut_leaves_nothing(sidecar, end):
    said = len(sidecar.log)
    with sidecar.channel() as channel:
        answers = conductor_pb2_grpc.ConductorStub(channel).ScheduleStream(asked(lease_s=0.5) for _ in range(200))
        next(answers)
        if end == "cancel":
            answers.cancel()
    stub = sidecar.stub()
    eventually(lambda: in_flight(stub) == 0)
    assert wrong_lines(sidecar.log[said:]) == []


async def test_an_answer_that_nobody_takes_any_more_is_no_error(sidecar):
    """The client reads nothing until the connection holds no more, and goes."""
    said = len(sidecar.log)
    request = asked("x" * 250, dry_run=True, explain=True).SerializeToString()
    small = [("grpc.http2.bdp_probe", 0)]  # buffers of 64 KiB, however fast the connection is
    for i in range(40):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{sidecar.ports['grpc']}", options=small) as channel:
            call = channel.stream_stream("/conductor.v1.Conductor/ScheduleStream", None, None)()
            sending = asyncio.create_task(sent(call, [request] * 400))
            await asyncio.sleep(0.15)
            if i % 2:
                call.cancel()
        sending.cancel()
        await asyncio.wait([sending])
    assert not sidecar.says("Traceback", within_s=0.5)
    assert wrong_lines(sidecar.log[said:]) == []


async def sent(call: Any, messages: list[bytes]) -> None:
    for message in messages:
        await call.write(message)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "prompt"),
        ({"tokens": b"12345"}, "tokens"),
        ({"tokens": b""}, "input_tokens"),
        ({"block_hashes": pb.BlockHashes(hashes=b"123", input_tokens=5)}, "block_hashes.hashes"),
        ({"block_hashes": pb.BlockHashes(hashes=b"12345678" * 3, input_tokens=5)}, "block_hashes"),
        ({"input_tokens": 2**32 - 1}, "input_tokens"),
        ({"input_tokens": 5, "lease_s": math.nan}, "lease_s"),
        ({"input_tokens": 5, "lease_s": math.inf}, "lease_s"),
        ({"input_tokens": 5, "lease_s": 1e9}, "lease_s"),
        ({"input_tokens": 5, "ttft_slo_s": -1.0}, "ttft_slo_s"),
        ({"input_tokens": 5, "tbt_slo_s": math.nan}, "tbt_slo_s"),
        ({"input_tokens": 5, "tenant": "t" * 300}, "tenant"),
        ({"input_tokens": 5, "request_id": "r" * 300}, "request_id"),
    ],
)
def test_a_request_that_cannot_be_names_its_field(sidecar, fields, named):
    error = fault(sidecar.stub().Schedule, pb.ScheduleRequest(**fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(named)


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"events": [{}, {"finished": {"decode_s": math.inf}}]}, "events[1].finished.decode_s"),
        ({"events": [{"finished": {"tbt_s": -1.0}}]}, "events[0].finished.tbt_s"),
        ({"events": [{"finished": {"output_tokens": 2**32 - 1}}]}, "events[0].finished.output_tokens"),
        ({"events": [{"prefill_started": {"expected_end_s": math.nan}}]}, "events[0].prefill_started.expected_end_s"),
        ({"events": [{"prefill_done": {"prefill_s": 1e300}}]}, "events[0].prefill_done.prefill_s"),
        ({"events": [{"first_token": {"stall_s": math.inf}}]}, "events[0].first_token.stall_s"),
        ({"events": [{"failed": {"stage": "of its own"}}]}, "events[0].failed.stage"),
        ({"loads": [{"worker_id": "d0", "kv_tokens": math.nan}]}, "loads[0].kv_tokens"),
        ({"loads": [{"worker_id": "p0", "prefill_end_s": math.inf}]}, "loads[0].prefill_end_s"),
    ],
)
def test_a_report_that_would_spoil_predictions_is_refused_whole(sidecar, report, named):
    stub = sidecar.stub()
    stub.Schedule(asked("kept"))
    events = [{"request_id": "kept", "finished": {}}, *({"request_id": "kept"} | e for e in report.get("events", ()))]
    shifted = re.sub(r"events\[(\d)\]", lambda found: f"events[{int(found[1]) + 1}]", named)
    loads = [pb.WorkerLoad(**load) for load in report.get("loads", ())]
    message = pb.ReportRequest(events=[pb.Event(**event) for event in events], loads=loads)
    error = fault(stub.Report, message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(shifted)
    assert in_flight(stub) == 1
    stub.Report(pb.ReportRequest(events=[pb.Event(request_id="kept", finished=pb.Finished())]))
    assert math.isfinite(stub.Schedule(asked("after", dry_run=True)).assignment.predicted_ttft_s)


def test_loads_and_explanations_of_nobody(sidecar):
    stub = sidecar.stub()
    error = fault(stub.Report, pb.ReportRequest(loads=[pb.WorkerLoad(worker_id="nobody")]))
    assert (error.code(), "nobody" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)
    assert fault(stub.Explain, pb.ExplainRequest(request_id="nobody")).code() == grpc.StatusCode.NOT_FOUND


def test_workers_register_and_leave(sidecar):
    stub = sidecar.stub()
    worker = pb.Worker(id="d9", role="decode", address="127.0.0.1:1009", metrics="http://127.0.0.1:9/metrics")
    worker.connector = "store"
    assert stub.Register(pb.RegisterRequest(worker=worker)).added
    assert not stub.Register(pb.RegisterRequest(worker=worker)).added
    shown = {each.worker.id: each.worker for each in stub.GetState(pb.GetStateRequest()).workers}
    assert shown["d9"].connector == "store" and shown["d0"].connector == ""
    answer = stub.Schedule(asked("only", candidates=["127.0.0.1:1009"]))
    assert answer.assignment.decode.id == "d9"
    assert stub.Deregister(pb.DeregisterRequest(id="d9")).removed
    assert not stub.Deregister(pb.DeregisterRequest(id="d9")).removed
    assert in_flight(stub) == 0
    assert stub.Explain(pb.ExplainRequest(request_id="only")).decodes[2].id == "d9"
    answer = stub.Schedule(asked("none", candidates=["127.0.0.1:1009"])).rejection  # no destination is not registered
    assert (answer.reason, answer.http_status) == ("rejected-no-endpoints", 503)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "worker.id"),
        ({"role": "cook"}, "worker.role"),
        ({"engine": "steam"}, "worker.engine"),
        *(
            ({"address": where}, "worker.address")
            for where in ("here", "h:0", "h:٣", "a/b@c:80", "a b:80", "a\r\nx:80")
        ),
        ({"kv_events": "http://127.0.0.1:1"}, "worker.kv_events"),
        ({"kv_replay": "tcp://127.0.0.1"}, "worker.kv_replay"),
        ({"metrics": "file:///etc/passwd"}, "worker.metrics"),
        ({"metrics": "http://"}, "worker.metrics"),
    ],
)
def test_a_worker_that_cannot_be_names_its_field(sidecar, fields, named):
    stub = sidecar.stub()
    worker = pb.Worker(**({"id": "w" if fields else "", "role": "decode"} | fields))
    error = fault(stub.Register, pb.RegisterRequest(worker=worker))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(named)
    assert len(stub.GetState(pb.GetStateRequest()).workers) == 4


def test_the_last_of_a_role_stays(sidecar):
    stub = sidecar.stub()
    assert stub.Deregister(pb.DeregisterRequest(id="p0")).removed
    error = fault(stub.Deregister, pb.DeregisterRequest(id="p1"))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    stub.Register(pb.RegisterRequest(worker=pb.Worker(id="p0", role="prefill", address="127.0.0.1:1001")))
    assert len(stub.GetState(pb.GetStateRequest()).workers) == 4


def test_health_and_reflection(sidecar):
    channel = sidecar.channel()
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE, "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
    assert fault(health.Check, health_pb2.HealthCheckRequest(service="no.such")).code() == grpc.StatusCode.NOT_FOUND
    reflected = ProtoReflectionDescriptorDatabase(channel)
    services = set(reflected.get_services())
    assert {SERVICE, "grpc.health.v1.Health", "envoy.service.ext_proc.v3.ExternalProcessor"} <= services
    assert reflected.FindFileContainingSymbol(SERVICE).package == "conductor.v1"


def test_a_message_that_is_too_large_is_refused_and_nothing_else(sidecar):
    stub = sidecar.stub()
    error = fault(stub.Schedule, asked("large", (LARGEST + (1 << 20)) // 4 + 100))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = stub.Schedule(asked("fits", LARGEST // 4 - 100, dry_run=True))
    assert answer.request_id == "fits"


CLIENT = """
import sys, time
import grpc
from runtime.proto import conductor_pb2 as pb, conductor_pb2_grpc
stub = conductor_pb2_grpc.ConductorStub(grpc.insecure_channel(sys.argv[1]))
def requests():
    for i in range(20):
        yield pb.ScheduleRequest(request_id=f"dies-{i}", input_tokens=500, lease_s=1.0)
    time.sleep(600)
for i, answer in enumerate(stub.ScheduleStream(requests())):
    if i == 19:
        print("ready", flush=True)
"""


def test_nothing_is_left_of_a_client_that_was_killed(sidecar):
    stub = sidecar.stub()
    expired = metric(sidecar, "conductor_leases_expired_total")
    where = f"127.0.0.1:{sidecar.ports['grpc']}"
    client = subprocess.Popen([sys.executable, "-c", CLIENT, where], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    eventually(lambda: in_flight(stub) == 0)
    assert metric(sidecar, "conductor_leases_expired_total") == expired + 20
    workers = stub.GetState(pb.GetStateRequest()).workers
    assert sum(w.batch + w.pending_requests + w.queue_requests for w in workers) == 0


# --- going down ------------------------------------------------------------------------------------------------------


def test_calls_under_way_end_before_the_process_does(serve, cluster_file):
    process = serve("--cluster", str(cluster_file()), "--drain-s", "60")
    stub, health = process.stub(), health_pb2_grpc.HealthStub(process.channel())
    go_on = threading.Event()

    def requests() -> Iterator[pb.ScheduleRequest]:
        yield asked("before")
        go_on.wait(60)
        yield asked("after")

    answers = stub.ScheduleStream(requests())
    assert next(answers).WhichOneof("result") == "assignment"
    watched = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    process.process.send_signal(signal.SIGTERM)
    assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watched.cancel()
    assert get(process, "/readyz") == (503, "draining\n")
    other = process.stub()
    eventually(lambda: fault(other.Schedule, asked("new")).code() == grpc.StatusCode.UNAVAILABLE)
    assert process.process.poll() is None
    go_on.set()
    rejection = next(answers).rejection
    assert (rejection.reason, rejection.http_status) == ("rejected-shutting-down", 503)
    assert list(answers) == []
    assert process.process.wait(30) == 0


def test_a_drain_has_an_end(serve, cluster_file):
    process = serve("--cluster", str(cluster_file()), "--drain-s", "0.5")
    held = threading.Event()
    answers = process.stub().ScheduleStream(iter(lambda: asked("x") if not held.wait(120) else None, None))
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(60) == 0
    held.set()
    with pytest.raises(grpc.RpcError):
        next(answers)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_over_ipv6(serve, cluster_file):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on the loopback interface")
    faces = ["--grpc", "[::1]:0", "--metrics", "[::1]:0"]
    process = serve("--cluster", str(cluster_file()), *faces, "--peer", "[::1]:1")
    assert process.says("starting cold: [::1]:1: UNAVAILABLE")  # a peer that is not there is no reason not to start
    channel = grpc.insecure_channel(f"[::1]:{process.ports['grpc']}")
    assert conductor_pb2_grpc.ConductorStub(channel).Schedule(asked("six")).HasField("assignment")
    with urllib.request.urlopen(f"http://[::1]:{process.ports['metrics']}/healthz") as answer:
        assert answer.status == 200
    assert process.stop(signal.SIGINT) == 0


# --- changing while serving ------------------------------------------------------------------------------------------

MISBEHAVING = "tests.runtime.failing_policies:Misbehaving"


def test_a_scrape_right_after_an_answer_has_it(serve, cluster_file):
    """Counting is put off until the answer is on its way, not until after the next scrape."""
    process = serve("--cluster", str(cluster_file()))
    stub = process.stub()
    for count in range(1, 101):
        stub.Schedule(asked(lease_s=0.5), timeout=60)
        assert metric(process, "conductor_requests_total") == count


def test_policies_and_workers_change_while_serving(serve, cluster_file, tmp_path, monkeypatch):
    orders, config = tmp_path / "orders", tmp_path / "config.yaml"
    monkeypatch.setenv("CONDUCTOR_TEST_ORDERS", str(orders))
    orders.write_text("")
    config.write_text("shadow: round_robin\n")
    path = cluster_file()
    process = serve("--cluster", str(path), "--config", str(config), "--deadline-ms", "100")
    stub = process.stub()

    def decided() -> Any:
        return stub.Schedule(asked(dry_run=True), timeout=60)

    def reloaded(how: str, change: Callable[[], object], *, hangup: bool = True) -> str:
        """Change a file; the log's line on it."""
        before, lines = metric(process, "conductor_config_reloads_total", result=how), len(process.log)
        change()
        if hangup:
            process.process.send_signal(signal.SIGHUP)
        eventually(lambda: metric(process, "conductor_config_reloads_total", result=how) > before, 60)
        eventually(lambda: any("reloaded" in line for line in process.log[lines:]))  # it comes through a pipe
        return "".join(process.log[lines:])

    def replaced(file: Path, text: str) -> Callable[[], None]:
        def replace() -> None:  # at once, as a mounted ConfigMap changes
            new = file.with_suffix(".new")
            new.write_text(text)
            new.replace(file)

        return replace

    stub.Schedule(asked("kept", lease_s=1000.0))
    stub.Register(pb.RegisterRequest(worker=pb.Worker(id="p7", role="prefill", address="127.0.0.1:1007")))
    assert decided().policy == "conductor+predictive"
    # taken: by the watcher alone
    reloaded("ok", replaced(config, f"policy: {MISBEHAVING}\ntenants: {{paying: 3}}\n"), hangup=False)
    eventually(lambda: decided().policy == MISBEHAVING)
    # a policy that fails is fallen back from, and counted
    for order, cause in (("raise", "error"), ("nan", "invalid"), ("outside", "invalid"), ("hang", "deadline")):
        orders.write_text(order)
        before = metric(process, "conductor_policy_fallbacks_total", cause=cause)
        answer = stub.Schedule(asked(lease_s=0.5), timeout=60)
        assert (answer.fell_back, answer.policy) == (cause, "conductor+slo")
        assert metric(process, "conductor_policy_fallbacks_total", cause=cause) == before + 1
    assert decided().fell_back == "hung"
    orders.write_text("")
    eventually(lambda: decided().fell_back == "")
    # refused, each with its reason; nothing changes
    good = path.read_text()
    workers = yaml.safe_load(good)
    for file, text, reason in (
        (config, "policy: no_such\n", "no_such"),
        (config, "canary_share: 0.5\n", "canary_share needs canary"),
        (path, "{not yaml", "not YAML"),
        (path, yaml.safe_dump(workers | {"block_tokens": 32}), "block_tokens cannot change"),
        (path, yaml.safe_dump(workers | {"workers": workers["workers"][:2]}), "at least one"),
    ):
        kept = config.read_text() if file == config else good
        assert reason in reloaded("refused", replaced(file, text), hangup=False), text
        assert decided().policy == MISBEHAVING
        reloaded("ok", replaced(file, kept), hangup=False)
    assert in_flight(stub) == 1
    # a policy that hangs when it is tried does not stop the present one
    orders.write_text("hang")
    replaced(config, f"policy: round_robin\nshadow: {MISBEHAVING}\n")()
    process.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    asked_s = time.monotonic()
    for _ in range(5):
        stub.Schedule(asked(dry_run=True), timeout=60)
    assert time.monotonic() - asked_s < 30.0
    orders.write_text("")
    eventually(lambda: decided().policy == "round_robin")
    # another worker in the file; the one that had registered stays, and so does what is in flight
    more = workers | {"workers": [*workers["workers"], {"id": "d5", "role": "decode", "address": "127.0.0.1:1005"}]}
    reloaded("ok", replaced(path, yaml.safe_dump(more)))
    names = {shown.worker.id for shown in stub.GetState(pb.GetStateRequest()).workers}
    assert names == {"p0", "p1", "p7", "d0", "d1", "d5"}
    assert in_flight(stub) == 1
    # what the file says no more is what the command line said
    reloaded("ok", replaced(config, "{}\n"))
    assert decided().policy == "conductor+predictive"
    assert process.stop() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("polices: conductor", "polices: no such field; expected policy"),
        ("canary_share: 7", "canary_share: expected a number in 0 .. 1, found 7"),
        ("canary_share: .nan", "canary_share: expected"),
        ("tenants: {a: 0}", "tenants: expected a weight above 0"),
        ("tenants: [a]", "tenants: expected"),
        ("policy: 5", "policy: expected the name of a policy"),
        ("[]", "expected a mapping"),
        ("", "expected a mapping"),
        ("{not yaml", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_names_its_field(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {re.escape(said)}"):
        read_config(path)


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority `ca`, and `server`, `client` by it, and `stranger` by itself: NAME.pem, NAME.key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]

    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        run(*new, "-x509", "-days", "2", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name in ("server", "client"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = [
            "openssl",
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
        ]
        run(*signed, "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
    return folder


def secure(folder: Path, port: int, who: str = "", authority: str = "ca") -> Any:
    parts = [(folder / f"{authority}.pem").read_bytes()]
    if who:
        parts += [(folder / f"{who}.key").read_bytes(), (folder / f"{who}.pem").read_bytes()]
    channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(*parts))
    return conductor_pb2_grpc.ConductorStub(channel)


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mtls"])
def test_tls(serve, cluster_file, certificates, mutual, tmp_path):
    flags = ["--tls-certificate", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key")]
    if mutual:
        flags += ["--tls-client-ca", str(certificates / "ca.pem")]
    process = serve("--cluster", str(cluster_file()), *flags)
    port = process.ports["grpc"]
    assert secure(certificates, port, "client").Schedule(asked("mine"), timeout=60).HasField("assignment")
    unavailable = grpc.StatusCode.UNAVAILABLE
    if mutual:
        for who in ("", "stranger"):
            assert fault(secure(certificates, port, who).Schedule, asked(), timeout=20).code() == unavailable
        replica = serve("--cluster", str(cluster_file()), *flags, "--peer", f"localhost:{port}")
        assert replica.says("restored 0 blocks from localhost")
    else:
        assert secure(certificates, port).Schedule(asked("anyone"), timeout=60).HasField("assignment")
    wrong = secure(certificates, port, "client", authority="stranger")
    assert fault(wrong.Schedule, asked(), timeout=20).code() == unavailable
    assert fault(process.stub().Schedule, asked(), timeout=20).code() == unavailable  # not in the clear


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def watchdog(seconds: int = 120) -> Iterator[None]:
    """What is wrongly served would be so for ever."""

    def late(*_: object) -> None:
        raise AssertionError(f"still running after {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--grpc", "nowhere"], "--grpc: expected HOST:PORT, found 'nowhere'"),
        (["--grpc", ":1"], "--grpc: expected HOST:PORT"),
        (["--metrics", "127.0.0.1:99999"], "--metrics: expected HOST:PORT"),
        (["--ext-proc", "127.0.0.1:²"], "--ext-proc: expected HOST:PORT"),
        (["--peer", "nowhere"], "--peer: expected HOST:PORT"),
        (["--grpc", "TAKEN"], "--grpc: cannot bind"),
        (["--metrics", "TAKEN"], "--metrics: cannot bind"),
        (["--policy", "no_such"], "no_such"),
        (["--policy", "conductor+no_such"], "no_such"),
        (["--policy", "no_such_module:Policy"], "no_such_module"),
        (["--policy", "tests.runtime.failing_policies:Unmakeable"], "no weights"),
        (["--fallback", "tests.runtime.failing_policies:Scripted"], "must be a heuristic"),
        (["--cluster", "missing.yaml"], "missing.yaml"),
        (["--cluster", "BAD"], "prefill.0.count"),
        (["--config", "missing.yaml"], "missing.yaml: cannot be read"),
        (["--canary-share", "0.5"], "--canary-share needs --canary"),
        (["--tls-key", "key.pem"], "--tls-certificate and --tls-key are needed together"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca needs"),
        (["--tls-key", "missing.pem", "--tls-certificate", "missing.pem"], "--tls-certificate: "),
        (["--tls-key", "BAD", "--tls-certificate", "BAD"], "--tls-certificate"),
        (["--snapshot", "/dev"], "/dev"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_status_2(flags, said, taken, cluster_file):
    bad = str(cluster_file(prefill=[{"count": 0, "hardware": "h100-llama3-8b"}], workers=None))
    given = [{"TAKEN": taken, "BAD": bad}.get(flag, flag) for flag in flags]
    default = [] if "--grpc" in flags else ["--grpc", "127.0.0.1:0"]
    with watchdog():
        result = CliRunner().invoke(app, [*default, *given])
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert result.exit_code == 2, (result.output, result.exception)
    assert len(lines) == 1, lines
    assert lines[0].startswith("serve_policy.py: ")
    assert said in lines[0]


def test_wrong_flags_of_a_real_process():
    command = [sys.executable, str(ROOT / "serve_policy.py"), "--policy", "no_such"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("serve_policy.py: no policy is called 'no_such'")
    assert done.stderr.count("\n") == 1
    command[-2:] = ["--deadline-ms", "soon"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"}
    )
    assert done.returncode == 2
    assert "--deadline-ms" in done.stderr


def test_help_shows_examples():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "examples:" in shown
    assert shown.count("python serve_policy.py") >= 3
    assert "127.0.0.1:50051" in shown  # on the loopback interface unless told otherwise
