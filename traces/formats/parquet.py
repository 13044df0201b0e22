"""The project's own Parquet, which is also the decision log's format.

Columns: `arrival_s` double, `input_tokens` int32, `output_tokens` int32, optional `block_ids`
list<int32 or int64>, `session_id`, `tenant_id` int32. Other columns are ignored, so a decision
log may carry what it likes. File metadata under `conductor_gym.trace`: JSON with
`schema_version`, `block_tokens`, `name`. Block ids need not be dense in a file (the live runtime
recycles them); the reader renumbers.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traces.formats.rows import RowProblem, Rows, integer
from traces.trace import Trace, TraceError, densify, joined_ranges, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
METADATA_KEY = b"conductor_gym.trace"
SCHEMA_VERSION = 1


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
            raise TraceError(
                f"{trace.block_offsets[-1]} block ids", file=path, expected="below 2**31 per file"
            )
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"damaged Parquet ({str(error).splitlines()[0]})",
            file=rows.file,
            expected="a whole file",
        ) from None
    head = _head(table, rows.file)
    kinds: dict[str, Any] = {
        "arrival_s": ("a number", lambda t: pa.types.is_floating(t) or pa.types.is_integer(t)),
        "input_tokens": ("an integer", pa.types.is_integer),
        "output_tokens": ("an integer", pa.types.is_integer),
        "session_id": ("an integer", pa.types.is_integer),
        "tenant_id": ("an integer", pa.types.is_integer),
        "block_ids": (
            "a list of integers",
            lambda t: (
                (pa.types.is_list(t) or pa.types.is_large_list(t))
                and pa.types.is_integer(t.value_type)
            ),
        ),
    }
    optional = ("block_ids", "session_id", "tenant_id")
    values: dict[str, Any] = {}
    for label, (expected, fits) in kinds.items():
        if label not in table.column_names:
            if label in optional:
                continue
            raise TraceError("column missing", file=rows.file, field=label, expected=expected)
        column = table.column(label)
        if not fits(column.type):
            raise TraceError(
                f"column of type {column.type}", file=rows.file, field=label, expected=expected
            )
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
            missing = float("nan") if label == "arrival_s" else -1
            if label == "arrival_s":
                column = column.cast(pa.float64())
            values[label] = np.asarray(column.fill_null(missing))
    return _checked(values, head, rows, name)


def _head(table: pa.Table, file: Path) -> dict[str, Any]:
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
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
        raise TraceError(
            f"metadata unreadable ({detail})", file=file, field=METADATA_KEY.decode()
        ) from None
    if version > SCHEMA_VERSION:
        raise TraceError(
            f"schema version {version}",
            file=file,
            expected=f"at most {SCHEMA_VERSION}",
            hint="a newer conductor-gym wrote it; upgrade",
        )
    assert isinstance(head, dict)
    return head


def _checked(values: dict[str, Any], head: dict[str, Any], rows: Rows, name: str) -> Trace:
    """All rules at once over columns; bad rows in order go to `rows.bad`."""
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
    if not rows.sort:
        before = np.maximum.accumulate(np.where(keep, arrival, -np.inf)) if n else arrival
        check(arrival >= before, "arrival_s", arrival, "rows in order of time (or sort=True)")
    for row, problem in sorted(problems, key=lambda item: item[0]):
        rows.bad(row + 1, problem)
    kept = np.flatnonzero(keep)
    if not len(kept):
        raise TraceError("no usable row", file=rows.file, expected="at least one request")
    order = kept[np.argsort(arrival[kept], kind="stable")]
    sessions, tenants = (_labels(values.get(k), order) for k in ("session_id", "tenant_id"))
    return Trace(
        arrival_s=arrival[order],
        input_tokens=tokens[order].astype(np.int32),
        output_tokens=output[order].astype(np.int32),
        block_offsets=offsets_of(lengths[order]),
        block_ids=densify(ids[joined_ranges(offsets[:-1][order], lengths[order])]),
        block_tokens=block_tokens,
        session_id=sessions,
        tenant_id=tenants,
        name=str(head.get("name") or name),
        skipped_rows=rows.skipped,
        skip_reasons=tuple(rows.reasons),
    )


def _labels(column: NDArray[Any] | None, order: NDArray[np.int64]) -> NDArray[np.int32] | None:
    if column is None:
        return None
    kept = column[order]
    fits = kept.size == 0 or (kept.min() >= -(2**31) and kept.max() < 2**31)
    return kept.astype(np.int32) if fits else densify(kept)
