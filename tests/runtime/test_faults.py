"""What goes wrong around a sidecar, done to a real one: workers, their events, its own death, nonsense, too much."""

from __future__ import annotations

import io
import json
import math
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil
import pytest
import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from runtime.block_hash import hash_blocks
from runtime.prefix_index import Medium
from runtime.proto import conductor_pb2 as pb
from runtime.proto import conductor_pb2_grpc
from runtime.snapshot import SnapshotError, capture, encode, restore

from ..waiting import eventually
from .conftest import Process
from .live_workers import Engine, Publisher
from .test_conductor import made
from .test_server import asked, get, in_flight, metric

# --- workers ---------------------------------------------------------------------------------------------------------


def test_workers_die_hang_and_talk_nonsense(serve, cluster_file):
    with Engine() as first, Engine() as second:
        workers = [
            {"id": "p0", "role": "prefill", "address": "127.0.0.1:1"},
            {"id": "d0", "role": "decode", "address": first.address},
            {"id": "d1", "role": "decode", "address": second.address},
        ]
        process = serve("--cluster", str(cluster_file(workers=workers)), "--scrape-interval-s", "0.05")
        stub = process.stub()

        def shown(which: str) -> Any:
            return next(w for w in stub.GetState(pb.GetStateRequest()).workers if w.worker.id == which)

        def chosen(count: int = 12) -> set[str]:
            """Who decodes when nothing else is going on."""
            names = set()
            for i in range(count):
                name = f"c{i}"
                names.add(stub.Schedule(asked(name)).assignment.decode.id)
            for i in range(count):
                stub.Report(pb.ReportRequest(events=[pb.Event(request_id=f"c{i}", failed=pb.Failed(stage="client"))]))
            return names

        eventually(lambda: shown("d0").up and shown("d1").up and not shown("d0").note and not shown("d1").note)
        assert chosen() == {"d0", "d1"}
        # killed: not chosen any more, until it is back
        first.stop()
        eventually(lambda: not shown("d0").up)
        assert shown("d0").note.startswith("down: ")
        assert chosen() == {"d1"}
        assert metric(process, "conductor_worker_up", worker="d0") == 0
        first.start()
        eventually(lambda: shown("d0").up)
        eventually(lambda: not shown("d0").note)
        assert chosen() == {"d0", "d1"}
        # hangs: stale, not down, and what it had is not taken to be gone
        second.running = 60
        eventually(lambda: shown("d1").batch == 60)
        second.mode = "hang"
        eventually(lambda: shown("d1").note.startswith("stale"))
        assert shown("d1").up
        assert shown("d1").batch == 60
        assert metric(process, "conductor_worker_metrics_stale", worker="d1") == 1
        assert chosen() == {"d0"}
        # talks nonsense: the same
        second.mode = "garbage"
        second._released.set()
        eventually(lambda: "UTF-8" in shown("d1").note)
        assert shown("d1").up
        assert chosen() == {"d0"}
        # all gone: then anybody is better than nobody
        first.stop()
        second.stop()
        eventually(lambda: "down" in shown("d0").note and "down" in shown("d1").note)
        assert stub.Schedule(asked("panic")).HasField("assignment")
        first.start()
        second.start()


# --- KV events, death and restart ------------------------------------------------------------------------------------


def contents(stub: Any) -> dict[str, set[tuple[int, int]]]:
    """By worker: (hash of a block, media it is on), as the index has them."""
    data = b"".join(chunk.data for chunk in stub.Snapshot(pb.SnapshotRequest()))
    with np.load(io.BytesIO(data)) as file:
        names = json.loads(file["meta"].tobytes())["prefills"]
        hashes, media = file["index.hashes"].tolist(), file["index.media"]
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in names}
    for i, name in enumerate(names):
        word, bit = divmod(i, 16)
        rows = [((media[:, word] >> (16 * row + bit)) & 1).tolist() for row in range(3)]
        for block, *here in zip(hashes, *rows, strict=True):
            if any(here):
                found[name].add((block, sum(flag << row for row, flag in enumerate(here))))
    return found


def test_the_index_survives_whatever_happens_to_events_and_to_the_sidecar(serve, cluster_file, tmp_path):
    publishers = [Publisher(), Publisher()]
    workers = [
        {"id": f"p{i}", "role": "prefill", "address": f"127.0.0.1:{i + 1}", **publisher.endpoints}
        for i, publisher in enumerate(publishers)
    ]
    workers.append({"id": "d0", "role": "decode", "address": "127.0.0.1:9"})
    flags = ["--cluster", str(cluster_file(workers=workers)), "--scrape-interval-s", "1000", "--blocks", "65536"]
    snapshot = tmp_path / "snapshot"
    kept = [*flags, "--snapshot", str(snapshot), "--snapshot-every-s", "0.2"]
    control, mortal = serve(*flags), serve(*kept)

    def told() -> dict[str, set[int]]:
        return {f"p{i}": set(publisher.resident) for i, publisher in enumerate(publishers)}

    def wrong(process: Process) -> str:
        """In what the index differs from what the workers have."""
        have, should = contents(process.stub()), told()
        for name, blocks in should.items():
            known = {block for block, _ in have[name]}
            if known != blocks:
                return f"{name}: {len(known - blocks)} too many, {len(blocks - known)} too few of {len(blocks)}"
        return ""

    def agreed(*processes: Process) -> None:
        for process in processes:
            eventually(lambda process=process: not wrong(process), what=lambda process=process: wrong(process))

    first = 0

    def work(which: int, prompts: int, **how: Any) -> None:
        nonlocal first
        for _ in range(prompts):
            first += 10_000
            publishers[which].prompt(800, first, **how)

    def written() -> None:
        """Wait for the snapshot that is begun after now."""
        for _ in range(2):
            before = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
            eventually(lambda before=before: snapshot.exists() and snapshot.stat().st_mtime_ns > before)

    try:
        work(0, 30)
        work(1, 20)
        publishers[0].publish(removed=sorted(publishers[0].resident)[:300])
        agreed(control, mortal)
        # duplicates, late ones, a gap, nonsense
        for publisher in publishers:
            for back in (0, 3, 0, 7):
                publisher.again(back)
        publishers[0].prompt(1600, 5, silent=True)
        work(0, 2)
        for frames in ((b"kv",), (b"kv", b"123", b"456"), (b"kv", b"\xff" * 8, b"\xc1"), ()):
            publishers[1].send(*(frames or (b"",)))
        work(1, 1)
        agreed(control, mortal)
        # killed, with events after the last snapshot and while it was down
        written()
        work(1, 5)
        mortal.stop(signal.SIGKILL)
        work(0, 5)
        publishers[1].publish(removed=sorted(publishers[1].resident)[:100])
        mortal = serve(*kept)
        assert mortal.says("restored")
        agreed(mortal, control)
        assert contents(mortal.stub()) == contents(control.stub())
        states = [process.stub().GetState(pb.GetStateRequest()) for process in (mortal, control)]
        for ours, theirs in zip(states[0].workers, states[1].workers, strict=True):
            assert (ours.kv_sequence, ours.device_blocks) == (theirs.kv_sequence, theirs.device_blocks)
            assert ours.kv_synced == theirs.kv_synced
        looked_up = [
            process.stub().Schedule(asked("look", 1600, dry_run=True), timeout=60).assignment.reused_tokens
            for process in (mortal, control)
        ]
        assert looked_up[0] == looked_up[1]
        # killed, and the publishers are others when it comes back: one has published less since, one more
        written()
        mortal.stop(signal.SIGKILL)
        for publisher in publishers:
            publisher.stop()
            publisher.start()
        work(0, 3)
        work(1, 60)
        mortal = serve(*kept)
        work(0, 1)  # with less than before in its replay, a publisher is known to be another by its next event
        work(1, 1)
        agreed(mortal, control)
        # a second replica has it all from its peer, where its own snapshot is damaged
        blocks = mortal.stub().GetState(pb.GetStateRequest()).blocks
        damaged = tmp_path / "damaged"
        damaged.write_bytes(snapshot.read_bytes()[:-200])
        replica = serve(*flags, "--snapshot", str(damaged), "--peer", f"127.0.0.1:{mortal.ports['grpc']}")
        assert replica.says("not restored: ")
        assert replica.says(f"restored {blocks} blocks from 127.0.0.1")
        assert not wrong(replica)
    finally:
        for publisher in publishers:
            publisher.close()


def test_a_damaged_snapshot_is_refused_or_restored_but_no_more():
    conductor = made()
    for first in range(20):
        conductor.state.index.store(first % 2, Medium.GPU, hash_blocks(np.arange(320, dtype=np.uint32) + first, 16))
    data = encode(capture(conductor.state, {"p0": (5, 7)}))
    chance = random.Random(0)
    outcomes = Counter()
    other = made()
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 4, 50))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            restore(other, bytes(damaged))
            outcomes["restored"] += 1
        except SnapshotError as error:
            assert str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    restore(other, data)
    assert other.state.index.used == conductor.state.index.used == 400


# --- nonsense --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pestered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Publisher]]:
    """A sidecar with all its faces, one of whose workers publishes events."""
    publisher = Publisher()
    described = {
        "block_tokens": 16,
        "prefill": [{"count": 1, "hardware": "h100-llama3-8b"}],
        "decode": [{"count": 1, "hardware": "h100-llama3-8b"}],
        "workers": [
            {"id": "p0", "role": "prefill", "address": "127.0.0.1:1", **publisher.endpoints},
            {"id": "d0", "role": "decode", "address": "127.0.0.1:2"},
        ],
    }
    path = tmp_path_factory.mktemp("pestered") / "cluster.yaml"
    path.write_text(yaml.safe_dump(described))
    flags = ["--cluster", str(path), "--scrape-interval-s", "1000", "--lease-s", "1", "--blocks", "65536"]
    process = Process([*flags, "--ext-proc", "127.0.0.1:0", "--indexer", "127.0.0.1:0", "--max-message-bytes", "65536"])
    yield process, publisher
    process.stop(signal.SIGKILL)
    publisher.close()


def mutated(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(chance.choice((0, 1, 2, 8))):
        at = chance.randrange(len(out))
        match chance.randrange(4):
            case 0:
                out[at] = chance.randrange(256)
            case 1:
                out[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 2:
                del out[at : at + chance.randrange(1, 9)]
                out = out or bytearray(b"\0")
            case _:
                out += out[at:]
    return bytes(out)


def seeds(chance: random.Random) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Valid messages for Schedule, for Report, and for ext_proc."""

    def number() -> float:
        return chance.choice((1.0, -1.0, 1e300, math.nan, math.inf, 1e-320)) if chance.random() < 0.15 else 0.0

    schedules, reports = [], []
    for i in range(60):
        message = asked(f"f{i}", chance.randrange(1, 200), priority=chance.randrange(-(2**31), 2**31))
        message.lease_s, message.ttft_slo_s = chance.choice((0.2, number())), number()
        message.tbt_slo_s, message.arrival_s = number(), number()
        message.tenant, message.unreported, message.explain = f"t{i}", i % 3 == 0, i % 5 == 0
        if i % 4 == 0:
            message.block_hashes.hashes = chance.choice((b"same hash" * 8, chance.randbytes(8 * (i + 1))))[
                : 8 * (i + 1)
            ]
            message.block_hashes.input_tokens = chance.randrange(1, 2**32)
        if i % 6 == 0:
            message.candidates[:] = ["127.0.0.1:2", "x"]
        schedules.append(message.SerializeToString())
        kinds = [
            {"prefill_started": pb.PrefillStarted(expected_end_s=number())},
            {"prefill_done": pb.PrefillDone(ttft_s=number(), reused_tokens=chance.randrange(2**32))},
            {"kv_ready": pb.KvReady()},
            {"first_token": pb.FirstToken(stall_s=number())},
            {"finished": pb.Finished(output_tokens=chance.randrange(300), decode_s=number())},
            {"failed": pb.Failed(stage=chance.choice(("prefill", "decode", "x" * 50)))},
            {"fetch_landed": pb.FetchLanded()},
            {},
        ]
        events = [
            pb.Event(request_id=f"f{chance.randrange(60)}", at_s=number(), **kind) for kind in chance.sample(kinds, 3)
        ]
        loads = [pb.WorkerLoad(worker_id=chance.choice(("p0", "d0", "x")), waiting=chance.randrange(2**32))]
        reports.append(pb.ReportRequest(events=events, loads=loads[: i % 2]).SerializeToString())
    headers = ext_proc.ProcessingRequest()
    for key, value in ((":path", "/v1/completions"), ("x-request-id", "e"), ("content-length", "99")):
        header = headers.request_headers.headers.headers.add()
        header.key, header.raw_value = key, value.encode()
    body = ext_proc.ProcessingRequest()
    body.request_body.body = b'{"model": "m", "prompt": "what is it", "stream": true, "max_tokens": 7}'
    body.request_body.end_of_stream = True
    return schedules, reports, [headers.SerializeToString(), body.SerializeToString()]


def flood(channel: grpc.Channel, method: str, messages: list[bytes], allowed: set[grpc.StatusCode]) -> Counter[str]:
    """Send raw bytes as messages; how the calls ended."""
    call = channel.unary_unary(method)
    ends: Counter[str] = Counter()
    for start in range(0, len(messages), 50):
        calls = [call.future(message, timeout=120) for message in messages[start : start + 50]]
        for each in calls:
            code = each.code()
            assert code in allowed, f"{code}: {each.details()}"
            ends[code.name] += 1
    return ends


def test_ten_thousand_malformed_messages_do_no_harm(pestered):
    process, publisher = pestered
    chance = random.Random(1)
    channel, stub = process.channel(), process.stub()
    resources = psutil.Process(process.process.pid)
    schedules, reports, streamed = seeds(chance)
    codes = grpc.StatusCode
    refused = {codes.OK, codes.INVALID_ARGUMENT, codes.INTERNAL, codes.NOT_FOUND, codes.RESOURCE_EXHAUSTED}
    service = "/conductor.v1.Conductor"

    def some(count: int, valid: list[bytes]) -> list[bytes]:
        return [
            chance.randbytes(chance.randrange(200)) if chance.random() < 0.2 else mutated(chance, chance.choice(valid))
            for _ in range(count)
        ]

    def round_of(count: int) -> Counter[str]:
        ends = flood(channel, f"{service}/Schedule", some(count, schedules), refused)
        ends += flood(channel, f"{service}/Report", some(count, reports), refused)
        return ends

    def pester(count: int) -> None:
        """The other faces."""
        envoy = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        for _ in range(count):
            messages = [mutated(chance, message) if chance.random() < 0.7 else message for message in streamed]
            try:
                list(envoy(iter(messages), timeout=60))
            except grpc.RpcError as error:
                assert error.code() in refused | {codes.CANCELLED}, error
        for _ in range(count):
            publisher.send(b"kv", chance.randbytes(8), chance.randbytes(chance.randrange(300)))
            event = [1.0, [["BlockStored", [1, 2], None, list(range(32)), 16]]]
            payload = mutated(chance, msgspec.msgpack.encode(event))
            publisher.send(b"kv", chance.randrange(2**63).to_bytes(8, "big"), payload)
        posts = ("/query", "/query_by_hash", "/register", "/unregister", "/nowhere")
        for i in range(count):
            head = f"POST {posts[i % 5]} HTTP/1.1\r\nHost: x\r\n"
            body = mutated(
                chance, b'{"model": "m", "token_ids": [1,2,3], "block_size": 16, "endpoint": "tcp://127.0.0.1:1"}'
            )
            raw = [
                chance.randbytes(300),
                b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
                head.encode() + b"Content-Length: 99999999999999999999\r\n\r\n",
                head.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
                head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body,
            ]
            for port, data in ((process.ports["metrics"], chance.choice(raw)), (process.ports["grpc"], raw[0])):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                    client.settimeout(5)
                    try:
                        client.sendall(data)
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(65536):
                            pass
                    except OSError:
                        pass

    round_of(1000)
    pester(100)
    before = resources.memory_info().rss
    ends = round_of(4000)
    pester(300)
    grown = resources.memory_info().rss - before
    print(f"{dict(ends)}; {grown / 1e6:.1f} MB more")
    assert ends["OK"] > 500
    assert ends["INVALID_ARGUMENT"] > 500
    assert grown < 32e6
    assert process.process.poll() is None
    assert get(process, "/healthz")[0] == 200
    # what is in flight are requests that asked for a long lease, or had it by a flipped bit; the rest has ended
    ours = [pb.Event(request_id=f"f{i}", failed=pb.Failed(stage="client")) for i in range(60)]
    stub.Report(pb.ReportRequest(events=ours))
    eventually(lambda: in_flight(stub) < 200)
    assert stub.Schedule(asked("alive")).HasField("assignment")
    lines = "".join(process.log)
    assert "Traceback" not in lines.replace('Traceback (most recent call last):\n  File "src/python/grpcio', ""), lines[
        -3000:
    ]


# --- too much --------------------------------------------------------------------------------------------------------


def test_overload_is_answered_by_type_and_recovered_from(serve, cluster_file):
    flags = ["--in-flight", "100", "--max-concurrent", "16", "--lease-s", "1", "--scrape-interval-s", "1000"]
    process = serve("--cluster", str(cluster_file()), *flags)
    where = f"127.0.0.1:{process.ports['grpc']}"
    resources = psutil.Process(process.process.pid)
    ends: Counter[str] = Counter()
    lock = threading.Lock()
    until_s = time.monotonic() + 6.0

    def count(what: str) -> None:
        with lock:
            ends[what] += 1

    def said(answer: Any) -> str:
        return answer.rejection.reason if answer.HasField("rejection") else "assigned"

    def unary(number: int) -> None:
        with grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            while time.monotonic() < until_s:  # 32 at once from each; what is finished is never reported
                calls = [stub.Schedule.future(asked("", 2000), timeout=120) for _ in range(32)]
                for call in calls:
                    code = call.code()
                    count(said(call.result()) if code == grpc.StatusCode.OK else f"{code.name}: {call.details()}")

    def streams(number: int) -> None:
        with grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            while time.monotonic() < until_s:
                try:
                    for answer in stub.ScheduleStream((asked("", 500) for _ in range(50)), timeout=120):
                        count(said(answer))
                except grpc.RpcError as error:
                    count(f"{error.code().name}: {error.details()}")

    unary_threads = [threading.Thread(target=unary, args=(i,)) for i in range(6)]
    before = resources.memory_info().rss
    threads = [*unary_threads, *(threading.Thread(target=streams, args=(i,)) for i in range(12))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grown = resources.memory_info().rss - before
    print(f"{dict(ends)}; {grown / 1e6:.1f} MB more")
    ends = Counter({what.partition(":")[0]: n for what, n in ends.items()})
    typed = {"assigned", "rejected-saturated", "rejected-queue-full", "RESOURCE_EXHAUSTED"}
    assert set(ends) <= typed
    assert ends["rejected-queue-full"] + ends["rejected-saturated"] > ends["assigned"]
    assert grown < 64e6
    stub = process.stub()
    eventually(lambda: in_flight(stub) == 0)
    answer = stub.Schedule(asked("afterwards", 500))
    assert (answer.fell_back, said(answer)) == ("", "assigned")
    stub.Report(pb.ReportRequest(events=[pb.Event(request_id="afterwards", finished=pb.Finished(output_tokens=3))]))
    assert in_flight(stub) == 0
    assert process.stop() == 0
