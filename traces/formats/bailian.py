"""Alibaba's Qwen-Bailian JSONL (`qwen_traceA_blksz_16.jsonl` and siblings): 16-token blocks.

`chat_id, parent_chat_id` (-1 for a first turn), timestamp (s), input_length, output_length,
type, turn, hash_ids`. A session is the tree of chats that hang on one first turn. Its publishers
say they hash each block by itself; a KV block also depends on all before it, so the reader names
blocks by the whole chain of ids.
"""

from __future__ import annotations

from typing import Any

from traces.formats.rows import RowProblem, Rows, id_list, integer, json_object, seconds, text_lines
from traces.trace import Trace

BLOCK_TOKENS = 16
NO_PARENT = -1


def sniff(row: dict[str, Any]) -> bool:
    return "chat_id" in row or "parent_chat_id" in row


def read(data: bytes, rows: Rows, name: str) -> Trace:
    root: dict[int, int] = {}
    for line, text in text_lines(data):
        try:
            row = json_object(text)
            chat = integer(row, "chat_id", least=0, most=2**62)
            parent = integer(row, "parent_chat_id", least=NO_PARENT, most=2**62)
            arrival_s = seconds(row, "timestamp", "seconds")
            tokens = integer(row, "input_length")
            output = integer(row, "output_length")
            ids = id_list(row, "hash_ids")
            # Whether the last, partial block got an id differs between releases: take both.
            full = tokens // BLOCK_TOKENS
            if len(ids) not in (full, -(-tokens // BLOCK_TOKENS)):
                raise RowProblem(
                    "hash_ids",
                    f"{len(ids)} ids for input_length {tokens}",
                    f"floor or ceil of {tokens} / {BLOCK_TOKENS} ids",
                )
            # A parent before the trace's start is a session of its own, shared by its children.
            session = root.get(parent, parent) if parent != NO_PARENT else chat
            rows.add(arrival_s, tokens, output, ids, session)
            root[chat] = session
        except RowProblem as problem:
            rows.bad(line, problem)
    return rows.trace(block_tokens=BLOCK_TOKENS, name=name, sessions=True, chain=True)
