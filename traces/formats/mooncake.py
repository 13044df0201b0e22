"""Mooncake's JSONL (FAST'25 release, also Dynamo's sample): 512-token blocks, times in ms.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}` with
exactly ceil(input_length / 512) ids: the last may stand for a partial block.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from traces.formats.rows import RowProblem, Rows, id_list, integer, json_object, seconds, text_lines
from traces.trace import Trace, TraceError

BLOCK_TOKENS = 512
FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}


def sniff(row: dict[str, Any]) -> bool:
    return len(FIELDS & row.keys()) >= 2


def read(data: bytes, rows: Rows, name: str) -> Trace:
    for line, text in text_lines(data):
        try:
            row = json_object(text)
            arrival_s = seconds(row, "timestamp", "milliseconds", 1e3)
            tokens = integer(row, "input_length")
            output = integer(row, "output_length")
            ids = id_list(row, "hash_ids")
            want = -(-tokens // BLOCK_TOKENS)
            if len(ids) != want:
                raise RowProblem(
                    "hash_ids",
                    f"{len(ids)} ids for input_length {tokens}",
                    f"ceil({tokens} / {BLOCK_TOKENS}) = {want} ids",
                )
            rows.add(arrival_s, tokens, output, ids)
        except RowProblem as problem:
            rows.bad(line, problem)
    return rows.trace(block_tokens=BLOCK_TOKENS, name=name)


def dump(trace: Trace, path: Path) -> bytes:
    """A trace as Mooncake JSONL; times are rounded to whole milliseconds.

    Raises:
        TraceError: the trace's blocks are not what the format means by `hash_ids`.
    """
    counts = np.diff(trace.block_offsets)
    want = -(-trace.input_tokens.astype(np.int64) // BLOCK_TOKENS)
    if not trace.has_blocks or trace.block_tokens != BLOCK_TOKENS or (counts != want).any():
        found = (
            "the trace has no block ids"
            if not trace.has_blocks
            else f"blocks of {trace.block_tokens} tokens"
            if trace.block_tokens != BLOCK_TOKENS
            else "requests whose last, partial block has no id"
        )
        raise TraceError(
            f"cannot write Mooncake JSONL: {found}",
            file=path,
            expected=f"ceil(input / {BLOCK_TOKENS}) block ids per request",
            hint=f"write Parquet, or reblock to {BLOCK_TOKENS}",
        )
    ms = np.rint(trace.arrival_s * 1e3).astype(np.int64).tolist()
    ids, offsets = trace.block_ids.tolist(), trace.block_offsets.tolist()
    lines = [
        json.dumps(
            {
                "timestamp": ms[i],
                "input_length": tokens,
                "output_length": output,
                "hash_ids": ids[offsets[i] : offsets[i + 1]],
            }
        )
        for i, (tokens, output) in enumerate(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist()))
    ]
    return ("\n".join(lines) + "\n").encode()
