"""`Simulator`: a batch of simulated clusters in flat arrays, on the compiled physics of `envs.kernel`."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from traces import Trace

from . import state as _state
from .kernel import events as _events
from .kernel import kvcache as _kvcache
from .kernel import memory
from .kernel import replay as _replay
from .kernel.compile import announce, entry_point
from .runs import Runs
from .spec import ClusterSpec
from .state import ROW_BITS, ClusterState, Observation, Parameters, Records, Source, World

_ERRORS = {
    1: "a decode batch outgrew its max_batch",
    2: "the ring of decode segments is too short for the longest output of this trace",
    3: "it was made without a disk tier, which its parameters ask for now",
    4: "it was made for LRU, its parameters ask for another eviction rule now",
}


_SIZES = np.array(  # as `kernel.replay.fork` wants them
    [
        record.itemsize
        for record in (
            _state.CLOCK,
            _state.PREFILL,
            _state.DECODE,
            _state.FLIGHT,
            _state.REQUEST,
            _state.CELL,
            _state.OUTCOME,
            _state.JOB,
            _state.ENGINE,
            _state.PREFILL_TIMER,
            _state.DECODE_TIMER,
            _state.EVICTION,
            _state.RELEASE,
            _state.FLOW,
            _state.MEMBER,
            _state.SEGMENT,
            _state.USE,
        )
    ]
)


_LINE = 64  # bytes of a cache line

Shape = tuple[tuple[int, ...], Any]  # of one cluster, and the dtype


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _allocate(clusters: int, state: dict[str, Shape], world: dict[str, Shape]) -> World:
    """Zeroed tables of the given shapes, stacked for `clusters`, in one piece of memory with large pages.

    The kernels reach far and wide in their tables; with pages of 4 kB most of that would miss the address cache.
    """
    offsets, size = [], 0
    for shape, dtype in (*state.values(), *world.values()):
        offsets.append(size)
        size += -(-clusters * int(np.prod(shape)) * np.dtype(dtype).itemsize // _LINE) * _LINE
    try:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
        else:
            pages = mmap.mmap(-1, size)
    except OSError:
        largest = max((*state, *world), key=lambda name: int(np.prod((state | world)[name][0])))
        raise MemoryError(
            f"no {size / 2**30:.1f} GiB for {clusters} simulated clusters; largest table: {largest!r}. Tables grow "
            "with the requests, the distinct blocks, and 'segments' with the longest output of the trace"
        ) from None
    tables = [
        np.ndarray((clusters, *shape), dtype, buffer=pages, offset=offset)
        for (shape, dtype), offset in zip((*state.values(), *world.values()), offsets, strict=True)
    ]
    parts = dict(zip((*state, *world), tables, strict=True))
    return World(state=ClusterState(**{name: parts[name] for name in state}), **{name: parts[name] for name in world})


def empty_observation(clusters: int, prefills: int, decodes: int) -> Observation:
    """Observations of `clusters` clusters, all zero."""
    return Observation(
        np.zeros((clusters, 1), _state.REQUEST_FEATURES),
        np.zeros((clusters, prefills), _state.PREFILL_FEATURES),
        np.zeros((clusters, decodes), _state.DECODE_FEATURES),
        np.zeros((clusters, 1), _state.CLUSTER_FEATURES),
        np.zeros((clusters, prefills, 3), np.uint8),
        np.zeros((clusters, decodes), np.uint8),
    )


class Simulator:
    """`clusters` independent clusters of one shape.

    `parameter_tables` holds each cluster's parameters (leading axis: clusters) and may be changed between episodes.

    Each gets requests with `load`, starts with `begin`, and goes on by `observe` and `decide`, by `step` (one
    decision in every cluster), by `replay` (a compiled policy until the end), or is copied with `fork`. Sizes are
    bounds on what a cluster may be given later.

    Args:
        cluster: its description, or the arrays of one.
        clusters: how many.
        max_requests: requests per cluster.
        max_references: sum of their numbers of runs (`envs.runs`).
        max_runs: distinct runs among these.
        max_blocks: distinct blocks.
        max_output_tokens: longest output.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Parameters,
        *,
        clusters: int = 1,
        max_requests: int,
        max_references: int,
        max_runs: int,
        max_blocks: int,
        max_output_tokens: int,
    ) -> None:
        announce()
        self.clusters = clusters
        one = cluster.parameters() if isinstance(cluster, ClusterSpec) else cluster
        self.parameter_tables = Parameters(*(np.repeat(table[None], clusters, axis=0) for table in one))
        self.prefills = p = len(one.prefill)
        self.decodes = d = len(one.decode)
        self.parameters = memory.headers(memory.PARAMETERS, self.parameter_tables, clusters, prefills=p, decodes=d)
        c, r, b = clusters, max_requests, max_blocks
        ring = _power_of_two(max_output_tokens + 2)
        words = -(-p // ROW_BITS)
        slots = p + d + 1
        leaves = _power_of_two(slots)
        batch_limit = min(int(one.decode["max_batch"].max()), r)
        counted = b if one.cluster["eviction"].any() else 0
        disk_runs = max_runs if one.prefill["disk_blocks"].any() else 0
        state: dict[str, Shape] = {
            "clock": ((1,), _state.CLOCK),
            "prefill": ((p,), _state.PREFILL),
            "decode": ((d,), _state.DECODE),
            "blocks": ((0, words), np.int64),
            "flight": ((r,), _state.FLIGHT),
        }
        world: dict[str, Shape] = {
            "requests": ((r,), _state.REQUEST),
            "references": ((max_references,), _state.REFERENCE),
            "run_blocks": ((max_runs,), np.int32),
            "outcomes": ((r,), _state.OUTCOME),
            "jobs": ((r,), _state.JOB),
            "engine": ((1,), _state.ENGINE),
            "prefill_timers": ((p,), _state.PREFILL_TIMER),
            "decode_timers": ((d,), _state.DECODE_TIMER),
            "evictions": ((p, _state.TIERS), _state.EVICTION),
            "cells": ((max_runs, p), _state.CELL),
            "disks": ((disk_runs, p), np.int32),
            "parts": ((p, b), _state.PART),
            "uses": ((p, counted), _state.USE),
            "heaps": ((p, _state.TIERS, counted), np.int32),
            "places": ((p, _state.TIERS, counted), np.int32),
            "releases": ((2 * r,), _state.RELEASE),
            "flows": ((2 * r,), _state.FLOW),
            "active": ((2 * r,), np.int32),
            "uncapped": ((2 * r,), np.int32),
            "members": ((d, batch_limit), _state.MEMBER),
            "segments": ((d, ring), _state.SEGMENT),
            "due_s": ((slots,), np.float64),
            "winners": ((2 * leaves,), np.int32),
            "scratch_tail": ((4, 2 * ring), np.float64),
            "scratch_match": ((4, p), np.int64),
            "scratch_forecast": ((d, 2), np.float64),
            "scratch_nics": ((2, 2 * p + d), np.int64),
            "scratch_capacity": ((2, 2 * p + d), np.float64),
            "scratch_members": ((2 * r,), np.int32),
        }
        self.batch = _allocate(c, state, world)
        self.states = memory.headers(
            memory.STATE,
            self.batch.state,
            c,
            prefills=p,
            decodes=d,
            words=words,
            block_capacity=0,
            flight_capacity=r,
        )
        self.worlds = memory.headers(
            memory.WORLD,
            self.batch,
            c,
            prefills=p,
            decodes=d,
            request_capacity=r,
            reference_capacity=max_references,
            run_capacity=max_runs,
            disk_capacity=disk_runs,
            block_capacity=b,
            use_capacity=counted,
            ring=ring,
            batch_limit=batch_limit,
            leaves=leaves,
        )
        self.worlds["state"] = self.states.ctypes.data + np.arange(c) * memory.STATE.itemsize
        self.observation_tables = empty_observation(c, p, d)
        self.observations = memory.headers(memory.OBSERVATION, self.observation_tables, c, prefills=p, decodes=d)
        self._loaded: dict[int, tuple[Trace, Runs, NDArray[np.int32]]] = {}  # by id
        self._room_for: tuple[Trace, ...] = ()  # traces of which any window of so many requests fits
        one_cluster = (self.worlds[0], self.parameters[0])
        self._begin = entry_point(_replay.begin, *one_cluster, 0)
        self._observe = entry_point(_replay.observe_arrival, *one_cluster, self.observations[0])
        self._load: Callable[..., Any] | None = None
        for c in range(clusters):
            self.begin(c)

    @classmethod
    def with_room(
        cls,
        cluster: ClusterSpec | Parameters,
        *traces: Trace,
        clusters: int = 1,
        requests: int | None = None,
    ) -> Self:
        """Clusters with room for any window of `requests` consecutive requests of any of `traces`, or for the whole."""
        runs = [Runs.of(trace) for trace in traces]
        requests = max(trace.n_requests for trace in traces) if requests is None else requests
        largest = [r.largest(min(requests, t.n_requests)) for t, r in zip(traces, runs, strict=True)]
        references, distinct, blocks = map(max, zip(*largest, strict=True))
        simulator = cls(
            cluster,
            clusters=clusters,
            max_requests=requests,
            max_references=references,
            max_runs=distinct,
            max_blocks=blocks,
            max_output_tokens=max(int(trace.output_tokens.max(initial=1)) for trace in traces),
        )
        for trace, its in zip(traces, runs, strict=True):
            simulator._use(trace, its)
            simulator._room_for += (trace,)
        return simulator

    @classmethod
    def for_trace(cls, cluster: ClusterSpec | Parameters, trace: Trace, *, clusters: int = 1) -> Simulator:
        """Clusters with room for the whole of `trace`, the trace loaded into each."""
        simulator = cls.with_room(cluster, trace, clusters=clusters)
        for c in range(clusters):
            simulator.load(c, trace)
        return simulator

    def _use(self, trace: Trace, runs: Runs) -> tuple[Trace, Runs, NDArray[np.int32]]:
        """Keep the runs of a trace. There is room for all in `_room_for`; of other traces only the last is kept."""
        using = (trace, runs, np.zeros((len(runs.lengths) + 1, 2), np.int32))
        self._loaded = {id(known): self._loaded[id(known)] for known in self._room_for} | {id(trace): using}
        return using

    @property
    def bytes_per_cluster(self) -> int:
        """Bytes of arrays per cluster."""
        tables: list[Any] = [*self.batch.state, *self.batch[1:], *self.observation_tables]
        return int(sum(table.nbytes for table in tables)) // self.clusters

    def load(
        self,
        cluster: int,
        trace: Trace,
        first: int = 0,
        last: int | None = None,
        *,
        speed: float = 1.0,
        recheck: bool | None = None,
    ) -> None:
        """Give a cluster the requests first .. last - 1 of `trace`, arriving `speed` times as fast, from time 0, and
        `begin`.

        Raises:
            ValueError: the trace's blocks do not fit the spec, or the window does not fit the simulator's sizes.
        """
        last = trace.n_requests if last is None else last
        block_tokens = int(self.parameter_tables.cluster["block_tokens"][cluster, 0])
        if trace.has_blocks and trace.block_tokens != block_tokens:
            raise ValueError(
                f"trace {trace.name!r} has blocks of {trace.block_tokens} tokens, the cluster of {block_tokens}: "
                f"convert one, e.g. trace.reblock({block_tokens})"
            )
        _, runs, seen = self._loaded.get(id(trace)) or self._use(trace, Runs.of(trace))
        if not any(trace is known for known in self._room_for) or last - first > self.batch.requests.shape[1]:
            self._check_room(trace, runs, first, last)
        arguments = (
            self.worlds[cluster],
            trace.arrival_s,
            float(speed),
            trace.input_tokens,
            trace.output_tokens,
            trace.block_offsets,
            runs.offsets,
            runs.runs,
            runs.lengths,
            int(runs.chained),
            first,
            last,
            seen,
        )
        if self._load is None:
            self._load = entry_point(_replay.load, *arguments)
        self._load(*arguments)
        self.begin(cluster, recheck=recheck)

    def _check_room(self, trace: Trace, runs: Runs, first: int, last: int) -> None:
        references, distinct, blocks = runs.counts(first, last)
        longest = int(trace.output_tokens[first:last].max(initial=1))
        for what, needed, room in (
            ("requests", last - first, self.batch.requests.shape[1]),
            ("runs of blocks", references, self.batch.references.shape[1]),
            ("distinct runs of blocks", distinct, self.batch.cells.shape[1]),
            ("distinct blocks", blocks, self.batch.parts.shape[2]),
            ("output tokens", longest + 2, self.batch.segments.shape[2]),
        ):
            if needed > room:
                raise ValueError(f"the window has {needed} {what}, this simulator has room for {room}")

    def begin(self, cluster: int, *, recheck: bool | None = None) -> None:
        """Empty a cluster and go back to its first request. `recheck` overrides the spec's `decode_recheck`."""
        if recheck is None:
            recheck = bool(self.parameter_tables.cluster["decode_recheck"][cluster, 0])
        self._begin(self.worlds[cluster], self.parameters[cluster], int(recheck))

    def observe(self, cluster: int) -> bool:
        """Go to a cluster's next arrival and observe it; False when none is left (then the cluster has drained)."""
        more = bool(self._observe(self.worlds[cluster], self.parameters[cluster], self.observations[cluster]))
        self.raise_errors()
        return more

    def decide(self, cluster: int, prefill: int, decode: int = -1, source: Source = Source.LOCAL) -> None:
        """Carry out a decision for the observed request; a negative `prefill` rejects it.

        Raises:
            ValueError: there is no request to decide on, or no such instance.
        """
        engine = self.batch.engine[cluster, 0]
        if engine["next_request"] >= engine["requests"]:
            raise ValueError(f"cluster {cluster} has no request left to decide on")
        source = Source(source)
        if prefill >= self.prefills or (prefill >= 0 and not 0 <= decode < self.decodes):
            raise ValueError(f"no prefill {prefill} or no decode {decode} in a {self.prefills}P{self.decodes}D cluster")
        _replay.carry_out(
            self.worlds[cluster], self.parameters[cluster], self.observations[cluster], prefill, decode, int(source)
        )

    def step(
        self, actions: NDArray[np.int64], done: NDArray[np.bool_], start: int = 0, stop: int | None = None
    ) -> None:
        """One decision in each cluster start .. stop - 1, then on to the next arrivals (without the GIL).

        Args:
            actions: int64[clusters]; 0 rejects, else 1 + (prefill * D + decode) * 3 + source.
            done: bool[clusters], written: where no request is left and the cluster has drained.
        """
        stop = self.clusters if stop is None else stop
        _replay.step(self.worlds, self.parameters, self.observations, actions, done, start, stop)
        self.raise_errors()

    def replay(
        self,
        cluster: int,
        router: _replay.Callback,
        router_values: NDArray[np.float64],
        admission: _replay.Callback,
        admission_values: NDArray[np.float64],
        memory: NDArray[np.uint64],
        *,
        limit: int = 1 << 62,
        until_s: float = math.inf,
    ) -> None:
        """Run a cluster for up to `limit` more requests under a compiled policy; past the last request it drains.

        With `until_s` it stops when all that happens up to that time has happened, to be looked at and gone on with; or
        before, with the last request of `limit`.

        Args:
            router: a compiled function, see `envs.kernel.replay`.
            admission: the same.
            memory: uint64[4], what the router keeps between decisions.

        Raises:
            ValueError: `until_s` is NaN.
        """
        if math.isnan(until_s):
            raise ValueError("until_s is NaN, expected seconds of simulated time")
        _replay.replay(
            self.worlds[cluster],
            self.parameters[cluster],
            self.observations[cluster],
            router,
            router_values,
            admission,
            admission_values,
            memory,
            np.zeros(3, np.int64),
            limit,
            float(until_s),
        )
        self.raise_errors()

    def fork(self, source: int, target: int) -> None:
        """Make cluster `target` a copy of cluster `source`, observation included, to try another future from here.

        Raises:
            IndexError: there is no such cluster.
        """
        for c in (source, target):
            if not 0 <= c < self.clusters:
                raise IndexError(f"no cluster {c} among {self.clusters}")
        _replay.fork(self.worlds[source], self.worlds[target], _SIZES)
        for table in self.observation_tables:
            table[target] = table[source]

    def branch(
        self,
        cluster: int,
        scratch: int,
        actions: NDArray[np.int64],
        router: _replay.Callback,
        router_values: NDArray[np.float64],
        admission: _replay.Callback,
        admission_values: NDArray[np.float64],
        memory: NDArray[np.uint64],
        *,
        horizon: int,
    ) -> NDArray[np.int64]:
        """How many more requests become good after each of some decisions for the request a cluster has observed.

        In every branch the same requests arrive; the `horizon` after this one follow a compiled policy, then none
        arrive until all is settled. Without the GIL.

        Args:
            scratch: another cluster of the batch, with the same parameters; what is in it is lost.
            actions: int64[A] as for `step`, all of them valid. The rest as for `replay`.

        Returns:
            int64[A].

        Raises:
            ValueError: nothing is observed, or `scratch` is the cluster itself.
        """
        engine = self.batch.engine[cluster, 0]
        if engine["next_request"] >= engine["requests"]:
            raise ValueError(f"cluster {cluster} has no request left to decide on")
        if scratch == cluster:
            raise ValueError(f"scratch is cluster {cluster} itself")
        good = np.zeros(len(actions), np.int64)
        _replay.branch(
            self.worlds[cluster],
            self.parameters[cluster],
            self.observations[cluster],
            self.worlds[scratch],
            self.observations[scratch],
            _SIZES,
            router,
            router_values,
            admission,
            admission_values,
            memory,
            actions,
            horizon,
            good,
        )
        return good

    def state(self, cluster: int) -> ClusterState:
        """What a scheduler may know about a cluster now: its tables, and a new one of who has which block.

        Blocks are numbered in order of appearance in what was loaded.
        """
        state = self.batch.state
        words = np.zeros((int(self.batch.engine["blocks"][cluster, 0]), state.blocks.shape[2]), np.int64)
        _kvcache.fill_blocks(self.worlds[cluster], words)
        return ClusterState(*(table[cluster] for table in state))._replace(blocks=words)

    def replicas(self, cluster: int) -> NDArray[np.int32]:
        """On how many prefill instances each block is resident now, int32[blocks] ([F] Fig. 11).

        Only copies that can be fetched count: those in host memory. Blocks are numbered as in `state`.
        """
        copies = np.zeros(int(self.batch.engine["blocks"][cluster, 0]), np.int32)
        _kvcache.count_copies(self.worlds[cluster], copies)
        return copies

    def outcomes(self, cluster: int) -> Records:
        """The `OUTCOME` records of a cluster's requests [R] (a view)."""
        _events.empty_outcomes(self.worlds[cluster])
        return self.batch.outcomes[cluster, : self.requests(cluster)]

    def requests(self, cluster: int) -> int:
        """How many requests a cluster has been given."""
        return int(self.batch.engine[cluster, 0]["requests"])

    def raise_errors(self) -> None:
        """Raise what a kernel found wrong."""
        errors = self.batch.engine["error"][:, 0]
        if errors.any():
            c = int(np.flatnonzero(errors)[0])
            raise RuntimeError(f"cluster {c}: {_ERRORS[int(errors[c])]}")
