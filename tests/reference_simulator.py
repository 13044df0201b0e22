"""The slow, plain reading of docs/physics.md.

Everything is computed the obvious way: one decode iteration after the other, every interval kept;
max-min rates from scratch at every change of the network; the next event by looking at all of them.
Section names in the docstrings are those of docs/physics.md. It shares no code with `envs/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAN = math.nan
INFINITY = math.inf
SOURCES = ("local", "fetch", "recompute")
EVICTION_RULES = ("lru", "lfu", "length_aware")

# A side of a NIC: ("tx", p) and ("rx", p) of prefill instance p, ("decode", d) of decode d.
Nic = tuple[str, int]

CLUSTER_INTEGERS = ("block_tokens", "layers", "eviction")
CLUSTER_NUMBERS = (
    "kv_bytes_per_token",
    "transfer_latency_s",
    "ttft_slo_s",
    "tbt_slo_s",
    "tbt_tail_share",
    "prior_output_tokens",
    "prior_decode_s",
    "decode_time_s",
    "rate_horizon_s",
)
PREFILL_INTEGERS = ("chunk_tokens", "device_blocks", "host_blocks", "pipeline_nodes", "disk_blocks")
PREFILL_NUMBERS = (
    "base_s",
    "linear_s",
    "quadratic_s",
    "chunk_overhead_s",
    "h2d_bytes_per_s",
    "nic_bytes_per_s",
    "disk_bytes_per_s",
)
DECODE_INTEGERS = ("kv_capacity_tokens", "max_batch")
DECODE_NUMBERS = (
    "step_base_s",
    "step_request_s",
    "step_token_s",
    "join_bytes_per_s",
    "nic_bytes_per_s",
)


@dataclass
class Request:
    """One line of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: list[int]


@dataclass(eq=False)
class Transfer:
    """Bytes on their way between two nodes: a fetch, or a KV stream to a decode instance."""

    number: int
    job: Job
    is_fetch: bool
    sender: Nic
    receiver: Nic
    total_bytes: float
    left_bytes: float
    cap: float
    rate: float = 0.0
    land_s: float = NAN


@dataclass(eq=False)
class Job:
    """A request that was accepted, with all that happened to it."""

    index: int
    request: Request
    prefill: int
    decode: int
    source: str
    hit: int
    local_k: int
    decided_s: float
    predicted_duration_s: float
    start: float  # the `start` of "in flight"
    fetch_s: float = 0.0
    holder: int = -1
    holder_pins: list[int] = field(default_factory=list)
    in_transfer: list[int] = field(default_factory=list)
    fetch_landed: bool = True
    pins: list[int] = field(default_factory=list)  # at its prefill instance
    prefill_start_s: float = NAN
    duration_s: float = NAN
    compute_s: float = NAN
    free_s: float | None = None  # leaves the first stage, None while not known
    finish_s: float | None = None  # of the prefill, likewise
    stream: Transfer | None = None
    joined: bool = False
    join_s: float = NAN
    context: int = 0
    iterations_left: int = 0
    interval_s: float = NAN  # of the iteration under way
    intervals: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.request.input_tokens

    @property
    def o(self) -> int:
        return self.request.output_tokens


class PrefillNode:
    """One prefill instance: its tiers, pins, releases and queue."""

    def __init__(self, parameters: Mapping[str, Any], eviction: str, seen: Counter[str]) -> None:
        self.x = _copy(parameters, PREFILL_INTEGERS, PREFILL_NUMBERS)
        self.eviction = eviction
        self.seen = seen
        self.resident: set[int] = set()
        self.device: set[int] = set()
        self.disk: set[int] = set()
        self.arriving: set[int] = set()  # in transfer to here: they have a place in the host tier
        self.pending: set[int] = set()
        self.pins: dict[int, int] = {}
        self.releases = 0
        self.released: dict[int, tuple[int, int]] = {}  # the last release that covered a block, and its depth there
        self.uses: dict[int, int] = {}
        self.queue: list[Job] = []
        self.running: Job | None = None  # in the first stage
        self.draining: list[Job] = []  # in the later ones, first in first out
        self.running_end = 0.0
        self.drain_s = 0.0

    @property
    def queued_s(self) -> float:
        """The sum of D over the queue."""
        return sum((job.predicted_duration_s for job in self.queue), 0.0)

    def places(self) -> set[int]:
        """Blocks that take a place in the host tier."""
        return self.resident | self.arriving

    # Section "Tiers".

    def ready_k(self, blocks: Sequence[int]) -> int:
        return _leading(blocks, self.resident)

    def device_k(self, blocks: Sequence[int]) -> int:
        return _leading(blocks, self.device)

    def local_k(self, blocks: Sequence[int]) -> int:
        return _leading(blocks, self.resident | self.disk | self.pending)

    def disk_k(self, blocks: Sequence[int]) -> int:
        return len(set(blocks[: self.local_k(blocks)]) & self.disk - self.pending)

    def pin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pins[block] = self.pins.get(block, 0) + 1

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pins[block] -= 1
            if self.pins[block] == 0:
                del self.pins[block]

    def release(self, blocks: Sequence[int]) -> None:
        """The newest release covers these blocks."""
        self.releases += 1
        for depth, block in enumerate(blocks):
            assert block not in self.disk
            self.released[block] = (self.releases, depth)
            self.uses[block] = self.uses.get(block, 0) + 1 if block in self.resident else 0

    def order(self, block: int) -> tuple[float, ...]:
        """What has less goes first. A block that was never released is pinned."""
        release, depth = self.released.get(block, (INFINITY, 0))
        uses = self.uses.get(block, 0)
        if self.eviction == "lru":
            return release, -depth
        if self.eviction == "lfu":
            return uses, release, -depth
        return uses, -depth, release

    def first_unpinned(self, tier: set[int]) -> int | None:
        """The block to evict."""
        for block in sorted(tier, key=self.order):
            if block not in self.pins:
                return block
            self.seen["eviction skips a pinned block"] += 1
        return None

    def make_room_host(self) -> bool:
        """Room for one block in the host tier. A host eviction also drops the device copy."""
        if len(self.places()) < self.x["host_blocks"]:
            return True
        block = self.first_unpinned(self.resident)
        if block is None:
            return False
        assert block not in self.pins
        self.seen["host eviction"] += 1
        self.resident.remove(block)
        if block in self.device:
            self.seen["host eviction drops the device copy"] += 1
            self.device.remove(block)
        self.disk.add(block)
        while len(self.disk) > self.x["disk_blocks"]:
            dropped = self.first_unpinned(self.disk)
            assert dropped is not None and dropped not in self.pins
            if self.x["disk_blocks"] > 0:
                self.seen["disk eviction" + (" of the newcomer" if dropped == block else "")] += 1
            self.disk.remove(dropped)
            self.uses[dropped] = 0
        return True

    def make_room_device(self) -> bool:
        """Room for one block in the device tier."""
        if len(self.device) < self.x["device_blocks"]:
            return True
        block = self.first_unpinned(self.device)
        if block is None:
            return False
        assert block not in self.pins
        self.seen["device eviction"] += 1
        self.device.remove(block)
        return True


class DecodeNode:
    """One decode instance: its FIFO, its batch and what the scheduler knows of it."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.x = _copy(parameters, DECODE_INTEGERS, DECODE_NUMBERS)
        self.waiting: list[Job] = []
        self.batch: list[Job] = []
        self.iteration_start_s = NAN
        self.iteration_end_s: float | None = None  # None: idle
        self.estimate_start_s = NAN  # u
        self.estimate_tokens = 0  # K0
        self.last_join_s: float | None = None
        self.stall_rate = 0.0
        self.join_rate = 0.0

    @property
    def reserved(self) -> int:
        return sum(job.n + job.o for job in self.batch)

    def step(self, requests: float, tokens: float) -> float:
        """Section "Decode": the time of one iteration."""
        x = self.x
        return float(x["step_base_s"] + x["step_request_s"] * requests + x["step_token_s"] * tokens)

    def kv_est(self, t: float) -> float:
        """Section "What the scheduler knows and predicts"."""
        if not self.batch:
            return 0.0
        size = len(self.batch)
        k0 = self.estimate_tokens
        return k0 + size * max(0.0, t - self.estimate_start_s) / self.step(size, k0)

    def tbt(self, requests: float, tokens: float, tail_share: float) -> float:
        """Section "What the scheduler knows and predicts": `tbt(d, B, K)`."""
        it = self.step(requests, tokens)
        if self.join_rate == 0.0:
            return it
        return it + self.stall_rate * min(it / tail_share, 1.0 / self.join_rate)


@dataclass(frozen=True)
class PrefillView:
    """What the scheduler predicts for the current request on one prefill instance."""

    local_k: int
    device_k: int
    disk_k: int
    holder: int
    holder_k: int  # F when there is a fetch
    has_fetch: bool
    queue_s: float
    fetch_s: float
    ttft_local_s: float
    ttft_fetch_s: float
    ttft_recompute_s: float

    def ttft(self, source: str) -> float:
        return {
            "local": self.ttft_local_s,
            "fetch": self.ttft_fetch_s,
            "recompute": self.ttft_recompute_s,
        }[source]


class ReferenceCluster:
    """The simulated cluster; a driver alternates `advance_to_next_arrival` and `decide`."""

    def __init__(
        self,
        cluster: Mapping[str, Any],
        prefill: Sequence[Mapping[str, Any]],
        decode: Sequence[Mapping[str, Any]],
        requests: Sequence[Request],
    ) -> None:
        self.x = _copy(cluster, CLUSTER_INTEGERS, CLUSTER_NUMBERS)
        self.recheck = bool(cluster["decode_recheck"])
        self.seen: Counter[str] = Counter()  # how often each branch of the page was taken
        self.check_every_event = False
        eviction = EVICTION_RULES[self.x["eviction"]]
        self.prefill = [PrefillNode(parameters, eviction, self.seen) for parameters in prefill]
        self.decode = [DecodeNode(parameters) for parameters in decode]
        self.requests = list(requests)
        arrivals = [request.arrival_s for request in self.requests]
        assert arrivals == sorted(arrivals)
        for request in self.requests:
            assert request.input_tokens >= 1 and request.output_tokens >= 1
            assert len(set(request.blocks)) == len(request.blocks)
        self.outcomes: list[dict[str, Any]] = [_empty_outcome() for _ in self.requests]

        self.now = -INFINITY
        self.current: int | None = None  # the request that waits for its decision
        self.next_request = 0
        self.in_flight: list[Job] = []  # in the order of the decisions

        self.network_s = -INFINITY  # when left_bytes and the rates were last brought up to date
        self.active: list[Transfer] = []
        self.landing: list[Transfer] = []
        self.transfers_started = 0

        self.expected_output_tokens: float = self.x["prior_output_tokens"]
        self.expected_decode_s: float = self.x["prior_decode_s"]
        self.arrival_rate = 0.0
        self.last_arrival_s: float | None = None

    # ------------------------------------------------------------------ the driver's side

    def advance_to_next_arrival(self) -> bool:
        """All events with time <= the next arrival, then the arrival. False: no request is left."""
        assert self.current is None, "the current request is not decided"
        if self.next_request == len(self.requests):
            return False
        t = self.requests[self.next_request].arrival_s
        while self._step(t):
            pass
        self._set_now(t)
        self.current = self.next_request
        self.next_request += 1
        if self.last_arrival_s is not None:
            self.arrival_rate *= math.exp(-(t - self.last_arrival_s) / self.x["rate_horizon_s"])
            if t == self.last_arrival_s:
                self.seen["arrivals at the same time"] += 1
        self.arrival_rate += 1.0 / self.x["rate_horizon_s"]
        self.last_arrival_s = t
        return True

    def drain(self) -> None:
        """Section "Order of events": after the last arrival everything runs to its end."""
        assert self.current is None and self.next_request == len(self.requests)
        while self._step(INFINITY):
            pass
        assert not self.in_flight

    def observe(self) -> dict[str, Any]:
        """What the scheduler sees for the current request. Changes nothing.

        Lists per instance under "prefill" and "decode" (both have an `rx_used_share`), and scalars.
        """
        assert self.current is not None
        request = self.requests[self.current]
        t, n = self.now, request.input_tokens
        q = self.x["tbt_tail_share"]
        views = [self._prefill_view(p, request) for p in range(len(self.prefill))]
        per_prefill: dict[str, list[float]] = {
            "queue_s": [view.queue_s for view in views],
            "queue_requests": [len(node.queue) for node in self.prefill],
            "device_tokens": [self._reuse(n, view.device_k) for view in views],
            "local_tokens": [self._reuse(n, view.local_k) for view in views],
            "fetch_tokens": [
                self._reuse(n, view.holder_k) - self._reuse(n, view.local_k) if view.has_fetch else 0 for view in views
            ],
            "fetch_s": [view.fetch_s for view in views],
            "ttft_local_s": [view.ttft_local_s for view in views],
            "ttft_fetch_s": [view.ttft_fetch_s for view in views],
            "ttft_recompute_s": [view.ttft_recompute_s for view in views],
            "tx_used_share": [self._used_share(("tx", p)) for p in range(len(self.prefill))],
            "rx_used_share": [self._used_share(("rx", p)) for p in range(len(self.prefill))],
            "host_used_share": [
                len(node.places()) / node.x["host_blocks"] if node.x["host_blocks"] else 0.0 for node in self.prefill
            ],
            "device_used_share": [
                len(node.device) / node.x["device_blocks"] if node.x["device_blocks"] else 0.0 for node in self.prefill
            ],
        }
        t_join = t + min(min(view.ttft_local_s, view.ttft_fetch_s) for view in views)
        per_decode: list[dict[str, float]] = []
        for d, node in enumerate(self.decode):
            batch, kv = len(node.batch), node.kv_est(t)
            pending = self._pending(d)
            pending_tokens = sum(job.n for job in pending)
            expected = self.expected_output_tokens
            per_decode.append(
                {
                    "batch": batch,
                    "kv_tokens": kv,
                    "free_tokens": node.x["kv_capacity_tokens"]
                    - kv
                    - pending_tokens
                    - (batch + len(pending)) * expected,
                    "pending_requests": len(pending),
                    "pending_tokens": pending_tokens,
                    "tbt_now_s": node.tbt(batch + 1, kv + n, q),
                    "tbt_assigned_s": self._tbt_assigned(d, n),
                    "tbt_at_join_s": self._tbt_at_join(d, n, t_join),
                    "rx_used_share": self._used_share(("decode", d)),
                    "waiting_requests": len(node.waiting),
                }
            )
        return {
            "prefill": per_prefill,
            "decode": {name: [row[name] for row in per_decode] for name in per_decode[0]},
            "expected_output_tokens": self.expected_output_tokens,
            "expected_decode_s": self.expected_decode_s,
            "arrival_rate": self.arrival_rate,
            "in_flight": len(self.in_flight),
        }

    def decide(self, decision: tuple[int, int, str] | None) -> None:
        """Section "A decision (p, d, source) at time t"; None rejects the request."""
        assert self.current is not None, "no request waits for a decision"
        index, self.current = self.current, None
        request = self.requests[index]
        outcome = self.outcomes[index]
        if decision is None:
            self.seen["rejected at arrival"] += 1
            outcome["status"] = "rejected_at_arrival"
            return
        p, d, source = int(decision[0]), int(decision[1]), decision[2]
        assert 0 <= p < len(self.prefill) and 0 <= d < len(self.decode) and source in SOURCES
        t, n, blocks = self.now, request.input_tokens, request.blocks
        node = self.prefill[p]
        view = self._prefill_view(p, request)
        if not blocks:
            self.seen["request without blocks"] += 1
        if source == "fetch" and not view.has_fetch:
            self.seen["fetch without more at the holder is local"] += 1
            source = "local"
        outcome["predicted_ttft_s"] = view.ttft(source)
        outcome["predicted_tbt_s"] = self._tbt_assigned(d, n)
        job = Job(
            index=index,
            request=request,
            prefill=p,
            decode=d,
            source=source,
            hit=0,
            local_k=view.local_k,
            decided_s=t,
            predicted_duration_s=NAN,
            start=t + view.ttft(source),
        )

        # Step 1.
        if source in ("local", "fetch"):
            job.hit = view.local_k
            self._pin_at_prefill(job, blocks[: view.local_k])
            if view.local_k > node.ready_k(blocks):
                self.seen["hit on pending blocks"] += 1
        if source == "fetch":
            self._start_fetch(job, view)
        # Step 2.
        node.pending |= set(blocks) - node.resident
        # Step 3.
        if job.source == "recompute":
            job.predicted_duration_s = self._duration(p, n, 0, 0, 0)
        else:
            job.predicted_duration_s = self._duration(p, n, job.hit, max(0, job.hit - view.device_k), view.disk_k)
        node.drain_s = self._drain_ahead(p, n, self._reuse(n, job.hit))
        node.queue.append(job)
        # Step 4. The pending requests of d are those in flight that have not joined.
        self.in_flight.append(job)
        outcome.update(prefill=p, decode=d, source=job.source, fetched_blocks=len(job.in_transfer))
        self.seen[f"source {job.source}"] += 1
        # Step 5.
        if node.running is None:
            self._start_prefill(p)
        if self.check_every_event:
            self.check_invariants()

    # ------------------------------------------------------------------ events

    def _step(self, limit: float) -> bool:
        """Process the next event, if its time is <= limit. Section "Order of events"."""
        # (time, kind, order inside the kind): the smallest is next.
        events: list[tuple[float, int, int]] = []
        for i, transfer in enumerate(self.landing):
            events.append((transfer.land_s, 0, i))
        for transfer in self.active:
            if transfer.rate > 0.0:
                end = self.network_s + transfer.left_bytes / transfer.rate
                events.append((max(self.now, end), 1, transfer.number))
        for p, prefill in enumerate(self.prefill):
            if prefill.running is not None and prefill.running.free_s is not None:
                events.append((prefill.running.free_s, 2, p))
            for job in prefill.draining:
                assert job.finish_s is not None
                events.append((job.finish_s, 2, p))
        for d, decode in enumerate(self.decode):
            if decode.iteration_end_s is not None:
                events.append((decode.iteration_end_s, 3, d))
        if not events:
            return False
        t, kind, order = min(events)
        if t > limit or t == INFINITY:
            return False
        self._set_now(t)
        if kind == 0:
            self._land(self.landing[order])
        elif kind == 1:
            self._complete_transfer(next(x for x in self.active if x.number == order))
        elif kind == 2:
            self._advance_prefill(order)
        else:
            self._end_iteration(order)
        if self.check_every_event:
            self.check_invariants()
        return True

    def _set_now(self, t: float) -> None:
        assert t >= self.now, f"time ran back from {self.now} to {t}"
        self.now = t

    # ------------------------------------------------------------------ prefill

    def _reuse(self, n: int, k: int) -> int:
        """Section "Prefill": tokens reused with the first k blocks."""
        return min(k * self.x["block_tokens"], n - 1) if k else 0

    def _compute(self, p: int, n: int, h: int) -> float:
        """Section "Prefill": time to compute what is left of n tokens when h are reused."""
        return sum(self._chunks(p, n, h)) / int(self.prefill[p].x["pipeline_nodes"])

    def _chunks(self, p: int, n: int, h: int) -> list[float]:
        """Section "Pipelined groups": what each chunk takes a node that has all layers."""
        x = self.prefill[p].x
        chunks: list[float] = []
        for s in range(h, n, x["chunk_tokens"]):
            e = min(s + x["chunk_tokens"], n)
            work = x["quadratic_s"] * (e**2 - s**2) + x["linear_s"] * (e - s)
            chunks.append(work + (x["chunk_overhead_s"] if chunks else x["base_s"]))
        if len(chunks) > 1:
            self.seen["several chunks"] += 1
        return chunks

    def _drain(self, p: int, n: int, h: int) -> float:
        """Section "Pipelined groups": from the first stage's end to the last one's."""
        nodes = int(self.prefill[p].x["pipeline_nodes"])
        chunks = self._chunks(p, n, h)
        if nodes > 1 and len(chunks) > 1:
            at = chunks.index(max(chunks))
            where = {0: "first", len(chunks) - 1: "last"}.get(at, "last full")
            self.seen[f"the {where} chunk is the longest"] += 1
        return (nodes - 1) / nodes * max(chunks)

    def _drain_ahead(self, p: int, n: int, h: int) -> float:
        """Section "What the scheduler knows and predicts": `drain_ahead(p, h)`."""
        node = self.prefill[p]
        if node.x["pipeline_nodes"] == 1:
            return 0.0
        left = node.drain_s - max(0.0, self.now - node.running_end)
        drain = self._drain(p, n, h)
        if left > drain:
            self.seen["expects to drain behind another"] += 1
        return max(drain, left)

    def _layers_per_node(self, p: int) -> float:
        return float(self.x["layers"] / self.prefill[p].x["pipeline_nodes"])

    def _block_bytes(self) -> float:
        return float(self.x["block_tokens"] * self.x["kv_bytes_per_token"])

    def _duration(self, p: int, n: int, k: int, j: int, x: int) -> float:
        """Section "Prefill": layer-wise overlap of computing and loading."""
        c = self._compute(p, n, self._reuse(n, k))
        h = j * self._block_bytes() / self.prefill[p].x["h2d_bytes_per_s"]
        from_disk = x * self._block_bytes() / self.prefill[p].x["disk_bytes_per_s"]
        if x:
            self.seen["disk slower than h2d" if from_disk > h else "disk faster than h2d"] += 1
        h = max(h, from_disk)
        if h > c:
            self.seen["load longer than compute"] += 1
        return float(max(c, h) + min(c, h) / self._layers_per_node(p))

    def _holder(self, p: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Section "Holder": the instance and its ready_k; (-1, 0) when p is alone."""
        candidates: list[tuple[int, float, int]] = []
        for h, node in enumerate(self.prefill):
            if h != p:
                backlog = sum(x.total_bytes for x in self.active if x.sender == ("tx", h))
                candidates.append((-node.ready_k(blocks), backlog, h))
        if not candidates:
            return -1, 0
        best = min(candidates)
        ties = [x for x in candidates if x[0] == best[0]]
        if len(ties) > 1 and best[0] < 0:
            by_backlog = sum(x[1] == best[1] for x in ties) == 1
            self.seen["holder tie by " + ("backlog" if by_backlog else "index")] += 1
        return best[2], -best[0]

    def _pin_at_prefill(self, job: Job, blocks: Sequence[int]) -> None:
        self.prefill[job.prefill].pin(blocks)
        job.pins.extend(blocks)

    def _start_fetch(self, job: Job, view: PrefillView) -> None:
        """Step 1 of a decision with source `fetch`."""
        node, blocks = self.prefill[job.prefill], job.request.blocks
        assert view.has_fetch
        for i in range(view.local_k, view.holder_k):
            block = blocks[i]
            if block in node.resident:
                self.seen["fetch range has a resident block"] += 1
            elif block in node.disk:
                self.seen["fetch range has a block on disk"] += 1
            elif block in node.arriving:
                # It has a place: another request's fetch is bringing it.
                self.seen["fetch range has a block in transfer for another"] += 1
            else:
                if not node.make_room_host():
                    self.seen["fetch finds no room"] += 1
                    break
                node.arriving.add(block)
                job.in_transfer.append(block)
            self._pin_at_prefill(job, [block])
            job.hit = i + 1
        if not job.in_transfer:
            self.seen["fetch degraded to local"] += 1
            job.source = "local"
            return
        if job.hit < view.holder_k:
            self.seen["fetch cut short"] += 1
        job.fetch_s = view.fetch_s
        job.fetch_landed = False
        job.holder = view.holder
        job.holder_pins = list(blocks[: job.hit])
        self.prefill[view.holder].pin(job.holder_pins)
        self._start_transfer(
            job,
            is_fetch=True,
            sender=("tx", view.holder),
            receiver=("rx", job.prefill),
            total_bytes=len(job.in_transfer) * self._block_bytes(),
            cap=INFINITY,
        )

    def _start_prefill(self, p: int) -> None:
        """Section "Start of a prefill at time t"."""
        t, node = self.now, self.prefill[p]
        job = node.queue.pop(0)  # takes its D out of queued_s
        node.running = job
        blocks, n = job.request.blocks, job.n
        if job.source == "recompute":
            k = 0
        elif job.fetch_landed:
            k = _leading(blocks, node.resident | node.disk)
        else:
            k = _leading(blocks, node.resident | node.disk | node.arriving & set(blocks[job.local_k : job.hit]))
        if k > job.hit and job.source != "recompute":
            self.seen["more resident at the start than the hit"] += 1
        if k < job.hit:
            self.seen["less resident at the start than the hit"] += 1
        device_k = node.device_k(blocks)
        j = max(0, k - device_k)
        x = len(set(blocks[:k]) & node.disk)
        self._pin_at_prefill(job, blocks[job.hit :])
        job.prefill_start_s = t
        job.duration_s = self._duration(p, n, k, j, x)
        job.compute_s = self._compute(p, n, self._reuse(n, k))
        if job.fetch_landed:
            if job.in_transfer:
                self.seen["fetch landed before the start"] += 1
            node.running_end = t + job.duration_s
        else:
            self.seen["start with an unlanded fetch"] += 1
            fetch_eta = job.decided_s + job.fetch_s
            one_layer_s = job.compute_s / self._layers_per_node(p)
            node.running_end = max(t + job.duration_s, fetch_eta + one_layer_s)
        reused = self._reuse(n, k)
        self.outcomes[job.index].update(
            prefill_start_s=t,
            reused_tokens=reused,
            device_tokens=min(self._reuse(n, device_k), reused),
        )
        if job.fetch_landed:
            self._finish_known(job, t + job.duration_s, reused)

    def _finish_known(self, job: Job, free_s: float, reused: int) -> None:
        """The end of a running prefill is known: its KV stream starts."""
        node = self.prefill[job.prefill]
        finish_s = free_s + self._drain(job.prefill, job.n, reused)
        if node.draining:
            before_s = node.draining[-1].finish_s
            assert before_s is not None
            if before_s + job.duration_s > finish_s:
                self.seen["held up in the pipeline"] += 1
                finish_s = before_s + job.duration_s
        job.free_s, job.finish_s = free_s, finish_s
        if job.o > 1:
            total = job.n * self.x["kv_bytes_per_token"]
            job.stream = self._start_transfer(
                job,
                is_fetch=False,
                sender=("tx", job.prefill),
                receiver=("decode", job.decode),
                total_bytes=total,
                cap=(1.0 - 1.0 / self.x["layers"]) * total / (finish_s - self.now),
            )

    def _land(self, transfer: Transfer) -> None:
        """The last byte of a transfer is there."""
        self.landing.remove(transfer)
        job = transfer.job
        if not transfer.is_fetch:
            self._land_stream(job)
            return
        # Section "Start of a prefill", "A fetch that lands".
        node, holder = self.prefill[job.prefill], self.prefill[job.holder]
        for block in job.request.blocks[job.local_k : job.hit]:
            if block in node.arriving:
                if block not in job.in_transfer:
                    self.seen["a block lands with another request's fetch"] += 1
                node.arriving.remove(block)
                node.resident.add(block)
                node.pending.discard(block)
        holder.unpin(job.holder_pins)
        holder.release(job.holder_pins)
        job.holder_pins = []
        job.fetch_landed = True
        if node.running is job:
            by_compute = job.prefill_start_s + job.duration_s
            by_fetch = self.now + job.compute_s / self._layers_per_node(job.prefill)
            self.seen["fetch delays its prefill" if by_fetch > by_compute else "fetch hidden"] += 1
            node.running_end = max(by_compute, by_fetch)
            reused = int(self.outcomes[job.index]["reused_tokens"])
            self._finish_known(job, node.running_end, reused)

    def _advance_prefill(self, p: int) -> None:
        """What is due at p now: section "End of a prefill at time t", last line."""
        node = self.prefill[p]
        if node.running is not None and node.running.free_s == self.now:
            self._leave_first_stage(p)
        if node.draining and node.draining[0].finish_s == self.now:
            self._end_prefill(node.draining.pop(0))
        if node.running is None and node.queue:
            if node.draining:
                self.seen["starts while another drains"] += 1
            self._start_prefill(p)

    def _leave_first_stage(self, p: int) -> None:
        """Section "The first stage is left at time t"."""
        t, node = self.now, self.prefill[p]
        job = node.running
        assert job is not None and job.fetch_landed
        blocks = job.request.blocks
        # Step 1.
        if node.disk & set(blocks):
            self.seen["promotion"] += 1
        node.disk -= set(blocks)
        for block in blocks:
            if block not in node.resident:
                if block in node.arriving:
                    # It has a place: the fetch of a request behind this one is bringing it.
                    self.seen["computed while in transfer for another"] += 1
                elif not node.make_room_host():
                    self.seen["no room in host"] += 1
                    break
                node.resident.add(block)
        node.pending -= set(blocks)
        if set(blocks) - node.resident:
            others = [set(other.request.blocks) for other in node.queue]
            if any((set(blocks) - node.resident) & other for other in others):
                self.seen["not kept though another request needs it"] += 1
        # Step 2.
        for block in blocks[: node.ready_k(blocks)]:
            if block not in node.device:
                if not node.make_room_device():
                    self.seen["no room on device"] += 1
                    break
                node.device.add(block)
        # Step 3.
        assert sorted(job.pins) == sorted(blocks)
        node.unpin(job.pins)
        job.pins = []
        node.release(blocks)
        # Step 4.
        self.outcomes[job.index]["prefill_s"] = t - job.prefill_start_s
        node.running = None
        node.draining.append(job)

    def _end_prefill(self, job: Job) -> None:
        """Section "End of a prefill at time t"."""
        t, outcome = self.now, self.outcomes[job.index]
        outcome["ttft_s"] = t - job.request.arrival_s
        outcome["prefill_end_s"] = t
        if job.o == 1:
            self.seen["one output token"] += 1
            self._complete(job, decode_s=None)
        else:
            assert job.stream is not None and job.stream in self.active
            self._update_left_bytes()
            job.stream.cap = INFINITY
            self._update_rates()
            job.start = t

    # ------------------------------------------------------------------ network

    def _start_transfer(
        self,
        job: Job,
        is_fetch: bool,
        sender: Nic,
        receiver: Nic,
        total_bytes: float,
        cap: float,
    ) -> Transfer:
        transfer = Transfer(
            number=self.transfers_started,
            job=job,
            is_fetch=is_fetch,
            sender=sender,
            receiver=receiver,
            total_bytes=total_bytes,
            left_bytes=total_bytes,
            cap=cap,
        )
        self.transfers_started += 1
        self._update_left_bytes()
        self.active.append(transfer)
        self._update_rates()
        return transfer

    def _complete_transfer(self, transfer: Transfer) -> None:
        """All bytes are moved: the transfer leaves the NICs and lands after the latency."""
        assert transfer.cap == INFINITY, "a capped stream never completes before its prefill ends"
        self._update_left_bytes()
        transfer.left_bytes = 0.0
        transfer.rate = 0.0
        self.active.remove(transfer)
        transfer.land_s = self.now + self.x["transfer_latency_s"]
        if self.landing and transfer.land_s - self.landing[-1].land_s < 1e-9:
            transfer.land_s = self.landing[-1].land_s
        self.landing.append(transfer)
        self.landing.sort(key=lambda x: (x.land_s, not x.is_fetch, x.job.index))
        self._update_rates()

    def _update_left_bytes(self) -> None:
        """Bytes moved since the last change of the network, at the rates of then."""
        for transfer in self.active:
            moved = transfer.rate * (self.now - self.network_s) if transfer.rate else 0.0
            transfer.left_bytes = max(0.0, transfer.left_bytes - moved)
        self.network_s = self.now

    def _update_rates(self) -> None:
        """Section "Network": all rates from scratch."""
        bandwidth = self._bandwidths()
        rates = max_min_rates([(x.sender, x.receiver, x.cap) for x in self.active], bandwidth)
        for transfer, rate in zip(self.active, rates, strict=True):
            transfer.rate = rate
            if transfer.cap < INFINITY:
                self.seen["stream at its cap" if rate == transfer.cap else "stream below cap"] += 1
        for nic, full in bandwidth.items():
            if self._flows(nic) > 1 and self._used(nic) > full * (1.0 - 1e-9):
                self.seen[f"contention on {nic[0]}"] += 1

    def _bandwidths(self) -> dict[Nic, float]:
        bandwidth: dict[Nic, float] = {}
        for p, prefill in enumerate(self.prefill):
            bandwidth["tx", p] = prefill.x["nic_bytes_per_s"]
            bandwidth["rx", p] = prefill.x["nic_bytes_per_s"]
        for d, decode in enumerate(self.decode):
            bandwidth["decode", d] = decode.x["nic_bytes_per_s"]
        return bandwidth

    def _flows(self, nic: Nic) -> int:
        return sum(nic in (x.sender, x.receiver) for x in self.active)

    def _used(self, nic: Nic) -> float:
        return sum((x.rate for x in self.active if nic in (x.sender, x.receiver)), 0.0)

    def _used_share(self, nic: Nic) -> float:
        return self._used(nic) / self._bandwidths()[nic]

    def _share(self, nic: Nic) -> float:
        """Section "What the scheduler knows and predicts": `share(nic)`."""
        bandwidth = self._bandwidths()[nic]
        return max(bandwidth / (1 + self._flows(nic)), bandwidth - self._used(nic))

    # ------------------------------------------------------------------ decode

    def _land_stream(self, job: Job) -> None:
        """Section "Decode": a stream that lands at d; the re-check."""
        t, node, q = self.now, self.decode[job.decode], self.x["tbt_tail_share"]
        self.outcomes[job.index]["kv_ready_s"] = t
        requests = len(node.batch) + len(node.waiting) + 1
        tokens = node.kv_est(t) + sum(other.n for other in node.waiting) + job.n
        if job.n + job.o > node.x["kv_capacity_tokens"]:
            self.seen["rejected: too long"] += 1
        elif self.recheck and node.tbt(requests, tokens, q) > self.x["tbt_slo_s"]:
            self.seen["rejected by the re-check"] += 1
        else:
            node.waiting.append(job)
            if not node.batch:
                self._between_iterations(job.decode, left=False)
            elif t < node.iteration_start_s:
                self.seen["ready during a stall"] += 1
            return
        self.in_flight.remove(job)
        self.outcomes[job.index]["status"] = "rejected_at_decode"

    def _end_iteration(self, d: int) -> None:
        """Every member gets one token; who has all of them leaves."""
        node = self.decode[d]
        for job in node.batch:
            job.context += 1
            job.iterations_left -= 1
            job.intervals.append(job.interval_s)
        leavers = [job for job in node.batch if job.iterations_left == 0]
        node.batch = [job for job in node.batch if job.iterations_left > 0]
        if len(leavers) > 1:
            self.seen["several leave at one boundary"] += 1
        for job in leavers:
            self._complete(job, decode_s=self.now - job.join_s)
        self._between_iterations(d, left=bool(leavers))

    def _between_iterations(self, d: int, left: bool) -> None:
        """Joins, their stall, and the start of the next iteration."""
        t, node = self.now, self.decode[d]
        members = list(node.batch)
        joiners: list[Job] = []
        while node.waiting:
            job = node.waiting[0]
            if node.reserved + job.n + job.o > node.x["kv_capacity_tokens"]:
                self.seen["wait for VRAM"] += 1
                break
            if len(node.batch) >= node.x["max_batch"]:
                self.seen["wait for max_batch"] += 1
                break
            node.waiting.pop(0)
            node.batch.append(job)
            joiners.append(job)
        bytes_per_token, rate = self.x["kv_bytes_per_token"], node.x["join_bytes_per_s"]
        stall = sum((job.n * bytes_per_token / rate for job in joiners), 0.0)
        if joiners:
            self._count_joins(node, len(joiners), stall)
            if len(joiners) > 1:
                self.seen["several joiners at one boundary"] += 1
            if members:
                self.seen["stall of a running batch"] += 1
            if left:
                self.seen["leave and join at one boundary"] += 1
        for job in joiners:
            job.joined = True
            job.join_s = t + stall
            job.start = job.join_s
            job.context = job.n
            job.iterations_left = job.o - 1
            self.outcomes[job.index]["join_s"] = job.join_s
        if not node.batch:
            node.iteration_end_s = None
            return
        node.iteration_start_s = t + stall
        tokens = sum(job.context for job in node.batch)
        if left or joiners:
            node.estimate_start_s = node.iteration_start_s
            node.estimate_tokens = tokens
        iteration = node.step(len(node.batch), tokens)
        node.iteration_end_s = node.iteration_start_s + iteration
        for job in node.batch:
            job.interval_s = iteration + stall if job in members else iteration

    def _count_joins(self, node: DecodeNode, joiners: int, stall: float) -> None:
        """Section "What the scheduler knows and predicts": the moving rates of a join boundary."""
        horizon = self.x["rate_horizon_s"]
        f = 0.0
        if node.last_join_s is not None:
            f = math.exp(-(self.now - node.last_join_s) / horizon)
        node.stall_rate = f * node.stall_rate + stall / horizon
        node.join_rate = f * node.join_rate + joiners / horizon
        node.last_join_s = self.now

    def _complete(self, job: Job, decode_s: float | None) -> None:
        """Section "Outcomes"; decode_s is None for a request with one output token."""
        self.in_flight.remove(job)
        self.expected_output_tokens = 0.98 * self.expected_output_tokens + 0.02 * job.o
        tbt = tbt_mean = 0.0
        if decode_s is not None:
            self.expected_decode_s = 0.98 * self.expected_decode_s + 0.02 * decode_s
            tbt = tail_mean(job.intervals, self.x["tbt_tail_share"])
            tbt_mean = sum(job.intervals) / len(job.intervals)
            assert len(job.intervals) == job.o - 1
        outcome = self.outcomes[job.index]
        good = outcome["ttft_s"] <= self.x["ttft_slo_s"] and tbt <= self.x["tbt_slo_s"]
        self.seen["good" if good else "violated"] += 1
        outcome.update(status="completed", good=good, tbt_s=tbt, tbt_mean_s=tbt_mean, finish_s=self.now)

    # ------------------------------------------------------------------ predictions

    def _pending(self, d: int) -> list[Job]:
        """Assigned to d and not yet joined."""
        return [job for job in self.in_flight if job.decode == d and not job.joined]

    def _tbt_assigned(self, d: int, n: int) -> float:
        node, pending = self.decode[d], self._pending(d)
        return node.tbt(
            len(node.batch) + len(pending) + 1,
            node.kv_est(self.now) + sum(job.n for job in pending) + n,
            self.x["tbt_tail_share"],
        )

    def _tbt_at_join(self, d: int, n: int, t_join: float) -> float:
        begin = t_join - (self.x["decode_time_s"] or self.expected_decode_s)
        group = [job for job in self.in_flight if job.decode == d and begin < job.start <= t_join]
        tokens = sum(job.n for job in group) + len(group) * self.expected_output_tokens / 2 + n
        return self.decode[d].tbt(len(group) + 1, tokens, self.x["tbt_tail_share"])

    def _prefill_view(self, p: int, request: Request) -> PrefillView:
        """Section "What the scheduler knows and predicts", the prefill side."""
        node, n, blocks = self.prefill[p], request.input_tokens, request.blocks
        local_k, device_k = node.local_k(blocks), node.device_k(blocks)
        disk_k = node.disk_k(blocks)
        queue_s = 0.0
        if node.running is not None:
            queue_s = max(0.0, node.running_end - self.now) + node.queued_s
        ttft_local = queue_s + self._duration(p, n, local_k, max(0, local_k - device_k), disk_k)
        ttft_local += self._drain_ahead(p, n, self._reuse(n, local_k))
        ttft_recompute = queue_s + self._duration(p, n, 0, 0, 0) + self._drain_ahead(p, n, 0)
        holder, holder_k = self._holder(p, blocks)
        has_fetch = holder_k > local_k
        fetch_s, ttft_fetch = 0.0, ttft_local
        if has_fetch:
            share = min(self._share(("tx", holder)), self._share(("rx", p)))
            fetch_s = (holder_k - local_k) * self._block_bytes() / share
            fetch_s += self.x["transfer_latency_s"]
            compute_s = self._compute(p, n, self._reuse(n, holder_k))
            ttft_fetch = max(
                queue_s + self._duration(p, n, holder_k, max(0, holder_k - device_k), disk_k),
                fetch_s + compute_s / self._layers_per_node(p),
            )
            ttft_fetch += self._drain_ahead(p, n, self._reuse(n, holder_k))
        return PrefillView(
            local_k=local_k,
            device_k=device_k,
            disk_k=disk_k,
            holder=holder,
            holder_k=holder_k,
            has_fetch=has_fetch,
            queue_s=queue_s,
            fetch_s=fetch_s,
            ttft_local_s=ttft_local,
            ttft_fetch_s=ttft_fetch,
            ttft_recompute_s=ttft_recompute,
        )

    # ------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Raise AssertionError when the state is impossible."""
        for nic, bandwidth in self._bandwidths().items():
            assert self._used(nic) <= bandwidth * (1.0 + 1e-9), f"{nic} over bandwidth"
        for transfer in self.active:
            assert 0.0 <= transfer.left_bytes <= transfer.total_bytes
            assert 0.0 <= transfer.rate <= transfer.cap
            assert transfer.rate > 0.0 or transfer.cap == 0.0, "an active transfer stands still"
        for transfer in self.landing:
            assert transfer.land_s >= self.now
        for p, node in enumerate(self.prefill):
            self._check_prefill(p, node)
        for d, node_d in enumerate(self.decode):
            self._check_decode(d, node_d)

    def _check_prefill(self, p: int, node: PrefillNode) -> None:
        assert len(node.places()) <= node.x["host_blocks"], "host tier over capacity"
        assert len(node.device) <= node.x["device_blocks"], "device tier over capacity"
        assert len(node.disk) <= node.x["disk_blocks"], "disk tier over capacity"
        assert node.device <= node.resident, "device not inside host"
        assert not node.disk & node.places(), "a block on disk has a place in the host tier"
        assert not node.pending & node.resident, "a resident block is pending"
        # The pins are exactly those of the requests here and of the fetches from here.
        pins: Counter[int] = Counter()
        for job in self.in_flight:
            if job.prefill == p:
                pins.update(job.pins)
            if job.holder == p:
                pins.update(job.holder_pins)
                assert set(job.holder_pins) <= node.resident, "a block in transfer left its holder"
        assert dict(pins) == node.pins, "pins do not add up"
        for block in node.resident | node.disk:
            assert block in pins or block in node.released, "an unpinned block was never released"
        fetching = [job for job in self.in_flight if job.prefill == p and not job.fetch_landed]
        arriving = {block for job in fetching for block in job.in_transfer}
        assert arriving - node.resident == node.arriving - node.resident, "blocks in transfer do not add up"
        assert all(block in pins for block in arriving), "a pinned block is missing"
        assert (node.running is not None) or not node.queue, "an idle instance has a queue"
        if node.running is not None and node.running.free_s is not None:
            assert node.running.free_s >= self.now
        ends = [job.finish_s for job in node.draining if job.finish_s is not None]
        assert ends == sorted(ends) and all(end >= self.now for end in ends), "overtaken"
        assert not node.draining or node.x["pipeline_nodes"] > 1, "one node has no later stages"

    def _check_decode(self, d: int, node: DecodeNode) -> None:
        assert node.reserved <= node.x["kv_capacity_tokens"], "reserved over capacity"
        assert len(node.batch) <= node.x["max_batch"], "batch over max_batch"
        assert sum(job.context for job in node.batch) <= node.reserved
        assert (node.iteration_end_s is None) == (not node.batch)
        assert node.batch or not node.waiting, "an idle instance has a queue"
        assert node.iteration_end_s is None or node.iteration_end_s >= self.now
        assert all(job.decode == d and job.joined for job in node.batch)
        assert all(job.decode == d and not job.joined for job in node.waiting)
        for job in node.batch:
            assert 0 < job.iterations_left < job.o
            assert job.context == job.n + len(job.intervals)


def max_min_rates(flows: Sequence[tuple[Nic, Nic, float]], bandwidth: Mapping[Nic, float]) -> list[float]:
    """Progressive filling. Each flow is (sender, receiver, cap).

    All rates rise together from 0. A flow stops at its cap, or when one of its NICs is full.
    """
    rates: dict[int, float] = {}
    rising = list(range(len(flows)))
    while rising:
        # Where would the common level stop, and whom would that stop?
        stops: list[tuple[float, list[int]]] = []
        for nic, full in bandwidth.items():
            through = [i for i in rising if nic in flows[i][:2]]
            if through:
                taken = sum(rate for i, rate in rates.items() if nic in flows[i][:2])
                stops.append((max(0.0, full - taken) / len(through), through))
        for i in rising:
            stops.append((flows[i][2], [i]))
        level, stopped = min(stops, key=lambda stop: stop[0])
        for i in stopped:
            rates[i] = level
        rising = [i for i in rising if i not in stopped]
    return [rates[i] for i in range(len(flows))]


def tail_mean(intervals: Sequence[float], tail_share: float) -> float:
    """Section "Decode": TBT, the mean of the longest share of the intervals."""
    count = max(1, math.ceil(tail_share * len(intervals) - 1e-9))
    longest = sorted(intervals, reverse=True)[:count]
    return sum(longest) / count


def _leading(blocks: Sequence[int], present: Collection[int]) -> int:
    """How many of the first blocks are all present."""
    k = 0
    while k < len(blocks) and blocks[k] in present:
        k += 1
    return k


def _copy(parameters: Mapping[str, Any], integers: Sequence[str], numbers: Sequence[str]) -> dict[str, Any]:
    """The named parameters as plain numbers; reads `parameters[name]` only."""
    copied: dict[str, Any] = {name: int(parameters[name]) for name in integers}
    copied.update({name: float(parameters[name]) for name in numbers})
    return copied


def _empty_outcome() -> dict[str, Any]:
    """The outcome of a request that nothing has happened to."""
    return {
        "status": "undecided",
        "prefill": -1,
        "decode": -1,
        "source": "",
        "good": False,
        "ttft_s": NAN,
        "tbt_s": NAN,
        "tbt_mean_s": NAN,
        "prefill_start_s": NAN,
        "prefill_s": NAN,
        "prefill_end_s": NAN,
        "kv_ready_s": NAN,
        "join_s": NAN,
        "finish_s": NAN,
        "reused_tokens": 0,
        "device_tokens": 0,
        "fetched_blocks": 0,
        "predicted_ttft_s": NAN,
        "predicted_tbt_s": NAN,
    }
