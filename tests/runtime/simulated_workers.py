"""Workers that are simulated, behind a sidecar that is real: what they would report, over gRPC and ZMQ.

The simulator goes from arrival to arrival. What happened on the way is read off its arrays and told as live workers
would: life-cycle events and engine loads as `Report`s, cached blocks as Mooncake KV events. The sidecar runs on the
simulated clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import zmq

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from envs.state import DEVICE, HOST, ROW_BITS, Source, Status
from policies import Policy
from runtime.proto import conductor_pb2 as pb
from traces import Trace


class Both(NamedTuple):
    """A request's decision in the gym and in the sidecar, with the predictions (NaN where rejected)."""

    gym: tuple[int, int, int]
    sidecar: tuple[int, int, int]
    gym_predicted: tuple[float, float]
    sidecar_predicted: tuple[float, float]


def block_hashes(block_ids: np.ndarray) -> np.ndarray:
    """A 64-bit hash for every block id of a trace."""
    x = block_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Publisher:
    """The KV events of one prefill worker."""

    def __init__(self, context: zmq.Context, spec: ClusterSpec) -> None:
        self.socket = context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.spec = spec
        self.sequence = -1

    def publish(self, stored: dict[str, np.ndarray], removed: dict[str, np.ndarray]) -> None:
        """Blocks that came to a tier, and blocks that left it, by medium."""
        events = []
        for kind, blocks in (("BlockRemoved", removed), ("BlockStored", stored)):
            for medium, ids in blocks.items():
                if len(ids):
                    events.append(
                        {
                            "event_id": self.sequence + 1,
                            "timestamp": 0.0,
                            "event_type": kind,
                            "block_size": self.spec.block_tokens,
                            "medium": medium,
                            "seq_hashes": [int(h) for h in block_hashes(ids)],
                        }
                    )
        if events:
            self.sequence += 1
            payload = msgpack.packb([0.0, events])
            self.socket.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])


class SimulatedWorkers:
    """A simulated cluster that plays a trace against a sidecar, and asks a policy in the gym about the same."""

    def __init__(self, spec: ClusterSpec, trace: Trace) -> None:
        self.spec = spec
        self.trace = trace
        self.simulator = Simulator.for_trace(spec, trace)
        # the simulator numbers blocks in order of appearance
        _, first, inverse = np.unique(trace.block_ids, return_index=True, return_inverse=True)
        self.blocks = np.argsort(np.argsort(first))[inverse]
        self.context = zmq.Context()
        self.publishers = [Publisher(self.context, spec) for _ in range(spec.n_prefill)]

    def workers(self) -> list[dict[str, Any]]:
        """The `workers` section of the cluster file."""
        prefills = [
            {
                "id": f"prefill-{p}",
                "role": "prefill",
                "engine": "mooncake",
                "kv_events": f"tcp://127.0.0.1:{publisher.port}",
            }
            for p, publisher in enumerate(self.publishers)
        ]
        return [*prefills, *({"id": f"decode-{d}", "role": "decode"} for d in range(self.spec.n_decode))]

    def play(self, stub: Any, policy: Policy, requests: int) -> Iterator[Both]:
        """Play the first `requests` requests, deciding in the gym as `policy` does, and in the sidecar beside it."""
        simulator = self.simulator
        simulator.begin(0)
        policy.reset(1, 0)
        decodes = self.spec.n_decode
        trace = self.trace
        self._wait_until_heard(stub)
        before = self._seen()
        for request in range(requests):
            if not simulator.observe(0):
                return
            after = self._seen()
            stub.Report(pb.ReportRequest(events=self._events(before, after, request), loads=self._loads(before, after)))
            self._publish(stub, before, after)
            arrival_s = float(simulator.batch.state.clock[0]["now_s"][0])
            hashes = block_hashes(self.blocks[trace.block_offsets[request] : trace.block_offsets[request + 1]])
            answer = stub.Schedule(
                pb.ScheduleRequest(
                    request_id=str(request),
                    block_hashes=pb.BlockHashes(hashes=hashes.tobytes(), input_tokens=int(trace.input_tokens[request])),
                    arrival_s=arrival_s,
                    lease_s=1e9,
                )
            )
            action = int(policy.decide(simulator.observation_tables)[0])
            pair, source = divmod(action - 1, 3)
            p, d = divmod(pair, decodes) if action else (-1, -1)
            simulator.decide(0, p, max(d, 0), Source(source if action else 0))
            outcome = simulator.batch.outcomes[0, request]
            gym = (p, d, int(outcome["source"])) if action else (-1, -1, 0)
            yield Both(
                gym,
                self._decided(answer),
                (float(outcome["predicted_ttft_s"]), float(outcome["predicted_tbt_s"])),
                (answer.assignment.predicted_ttft_s, answer.assignment.predicted_tbt_s) if action else (np.nan, np.nan),
            )
            before = self._started_at_once(after, request)

    def close(self) -> None:
        self.context.destroy(linger=0)

    @staticmethod
    def _decided(answer: Any) -> tuple[int, int, int]:
        if answer.WhichOneof("result") == "rejection":
            return -1, -1, 0
        chosen = answer.assignment
        p, d = int(chosen.prefill.id.removeprefix("prefill-")), int(chosen.decode.id.removeprefix("decode-"))
        return p, d, int(chosen.source)

    def _seen(self) -> Any:
        """A copy of what events are read off."""
        batch = self.simulator.batch
        return {
            "outcomes": batch.outcomes[0].copy(),
            "blocks": self.simulator.state(0).blocks,
            "prefill": batch.state.prefill[0].copy(),
            "decode": batch.state.decode[0].copy(),
            "landed": batch.jobs["landed"][0].copy(),
            "due_s": batch.jobs["due_s"][0].copy(),
        }

    def _started_at_once(self, after: Any, request: int) -> Any:
        """What was seen before the decision: what it set off is told with the next events."""
        after["landed"][request] = 0
        return after

    def _events(self, before: Any, after: Any, upto: int) -> list[Any]:
        old, new = before["outcomes"][:upto], after["outcomes"][:upto]
        found: list[tuple[Any, Any]] = []  # in the order of docs/physics.md, "Order of events"

        def since(column: str) -> np.ndarray:
            return np.flatnonzero(np.isnan(old[column]) & ~np.isnan(new[column]))

        for r in np.flatnonzero((before["landed"][:upto] == 0) & (after["landed"][:upto] != 0)):
            if new["fetched_blocks"][r] > 0:
                found.append(((-1.0, 0), pb.Event(request_id=str(r), fetch_landed=pb.FetchLanded())))
        for r in since("prefill_start_s"):
            p = int(new["prefill"][r])
            end_s = 0.0
            if np.isnan(new["prefill_end_s"][r]):
                end_s = float(after["due_s"][r] if after["landed"][r] else after["prefill"]["running_end_s"][p])
            at_s = float(new["prefill_start_s"][r])
            event = pb.Event(request_id=str(r), at_s=at_s, prefill_started=pb.PrefillStarted(expected_end_s=end_s))
            found.append(((at_s, 3, p), event))
        for r in since("prefill_end_s"):
            at_s = float(new["prefill_end_s"][r])
            done = pb.PrefillDone(prefill_s=new["prefill_s"][r], ttft_s=new["ttft_s"][r])
            found.append(((at_s, 1, int(new["prefill"][r])), pb.Event(request_id=str(r), at_s=at_s, prefill_done=done)))
        for r in since("kv_ready_s"):
            at_s = float(new["kv_ready_s"][r])
            found.append(((at_s, 0, r), pb.Event(request_id=str(r), at_s=at_s, kv_ready=pb.KvReady())))
            if new["status"][r] == Status.REJECTED_AT_DECODE:
                failed = pb.Failed(stage="recheck")
                found.append(((at_s, 0, r + 0.5), pb.Event(request_id=str(r), at_s=at_s, failed=failed)))
        boundaries: dict[tuple[int, float], list[int]] = {}
        for r in since("join_s"):
            boundaries.setdefault((int(new["decode"][r]), float(new["join_s"][r])), []).append(int(r))
        for (d, join_s), joiners in boundaries.items():
            tokens = sum(int(self.trace.input_tokens[r]) for r in joiners)
            bandwidth = float(self.simulator.parameter_tables.decode["join_bytes_per_s"][0, d])
            stall_s = tokens * self.spec.model.kv_bytes_per_token / bandwidth
            at_s = join_s - stall_s
            if abs(at_s - float(after["decode"]["last_join_s"][d])) < 1e-6:
                at_s = float(after["decode"]["last_join_s"][d])  # without the rounding
            for r in sorted(joiners, key=lambda r: new["kv_ready_s"][r]):
                first = pb.Event(request_id=str(r), at_s=at_s, first_token=pb.FirstToken(stall_s=stall_s))
                found.append(((at_s, 5, d, 0.0), first))
        for r in since("finish_s"):
            at_s, d = float(new["finish_s"][r]), int(new["decode"][r])
            tokens = int(self.trace.output_tokens[r])
            last = pb.Finished(
                output_tokens=tokens,
                ttft_s=new["ttft_s"][r],
                tbt_s=new["tbt_s"][r],
                decode_s=at_s - new["join_s"][r] if tokens > 1 else 0.0,
            )
            order: tuple[float, ...] = (at_s, 4, d, new["join_s"][r], new["kv_ready_s"][r], r)
            if tokens == 1:
                order = (at_s, 2, int(new["prefill"][r]))
            found.append((order, pb.Event(request_id=str(r), at_s=at_s, finished=last)))
        return [event for _, event in sorted(found, key=lambda item: item[0])]

    def _loads(self, before: Any, after: Any) -> list[Any]:
        """What engines say of themselves, where it has changed."""
        loads = []
        for p, (old, row) in enumerate(zip(before["prefill"], after["prefill"], strict=True)):
            if old != row:
                loads.append(
                    pb.WorkerLoad(
                        worker_id=f"prefill-{p}",
                        prefill_end_s=row["running_end_s"],
                        tx_flows=row["tx_flows"],
                        rx_flows=row["rx_flows"],
                        tx_bytes_per_s=row["tx_used"],
                        rx_bytes_per_s=row["rx_used"],
                        tx_backlog_bytes=row["tx_backlog_bytes"],
                    )
                )
        for d, (old, row) in enumerate(zip(before["decode"], after["decode"], strict=True)):
            if old != row:
                loads.append(
                    pb.WorkerLoad(
                        worker_id=f"decode-{d}",
                        at_s=row["updated_s"],
                        batch=row["batch"],
                        kv_tokens=row["kv_tokens"],
                        rx_flows=row["rx_flows"],
                        rx_bytes_per_s=row["rx_used"],
                    )
                )
        return loads

    def _publish(self, stub: Any, before: Any, after: Any) -> None:
        changed = False
        for p, publisher in enumerate(self.publishers):
            word, bit = p // ROW_BITS, p % ROW_BITS
            stored, removed = {}, {}
            for medium, row in (("CPU", HOST), ("GPU", DEVICE)):
                mask = np.int64(1 << (ROW_BITS * row + bit)) if ROW_BITS * row + bit < 63 else np.int64(-(1 << 63))
                was, now = before["blocks"][:, word] & mask, after["blocks"][:, word] & mask
                stored[medium] = np.flatnonzero((was == 0) & (now != 0))
                removed[medium] = np.flatnonzero((was != 0) & (now == 0))
            sequence = publisher.sequence
            publisher.publish(stored, removed)
            changed |= publisher.sequence != sequence
        if changed:
            self._wait_until_applied(stub)

    def _wait_until_applied(self, stub: Any) -> None:
        deadline = time.monotonic() + 10.0
        wanted = {f"prefill-{p}": publisher.sequence for p, publisher in enumerate(self.publishers)}
        while time.monotonic() < deadline:
            state = stub.GetState(pb.GetStateRequest())
            if all(shown.kv_sequence >= wanted.get(shown.worker.id, -1) for shown in state.workers):
                return
        raise AssertionError("KV events were not applied within 10 s")

    def _wait_until_heard(self, stub: Any) -> None:
        """ZMQ drops what is published before a subscription is through: publish until everyone is heard."""
        deadline = time.monotonic() + 20.0
        none = np.zeros(0, np.int64)
        while time.monotonic() < deadline:
            for publisher in self.publishers:
                publisher.publish({"CPU": none}, {"CPU": np.array([1 << 40])})
            time.sleep(0.05)
            state = stub.GetState(pb.GetStateRequest())
            if all(shown.kv_sequence >= 0 for shown in state.workers if shown.worker.kv_events):
                self._wait_until_applied(stub)
                return
        raise AssertionError("the sidecar did not subscribe within 20 s")
