"""What all readers share: bytes of a file, the rows gathered so far, and what a bad row costs."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from traces.trace import Trace, TraceError, chain_ids, densify, joined_ranges, offsets_of

OnError = Literal["raise", "skip"]

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_TOKENS = 2**31 - 1
MAX_BLOCK_ID = 2**63 - 1
KEPT_REASONS = 5


def read_bytes(path: Path) -> bytes:
    """Content of a file, decompressed by what it starts with (gzip, zstd), not by its name.

    Raises:
        TraceError: missing, unreadable, empty, a directory, or a damaged compressed stream.
    """
    if path.is_dir():
        raise TraceError("is a directory", file=path, expected="a trace file")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TraceError("no such file", file=path, expected="a trace file") from None
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})", file=path) from error
    if data.startswith(GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except EOFError:
            raise TraceError(
                "gzip stream ends early", file=path, expected="a whole file", hint="copy it again"
            ) from None
        except (OSError, zlib.error) as error:
            raise TraceError(f"damaged gzip stream ({error})", file=path) from error
    elif data.startswith(ZSTD_MAGIC):
        data = _unzstd(data, path)
    if not data.strip():
        raise TraceError("file is empty", file=path, expected="at least one request")
    return data


def _unzstd(data: bytes, path: Path) -> bytes:
    import zstandard

    out = bytearray()
    rest = data
    try:
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            out += frame.decompress(rest)
            if not frame.eof:
                raise TraceError(
                    "zstd stream ends early",
                    file=path,
                    expected="a whole file",
                    hint="copy it again",
                )
            rest = frame.unused_data
    except zstandard.ZstdError as error:
        raise TraceError(f"damaged zstd stream ({error})", file=path) from error
    return bytes(out)


def text_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, stripped line) of every line that is not blank."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        stripped = line.strip()
        if stripped:
            yield number, stripped


class RowProblem(Exception):
    """One bad value of one row: field, what was found, what was expected."""

    def __init__(self, field: str | None, found: str, expected: str, hint: str | None = None):
        super().__init__(found)
        self.field, self.found, self.expected, self.hint = field, found, expected, hint


@dataclass
class Rows:
    """Columns gathered row by row; bad rows raise at once or are counted.

    A row whose time lies before the row above it is a bad row unless `sort` is set.
    """

    file: Path
    on_error: OnError = "raise"
    sort: bool = False
    arrival_s: list[float] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    block_counts: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    session: list[Any] = field(default_factory=list)
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def bad(self, line: int | None, problem: RowProblem) -> None:
        hint = problem.hint
        if self.on_error == "raise" and hint is None:
            hint = 'on_error="skip", or --on-error skip, drops and counts such rows'
        error = TraceError(
            problem.found,
            file=self.file,
            line=line,
            field=problem.field,
            expected=problem.expected,
            hint=hint if self.on_error == "raise" else None,
        )
        if self.on_error == "raise":
            raise error
        self.skipped += 1
        if len(self.reasons) < KEPT_REASONS:
            self.reasons.append(str(error))

    def add(
        self,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        block_ids: list[int] | None = None,
        session: Any = None,
        *,
        time_field: str = "timestamp",
    ) -> None:
        """Append one checked row.

        Raises:
            RowProblem: the row's time lies before the last one's and `sort` is off.
        """
        if not self.sort and self.arrival_s and arrival_s < self.arrival_s[-1]:
            raise RowProblem(
                time_field,
                f"{arrival_s:g} s, before the row above ({self.arrival_s[-1]:g} s)",
                "rows in order of time",
                "sort=True, or --sort, orders them; on_error skip drops the late row",
            )
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        if block_ids is not None:
            self.block_counts.append(len(block_ids))
            self.block_ids.extend(block_ids)
        self.session.append(session)

    def trace(self, *, block_tokens: int, name: str, sessions: bool = False, chain: bool = False) -> Trace:
        """The gathered columns as a `Trace`.

        `chain`: the source hashes each block by itself; identify it by the whole prefix.

        Raises:
            TraceError: no good row was left.
        """
        n = len(self.arrival_s)
        if n == 0:
            raise TraceError(
                f"no usable row ({self.skipped} bad ones"
                + (f", first: {self.reasons[0]}" if self.reasons else "")
                + ")",
                file=self.file,
                expected="at least one request",
            )
        arrival = np.array(self.arrival_s, np.float64)
        # Stable, so rows of one time keep the file's order.
        order = np.argsort(arrival, kind="stable")
        lengths = np.array(self.block_counts or [0] * n, np.int64)
        ids = np.array(self.block_ids, np.int64)
        labels = np.unique(self.session, return_inverse=True)[1] if sessions else None
        if chain:
            ids = chain_ids(offsets_of(lengths), densify(ids))
        return Trace(
            arrival_s=arrival[order],
            input_tokens=np.array(self.input_tokens, np.int32)[order],
            output_tokens=np.array(self.output_tokens, np.int32)[order],
            block_offsets=offsets_of(lengths[order]),
            block_ids=densify(ids[joined_ranges(offsets_of(lengths)[:-1][order], lengths[order])]),
            block_tokens=block_tokens,
            session_id=None if labels is None else densify(labels[order]),
            name=name,
            skipped_rows=self.skipped,
            skip_reasons=tuple(self.reasons),
        )


# -- checks of single values ------------------------------------------------------------------


def json_object(line: bytes) -> dict[str, Any]:
    """A line as a JSON object, or `RowProblem`."""
    try:
        value = orjson.loads(line)
    except ValueError:
        value = _lenient_json(line)
    if not isinstance(value, dict):
        raise RowProblem(None, f"a JSON {type(value).__name__}", "one JSON object per line")
    return value


def _lenient_json(line: bytes) -> Any:
    """What Python's parser takes and orjson does not (NaN, huge integers), to name the field."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        shown = line[:40].decode("utf-8", "replace")
        raise RowProblem(None, f"{shown!r} is not JSON", "one JSON object per line") from None


def get(row: dict[str, Any], name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise RowProblem(name, "missing", "the field to be present") from None


def integer(row: dict[str, Any], name: str, least: int = 1, most: int = MAX_TOKENS, hint: str | None = None) -> int:
    value = get(row, name)
    if type(value) is not int or not least <= value <= most:
        raise RowProblem(name, f"found {show(value)}", f"an integer from {least} to {most}", hint)
    return value


def seconds(row: dict[str, Any], name: str, unit: str, per_second: float = 1.0) -> float:
    """A finite, non-negative time, converted to seconds."""
    value = get(row, name)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise RowProblem(name, f"found {show(value)}", f"a finite number of {unit} >= 0")
    return float(value) / per_second


def id_list(row: dict[str, Any], name: str) -> list[int]:
    value = get(row, name)
    if type(value) is not list:
        raise RowProblem(name, f"found {show(value)}", "a list of integers")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_BLOCK_ID):
        wrong = next(v for v in value if type(v) is not int or not 0 <= v <= MAX_BLOCK_ID)
        raise RowProblem(name, f"a list that holds {show(wrong)}", "integers >= 0 below 2**63")
    return value


def show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."
