"""The columnar `Trace` every other part of the project reads, and its transforms.

One row is one request. KV blocks are dense integers numbered in order of first appearance, so a
consumer may index arrays by block id. Every transform returns a new `Trace` whose ids are dense
again. All transforms are vectorised; a million requests take seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

DEFAULT_BLOCK_TOKENS = 512
"""Tokens per KV block in the traces Mooncake released (FAST'25, section on the traces)."""


class TraceError(ValueError):
    """Bad trace input. The message names the file, line, field, what was found and expected.

    The parts are also attributes, each `None` where it does not apply.
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str | None = None,
        file: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        self.found = found
        self.expected = expected
        self.hint = hint
        place = [] if file is None else [str(file)]
        if line is not None:
            place.append(f"line {line}")
        if field is not None:
            place.append(f"field {field!r}")
        text = f"{', '.join(place)}: {found}" if place else found
        if expected is not None:
            text += f"; expected {expected}"
        if hint is not None:
            text += f" ({hint})"
        super().__init__(text)


class Split(NamedTuple):
    """A trace cut by time into three parts; the last is never trained on."""

    train: Trace
    validation: Trace
    test: Trace


def _column_error(column: str, row: int | None, found: str, expected: str) -> TraceError:
    where = f"column {column!r}" + ("" if row is None else f", row {row}")
    return TraceError(f"{where}: found {found}", expected=expected)


def _as_column(name: str, values: ArrayLike, dtype: Any) -> NDArray[Any]:
    """One-dimensional array of `dtype`; refuses what would not survive the conversion."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise _column_error(name, None, f"{array.ndim} dimensions", "a one-dimensional array")
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    want = np.dtype(dtype)
    if array.size and array.dtype.kind not in ("iu" if want.kind == "i" else "iuf"):
        raise _column_error(name, None, f"dtype {array.dtype}", f"values of dtype {want}")
    if want.kind == "i" and array.size:
        limits = np.iinfo(want)
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            row = int(np.argmax(outside))
            raise _column_error(name, row, f"{array[row]}", f"a value that fits {want}")
    return np.ascontiguousarray(array.astype(dtype))


@dataclass(frozen=True, eq=False)
class Trace:
    """A sequence of requests in order of arrival. Treat the arrays as immutable.

    N requests touch M KV blocks in all. Request i's blocks are
    `block_ids[block_offsets[i]:block_offsets[i + 1]]`, in prefix order.

    Raises:
        TraceError: a column breaks a rule; the message names column, row and expectation.
    """

    arrival_s: Float64
    """float64[N], seconds, ascending, >= 0."""
    input_tokens: Int32
    """int32[N], prompt length, >= 1."""
    output_tokens: Int32
    """int32[N], generated length, >= 1."""
    block_offsets: Int64
    """int64[N + 1], ascending from 0 to M. All zero: the trace knows nothing about reuse."""
    block_ids: Int32
    """int32[M], dense 0..n_distinct_blocks-1, numbered in order of first appearance."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    """Tokens per block; a request's last block may be partial."""
    session_id: Int32 | None = None
    """int32[N] or None: requests of one conversation share it."""
    tenant_id: Int32 | None = None
    """int32[N] or None."""
    name: str = ""
    skipped_rows: int = 0
    """Bad rows the reader dropped under `on_error="skip"`."""
    skip_reasons: tuple[str, ...] = ()
    """The first few reasons why rows were dropped."""

    def __post_init__(self) -> None:
        for name, dtype in (
            ("arrival_s", np.float64),
            ("input_tokens", np.int32),
            ("output_tokens", np.int32),
            ("block_offsets", np.int64),
            ("block_ids", np.int32),
            ("session_id", np.int32),
            ("tenant_id", np.int32),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_column(name, value, dtype))
        self._validate()

    def _validate(self) -> None:
        n = len(self.arrival_s)
        if self.block_tokens < 1:
            raise _column_error("block_tokens", None, f"{self.block_tokens}", "an integer >= 1")
        for name, column, want in (
            ("input_tokens", self.input_tokens, n),
            ("output_tokens", self.output_tokens, n),
            ("block_offsets", self.block_offsets, n + 1),
            ("session_id", self.session_id, n),
            ("tenant_id", self.tenant_id, n),
        ):
            if column is not None and len(column) != want:
                raise _column_error(name, None, f"{len(column)} values", f"{want} values")
        finite = np.isfinite(self.arrival_s)
        _require(finite, "arrival_s", self.arrival_s, "a finite number of seconds")
        _require(self.arrival_s >= 0, "arrival_s", self.arrival_s, "seconds >= 0")
        ascending = np.ones(n, bool)
        ascending[1:] = np.diff(self.arrival_s) >= 0
        _require(ascending, "arrival_s", self.arrival_s, "a time not before the previous row's")
        _require(self.input_tokens >= 1, "input_tokens", self.input_tokens, "an integer >= 1")
        _require(self.output_tokens >= 1, "output_tokens", self.output_tokens, "an integer >= 1")

        offsets, m = self.block_offsets, len(self.block_ids)
        if offsets[0] != 0 or offsets[-1] != m:
            raise _column_error("block_offsets", None, f"{offsets[0]}..{offsets[-1]}", f"0..{m} (all blocks)")
        lengths = np.diff(offsets)
        _require(lengths >= 0, "block_offsets", lengths, "ascending offsets")
        if m == 0:
            return
        # Floor (full blocks only) and ceil (last block partial) are both in use among traces.
        most = -(-self.input_tokens.astype(np.int64) // self.block_tokens)
        _require(
            lengths <= most,
            "block_offsets",
            lengths,
            f"at most ceil(input_tokens / {self.block_tokens}) blocks",
        )
        ids = self.block_ids
        _require(ids >= 0, "block_ids", ids, "an id >= 0")
        seen_max = np.maximum.accumulate(ids)
        dense = np.ones(m, bool)
        dense[0] = ids[0] == 0
        dense[1:] = ids[1:] <= seen_max[:-1].astype(np.int64) + 1
        _require(dense, "block_ids", ids, "ids numbered from 0 in order of first appearance (densify)")

    @property
    def n_requests(self) -> int:
        """N."""
        return len(self.arrival_s)

    @property
    def has_blocks(self) -> bool:
        """False where the source carries no block ids: nothing is known about reuse."""
        return len(self.block_ids) > 0

    @property
    def n_distinct_blocks(self) -> int:
        """Block ids are below this."""
        return int(self.block_ids.max()) + 1 if len(self.block_ids) else 0

    @property
    def duration_s(self) -> float:
        """Last arrival minus first, seconds."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if self.n_requests else 0.0

    @property
    def checksum(self) -> str:
        """sha256 (hex) over all columns and `block_tokens`; the name does not count."""
        digest = hashlib.sha256(f"trace/1 {self.block_tokens}".encode())
        for label in (
            "arrival_s",
            "input_tokens",
            "output_tokens",
            "block_offsets",
            "block_ids",
            "session_id",
            "tenant_id",
        ):
            column = getattr(self, label)
            digest.update(f"|{label}:".encode())
            if column is None:
                digest.update(b"none")
            else:
                little = column.astype(column.dtype.newbyteorder("<"), copy=False)
                digest.update(little.tobytes())
        return digest.hexdigest()

    def blocks(self, row: int) -> Int32:
        """Block ids of request `row`, int32, in prefix order (a view)."""
        return self.block_ids[self.block_offsets[row] : self.block_offsets[row + 1]]

    # -- transforms -------------------------------------------------------------------------

    def rows(self, start: int, stop: int) -> Trace:
        """Rows `start` up to (not including) `stop`, Python slice rules. Times are kept."""
        start, stop, _ = slice(start, stop).indices(self.n_requests)
        return self.take(np.arange(start, max(start, stop)))

    def window(self, start_s: float, stop_s: float, *, rebase: bool = False) -> Trace:
        """Requests with `start_s <= arrival < stop_s`; `rebase` moves `start_s` to time 0."""
        if not start_s <= stop_s:
            raise TraceError(f"window from {start_s} to {stop_s}", expected="start_s <= stop_s")
        first, last = np.searchsorted(self.arrival_s, [start_s, stop_s], side="left")
        part = self.rows(int(first), int(last))
        return replace(part, arrival_s=part.arrival_s - max(start_s, 0.0)) if rebase else part

    def take(self, rows: ArrayLike) -> Trace:
        """The given rows (ascending indices, int[K]) as a trace with dense ids."""
        index = np.asarray(rows, dtype=np.int64)
        lengths = np.diff(self.block_offsets)[index]
        offsets = offsets_of(lengths)
        ids = self.block_ids[joined_ranges(self.block_offsets[:-1][index], lengths)]
        return replace(
            self,
            arrival_s=self.arrival_s[index],
            input_tokens=self.input_tokens[index],
            output_tokens=self.output_tokens[index],
            block_offsets=offsets,
            block_ids=densify(ids),
            session_id=None if self.session_id is None else self.session_id[index],
            tenant_id=None if self.tenant_id is None else self.tenant_id[index],
        )

    def speed_up(self, factor: float) -> Trace:
        """Arrivals `factor` times as fast, counted from the first; 2 halves every gap."""
        if not (np.isfinite(factor) and factor > 0):
            raise TraceError(f"speed-up factor {factor}", expected="a finite number > 0")
        if not self.n_requests:
            return self
        first = self.arrival_s[0]
        return replace(self, arrival_s=first + (self.arrival_s - first) / factor)

    def jitter(self, seed: int) -> Trace:
        """Spread requests that share a timestamp over the gap to the next distinct one.

        Mooncake's real traces sit on a 3 s grid (reference G10), so replay comes in bursts.
        Offsets are uniform and sorted within a tick, so the order of requests, and with it the
        reuse, stays as it is. The last tick uses the median gap. A trace with fewer than two
        distinct timestamps is returned as it is.
        """
        ticks, inverse = np.unique(self.arrival_s, return_inverse=True)
        if len(ticks) < 2:
            return self
        gaps = np.append(np.diff(ticks), np.median(np.diff(ticks)))
        moved = self.arrival_s + np.random.default_rng(seed).random(self.n_requests) * gaps[inverse]
        # Floating point may round ticks[i] + u * gap up to the next tick; keep it inside.
        upper = np.nextafter(np.append(ticks[1:], np.inf), -np.inf)
        return replace(self, arrival_s=np.sort(np.minimum(moved, upper[inverse])))

    def reblock(self, block_tokens: int) -> Trace:
        """Coarser blocks, for example 16 -> 512 tokens.

        A coarse block is identified by the whole chain of fine ids from the prompt's start to its
        own end, as chained block hashes are. A request's last block may cover fewer fine blocks
        and then has an identity of its own.

        Raises:
            TraceError: the new size is not a multiple of the present one (a block cannot be
                split: its id says nothing about its halves).
        """
        if block_tokens < 1 or block_tokens % self.block_tokens:
            raise TraceError(
                f"reblock to {block_tokens} tokens",
                expected=f"a multiple of the trace's block size, {self.block_tokens}",
            )
        ratio = block_tokens // self.block_tokens
        if ratio == 1:
            return self
        if not self.has_blocks:
            return replace(self, block_tokens=block_tokens)
        chains = chain_ids(self.block_offsets, self.block_ids)
        lengths = np.diff(self.block_offsets)
        coarse = -(-lengths // ratio)
        # The chain id at a coarse block's last fine block names the whole prefix up to there.
        within = joined_ranges(np.zeros(len(coarse), np.int64), coarse)
        start = np.repeat(self.block_offsets[:-1], coarse)
        last = np.repeat(lengths, coarse)
        ends = start + np.minimum((within + 1) * ratio, last) - 1
        # A partial block must differ from a full one that ends with the same chain by accident
        # of depth; equal chains have equal depth, so the chain id alone is enough.
        return replace(
            self,
            block_offsets=offsets_of(coarse),
            block_ids=densify(chains[ends]),
            block_tokens=block_tokens,
        )

    def split(self, train: float = 0.6, validation: float = 0.2, test: float = 0.2) -> Split:
        """Cut by time into train, validation and test; shares of the duration, sum 1."""
        shares = (train, validation, test)
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise TraceError(f"split shares {shares}", expected="three shares >= 0 that sum to 1")
        if not self.n_requests:
            return Split(self, self, self)
        first = self.arrival_s[0]
        at = first + self.duration_s * np.array([train, train + validation])
        a, b = np.searchsorted(self.arrival_s, at, side="left")
        n = self.n_requests
        # With no share left for a later part, rounding must not leave it the last arrival.
        b = n if test == 0 else b
        a = b if validation == 0 else min(a, b)
        return Split(self.rows(0, int(a)), self.rows(int(a), int(b)), self.rows(int(b), n))

    def subsample_sessions(self, share: float, seed: int) -> Trace:
        """Keep each session, whole, with probability `share`: lowers load, keeps reuse."""
        if self.session_id is None:
            raise TraceError(
                "subsample_sessions on a trace without session ids",
                expected="a trace whose session_id column is present",
            )
        if not 0 <= share <= 1:
            raise TraceError(f"share {share}", expected="a number from 0 to 1")
        sessions, inverse = np.unique(self.session_id, return_inverse=True)
        keep = np.random.default_rng(seed).random(len(sessions)) < share
        return self.take(np.flatnonzero(keep[inverse]))


def _require(good: NDArray[np.bool_], column: str, values: NDArray[Any], expected: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise _column_error(column, row, f"{values[row]}", expected)


def offsets_of(lengths: NDArray[Any]) -> Int64:
    """Where each of consecutive pieces starts, and the end: int64[K + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined_ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> Int64:
    """Positions of pieces of a flat array, in a row: `arange(start, start + length)` of every pair, concatenated."""
    offsets = offsets_of(lengths)
    shift = np.asarray(starts, np.int64) - offsets[:-1]
    return np.arange(offsets[-1]) + np.repeat(shift, lengths)


def densify(ids: ArrayLike) -> Int32:
    """Renumber arbitrary ids (int[M]) to 0.. in order of first appearance -> int32[M]."""
    raw = np.asarray(ids)
    m = len(raw)
    if m == 0:
        return np.zeros(0, np.int32)
    raw = raw.astype(np.int64, copy=False)
    low, high = int(raw.min()), int(raw.max())
    if high - low < 4 * m + 1024:
        key, size = raw - low, high - low + 1
    else:
        distinct, key = np.unique(raw, return_inverse=True)
        size = len(distinct)
    first = np.empty(size, np.int64)
    # Later assignments win, so walking backwards leaves each id's first position.
    first[key[::-1]] = np.arange(m - 1, -1, -1)
    at = first[key]
    rank = np.cumsum(at == np.arange(m)) - 1
    dense: Int32 = rank[at].astype(np.int32)
    return dense


def chain_ids(offsets: Int64, ids: Int32) -> Int64:
    """Identity of every prefix: int64[M], equal where the whole chain of ids up to there is equal.

    Works depth by depth, so it costs a sort of each depth's rows.
    """
    lengths = np.diff(offsets)
    out = np.empty(len(ids), np.int64)
    order = np.argsort(-lengths, kind="stable")
    alive_at = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0) + 1), "right")
    parent = np.zeros(len(lengths), np.int64)
    base = int(ids.max(initial=0)) + 1
    issued = 0
    for depth, alive in enumerate(alive_at):
        rows = order[:alive]
        at = offsets[:-1][rows] + depth
        # parent < M and base <= M, so the product fits 63 bits for any M below 3e9.
        distinct, inverse = np.unique(parent[rows] * base + ids[at], return_inverse=True)
        chain = inverse + issued
        issued += len(distinct)
        out[at] = chain
        parent[rows] = chain
    return out


def merge(traces: Sequence[Trace], *, share_blocks: bool = False, name: str = "") -> Trace:
    """One trace of all requests in order of arrival (ties: in the order of `traces`).

    Blocks of different traces are kept apart unless `share_blocks` says equal ids mean equal
    content. Sessions are always kept apart. Tenants: each trace becomes one tenant where none of
    them has tenant ids; otherwise each trace's tenants are kept apart.

    Raises:
        TraceError: no traces, or different block sizes (use `reblock` first).
    """
    if not traces:
        raise TraceError("merge of no traces", expected="at least one trace")
    sizes = {t.block_tokens for t in traces if t.has_blocks} or {traces[0].block_tokens}
    if len(sizes) > 1:
        raise TraceError(
            f"merge of traces with blocks of {sorted(sizes)} tokens",
            expected="one block size",
            hint="reblock the finer trace first",
        )
    arrival = np.concatenate([t.arrival_s for t in traces])
    order = np.argsort(arrival, kind="stable")
    lengths = np.concatenate([np.diff(t.block_offsets) for t in traces])
    spaces = [0 if share_blocks else t.n_distinct_blocks for t in traces]
    shift = np.cumsum([0, *spaces[:-1]])
    ids = np.concatenate([t.block_ids.astype(np.int64) + s for t, s in zip(traces, shift)])
    moved = ids[joined_ranges(offsets_of(lengths)[:-1][order], lengths[order])]

    def labels(column: str, otherwise: str) -> Int32 | None:
        values = [getattr(t, column) for t in traces]
        if all(v is None for v in values) and otherwise == "none":
            return None
        parts, issued = [], 0
        for trace, value in zip(traces, values):
            part = np.zeros(trace.n_requests, np.int64) if value is None else value
            if value is None and otherwise == "none":
                # Requests without a session are sessions of one turn.
                part = np.arange(trace.n_requests)
            distinct, inverse = np.unique(part, return_inverse=True)
            parts.append(inverse + issued)
            issued += max(len(distinct), 1)
        return np.concatenate(parts)[order].astype(np.int32)

    return Trace(
        arrival_s=arrival[order],
        input_tokens=np.concatenate([t.input_tokens for t in traces])[order],
        output_tokens=np.concatenate([t.output_tokens for t in traces])[order],
        block_offsets=offsets_of(lengths[order]),
        block_ids=densify(moved),
        block_tokens=sizes.pop(),
        session_id=labels("session_id", "none"),
        tenant_id=labels("tenant_id", "one each"),
        name=name or "+".join(t.name for t in traces if t.name),
        skipped_rows=sum(t.skipped_rows for t in traces),
        skip_reasons=tuple(r for t in traces for r in t.skip_reasons)[:5],
    )
