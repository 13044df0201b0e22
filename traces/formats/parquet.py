"""The project's own Parquet, which is also the decision log's format.

Columns: `arrival_s` double, `input_tokens` int32, `output_tokens` int32, optional `block_ids`
list<int32 or int64>, `session_id`, `tenant_id` int32 or int64. Other columns are ignored, so a
decision log may carry what it likes. A request without a session is a session of its own. File
metadata under `conductor_gym.trace`: JSON with `schema_version`, `block_tokens`, `name`. Block ids
need not be dense in a file; the reader renumbers.

A decision log is a folder of such files, its segments. Each has more metadata under
`conductor_gym.decision_log`, of which the reader uses `clock_offset_s` (Unix time minus
`arrival_s`). Segments are put in one order by arrival and, at one time, by the column `sequence`:
a request is logged when it has ended, so segments overlap. In all segments of a log, equal block
ids, sessions and tenants are equal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.formats.rows import KEPT_REASONS, RowProblem, Rows, integer
from traces.trace import Trace, TraceError, densify, joined_ranges, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
METADATA_KEY = b"conductor_gym.trace"
LOG_KEY = b"conductor_gym.decision_log"
SCHEMA_VERSION = 1
_KINDS = ("arrival_s", "input_tokens", "output_tokens", "session_id", "tenant_id", "block_ids", "sequence")


class Part(NamedTuple):
    """The columns of one file, and what its metadata says."""

    values: dict[str, Any]
    head: dict[str, Any]
    log: dict[str, Any] | None  # of a decision log's segment


def schema(block_tokens: int, name: str = "", *, has_blocks: bool = True) -> pa.Schema:
    """The Arrow schema of a trace; a decision log adds its own columns to it."""
    import pyarrow as pa

    fields = [
        pa.field("arrival_s", pa.float64(), nullable=False),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
    ]
    if has_blocks:
        fields.append(pa.field("block_ids", pa.list_(pa.int32()), nullable=False))
    head = {"schema_version": SCHEMA_VERSION, "block_tokens": block_tokens, "name": name}
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps(head).encode()})


def dump(trace: Trace, path: Path) -> bytes:
    """A trace as Parquet (zstd)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shape = schema(trace.block_tokens, trace.name, has_blocks=trace.has_blocks)
    columns: list[Any] = [trace.arrival_s, trace.input_tokens, trace.output_tokens]
    if trace.has_blocks:
        if trace.block_offsets[-1] > 2**31 - 1:
            raise TraceError(f"{trace.block_offsets[-1]} block ids", file=path, expected="below 2**31 per file")
        offsets = pa.array(trace.block_offsets.astype(np.int32))
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(trace.block_ids)))
    for label in ("session_id", "tenant_id"):
        column = getattr(trace, label)
        if column is not None:
            shape = shape.append(pa.field(label, pa.int32(), nullable=False))
            columns.append(column)
    table = pa.Table.from_arrays([_arrow(c) for c in columns], schema=shape)
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def _arrow(column: Any) -> pa.Array:
    import pyarrow as pa

    return pa.array(column) if isinstance(column, np.ndarray) else column


def read(data: bytes, rows: Rows, name: str) -> Trace:
    """`line` in errors is the row, counted from 1."""
    part = columns(data, rows.file)
    return _trace([part.values], [_kept(part, rows)], part.head, name, rows.skipped, rows.reasons)


def read_segments(files: Sequence[tuple[Rows, bytes]], name: str) -> Trace:
    """Segments of one decision log as one trace.

    `arrival_s` is as the earliest started process counts it; another's clock is put beside it by
    the wall clock (`clock_offset_s`).

    Raises:
        TraceError: one of the files is damaged, no segment, or of another block size.
    """
    parts = [columns(data, rows.file) for rows, data in files]
    for part, (rows, _) in zip(parts, files):
        if part.log is None:
            raise TraceError(
                "not a segment of a decision log",
                file=rows.file,
                expected="only segments where several Parquet files are loaded together",
                hint="load other files one by one and use traces.merge",
            )
        if part.head["block_tokens"] != parts[0].head["block_tokens"]:
            raise TraceError(
                f"blocks of {part.head['block_tokens']} tokens",
                file=rows.file,
                expected=f"{parts[0].head['block_tokens']}, as in {files[0][0].file.name}",
            )
    for part, shift_s in zip(parts, clock_shifts([part.log or {} for part in parts])):
        part.values["arrival_s"] = part.values["arrival_s"] + shift_s
    kept = [_kept(part, rows) for part, (rows, _) in zip(parts, files)]
    skipped = sum(rows.skipped for rows, _ in files)
    reasons = [reason for rows, _ in files for reason in rows.reasons]
    return _trace([part.values for part in parts], kept, parts[0].head, name, skipped, reasons[:KEPT_REASONS])


def clock_shifts(logs: Sequence[dict[str, Any]]) -> list[float]:
    """What to add to the `arrival_s` of each segment to have them all on the earliest clock."""
    offsets = [float(log.get("clock_offset_s", 0.0)) for log in logs]
    return [offset - min(offsets) for offset in offsets]


def order_of(arrival_s: NDArray[np.float64], sequence: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Rows by arrival; those of one time by `sequence`, else as they are."""
    if sequence is None:
        return np.argsort(arrival_s, kind="stable")
    return np.lexsort((sequence, arrival_s))


def columns(data: bytes, file: Path) -> Part:
    """The columns of a file that belong to a trace.

    Raises:
        TraceError: damaged, no metadata, or a column missing or of a wrong type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(io.BytesIO(data))
        table = source.read([c for c in _KINDS if c in source.schema_arrow.names])
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"damaged Parquet ({str(error).splitlines()[0]})",
            file=file,
            expected="a whole file",
        ) from None
    head = _head(source.schema_arrow, file)
    kinds: dict[str, Any] = {
        "arrival_s": ("a number", lambda t: pa.types.is_floating(t) or pa.types.is_integer(t)),
        "input_tokens": ("an integer", pa.types.is_integer),
        "output_tokens": ("an integer", pa.types.is_integer),
        "sequence": ("an integer", pa.types.is_integer),
        "session_id": ("an integer", pa.types.is_integer),
        "tenant_id": ("an integer", pa.types.is_integer),
        "block_ids": (
            "a list of integers",
            lambda t: (pa.types.is_list(t) or pa.types.is_large_list(t)) and pa.types.is_integer(t.value_type),
        ),
    }
    optional = ("block_ids", "session_id", "tenant_id", "sequence")
    values: dict[str, Any] = {}
    for label, (expected, fits) in kinds.items():
        if label not in table.column_names:
            if label in optional:
                continue
            raise TraceError("column missing", file=file, field=label, expected=expected)
        column = table.column(label)
        if not fits(column.type):
            raise TraceError(f"column of type {column.type}", file=file, field=label, expected=expected)
        if label == "block_ids":
            column = column.fill_null([]) if column.null_count else column
            whole = column.combine_chunks()
            if isinstance(whole, pa.ChunkedArray):
                whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else whole.chunk(0)
            values[label] = (
                np.asarray(whole.value_lengths()).astype(np.int64),
                np.asarray(whole.flatten().fill_null(-1)).astype(np.int64),
            )
        else:
            if label == "session_id" and column.null_count:
                values["no_session"] = np.asarray(column.is_null())
            missing = float("nan") if label == "arrival_s" else -1
            if label == "arrival_s":
                column = column.cast(pa.float64())
            values[label] = np.asarray(column.fill_null(missing))
    return Part(values, head, _log_head(source.schema_arrow, file))


def _head(schema: pa.Schema, file: Path) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise TraceError(
            "Parquet without trace metadata",
            file=file,
            field=METADATA_KEY.decode(),
            expected="a file written by traces.save or the decision log",
        )
    try:
        head = json.loads(raw)
        version = integer(head, "schema_version", least=1)
        integer(head, "block_tokens")
    except (ValueError, TypeError, RowProblem) as error:
        detail = f"{error.field}: {error.found}" if isinstance(error, RowProblem) else str(error)
        raise TraceError(f"metadata unreadable ({detail})", file=file, field=METADATA_KEY.decode()) from None
    if version > SCHEMA_VERSION:
        raise TraceError(
            f"schema version {version}",
            file=file,
            expected=f"at most {SCHEMA_VERSION}",
            hint="a newer conductor-gym wrote it; upgrade",
        )
    assert isinstance(head, dict)
    return head


def _log_head(schema: pa.Schema, file: Path) -> dict[str, Any] | None:
    """What the decision log says of a segment; None where the file is none."""
    raw = (schema.metadata or {}).get(LOG_KEY)
    if raw is None:
        return None
    try:
        head = json.loads(raw)
        if not isinstance(head, dict):
            raise ValueError(f"found {type(head).__name__}, expected an object")
        float(head.get("clock_offset_s", 0.0))
    except (ValueError, TypeError) as error:
        raise TraceError(f"metadata unreadable ({error})", file=file, field=LOG_KEY.decode()) from None
    return head


def _kept(part: Part, rows: Rows) -> NDArray[np.int64]:
    """Indices of good rows. All rules at once over columns; bad rows in order go to `rows.bad`."""
    values, head = part.values, part.head
    arrival: NDArray[np.float64] = values["arrival_s"]
    n = len(arrival)
    block_tokens = int(head["block_tokens"])
    tokens, output = values["input_tokens"], values["output_tokens"]
    keep = np.ones(n, bool)
    problems: list[tuple[int, RowProblem]] = []

    def check(good: NDArray[np.bool_], field: str, column: Any, expected: str) -> None:
        for row in np.flatnonzero(keep & ~good):
            problems.append((int(row), RowProblem(field, f"found {column[row]}", expected)))
        keep[~good] = False

    check(np.isfinite(arrival) & (arrival >= 0), "arrival_s", arrival, "a finite number of s >= 0")
    for label, column in (("input_tokens", tokens), ("output_tokens", output)):
        check((column >= 1) & (column < 2**31), label, column, "an integer >= 1")
    lengths, ids = values.get("block_ids", (np.zeros(n, np.int64), np.zeros(0, np.int64)))
    offsets = offsets_of(lengths)
    most = -(-tokens.astype(np.int64) // block_tokens)
    check(lengths <= most, "block_ids", lengths, f"at most ceil(input / {block_tokens}) ids")
    negative = offsets_of(ids < 0)
    check(
        negative[offsets[1:]] == negative[offsets[:-1]],
        "block_ids",
        np.repeat("a negative or null id", max(n, 1)),
        "ids >= 0",
    )
    if not rows.sort and part.log is None:
        before = np.maximum.accumulate(np.where(keep, arrival, -np.inf)) if n else arrival
        check(arrival >= before, "arrival_s", arrival, "rows in order of time (or sort=True)")
    for row, problem in sorted(problems, key=lambda item: item[0]):
        rows.bad(row + 1, problem)
    kept = np.flatnonzero(keep)
    if not len(kept):
        raise TraceError("no usable row", file=rows.file, expected="at least one request")
    return kept


def _trace(
    parts: Sequence[dict[str, Any]],
    kept: Sequence[NDArray[np.int64]],
    head: dict[str, Any],
    name: str,
    skipped: int,
    reasons: Sequence[str],
) -> Trace:
    """One trace of the kept rows of all parts, in order."""

    def joined(label: str) -> NDArray[Any] | None:
        if any(label not in values for values in parts):
            return None
        return np.concatenate([values[label][rows] for values, rows in zip(parts, kept)])

    none = np.zeros(0, np.int64)
    ids, lengths = [], []
    for values, rows in zip(parts, kept):
        size, number = values.get("block_ids", (np.zeros(len(values["arrival_s"]), np.int64), none))
        ids.append(number[joined_ranges(offsets_of(size)[:-1][rows], size[rows])])
        lengths.append(size[rows])
    arrival, tokens, output = (
        np.concatenate([values[label][rows] for values, rows in zip(parts, kept)])
        for label in ("arrival_s", "input_tokens", "output_tokens")
    )
    order = order_of(arrival, joined("sequence"))
    length = np.concatenate(lengths)
    starts = offsets_of(length)[:-1]
    sessions = joined("session_id")
    if sessions is not None and any("no_session" in values for values in parts):
        none_of = [values.get("no_session", np.zeros(len(values["arrival_s"]), bool)) for values in parts]
        sessions = _own_sessions(sessions, np.concatenate([m[rows] for m, rows in zip(none_of, kept)]))
    return Trace(
        arrival_s=arrival[order],
        input_tokens=tokens[order].astype(np.int32),
        output_tokens=output[order].astype(np.int32),
        block_offsets=offsets_of(length[order]),
        block_ids=densify(np.concatenate(ids)[joined_ranges(starts[order], length[order])]),
        block_tokens=int(head["block_tokens"]),
        session_id=_labels(sessions, order),
        tenant_id=_labels(joined("tenant_id"), order),
        name=str(head.get("name") or name),
        skipped_rows=skipped,
        skip_reasons=tuple(reasons),
    )


def _labels(column: NDArray[Any] | None, order: NDArray[np.int64]) -> NDArray[np.int32] | None:
    if column is None:
        return None
    kept = column[order]
    fits = kept.size == 0 or (kept.min() >= -(2**31) and kept.max() < 2**31)
    return kept.astype(np.int32) if fits else densify(kept)


def _own_sessions(labels: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Sessions renumbered, each missing one a session of its own; None where all are missing."""
    if missing.all():
        return None
    found: NDArray[np.int64] = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    found[missing] = found.max() + 1 + np.arange(missing.sum())
    return found
