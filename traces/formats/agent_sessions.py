"""kv-cache-tester's session JSON: one file is one agent session, 64-token full blocks.

`{"id", "block_size": 64, "hash_id_scope": "local", "tool_tokens", "system_tokens", "requests":
[...]}`. A request has `t` (s from the session's start), `in`, `out` and `hash_ids` with exactly
floor(in / 64) ids. An entry of type `subagent` nests `requests` whose clock starts at the
sub-agent's own `t`; they share the session's ids. Think times are part of `t`. Ids of different
files never mean the same block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from traces.formats.rows import OnError, RowProblem, Rows, id_list, integer, seconds, show
from traces.trace import Trace, TraceError


def sniff(document: dict[str, Any]) -> bool:
    return "hash_id_scope" in document or {"requests", "block_size"} <= document.keys()


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """The session object.

    Raises:
        TraceError: not JSON, or its head is not what the format says.
    """
    try:
        document = orjson.loads(data)
    except ValueError as error:
        raise TraceError(f"not JSON ({error})", file=path, expected="one session") from None
    if not isinstance(document, dict):
        raise TraceError(f"a JSON {type(document).__name__}", file=path, expected="one session")
    scope = document.get("hash_id_scope", "local")
    if scope != "local":
        raise TraceError(f"{show(scope)}", file=path, field="hash_id_scope", expected='"local"')
    if not isinstance(document.get("requests"), list):
        raise TraceError("not a list", file=path, field="requests", expected="a list of requests")
    return document


def read(document: dict[str, Any], path: Path, on_error: OnError, name: str) -> Trace:
    """One session, its clock starting at 0; requests of sub-agents in order of time."""
    rows = Rows(path, on_error, sort=True)
    try:
        block_tokens = integer(document, "block_size")
    except RowProblem as problem:
        raise TraceError(problem.found, file=path, field=problem.field, expected=problem.expected) from None
    for where, start_s, entry in _entries(document["requests"], "requests", 0.0, rows):
        try:
            arrival_s = start_s + seconds(entry, "t", "seconds")
            tokens = integer(entry, "in")
            # An interrupted request has out = 0; its prefill happened, and with it one token.
            output = max(integer(entry, "out", least=0), 1)
            ids = id_list(entry, "hash_ids")
            if len(ids) != tokens // block_tokens:
                raise RowProblem(
                    "hash_ids",
                    f"{len(ids)} ids for in = {tokens}",
                    f"floor({tokens} / {block_tokens}) = {tokens // block_tokens} ids",
                )
            rows.add(arrival_s, tokens, output, ids, 0)
        except RowProblem as problem:
            _bad(rows, where, problem)
    return rows.trace(block_tokens=block_tokens, name=name, sessions=True)


def _entries(entries: list[Any], where: str, start_s: float, rows: Rows) -> Iterator[tuple[str, float, dict[str, Any]]]:
    for index, entry in enumerate(entries):
        here = f"{where}[{index}]"
        try:
            if not isinstance(entry, dict):
                raise RowProblem(None, f"a JSON {type(entry).__name__}", "an object")
            if entry.get("type") != "subagent":
                yield here, start_s, entry
                continue
            nested_start_s = start_s + seconds(entry, "t", "seconds")
            nested = entry.get("requests")
            if not isinstance(nested, list):
                raise RowProblem("requests", show(nested), "a list of requests")
        except RowProblem as problem:
            _bad(rows, here, problem)
            continue
        yield from _entries(nested, f"{here}.requests", nested_start_s, rows)


def _bad(rows: Rows, where: str, problem: RowProblem) -> None:
    field = where if problem.field is None else f"{where}.{problem.field}"
    rows.bad(None, RowProblem(field, problem.found, problem.expected, problem.hint))
