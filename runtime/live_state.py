"""`LiveState`: the `ClusterState` of live workers, kept from decisions, reports, KV events and engine metrics.

The simulator knows its cluster; here it is reckoned. What a decision promises is entered at once (a *reservation*), so
that a burst sees its own first half; what is reported moves the reservation on; what nobody reports follows the
prediction; and what an engine says of itself replaces the reckoning. The rules are those of docs/physics.md, "A
decision" to "What the scheduler knows and predicts".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from heapq import heapify, heappop, heappush
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.kernel.compile import entry_point
from envs.observer import Observer
from envs.state import ROW_BITS, Observation, Source

from .block_hash import NO_EXTRAS, Namespace, signed
from .kernel import deciding, reservations
from .kernel.ledger import LEDGER
from .prefix_index import PrefixIndex
from .telemetry import EngineMetrics
from .workers import LiveCluster, Role, Worker

FORGET_EVERY_S = 0.1  # what is assumed to be cached ends this late at most
MOST_REQUESTS = 1 << 20  # that an engine is believed to have
NO_BLOCKS: NDArray[np.int32] = np.zeros(0, np.int32)
NO_HASHES: NDArray[np.uint64] = NO_EXTRAS
SOURCES = tuple(Source)
NAN = math.nan


class Stage(IntEnum):
    """How far a request has come."""

    QUEUED = 0
    PREFILL = 1
    TRANSFER = 2  # prefilled; its KV is on the way to the decode instance
    WAITING = 3  # its KV is there
    DECODE = 4
    GONE = 5


# A member of an enum class takes a tenth of a microsecond to look up, and a request asks for twenty.
QUEUED, PREFILL, TRANSFER, WAITING, DECODE, GONE = Stage


class Reservation:
    """An admitted request: what it takes of the cluster until it is finished, failed, or its lease ends."""

    hashes: NDArray[np.uint64] = NO_HASHES
    blocks: NDArray[np.int32] = NO_BLOCKS  # their numbers, while they are expected
    fetching = 0  # blocks on their way from the holder
    fetch_bytes = 0.0
    reused_tokens = 0
    stage = QUEUED
    flight = -1
    prefill_start_s = NAN
    prefill_end_s = NAN
    join_s = NAN
    due_s = math.inf  # of the next predicted step, where it is not reported
    drain_s = 0.0  # predicted for the later stages of a pipelined group
    ttft_s = NAN
    tbt_s = NAN
    output_tokens = 0
    prefill_s = NAN
    prefill_reported = False  # `prefill_s` was measured
    decode_s = NAN
    loaded_blocks = 0  # of the reused ones, those that come from host memory
    batch = NAN  # requests in its decode batch, and their context tokens, in the mean
    kv_tokens = NAN
    end = ""  # finished, expired, or the stage it failed at
    note: Any = None  # of the one who made the reservation

    def __init__(
        self,
        request_id: str,
        prefill: int,
        decode: int,
        source: Source,
        holder: int,
        input_tokens: int,
        arrival_s: float,
        predicted_s: float,  # of its prefill
        predicted_ttft_s: float,
        predicted_tbt_s: float,
        ttft_slo_s: float,
        tbt_slo_s: float,
        lease_s: float,
        expires_s: float,
        reported: bool,
        tenant: str = "",
    ) -> None:
        self.request_id = request_id
        self.prefill = prefill
        self.decode = decode
        self.source = source
        self.holder = holder
        self.input_tokens = input_tokens
        self.arrival_s = arrival_s
        self.predicted_s = predicted_s
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_tbt_s = predicted_tbt_s
        self.ttft_slo_s = ttft_slo_s
        self.tbt_slo_s = tbt_slo_s
        self.lease_s = lease_s
        self.expires_s = expires_s
        self.reported = reported
        self.tenant = tenant


@dataclass(slots=True)
class External:
    """What an engine has beyond our reservations: requests of others, or of before we started."""

    queue_s: float = 0.0
    queue_requests: int = 0
    batch: int = 0
    kv_tokens: float = 0.0


class LiveState:
    """The state a live decision is made on.

    Args:
        cluster: spec and workers. blocks: how many distinct blocks to remember.
        in_flight: most reservations at a time. started_s: the clock's first time.
        assumed_s: for how long what a worker without KV events has computed is taken to be cached there.
        on_end: called with every reservation that ends.
    """

    def __init__(
        self,
        cluster: LiveCluster,
        *,
        blocks: int = 1 << 20,
        in_flight: int = 1 << 16,
        started_s: float = 0.0,
        assumed_s: float = 300.0,
        on_end: Callable[[Reservation], None] | None = None,
    ) -> None:
        self.capacity = blocks
        self.most_in_flight = in_flight
        self.assumed_s = assumed_s
        self.on_end = on_end or (lambda reservation: None)
        self.reservations: dict[str, Reservation] = {}
        self.expired = 0
        self._steps: list[tuple[float, int, Reservation]] = []  # leases, and steps that nobody reports
        self._steps_made = 0
        self._forget_s = started_s
        self._set_up(cluster)
        self.clock["last_arrival_s"] = started_s
        self.clock["now_s"] = started_s
        self._use_index(PrefixIndex(self.observer.state.blocks, self.block_tokens, instances=len(cluster.prefills)))

    # --- the cluster -------------------------------------------------------------------------------------------------

    def _set_up(self, cluster: LiveCluster) -> None:
        self.cluster = cluster
        self.spec = cluster.spec
        self.prefills = cluster.prefills
        self.decodes = cluster.decodes
        self.block_tokens = cluster.spec.block_tokens
        self.block_bytes = cluster.spec.block_tokens * cluster.spec.model.kv_bytes_per_token
        self.observer = Observer(cluster.spec, blocks=self.capacity, in_flight=self.most_in_flight)
        state = self.observer.state
        self.clock = state.clock[0]
        self.prefill, self.decode, self.flight = state.prefill, state.decode, state.flight
        self._now_s, self._start_s = state.clock["now_s"], state.flight["start_s"]
        self._expected_output_tokens = state.clock["expected_output_tokens"]
        observation = self.observer.observation
        self.ttft_s = tuple(observation.prefill[f"ttft_{source.name.lower()}_s"][0] for source in Source)  # by source
        self.prefill_of = {worker.id: p for p, worker in enumerate(self.prefills)}
        self.decode_of = {worker.id: d for d, worker in enumerate(self.decodes)}
        self.twin = np.array(  # the decode index of a coupled instance, by its prefill index
            [self.decode_of[w.id] if w.role == Role.BOTH else -1 for w in self.prefills], np.int64
        )
        p, d = len(self.prefills), len(self.decodes)
        self.queues: list[deque[Reservation]] = [deque() for _ in range(p)]
        self.running: list[Reservation | None] = [None] * p  # of a pipelined group, in the first stage
        self.pipelined = (self.observer.parameters.prefill["pipeline_nodes"] > 1).tolist()
        self.fetching = np.zeros(p, np.int64)
        self.reports_nic = np.zeros(p + d, np.uint8)  # whose NICs are reported, and need no reckoning
        self.flying: list[Reservation] = []  # by row of `flight`
        self.external_prefill = [External() for _ in range(p)]
        self.external_decode = [External() for _ in range(d)]
        self.mean_prefill_s = [self.observer.prefill_s(i, 2048, 0, 0) for i in range(p)]
        self._kernels = _entry_points()
        self._ledger = np.zeros(1, LEDGER)
        self._at: int = self._ledger.ctypes.data
        places = self.observer.addresses | {"fetching": self.fetching.ctypes.data, "told": self.reports_nic.ctypes.data}
        for name, address in places.items():
            self._ledger[name] = address
        self.largest_context = int(self.observer.parameters.decode["kv_capacity_tokens"].max())
        self.up_prefill = _reachable(self.prefills)
        self.up_decode = _reachable(self.decodes)
        self._open_pools()

    def change_cluster(self, cluster: LiveCluster) -> list[Reservation]:
        """Go over to another set of workers or another spec, keeping what is known of those that stay.

        Returns the reservations that end because a worker of theirs is gone.

        Raises:
            ValueError: the block size differs; cached blocks would mean something else.
        """
        if cluster.spec.block_tokens != self.block_tokens:
            raise ValueError(
                f"block_tokens cannot change while serving: {self.block_tokens} now, "
                f"{cluster.spec.block_tokens} in the new cluster file; restart the sidecar"
            )
        prefilling, decoding = {w.id for w in cluster.prefills}, {w.id for w in cluster.decodes}
        lost = [
            r
            for r in self.reservations.values()
            if self.prefills[r.prefill].id not in prefilling or self.decodes[r.decode].id not in decoding
        ]
        for reservation in lost:
            self.end(reservation, "worker gone")
        for reservation in self.flying:
            if reservation.holder >= 0 and self.prefills[reservation.holder].id not in prefilling:
                self.fetch_landed(reservation)  # nothing more comes from there
                reservation.holder = -1
        old = copy(self)
        self._set_up(cluster)
        self.observer.state.clock[:] = old.observer.state.clock
        prefills = np.array([self.prefill_of.get(worker.id, -1) for worker in old.prefills], np.int64)
        decodes = np.array([self.decode_of.get(worker.id, -1) for worker in old.decodes], np.int64)
        for before, now in enumerate(prefills):
            if now >= 0:
                self.prefill[now] = old.prefill[before]
                self.queues[now] = old.queues[before]
                self.running[now] = old.running[before]
                self.external_prefill[now] = old.external_prefill[before]
                if old.prefills[before] == self.prefills[now]:
                    self.up_prefill[now] = old.up_prefill[before]
                self.mean_prefill_s[now] = old.mean_prefill_s[before]
                self.reports_nic[now] = old.reports_nic[before]
        for before, now in enumerate(decodes):
            if now >= 0:
                self.decode[now] = old.decode[before]
                self.external_decode[now] = old.external_decode[before]
                if old.decodes[before] == self.decodes[now]:
                    self.up_decode[now] = old.up_decode[before]
                self.reports_nic[len(self.prefills) + now] = old.reports_nic[len(old.prefills) + before]
        self.flying = old.flying
        self.flight[: len(self.flying)] = old.flight[: len(self.flying)]
        for reservation in self.flying:
            reservation.prefill = int(prefills[reservation.prefill])
            reservation.decode = int(decodes[reservation.decode])
            reservation.holder = int(prefills[reservation.holder]) if reservation.holder >= 0 else -1
            self.flight["decode"][reservation.flight] = reservation.decode
            self.fetching[reservation.prefill] += reservation.fetching
        self._open_pools()
        self.index.rebind(self.observer.state.blocks, prefills.tolist(), instances=len(self.prefills))
        self._use_index(self.index)
        return lost

    def restore_index(self, snapshot: dict[str, np.ndarray], names: list[str]) -> None:
        """Take over an index whose instances were the workers `names`; those that are gone are left out.

        Raises:
            ValueError: it is damaged, too large, or of another block size.
        """
        words = -(-max(len(names), len(self.prefills)) // ROW_BITS)
        index = PrefixIndex(np.zeros((self.capacity, words), np.int64), self.block_tokens, instances=len(names))
        index.restore(snapshot)
        mapping = [self.prefill_of.get(name, -1) for name in names]
        self.observer.state.blocks[:] = 0
        index.rebind(self.observer.state.blocks, mapping, instances=len(self.prefills))
        self._use_index(index)

    def _use_index(self, index: PrefixIndex) -> None:
        self.index = index
        self._ledger["index"] = index.address

    def mark(self, worker_id: str, up: bool) -> None:
        """Whether a worker may be chosen. Where none of a pool may, all may: a verdict on everyone is more likely an
        error of the judge (Envoy's panic threshold), and a request that is sent nowhere fails for certain."""
        p, d = self.prefill_of.get(worker_id), self.decode_of.get(worker_id)
        if p is not None:
            self.up_prefill[p] = up
        if d is not None:
            self.up_decode[d] = up
        self._open_pools()

    def _open_pools(self) -> None:
        panic = [not verdicts.any() for verdicts in (self.up_prefill, self.up_decode)]
        self.panic = " and ".join(pool for pool, all_down in zip(("prefill", "decode"), panic, strict=True) if all_down)
        self.prefill["up"] = 1 if panic[0] else self.up_prefill
        self.decode["up"] = 1 if panic[1] else self.up_decode
        self.open_prefill, self.open_decode = self.prefill["up"].copy(), self.decode["up"].copy()

    # --- a decision --------------------------------------------------------------------------------------------------

    def observe(
        self,
        input_tokens: int,
        blocks: NDArray[np.int32],
        now_s: float,
        ttft_slo_s: float,
        tbt_slo_s: float,
        candidates: Iterable[int] | None = None,
    ) -> Observation:
        """The observation for a request that arrives now, after `advance`; the next overwrites it.

        Args:
            blocks: numbers of the leading blocks of its prompt that the index knows.
            candidates: decode instances that may be chosen.
        """
        if candidates is not None:
            self._restrict(candidates)
        self._kernels.observe(self._at, blocks, len(blocks), input_tokens, now_s, ttft_slo_s, tbt_slo_s)
        if candidates is not None:
            self._open()
        return self.observer.observation

    def observe_tokens(
        self,
        tokens: NDArray[np.uint32],
        namespace: Namespace,
        now_s: float,
        ttft_slo_s: float,
        tbt_slo_s: float,
        candidates: Iterable[int] | None = None,
    ) -> tuple[Observation, NDArray[np.int32], NDArray[np.uint64]]:
        """`PrefixIndex.find_tokens` of a prompt and `observe` in one: (observation, leading blocks, hashes)."""
        count = len(tokens) // self.block_tokens
        hashes, numbers = np.empty(count, np.uint64), np.empty(count, np.int32)
        seed, root_extra = namespace
        if candidates is not None:
            self._restrict(candidates)
        known = self._kernels.observe_tokens(
            self._at, tokens, signed(seed), signed(root_extra), hashes, numbers, now_s, ttft_slo_s, tbt_slo_s
        )
        if candidates is not None:
            self._open()
        return self.observer.observation, numbers[:known], hashes

    def _restrict(self, candidates: Iterable[int]) -> None:
        """Leave only some decode instances open."""
        allowed = np.zeros(len(self.decodes), np.int64)
        allowed[list(candidates)] = 1
        self.decode["up"] = self.open_decode * allowed
        coupled = self.twin >= 0
        if coupled.any():  # a coupled instance decodes what it prefills
            self.prefill["up"] = self.open_prefill * np.where(coupled, allowed[self.twin], 1)

    def _open(self) -> None:
        self.decode["up"] = self.open_decode
        self.prefill["up"] = self.open_prefill

    def place(self, p: int, d: int, source: int, pairs: NDArray[np.int64]) -> tuple[int, float, float]:
        """What a choice means for the request observed last: (whom it fetches from or -1, predicted TTFT, TBT).

        `pairs` int64[K, 2] gets what could be chosen instead, -1 beyond the last.
        """
        return self._kernels.place(self._at, p, d, source, pairs)  # type: ignore[no-any-return]

    def admit(self, reservation: Reservation, hashes: NDArray[np.uint64], known: NDArray[np.int32]) -> None:
        """Enter a reservation, decided on the observation made last ("A decision", steps 1-5).

        Args:
            hashes: of all full blocks of the prompt. known: numbers of the leading ones that the index knew.
        """
        p, slot = reservation.prefill, len(self.flying)
        blocks = np.empty(len(hashes), np.int32)
        queue, external = self.queues[p], self.external_prefill[p]
        entry = (
            self._at,
            hashes,
            known,
            blocks,
            p,
            reservation.decode,
            reservation.source,
            reservation.holder,
            reservation.input_tokens,
            reservation.predicted_ttft_s,
            slot,
            reservation.arrival_s,
            self.running[p] is None and not queue,
            external.queue_requests,
            external.queue_s,
        )
        entered = self._kernels.admit(*entry)
        if entered[0] == -2:
            self.index.grow_expected(len(hashes))
            entered = self._kernels.admit(*entry)
        held, source, fetching, loaded, predicted_s, reused_tokens, end_s = entered
        reservation.hashes = hashes
        reservation.blocks = blocks if held == len(hashes) else blocks[:held]
        reservation.source = SOURCES[source]
        reservation.fetching, reservation.fetch_bytes = fetching, fetching * self.block_bytes
        reservation.loaded_blocks = loaded
        reservation.predicted_s, reservation.reused_tokens = predicted_s, reused_tokens
        if self.pipelined[p]:
            reservation.drain_s = float(self.prefill["drain_s"][p])
        reservation.flight = slot
        self.flying.append(reservation)
        self.reservations[reservation.request_id] = reservation
        if reservation.reported or end_s != end_s:  # else it has a step to come, see `_step_at`
            self._schedule(reservation, reservation.expires_s)
        self.mean_prefill_s[p] += 0.05 * (predicted_s - self.mean_prefill_s[p])
        if end_s == end_s:
            self._runs(p, reservation, reservation.arrival_s, end_s)
            return
        queue.append(reservation)
        if self.running[p] is None and not self.prefill["running"][p]:
            self._begin(p, reservation.arrival_s)

    @property
    def expected_output_tokens(self) -> float:
        """Of the next request, by the moving mean."""
        return self._expected_output_tokens.item(0)  # type: ignore[no-any-return]

    @property
    def full(self) -> bool:
        """Whether there is no room for another reservation."""
        return len(self.flying) >= self.most_in_flight

    # --- what becomes of a reservation -------------------------------------------------------------------------------

    def _begin(self, p: int, now_s: float) -> None:
        """The head of p's queue starts."""
        reservation = self.queues[p].popleft()
        external = self.external_prefill[p]
        end_s = self._kernels.start(
            self._at,
            p,
            reservation.decode,
            reservation.input_tokens,
            now_s,
            reservation.predicted_s,
            external.queue_requests,
            external.queue_s,
        )
        self._runs(p, reservation, now_s, end_s)

    def _runs(self, p: int, reservation: Reservation, now_s: float, end_s: float) -> None:
        self.running[p] = reservation
        reservation.stage = PREFILL
        reservation.prefill_start_s = now_s
        if not reservation.reported or self.pipelined[p]:
            self._step_at(reservation, end_s)

    def _leave_first_stage(self, reservation: Reservation, at_s: float) -> None:
        """It makes way for the next in the first stage of its pipelined group: no engine reports that."""
        p = reservation.prefill
        self.running[p] = None
        self.prefill["running"][p] = 0
        if self.queues[p]:
            self._begin(p, at_s)
        if not reservation.reported:
            self._step_at(reservation, at_s + reservation.drain_s)

    def _unqueue(self, p: int, reservation: Reservation) -> None:
        external = self.external_prefill[p]
        self._kernels.leave_queue(self._at, p, reservation.predicted_s, external.queue_requests, external.queue_s)

    def prefill_started(self, reservation: Reservation, at_s: float, expected_end_s: float = 0.0) -> None:
        """The engine has started on it; `expected_end_s` 0: it will take as long as predicted."""
        p = reservation.prefill
        if reservation.stage == QUEUED:
            if reservation in self.queues[p]:
                self.queues[p].remove(reservation)
            self.queues[p].appendleft(reservation)
            self._begin(p, at_s)
        if reservation.stage == PREFILL:
            reservation.prefill_start_s = at_s
            end_s = expected_end_s - reservation.drain_s if expected_end_s > 0 else at_s + reservation.predicted_s
            if self.running[p] is reservation:
                self.prefill["running_end_s"][p] = end_s
                if self.pipelined[p]:
                    self._step_at(reservation, end_s)

    def fetch_landed(self, reservation: Reservation) -> None:
        """The prefix that it fetches is on its prefill instance."""
        if reservation.fetching:
            self.fetching[reservation.prefill] -= reservation.fetching
            self._kernels.flow(self._at, reservation.holder, reservation.prefill, reservation.fetch_bytes, math.inf, -1)
            reservation.fetching = 0
            p = reservation.prefill
            if self.pipelined[p] and self.running[p] is reservation:  # it was held up, see `_step`
                self._step_at(reservation, max(float(self._now_s[0]), float(self.prefill["running_end_s"][p])))

    def prefill_done(self, reservation: Reservation, at_s: float) -> None:
        """Its first token is out; its blocks are where KV events say."""
        if reservation.stage > PREFILL:
            return
        p = reservation.prefill
        self.fetch_landed(reservation)
        running = self.running[p] is reservation
        if running:
            self.running[p] = None
        elif reservation.stage == QUEUED:  # engines batch prefills: it has overtaken
            self.queues[p].remove(reservation)
            self._unqueue(p, reservation)
            reservation.prefill_start_s = at_s - reservation.predicted_s
            self._stream(reservation, 1)
        reservation.stage = TRANSFER
        reservation.prefill_end_s = at_s
        if math.isnan(reservation.prefill_s):
            reservation.prefill_s = at_s - reservation.prefill_start_s
        if math.isnan(reservation.ttft_s):
            reservation.ttft_s = at_s - reservation.arrival_s
        # where no KV events tell what the worker keeps, that is assumed
        until_us = -1 if self.prefills[p].kv_events else round((at_s + self.assumed_s) * 1e6)
        done = (
            self._at,
            reservation.hashes,
            reservation.blocks,
            p,
            reservation.decode,
            reservation.input_tokens,
            reservation.flight,
            at_s,
            reservation.prefill_s,
            running,
            until_us,
        )
        layer_s = self._kernels.prefilled(*done)  # the rest went out during the prefill ([A] 5.2)
        if layer_s < 0:
            self.index.grow_routes(len(reservation.hashes))
            layer_s = self._kernels.prefilled(*done)
        if self.queues[p] and self.running[p] is None:
            self._begin(p, at_s)
        if not reservation.reported:
            self._step_at(reservation, at_s + layer_s + self.spec.transfer_latency_s)

    def kv_ready(self, reservation: Reservation) -> None:
        """All of its KV is on the decode instance, where it waits for the next iteration."""
        if reservation.stage != TRANSFER:
            return
        reservation.stage = WAITING
        self._kernels.land(
            self._at, reservation.prefill, reservation.decode, reservation.input_tokens, reservation.predicted_s
        )

    def recheck(self, reservation: Reservation, at_s: float) -> float:
        """Predicted TBT on its decode instance if it joins now that its KV is there ([A] 3, step 4)."""
        return float(self._kernels.recheck(self._at, reservation.decode, reservation.input_tokens, at_s))

    def joined(self, reservations: list[Reservation], at_s: float, stall_s: float | None = None) -> None:
        """They have joined the batch of their (common) decode instance at one boundary, which waited `stall_s`.

        None reckons the stall from the size of their KV.
        """
        joiners = [r for r in dict.fromkeys(reservations) if r.stage < DECODE]  # each once, if told twice
        if not joiners:
            return
        tokens = 0
        for reservation in joiners:
            self.prefill_done(reservation, at_s)
            self.kv_ready(reservation)
            tokens += reservation.input_tokens
        stall_s, batch, kv_tokens, expected_s = self._kernels.join(
            self._at, joiners[0].decode, len(joiners), tokens, at_s, NAN if stall_s is None else stall_s
        )
        join_s = at_s + stall_s
        for reservation in joiners:
            reservation.stage = DECODE
            reservation.join_s = join_s
            reservation.batch, reservation.kv_tokens = batch, kv_tokens
            self._start_s[reservation.flight] = join_s
            if not reservation.reported:
                self._step_at(reservation, join_s + expected_s)

    def finished(
        self,
        reservation: Reservation,
        at_s: float,
        *,
        output_tokens: int = 0,
        ttft_s: float = math.nan,
        tbt_s: float = math.nan,
        decode_s: float = math.nan,
    ) -> None:
        """Its last token is out. What is not known (0, NaN) is left out of the moving means."""
        if not math.isnan(ttft_s):
            reservation.ttft_s = ttft_s
        if reservation.stage < DECODE and output_tokens != 1:
            self.joined([reservation], at_s)
        self.prefill_done(reservation, at_s)
        reservation.tbt_s = tbt_s
        reservation.output_tokens = output_tokens
        if math.isnan(decode_s) and reservation.reported:
            decode_s = at_s - reservation.join_s
        reservation.decode_s = decode_s
        good = reservation.ttft_s <= reservation.ttft_slo_s and not tbt_s > reservation.tbt_slo_s
        batch, kv_tokens = self._kernels.finish(self._at, reservation.decode, at_s, output_tokens, decode_s, good)
        if reservation.stage == DECODE:
            reservation.batch = (reservation.batch + batch) / 2
            reservation.kv_tokens = (reservation.kv_tokens + kv_tokens) / 2
        self.end(reservation, "finished", at_s)

    def end(self, reservation: Reservation, how: str, at_s: float | None = None) -> None:
        """The reservation is no more, at whatever stage; everything it took is given back."""
        if reservation.stage == GONE:
            return
        p, stage = reservation.prefill, reservation.stage
        at_s = float(self._now_s[0]) if at_s is None else at_s
        if stage == QUEUED:
            self.queues[p].remove(reservation)
            self._unqueue(p, reservation)
        if stage == PREFILL and self.running[p] is reservation:
            self.running[p] = None
            self.prefill["running"][p] = 0
            if self.queues[p]:
                self._begin(p, at_s)
        if stage <= PREFILL:
            self.fetch_landed(reservation)
            self.index.unexpect(p, reservation.blocks)
        if stage in (PREFILL, TRANSFER):
            self._stream(reservation, -1)
        last = self.flying.pop()
        slot = reservation.flight
        self._kernels.leave(
            self._at,
            stage,
            reservation.decode,
            reservation.input_tokens,
            slot,
            len(self.flying),
            at_s,
            reservation.join_s,
            reservation.output_tokens,
        )
        if last is not reservation:
            self.flying[slot] = last
            last.flight = slot
        reservation.flight = -1
        if how == "recheck":
            self.clock["rejected_at_decode"] += 1
            if not math.isnan(reservation.prefill_s):
                self.clock["wasted_prefill_s"] += reservation.prefill_s
        reservation.stage = GONE
        reservation.end = how
        del self.reservations[reservation.request_id]
        self.on_end(reservation)
        reservation.hashes, reservation.blocks = NO_HASHES, NO_BLOCKS  # its lease may keep it in `_steps` for long
        if len(self._steps) > 8 * len(self.flying) + 1024:  # those in flight have up to four
            self._steps[:] = [step for step in self._steps if step[2].stage != GONE]
            heapify(self._steps)

    def move(self, reservation: Reservation, d: int) -> None:
        """It is on another decode instance than was decided."""
        if reservation.stage >= WAITING or d == reservation.decode:
            return
        streaming = reservation.stage > QUEUED
        if streaming:
            self._stream(reservation, -1)
        for instance, sign in ((reservation.decode, -1), (d, 1)):
            self.decode["pending_requests"][instance] += sign
            self.decode["pending_tokens"][instance] += sign * reservation.input_tokens
        reservation.decode = d
        self.flight["decode"][reservation.flight] = d
        if streaming:
            self._stream(reservation, 1)

    def renew(self, reservation: Reservation, now_s: float) -> None:
        """It is alive: its lease starts anew. (The old expiry in the heap finds this out when it comes up.)"""
        reservation.expires_s = now_s + reservation.lease_s

    def advance(self, now_s: float) -> None:
        """Everything that is due by now: predicted steps of what nobody reports, and leases that end."""
        steps = self._steps
        while steps and steps[0][0] <= now_s:
            due_s, _, reservation = heappop(steps)
            if reservation.stage == GONE:
                continue
            if due_s == reservation.due_s:
                reservation.due_s = math.inf
                self._step(reservation, due_s)
            elif reservation.expires_s <= now_s:
                self.expired += 1
                self.end(reservation, "expired", now_s)
            elif due_s < reservation.expires_s:
                self._schedule(reservation, reservation.expires_s)
        if now_s >= self._forget_s:
            self.index.expire(now_s)
            self._forget_s = now_s + FORGET_EVERY_S
        if now_s > self._now_s[0]:
            self._now_s[0] = now_s

    def _step(self, reservation: Reservation, at_s: float) -> None:
        """The step that was predicted for it."""
        p = reservation.prefill
        if reservation.stage == PREFILL and self.pipelined[p] and self.running[p] is reservation:
            if reservation.reported and reservation.fetching:
                return  # held up, nobody knows for how long
            end_s = float(self.prefill["running_end_s"][p])
            if end_s > at_s:  # the engine has said so since
                self._step_at(reservation, end_s)
            else:
                self._leave_first_stage(reservation, at_s)
        elif reservation.reported:
            return  # has taken it already, or will
        elif reservation.stage == PREFILL:
            self.prefill_done(reservation, at_s)
        elif reservation.stage == TRANSFER:
            self.joined([reservation], at_s)
        elif reservation.stage == DECODE:
            self.finished(reservation, at_s)

    def _step_at(self, reservation: Reservation, due_s: float) -> None:
        """Its next step; where nobody reports, and so renews its lease, no later than that ends."""
        reservation.due_s = due_s
        if not reservation.reported and reservation.expires_s < due_s:
            due_s = reservation.expires_s
        self._schedule(reservation, due_s)

    def _schedule(self, reservation: Reservation, due_s: float) -> None:
        self._steps_made += 1
        heappush(self._steps, (due_s, self._steps_made, reservation))

    # --- what an engine says -----------------------------------------------------------------------------------------

    def engine_metrics(self, worker_id: str, metrics: EngineMetrics) -> None:
        """Take up what an engine's metrics show beyond our reservations of before they were taken."""
        p, d = self.prefill_of.get(worker_id), self.decode_of.get(worker_id)
        running, waiting = (int(min(count or 0, MOST_REQUESTS)) for count in (metrics.running, metrics.waiting))
        if p is not None:
            ours = len(self.queues[p]) + (self.running[p] is not None)
            if self.pipelined[p]:
                drain = (r.prefill == p and r.stage == PREFILL and r is not self.running[p] for r in self.flying)
                ours += sum(drain)
            old = self.external_prefill[p]
            if d is not None:  # coupled: what decodes is running too
                ours += int(self.decode["batch"][d]) - self.external_decode[d].batch
            extra = max(0, (running if d is None else 0) + waiting - ours)
            new = External(queue_s=extra * self.mean_prefill_s[p], queue_requests=extra)
            self.prefill["queue_requests"][p] += new.queue_requests - old.queue_requests
            self.prefill["queued_s"][p] = max(0.0, float(self.prefill["queued_s"][p]) + new.queue_s - old.queue_s)
            self.external_prefill[p] = new
            busy = self.running[p] is not None or extra > 0
            if busy and not self.prefill["running"][p]:
                self.prefill["running_end_s"][p] = self.clock["now_s"]
            self.prefill["running"][p] = busy
            if self.queues[p] and not busy:  # what was before them is gone
                self._begin(p, float(self.clock["now_s"]))
        if d is not None:
            row = self.decode[d]
            old = self.external_decode[d]
            ours = int(row["batch"]) - old.batch
            extra = max(0, running - ours - (int(row["waiting_requests"]) if p is None else 0))
            capacity = float(self.observer.parameters.decode["kv_capacity_tokens"][d])
            now_s = float(self.clock["now_s"])
            context = self._kernels.context(self._at, d, now_s) if ours else 0.0
            kv_tokens = 0.0
            if extra and metrics.kv_usage is not None:
                kv_tokens = max(0.0, metrics.kv_usage * capacity - max(0.0, context - old.kv_tokens))
            row["batch"] = ours + extra
            row["kv_tokens"] = max(0.0, context - (old.kv_tokens if ours else 0.0)) + kv_tokens
            row["updated_s"] = max(now_s, float(row["updated_s"])) if ours else now_s
            self.external_decode[d] = External(batch=extra, kv_tokens=kv_tokens)

    def engine_load(self, worker_id: str, load: Any) -> None:
        """Take over what an engine says of itself (`WorkerLoad`): only it knows.

        Raises:
            KeyError: there is no such worker.
        """
        p, d = self.prefill_of.get(worker_id), self.decode_of.get(worker_id)
        if p is None and d is None:
            raise KeyError(worker_id)
        given = load.HasField
        if p is not None:
            row = self.prefill[p]
            if given("prefill_end_s"):
                row["running_end_s"] = load.prefill_end_s
            self._take_nic(row, load, p, ("tx_flows", "rx_flows"), (("tx_bytes_per_s", "tx_used"),))
            if given("tx_backlog_bytes"):
                row["tx_backlog_bytes"] = load.tx_backlog_bytes
        if d is not None:
            row = self.decode[d]
            if given("batch"):
                row["batch"] = load.batch
            if given("kv_tokens"):
                row["kv_tokens"] = load.kv_tokens
                row["updated_s"] = load.at_s or float(self.clock["now_s"])
            self._take_nic(row, load, len(self.prefills) + d, ("rx_flows",), ())

    def _take_nic(self, row: Any, load: Any, node: int, flows: Iterable[str], rates: Iterable[tuple[str, str]]) -> None:
        for name in flows:
            if load.HasField(name):
                row[name] = getattr(load, name)
                self.reports_nic[node] = 1
        for name, column in (*rates, ("rx_bytes_per_s", "rx_used")):
            if load.HasField(name):
                row[column] = getattr(load, name)
                self.reports_nic[node] = 1

    # --- reckoning ---------------------------------------------------------------------------------------------------

    def _stream(self, reservation: Reservation, sign: int) -> None:
        """The KV of a request streams to its decode instance while it is computed ([A] 5.2), or does so no more."""
        self._kernels.stream(
            self._at, reservation.prefill, reservation.decode, reservation.input_tokens, reservation.predicted_s, sign
        )

    def count_blocks(self) -> None:
        """Bring the used shares of the cache tiers up to date with the index, which KV events change."""
        self._kernels.count_blocks(self._at)


def _reachable(workers: tuple[Worker, ...]) -> NDArray[np.int64]:
    """Which workers may be chosen at first: those with an address, where any has one."""
    addressed = np.array([bool(worker.address) for worker in workers], np.int64)
    return addressed if addressed.any() else np.ones_like(addressed)


@cache
def _entry_points() -> SimpleNamespace:
    """The kernels, for arguments of the types that they get here."""
    at = count = 0
    p = d = slot = 0
    s = 0.0
    numbers, hashes = NO_BLOCKS, NO_HASHES
    tokens, pairs = np.zeros(0, np.uint32), np.zeros((0, 2), np.int64)
    arguments: dict[Callable[..., Any], tuple[Any, ...]] = {
        deciding.count_blocks: (at,),
        deciding.observe: (at, numbers, count, count, s, s, s),
        deciding.observe_tokens: (at, tokens, 0, 0, hashes, numbers, s, s, s),
        deciding.place: (at, p, d, 0, pairs),
        reservations.admit: (at, hashes, numbers, numbers, p, d, 0, p, count, s, slot, s, 0, count, s),
        reservations.leave_queue: (at, p, s, count, s),
        reservations.start: (at, p, d, count, s, s, count, s),
        reservations.stream: (at, p, d, count, s, 1),
        reservations.flow: (at, p, d, s, s, 1),
        reservations.prefilled: (at, hashes, numbers, p, d, count, slot, s, s, 0, 0),
        reservations.land: (at, p, d, count, s),
        reservations.recheck: (at, d, count, s),
        reservations.join: (at, d, count, count, s, s),
        reservations.context: (at, d, s),
        reservations.finish: (at, d, s, count, s, 0),
        reservations.leave: (at, 0, d, count, slot, slot, s, s, count),
    }
    return SimpleNamespace(**{kernel.__name__: entry_point(kernel, *given) for kernel, given in arguments.items()})
