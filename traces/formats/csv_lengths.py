"""CSV traces of lengths only, no block ids: Azure 2023/2024 and BurstGPT.

Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`, wall-clock time with up to nine decimals,
CRLF line ends. BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`,
time in seconds; its failed requests have 0 response tokens.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable

import numpy as np

from traces.formats.rows import RowProblem, Rows, integer, seconds
from traces.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_WALL_CLOCK = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(\+00:00|Z)?")


def header_of(first_line: bytes) -> list[str]:
    text = first_line.decode("utf-8-sig", "replace").strip()
    return [name.strip() for name in text.split(",")]


def read(data: bytes, rows: Rows, name: str) -> Trace:
    """Either format, told apart by its header.

    Arrival times are seconds from the first row for Azure, as given for BurstGPT.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError("bytes that are not UTF-8", file=rows.file, line=line, expected="CSV text") from None
    lines = text.splitlines()
    header = [column.strip() for column in lines[0].split(",")]
    azure = AZURE[0] in header
    fields = AZURE if azure else BURSTGPT
    for column in fields:
        if column not in header:
            raise TraceError(
                "column missing from the header",
                file=rows.file,
                line=1,
                field=column,
                expected=f"the columns {', '.join(fields)}",
            )
    time = _wall_clock() if azure else _plain_seconds
    hint = None if azure else "failed requests of BurstGPT; on_error skip drops and counts them"
    reader = csv.reader(lines[1:])
    for cells in reader:
        if not cells:
            continue
        line = reader.line_num + 1
        try:
            if len(cells) != len(header):
                raise RowProblem(None, f"{len(cells)} values", f"{len(header)}, as in the header")
            row = dict(zip(header, cells))
            arrival_s = time(row[fields[0]], fields[0])
            tokens = _tokens(row, fields[1], None)
            output = _tokens(row, fields[2], hint if row[fields[2]].strip() == "0" else None)
            rows.add(arrival_s, tokens, output, time_field=fields[0])
        except RowProblem as problem:
            rows.bad(line, problem)
    return rows.trace(block_tokens=DEFAULT_BLOCK_TOKENS, name=name)


def _tokens(row: dict[str, str], name: str, hint: str | None) -> int:
    cell = row[name].strip()
    value = int(cell) if re.fullmatch(r"-?\d{1,18}", cell) else cell
    return integer({name: value}, name, hint=hint)


def _plain_seconds(cell: str, name: str) -> float:
    try:
        value: float | str = float(cell)
    except ValueError:
        value = cell
    return seconds({name: value}, name, "seconds")


def _wall_clock() -> Callable[[str, str], float]:
    """Parser of wall-clock times -> seconds since the first one it saw."""
    first: list[np.datetime64] = []

    def parse(cell: str, name: str) -> float:
        cell = cell.strip()
        try:
            if not _WALL_CLOCK.fullmatch(cell):
                raise ValueError
            at = np.datetime64(cell.removesuffix("Z").removesuffix("+00:00"), "ns")
        except ValueError:
            raise RowProblem(name, repr(cell[:40]), "a time such as 2023-11-16 18:15:46.6805900") from None
        if not first:
            first.append(at)
        return float((at - first[0]).astype(np.int64)) / 1e9

    return parse


def is_csv_trace(first_line: bytes) -> bool:
    header = header_of(first_line)
    return AZURE[0] in header or len(set(BURSTGPT) & set(header)) >= 2
