"""The decision log: what was seen, decided and became of it, one row per request, in Parquet segments.

A segment is a trace (`traces.formats.parquet`) with more columns; a folder of them is one log:
`traces.load(folder)` reads it as a trace, `read_log(folder)` as evidence for `leaderboard.py --log`.

    decisions-20261130T031511123Z-000007.parquet      when it was begun (UTC), and its number
    .decisions-….parquet.unfinished                   being written; ignored by readers, swept at the next start

Unique over time and over restarts: a block is identified by 63 bits of its chained hash (never by the dense numbers
of the live index, which are recycled), a session and a tenant by 63 bits of a hash of its name.

A request whose output is not known (rejected, failed, never reported) has `output_known` false and, as
`output_tokens`, what was expected of any request at that time: a trace needs some length to replay it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from envs.spec import ClusterSpec
from envs.state import (
    CLUSTER_FEATURES,
    DECODE_FEATURES,
    PREFILL_FEATURES,
    REQUEST_FEATURES,
    Observation,
    Source,
)
from policies.off_policy import Logged, Observed
from policies.run_folder import observation_schema
from traces import Trace, TraceError
from traces.formats import files_of, load
from traces.formats.parquet import LOG_KEY, METADATA_KEY, clock_shifts, order_of, schema
from traces.trace import joined_ranges, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
PREFIX, SUFFIX, UNFINISHED = "decisions-", ".parquet", ".unfinished"
ROW_GROUP = 8192
BUFFERS = 3
"""Segments held in memory at most: one filling, one being written, one waiting."""
LARGEST_ID = 2**63 - 1

log = logging.getLogger(__name__)


class Ended(IntEnum):
    """How a request ended."""

    COMPLETED = 0
    REJECTED_AT_ARRIVAL = 1
    REJECTED_AT_DECODE = 2
    FAILED = 3  # an engine or the client gave it up
    EXPIRED = 4  # its lease ended without a report: what became of it is not known


@dataclass(slots=True)
class LogRow:
    """One request. Made at its decision, completed and recorded when it has ended.

    Args:
        arrival_s: on the state's clock, the one given to `DecisionLog`.
        action: as the gym encodes it: 0 rejects, else 1 + (prefill * D + decode) * 3 + source.
        block_ids: int[n], chained hashes of the prompt's blocks (any integer type; 63 bits are kept).
        sequence: tells requests of one arrival time apart; by default rows are numbered as they are made.
        output_tokens: generated; 0 where that is not known.
        expected_output_tokens: what was expected at the time.
        propensity: probability with which this action was chosen, given the observation; 1 for a deterministic
            policy, share times that for a canary. It is what makes other policies' goodput estimable.
        good: completed within both SLOs; None: from the times and SLOs below.
        prefills: size P of the prefill pool at the decision.
        decodes: size D of the decode pool.
        observation: `pack(observation)`.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    action: int = 0
    status: Ended = Ended.EXPIRED
    block_ids: NDArray[Any] | None = None
    sequence: int = field(default_factory=count().__next__)
    output_tokens: int = 0
    expected_output_tokens: float = 1.0
    tenant: str = ""
    session: str = ""
    policy: str = ""
    fell_back: str = ""
    reason: str = ""
    propensity: float = 1.0
    prefill: str = ""
    decode: str = ""
    predicted_ttft_s: float = math.nan
    predicted_tbt_s: float = math.nan
    ttft_s: float = math.nan
    tbt_s: float = math.nan
    prefill_s: float = math.nan
    ttft_slo_s: float = math.nan
    tbt_slo_s: float = math.nan
    good: bool | None = None
    prefills: int = 0
    decodes: int = 0
    observation: bytes | None = None


# --- observations ------------------------------------------------------------------------------------------------

_TABLES = (
    ("request", REQUEST_FEATURES),
    ("prefill", PREFILL_FEATURES),
    ("decode", DECODE_FEATURES),
    ("cluster", CLUSTER_FEATURES),
)
_WIDTH = {name: len(features.names or ()) for name, features in _TABLES}


def pack(observation: Observation, row: int = 0) -> bytes:
    """A copy of one row of an observation, as a log row carries it (the tables one after the other)."""
    return b"".join([table[row].tobytes() for table in observation])


# Bytes of a packed observation: of the whole, of each prefill instance, of each decode instance; masks included.
_PACKED = 8 * (_WIDTH["request"] + _WIDTH["cluster"])
_PACKED_PREFILL = 8 * _WIDTH["prefill"] + len(Source)
_PACKED_DECODE = 8 * _WIDTH["decode"] + 1


# --- buffers -----------------------------------------------------------------------------------------------------

_RECORD = (
    ("sequence", "i8", "q"),
    ("arrival_s", "f8", "d"),
    ("action", "i8", "q"),
    ("propensity", "f8", "d"),
    ("predicted_ttft_s", "f8", "d"),
    ("predicted_tbt_s", "f8", "d"),
    ("ttft_s", "f8", "d"),
    ("tbt_s", "f8", "d"),
    ("prefill_s", "f8", "d"),
    ("ttft_slo_s", "f8", "d"),
    ("tbt_slo_s", "f8", "d"),
    ("start", "i8", "q"),  # of its block ids in the arena; the observation follows them
    ("ids", "i4", "i"),
    ("observed", "i4", "i"),  # bytes
    ("input_tokens", "i4", "i"),
    ("output_tokens", "i4", "i"),
    ("prefills", "i4", "i"),
    ("decodes", "i4", "i"),
    ("tenant", "i4", "i"),
    ("session", "i4", "i"),
    ("policy", "i4", "i"),
    ("fell_back", "i4", "i"),
    ("reason", "i4", "i"),
    ("prefill", "i4", "i"),
    ("decode", "i4", "i"),
    ("output_known", "i1", "b"),
    ("good", "i1", "b"),
    ("status", "i1", "b"),
)
_DTYPE = np.dtype([(name, kind) for name, kind, _ in _RECORD])
_PACK = struct.Struct("<" + "".join(code for _, _, code in _RECORD))
_FLOATS = tuple(name for name, kind, _ in _RECORD if kind == "f8" and name != "arrival_s")
_WORDS = ("policy", "fell_back", "reason", "prefill", "decode")
_SOURCES = [source.name.lower() for source in Source] + [""]


class _Buffer:
    """Rows of a segment to be: fixed columns in `memory`, block ids and observations one after the other in `arena`.

    Pages of memory that are never written to are never taken.
    """

    def __init__(self, rows: int, arena_bytes: int) -> None:
        self.memory = np.empty(rows * _PACK.size, np.uint8)
        self.memory_view = self.memory.data
        self.arena: NDArray[np.int64] = np.empty(arena_bytes // 8, np.int64)
        self.packed = self.arena.view(np.uint8).data
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.used = 0
        self.request_ids: list[str] = []
        self.words, self.tenants, self.sessions = (_Codes({"": 0}) for _ in range(3))
        self.started_s = 0.0  # monotonic
        self.started_unix_s = 0.0

    @property
    def records(self) -> NDArray[Any]:
        """The fixed columns."""
        return self.memory[: self.count * _PACK.size].view(_DTYPE)


class _Codes(dict[str, int]):
    """Numbers of words; a new word gets the next."""

    def __missing__(self, word: str) -> int:
        code = self[word] = len(self)
        return code


def _good(row: LogRow) -> int:
    """1 or 0; -1 where it is not known."""
    if row.good is not None:
        return int(row.good)
    if row.status is not Ended.COMPLETED:
        return -1 if row.status is Ended.EXPIRED else 0
    ttft_s, ttft_slo_s, tbt_s, tbt_slo_s = row.ttft_s, row.ttft_slo_s, row.tbt_s, row.tbt_slo_s
    if ttft_s <= ttft_slo_s and (tbt_s <= tbt_slo_s or row.output_tokens == 1):
        return 1
    return 0 if ttft_s > ttft_slo_s or tbt_s > tbt_slo_s else -1


# --- the writer --------------------------------------------------------------------------------------------------


class DecisionLog:
    """Writes the decision log. `record` is cheap and never blocks or raises; a thread of its own writes segments.

    What cannot be written (disk full, folder gone) is dropped and counted, said once in the log, and serving goes on.
    A crash costs what has not become a segment yet: at most `max_age_s` of requests, or `BUFFERS` segments.

    Counters: `rows_recorded`, `rows_written`, `rows_refused` (not a possible row), `rows_dropped` (recorded or not,
    never written), `segments_written`, `segments_failed`, `segments_pruned`, `bytes_written`, `last_error`.

    Args:
        folder: where segments go; made if need be.
        block_tokens: tokens per KV block.
        name: of the log, as a trace.
        max_rows: a segment ends with the first of this,
        max_bytes: of block ids and observations in memory, of which there are at most `BUFFERS` times as many,
        max_age_s: and its age.
        keep_segments: the oldest segments go when there are more in the folder; None keeps all.
        keep_bytes: the same of their size.
        observations: whether to write what the policy saw, without which other policies can be evaluated by replay
            only.
        clock: the clock of `LogRow.arrival_s`; its distance to the wall clock puts the runs of a log in order.
        cluster: whose log it is, for `leaderboard.py --log`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        block_tokens: int,
        name: str,
        *,
        max_rows: int = 100_000,
        max_bytes: int = 64 << 20,
        max_age_s: float = 300.0,
        keep_segments: int | None = None,
        keep_bytes: int | None = None,
        observations: bool = True,
        clock: Callable[[], float] = time.monotonic,
        cluster: ClusterSpec | None = None,
    ) -> None:
        for what, value in (("block_tokens", block_tokens), ("max_rows", max_rows), ("max_age_s", max_age_s)):
            if not value > 0:
                raise ValueError(f"{what} must be above 0, found {value}")
        for what, limit in (("keep_segments", keep_segments), ("keep_bytes", keep_bytes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{what} must be at least 1, or None to keep all; found {limit}")
        self.folder = Path(folder)
        self.block_tokens = block_tokens
        self.name = name
        self.observations = observations
        self._max_rows, self._max_bytes, self._max_age_s = max_rows, max(8, max_bytes & ~7), max_age_s
        self._keep_segments, self._keep_bytes = keep_segments, keep_bytes
        self._head = {
            "format": FORMAT,
            "run": uuid.uuid4().hex,
            "clock_offset_s": time.time() - clock(),
            "observation": observation_schema() if observations else None,
            "cluster": None if cluster is None else cluster.model_dump(mode="json"),
        }
        self.rows_recorded = self.rows_written = self.rows_refused = self.rows_dropped = 0
        self.segments_written = self.segments_failed = self.segments_pruned = self.bytes_written = 0
        self.last_error = ""
        self._failing = self._refusing = False
        self._number = 0
        self._made = 0
        self._closed = False
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._free: list[_Buffer] = []
        self._full: deque[_Buffer] = deque()
        self._buffer = self._take()
        self._sweep()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rows_pending(self) -> int:
        """Rows recorded that are in no segment yet."""
        with self._wake:
            waiting = sum(buffer.count for buffer in self._full)
            return waiting + (self._buffer.count if self._buffer is not None else 0)

    def record(self, row: LogRow) -> None:
        """Append a row. Any thread may; the row may be used again."""
        with self._lock:
            try:
                self._append(row)
            except (struct.error, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.rows_refused += 1
                refused = not self._refusing
                self._refusing = True
                self.last_error = f"row refused: {error}"
            else:
                return
        if refused:
            log.warning("decision log: %r: %s; further ones are only counted", row.request_id, self.last_error)

    def _append(self, row: LogRow) -> None:
        ids = row.block_ids
        blocks = 0 if ids is None else len(ids)
        if row.input_tokens < 1 or blocks > -(-row.input_tokens // self.block_tokens):
            raise ValueError(f"{row.input_tokens} input tokens with {blocks} blocks of {self.block_tokens}")
        if not 0.0 <= row.arrival_s < math.inf:
            raise ValueError(f"arrival_s {row.arrival_s}, expected a finite number >= 0")
        if not 0.0 < row.propensity <= 1.0:
            raise ValueError(f"propensity {row.propensity}, expected a number above 0, at most 1")
        observation = row.observation if self.observations else None
        observed = 0
        if observation is not None:
            observed = len(observation)
            if observed != _PACKED + _PACKED_PREFILL * row.prefills + _PACKED_DECODE * row.decodes:
                raise ValueError(f"an observation of {observed} bytes for {row.prefills} x {row.decodes} instances")
        size = 8 * blocks + (observed + 7 & ~7)
        if size > self._max_bytes:
            raise ValueError(f"a row of {size} bytes, expected at most {self._max_bytes} (max_bytes)")
        buffer = self._buffer
        if buffer is not None and buffer.used + size > self._max_bytes:
            self._rotate()
            buffer = self._buffer
        if buffer is None or self._closed:
            buffer = None if self._closed else self._take()
            self._buffer = buffer
            if buffer is None:
                self.rows_dropped += 1
                return
        start = buffer.used
        if ids is not None:
            buffer.arena[start >> 3 : (start >> 3) + blocks] = ids
        if observation is not None:
            at = start + 8 * blocks
            buffer.packed[at : at + observed] = observation
        known = row.output_tokens >= 1
        expected = row.expected_output_tokens
        output = row.output_tokens if known else int(expected + 0.5) if expected >= 1.0 else 1
        words = buffer.words
        _PACK.pack_into(
            buffer.memory_view,
            buffer.count * _PACK.size,
            row.sequence,
            row.arrival_s,
            row.action,
            row.propensity,
            row.predicted_ttft_s,
            row.predicted_tbt_s,
            row.ttft_s,
            row.tbt_s,
            row.prefill_s,
            row.ttft_slo_s,
            row.tbt_slo_s,
            start,
            blocks,
            observed,
            row.input_tokens,
            output,
            row.prefills,
            row.decodes,
            buffer.tenants[row.tenant],
            buffer.sessions[row.session],
            words[row.policy],
            words[row.fell_back],
            words[row.reason],
            words[row.prefill],
            words[row.decode],
            known,
            _good(row),
            row.status,
        )
        buffer.request_ids.append(row.request_id)
        if buffer.count == 0:
            buffer.started_s, buffer.started_unix_s = time.monotonic(), time.time()
        buffer.count += 1
        buffer.used = start + size
        self.rows_recorded += 1
        if buffer.count == self._max_rows:
            self._rotate()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Have all recorded rows written (or dropped); False when that took longer."""
        with self._wake:
            self._rotate()
            return self._wake.wait_for(lambda: not self._full, timeout_s)

    def close(self, timeout_s: float | None = 30.0) -> None:
        """Write what is left and stop. Later records are dropped and counted."""
        with self._wake:
            self._rotate()
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout_s)

    # With the lock held.

    def _take(self) -> _Buffer | None:
        if self._free:
            return self._free.pop()
        if self._made == BUFFERS:
            return None
        self._made += 1
        return _Buffer(self._max_rows, self._max_bytes)

    def _rotate(self) -> None:
        """Hand the filling buffer to the writer."""
        if self._buffer is not None and self._buffer.count:
            self._full.append(self._buffer)
            self._buffer = None if self._closed else self._take()
            self._wake.notify_all()

    # In the writer's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._full:
                    if self._closed:
                        return
                    self._wake.wait(min(1.0, self._max_age_s / 4))
                    filling = self._buffer
                    if filling is not None and time.monotonic() - filling.started_s >= self._max_age_s:
                        self._rotate()
                buffer = self._full[0]
            problem = ""
            try:
                size = self._write(buffer)
            except Exception as error:  # whatever it is, serving goes on and the next segment is tried
                problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            with self._wake:
                if problem:
                    self.rows_dropped += buffer.count
                    self.segments_failed += 1
                    self.last_error = problem
                else:
                    self.rows_written += buffer.count
                    self.segments_written += 1
                    self.bytes_written += size
                buffer.clear()
                self._full.popleft()
                self._free.append(buffer)
                self._wake.notify_all()
            if problem and not self._failing:
                log.warning("decision log: %s: dropped until it can be written: %s", self.folder, problem)
            elif self._failing and not problem:
                log.warning("decision log: %s: written again; %d rows were dropped", self.folder, self.rows_dropped)
            self._failing = bool(problem)

    def _write(self, buffer: _Buffer) -> int:
        """Write a segment, whole or not at all; returns its bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._next_name(buffer.started_unix_s)
        unfinished = target.with_name(f".{target.name}{UNFINISHED}")
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # alive: another process's sweep lets it be
                write_segment(buffer, unfinished, self.block_tokens, self.name, self._head | {"segment": self._number})
                os.fsync(handle)
                size = os.fstat(handle).st_size
                unfinished.rename(target)
            finally:
                os.close(handle)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._number += 1
        try:
            self._sync_folder()
            self._prune(target)
        except OSError as error:  # the segment is there all the same
            self.last_error = str(error)
        return size

    def _next_name(self, unix_s: float) -> Path:
        second, fraction = divmod(unix_s, 1.0)
        stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(second))}{int(fraction * 1000):03d}Z"
        while (path := self.folder / f"{PREFIX}{stamp}-{self._number:06d}{SUFFIX}").exists():
            self._number += 1
        return path

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _prune(self, newest: Path) -> None:
        """Drop the oldest segments while there are too many; the newest always stays."""
        if self._keep_segments is None and self._keep_bytes is None:
            return
        files = sorted(self.folder.glob(f"{PREFIX}*{SUFFIX}"))
        sizes = {file: file.stat().st_size for file in files}
        kept, total = len(files), sum(sizes.values())
        for file in files:
            too_many = self._keep_segments is not None and kept > self._keep_segments
            too_large = self._keep_bytes is not None and total > self._keep_bytes
            if file == newest or not (too_many or too_large):
                return
            file.unlink(missing_ok=True)
            kept -= 1
            total -= sizes[file]
            self.segments_pruned += 1

    def _sweep(self) -> None:
        """Remove what crashed processes left unfinished."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.glob(f".{PREFIX}*{UNFINISHED}"):
                handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink(missing_ok=True)
                except BlockingIOError:
                    pass  # somebody is writing it
                finally:
                    os.close(handle)
        except OSError as error:
            self.last_error = str(error)
            log.warning("decision log: %s: %s", self.folder, error)


# --- a segment ---------------------------------------------------------------------------------------------------


def write_segment(buffer: _Buffer, path: Path, block_tokens: int, name: str, head: dict[str, Any]) -> None:
    """The rows of a buffer as a Parquet file, in order of arrival."""
    import pyarrow.parquet as pq

    records = buffer.records
    order = order_of(records["arrival_s"], records["sequence"])
    head = head | {
        "started_unix_s": buffer.started_unix_s,
        "actions": "0 rejects, else 1 + (prefill * decodes + decode) * 3 + source",
        "sources": _SOURCES[:-1],
        "block_ids": "63 bits of the chained hash",
    }
    shape = segment_schema(block_tokens, name).with_metadata(
        (schema(block_tokens, name).metadata or {}) | {LOG_KEY: json.dumps(head).encode()}
    )
    labels = _Labels(
        _strings(buffer.words), _strings(buffer.tenants), _hashes(buffer.tenants), _hashes(buffer.sessions)
    )
    floats = [*(n for n in _FLOATS), *(f"observed_{n}.list.element" for n, _ in _TABLES)]
    with pq.ParquetWriter(
        path,
        shape,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*_WORDS, "tenant", "source", "status"],
        use_byte_stream_split=floats,
        write_statistics=["arrival_s"],
    ) as writer:
        for first in range(0, len(order), ROW_GROUP):
            writer.write_table(_table(buffer, records, order[first : first + ROW_GROUP], labels, shape))


@dataclass(frozen=True)
class _Labels:
    """The strings of a segment, by code."""

    words: pa.Array
    tenants: pa.Array
    tenant_ids: NDArray[np.int64]
    session_ids: NDArray[np.int64]


def segment_schema(block_tokens: int, name: str) -> pa.Schema:
    """Columns of a segment."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    shape = schema(block_tokens, name)
    ids = pa.field("block_ids", pa.list_(pa.int64()), nullable=False)
    fields = [ids if given.name == "block_ids" else given for given in shape]
    fields += [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("session_id", pa.int64()),
        pa.field("tenant_id", pa.int64(), nullable=False),
        pa.field("tenant", word),
        pa.field("request_id", pa.string()),
        pa.field("output_known", pa.bool_()),
        pa.field("action", pa.int64()),
        pa.field("source", word),
        pa.field("status", word),
        pa.field("good", pa.bool_()),
        pa.field("prefills", pa.int32()),
        pa.field("decodes", pa.int32()),
    ]
    fields += [pa.field(label, word) for label in _WORDS]
    fields += [pa.field(label, pa.float64()) for label in _FLOATS]
    fields += [pa.field(f"observed_{label}", pa.list_(pa.float64())) for label, _ in _TABLES]
    fields += [pa.field(f"observed_{label}_mask", pa.list_(pa.uint8())) for label in ("prefill", "decode")]
    return pa.schema(fields)


def _table(
    buffer: _Buffer, records: NDArray[Any], rows: NDArray[np.int64], labels: _Labels, shape: pa.Schema
) -> pa.Table:
    """Some rows as a table."""
    import pyarrow as pa

    part = records[rows]
    where = part["start"] // 8  # in the arena, in words
    blocks = part["ids"].astype(np.int64)
    ids = buffer.arena[joined_ranges(where, blocks)] & LARGEST_ID
    columns: dict[str, Any] = {
        "block_ids": _lists(blocks, ids),
        "session_id": pa.array(labels.session_ids[part["session"]], mask=part["session"] == 0),
        "tenant_id": labels.tenant_ids[part["tenant"]],
        "tenant": _dictionary(part["tenant"], labels.tenants),
        "request_id": _strings([buffer.request_ids[row] for row in rows]),
        "output_known": part["output_known"] != 0,
        "source": _dictionary(np.where(part["action"] > 0, (part["action"] - 1) % 3, 3), _strings(_SOURCES)),
        "status": _dictionary(part["status"], _strings(ended.name.lower() for ended in Ended)),
        "good": pa.array(part["good"] == 1, mask=part["good"] < 0),
    }
    columns |= {label: _dictionary(part[label], labels.words) for label in _WORDS}
    seen = part["observed"] > 0
    prefills, decodes = (np.where(seen, part[label], 0).astype(np.int64) for label in ("prefills", "decodes"))
    at = where + blocks
    one = seen.astype(np.int64)
    rows_of = {"request": one, "prefill": prefills, "decode": decodes, "cluster": one}
    for label, _ in _TABLES:
        width = rows_of[label] * _WIDTH[label]
        columns[f"observed_{label}"] = _lists(width, buffer.arena[joined_ranges(at, width)].view(np.float64))
        at = at + width
    packed = buffer.arena.view(np.uint8)
    columns["observed_prefill_mask"] = _lists(3 * prefills, packed[joined_ranges(8 * at, 3 * prefills)])
    columns["observed_decode_mask"] = _lists(decodes, packed[joined_ranges(8 * at + 3 * prefills, decodes)])
    plain = [np.ascontiguousarray(part[f.name]) if f.name not in columns else columns[f.name] for f in shape]
    arrays = [pa.array(column) if isinstance(column, np.ndarray) else column for column in plain]
    return pa.Table.from_arrays(arrays, schema=shape)


def _lists(lengths: NDArray[np.int64], values: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets_of(lengths).astype(np.int32)), pa.array(values))


def _dictionary(codes: NDArray[Any], words: pa.Array) -> pa.Array:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), words)


def _strings(words: Iterable[str]) -> pa.Array:
    """Strings as they are; what is no text is made some, rather than lose a segment."""
    import pyarrow as pa

    given = list(words)
    try:
        return pa.array(given, pa.string())
    except (pa.ArrowException, UnicodeError, TypeError):
        return pa.array([str(word).encode("utf-8", "replace").decode() for word in given], pa.string())


def _hashes(words: Iterable[str]) -> NDArray[np.int64]:
    """63 bits of a hash of each, the same in every process: int64[words]."""
    given = list(words)
    found = np.empty(len(given), np.int64)
    for i, word in enumerate(given):
        if i % 256 == 255:
            time.sleep(0)  # the decisions' thread may want the interpreter
        digest = hashlib.blake2b(str(word).encode("utf-8", "replace"), digest_size=8).digest()
        found[i] = int.from_bytes(digest, "little") & LARGEST_ID
    return found


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Log:
    """A decision log, read: N rows in order of arrival.

    `trace` has the same rows. `columns` has the segments' columns by name: numbers as they are, `good` as float64
    with NaN for not known, strings as object arrays. `cluster`: whose log it is, where the writer said so.
    """

    trace: Trace
    logged: Logged
    columns: dict[str, NDArray[Any]]
    cluster: dict[str, Any] | None


def read_log(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, observations: bool = True) -> Log:
    """Read a segment, a folder, a pattern or a list of segments.

    Raises:
        TraceError: no segment there, one is damaged, or logged with another observation; names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = files_of(Path(path)) if isinstance(path, (str, os.PathLike)) else [Path(p) for p in path]
    trace = load(files)
    tables, heads = [], []
    names = [name for name in segment_schema(1, "").names if name not in ("block_ids", "session_id")]
    wanted = [name for name in names if observations or not name.startswith("observed_")]
    for file in files:
        try:
            source = pq.ParquetFile(file)
            heads.append(_segment_head(source, file))
            tables.append(source.read(wanted))
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"cannot be read ({str(error).splitlines()[0]})", file=file) from None
    plain = [name for name in tables[0].column_names if not name.startswith("observed_")]
    columns = _joined([table.select(plain) for table in tables])
    shifts = np.repeat(clock_shifts(heads), [table.num_rows for table in tables])
    columns["arrival_s"] = columns["arrival_s"] + shifts
    order = order_of(columns["arrival_s"], columns["sequence"])
    columns = {label: column[order] for label, column in columns.items()}
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    observed = _observed(tables, place, files) if observations else ()
    logged = Logged(
        **{label: columns[label] for label in ("arrival_s", "action", "propensity", "good", "ttft_s", "tbt_s")},
        **{label: columns[label] for label in ("ttft_slo_s", "tbt_slo_s")},
        completed=columns["status"] == Ended.COMPLETED.name.lower(),
        observed=observed,
    )
    return Log(trace, logged, columns, heads[-1].get("cluster"))


def _segment_head(source: Any, file: Path) -> dict[str, Any]:
    """What a segment says of itself, checked.

    Raises:
        TraceError: it is no segment, of a newer format, or logged with another observation.
    """
    metadata = source.schema_arrow.metadata or {}
    if LOG_KEY not in metadata or METADATA_KEY not in metadata:
        raise TraceError("no decision log", file=file, field=LOG_KEY.decode(), expected="a segment of a decision log")
    head: dict[str, Any] = json.loads(metadata[LOG_KEY])
    if head.get("format") != FORMAT:
        raise TraceError(f"format {head.get('format')!r}", file=file, expected=f"format {FORMAT}")
    missing = [name for name in segment_schema(1, "").names if name not in source.schema_arrow.names]
    if missing:
        raise TraceError("column missing", file=file, field=missing[0], expected="the columns of a decision log")
    theirs, ours = head.get("observation"), observation_schema()
    if theirs is not None and theirs != ours:
        differs = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
        raise TraceError(
            f"logged with another observation (different: {', '.join(differs)})",
            file=file,
            expected=f"schema {ours['sha256']}",
            hint="it still loads as a trace",
        )
    return head


def _joined(tables: list[pa.Table]) -> dict[str, NDArray[Any]]:
    import pyarrow as pa

    found = {}
    for name in tables[0].column_names:
        parts = []
        for table in tables:
            column = table.column(name)
            if pa.types.is_dictionary(column.type):
                column = column.cast(pa.string())
            if name == "good":
                column = column.cast(pa.int8()).cast(pa.float64())
            parts.append(column.to_numpy())
        found[name] = np.concatenate(parts)
    return found


def _observed(tables: list[pa.Table], place: NDArray[np.int64], files: Sequence[Path]) -> tuple[Observed, ...]:
    """Observations by pool sizes; `place[i]` is the row, in order, of the i-th row of all tables."""
    found: dict[tuple[int, int], list[tuple[NDArray[np.int64], list[NDArray[Any]]]]] = {}
    first = 0
    for table, file in zip(tables, files):
        sizes = np.stack([table.column(label).to_numpy() for label in ("prefills", "decodes")], axis=1)
        lists = {}
        for name in (*(label for label, _ in _TABLES), "prefill_mask", "decode_mask"):
            column = table.column(f"observed_{name}").combine_chunks()
            if column.null_count:
                raise TraceError("null", file=file, field=f"observed_{name}", expected="lists")
            lists[name] = (
                offsets_of(column.value_lengths().to_numpy(zero_copy_only=False)),
                column.flatten().to_numpy(zero_copy_only=False),
            )
        seen = np.diff(lists["request"][0]) > 0
        for p, d in np.unique(sizes[seen], axis=0):
            rows = np.flatnonzero(seen & (sizes[:, 0] == p) & (sizes[:, 1] == d))
            counts = {"request": 1, "prefill": p, "decode": d, "cluster": 1}
            widths = {name: _WIDTH[name] * count for name, count in counts.items()}
            widths |= {"prefill_mask": 3 * p, "decode_mask": d}
            parts = []
            for name, (offsets, values) in lists.items():
                lengths = np.diff(offsets)[rows]
                if (lengths != widths[name]).any():
                    raise TraceError(
                        f"{lengths[lengths != widths[name]][0]} values",
                        file=file,
                        field=f"observed_{name}",
                        expected=f"{widths[name]} for {p} x {d} instances",
                    )
                parts.append(values[joined_ranges(offsets[rows], lengths)].reshape(len(rows), -1))
            found.setdefault((int(p), int(d)), []).append((place[first + rows], parts))
        first += table.num_rows
    groups = []
    for (p, d), pieces in sorted(found.items()):
        rows = np.concatenate([rows for rows, _ in pieces])
        order = np.argsort(rows)
        values = [np.concatenate(column)[order] for column in zip(*(parts for _, parts in pieces), strict=True)]
        request, prefill, decode, cluster = (v.view(features) for v, (_, features) in zip(values, _TABLES))
        masks = values[4].reshape(-1, p, 3), values[5].reshape(-1, d)
        groups.append(Observed(rows[order], Observation(request, prefill, decode, cluster, *masks)))
    return tuple(groups)
