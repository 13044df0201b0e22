"""RAGPulse's JSONL: retrieval-augmented requests as lists of text chunks, whose lengths are in five files beside it.

`{"timestamp": "s", "input_length": tokens, "output_length": tokens, "hash_ids": {"sys_prompt": [...], "passages_ids":
[...], "history": [...], "web_search": [...], "user_input": [...]}, "session_id": "..."}` in `0_trace.jsonl`; a chunk id
of any of the lists stands in one of `1_sys_prompt.jsonl` .. `5_web_search.jsonl` with its `token_length`. All ids are
of one number space.

A prompt is its components in the order above, the chunks of each in theirs. The 6 to 12 tokens by which `input_length`
is more are taken to follow the last chunk and to belong to it. A block is named by the chain of chunks up to the one it
ends in, so two requests share the blocks that lie whole in their common chunks.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from traces.formats.rows import (
    MAX_BLOCK_ID,
    RowProblem,
    Rows,
    get,
    id_list,
    integer,
    json_object,
    read_bytes,
    seconds,
    show,
    text_lines,
)
from traces.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
TRACE_FILE = "0_trace.jsonl"
TABLES = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""The files of chunk lengths, and what each calls its id."""
COMPRESSED = ("", ".gz", ".zst")


def sniff(row: dict[str, Any]) -> bool:
    return isinstance(row.get("hash_ids"), dict)


def read(data: bytes, rows: Rows, name: str, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Trace:
    """The trace in blocks of any size.

    Raises:
        TraceError: a file of chunk lengths is missing or damaged, or a bad row.
    """
    if block_tokens < 1:
        raise TraceError(f"blocks of {block_tokens} tokens", expected="an integer >= 1")
    lengths = chunk_lengths(rows.file)
    names = _Names(block_tokens)
    for line, text in text_lines(data):
        try:
            row = json_object(text)
            arrival_s = _seconds(row)
            tokens = integer(row, "input_length")
            output = integer(row, "output_length")
            chunks = chunks_of(row)
            sizes = [_length(lengths, chunk) for chunk in chunks]
            if sum(sizes) > tokens:
                raise RowProblem("hash_ids", f"chunks of {sum(sizes)} tokens", f"at most input_length = {tokens}")
            session = get(row, "session_id")
            if not isinstance(session, str):
                raise RowProblem("session_id", f"found {show(session)}", "a string")
            rows.add(arrival_s, tokens, output, names.blocks(chunks, sizes, tokens), session)
        except RowProblem as problem:
            rows.bad(line, problem)
    return rows.trace(block_tokens=block_tokens, name=name, sessions=True)


def chunks_of(row: dict[str, Any]) -> list[int]:
    """The chunk ids of a row's prompt, in order.

    Raises:
        RowProblem: a component is missing or no list of ids.
    """
    parts = get(row, "hash_ids")
    if not isinstance(parts, dict) or set(parts) != set(COMPONENTS):
        found = sorted(parts) if isinstance(parts, dict) else parts
        raise RowProblem("hash_ids", f"found {show(found)}", f"an object of {', '.join(COMPONENTS)}")
    return [chunk for component in COMPONENTS for chunk in id_list(parts, component)]


class _Names:
    """Chunks, in blocks of `size` tokens: a number for every distinct block in its prefix."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._chains: dict[tuple[int, int], int] = {}
        self._blocks: dict[tuple[int, int, int], int] = {}

    def blocks(self, chunks: list[int], sizes: list[int], tokens: int) -> list[int]:
        """Numbers of the ceil(tokens / size) blocks of a prompt."""
        chain = end = 0
        found: list[int] = []
        for chunk, length in zip(chunks, sizes, strict=True):
            chain = self._chains.setdefault((chain, chunk), len(self._chains) + 1)
            end += length
            while (len(found) + 1) * self.size <= end:
                found.append(self._name(chain, len(found), 0))
        while len(found) * self.size < tokens:
            # What reaches beyond the chunks, or is partial, is the same only in a prompt of the same length.
            found.append(self._name(chain, len(found), tokens))
        return found

    def _name(self, chain: int, position: int, tokens: int) -> int:
        return self._blocks.setdefault((chain, position, tokens), len(self._blocks))


def chunk_lengths(trace_file: Path) -> dict[int, int]:
    """Chunk id -> tokens, from the files beside the trace; what precedes `0_trace.jsonl` in its name precedes theirs.

    Raises:
        TraceError: one is missing or damaged.
    """
    start = trace_file.name.find(TRACE_FILE.removesuffix(".jsonl"))
    prefix = trace_file.name[: max(start, 0)]
    places = {table: _present(trace_file.with_name(prefix + table)) for table in TABLES}
    missing = [prefix + table for table, place in places.items() if place is None]
    if missing:
        raise TraceError(
            f"the chunk lengths are not beside it: no {', '.join(missing)}",
            file=trace_file,
            expected=f"{'it' if len(missing) == 1 else 'them'} in {trace_file.parent}, plain, .gz or .zst",
            hint="from the data folder of github.com/flashserve/RAGPulse",
        )
    lengths: dict[int, int] = {}
    for table, place in places.items():
        assert place is not None
        for line, text in text_lines(read_bytes(place)):
            try:
                row = json_object(text)
                chunk = integer(row, TABLES[table], least=0, most=MAX_BLOCK_ID)
                tokens = integer(row, "token_length", least=0)
                if lengths.setdefault(chunk, tokens) != tokens:
                    raise RowProblem(TABLES[table], f"{chunk} again, of {tokens} tokens", f"{lengths[chunk]} tokens")
            except RowProblem as problem:
                raise TraceError(
                    problem.found, file=place, line=line, field=problem.field, expected=problem.expected
                ) from None
    return lengths


def _present(file: Path) -> Path | None:
    candidates = [file.with_name(file.name + suffix) for suffix in COMPRESSED]
    return next((place for place in candidates if place.exists()), None)


def _length(lengths: dict[int, int], chunk: int) -> int:
    try:
        return lengths[chunk]
    except KeyError:
        raise RowProblem(
            "hash_ids", f"chunk {chunk}, which no file of lengths has", f"one in {', '.join(TABLES)}"
        ) from None


def _seconds(row: dict[str, Any]) -> float:
    value = get(row, "timestamp")
    if isinstance(value, str):
        with suppress(ValueError):  # said below
            value = float(value)
    return seconds({"timestamp": value}, "timestamp", "seconds")
