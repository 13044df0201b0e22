"""RAGPulse: chunks with lengths in files beside the trace, in blocks of any size."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from traces import TraceError, load
from traces.formats import ragpulse
from traces.formats.rows import text_lines

LENGTHS = {100: 512, 101: 300, 200: 700, 201: 90, 202: 600, 300: 10, 400: 25, 401: 40, 500: 512}


def row(
    t: Any = "0",
    chunks: tuple[list[int], ...] = ([100, 101], [200], [300], [], [400]),
    extra: int = 8,
    session: str = "a",
    **change: Any,
) -> str:
    tokens = sum(LENGTHS.get(c, 0) for part in chunks for c in part) + extra
    made = {
        "timestamp": t,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": dict(zip(ragpulse.COMPONENTS, chunks)),
        "session_id": session,
    }
    return json.dumps(made | change)


def write(folder: Path, *rows: str, prefix: str = "", zipped: bool = False, without: str = "") -> Path:
    for k, (table, field) in enumerate(ragpulse.TABLES.items(), start=1):
        ids = [chunk for chunk in LENGTHS if chunk // 100 == k]
        lines = "\n".join(json.dumps({field: chunk, "token_length": LENGTHS[chunk]}) for chunk in ids) + "\n\n"
        if table == without:
            continue
        if zipped:
            (folder / f"{prefix}{table}.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            (folder / f"{prefix}{table}").write_text(lines)
    path = folder / f"{prefix}0_trace.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_columns(tmp_path: Path) -> None:
    path = write(tmp_path, row("3"), row("7", session="b"), row("9", session="a"))
    trace = load(path)
    assert trace.arrival_s.tolist() == [3, 7, 9]
    assert trace.input_tokens.tolist() == [512 + 300 + 700 + 10 + 25 + 8] * 3
    assert trace.output_tokens.tolist() == [5] * 3
    assert trace.session_id is not None and trace.session_id.tolist() == [0, 1, 0]
    assert trace.block_tokens == 512
    assert np.diff(trace.block_offsets).tolist() == [4, 4, 4]
    assert trace.name == "0_trace"


def test_shared_blocks_are_those_within_common_chunks(tmp_path: Path) -> None:
    first = ([100, 101], [200, 201], [300], [], [400])
    path = write(
        tmp_path,
        row("0", first),
        row("1", ([100, 101], [200, 202], [300], [], [400])),  # common: 512 + 300 + 700 = 1512 tokens
        row("2", ([100, 101], [202, 200], [300], [], [400])),  # common with both: 812
        row("3", first),  # all
        row("4", first, extra=9),  # all but the last, partial block
        row("5", ([101, 100], [200, 201], [300], [], [400])),  # nothing
    )
    trace = load(path)
    blocks = [trace.blocks(i).tolist() for i in range(6)]

    def common(a: int, b: int) -> int:
        return int(np.cumprod([x == y for x, y in zip(blocks[a], blocks[b])]).sum())

    assert common(0, 1) == 1512 // 512
    assert common(0, 2) == common(1, 2) == 812 // 512
    assert blocks[3] == blocks[0]
    assert common(0, 4) == len(blocks[0]) - 1
    assert not set(blocks[5]) & set(blocks[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_against_tokens_spelt_out(data: st.DataObject) -> None:
    """Prompts as lists of tokens, cut in blocks: equal prefixes and equal ids go together."""
    size = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=3, max_size=5))
    prompts = data.draw(st.lists(st.lists(st.integers(0, len(lengths) - 1), max_size=6), min_size=2, max_size=6))
    names = ragpulse._Names(size)
    seen: dict[tuple[Any, ...], int] = {}
    for chunks in prompts:
        sizes = [lengths[c] for c in chunks]
        tokens = [(c, i) for c in chunks for i in range(lengths[c])] + ["rest"] * 3
        ids = names.blocks(chunks, sizes, len(tokens))
        assert len(ids) == -(-len(tokens) // size)
        for k, block in enumerate(ids):
            prefix = (tuple(tokens[: (k + 1) * size]), min((k + 1) * size, len(tokens)) > sum(sizes) and tuple(chunks))
            known = seen.setdefault(prefix, block)
            if (k + 1) * size <= sum(sizes):
                assert known == block
    assert len(set(seen.values())) == len(seen)


def test_any_block_size(tmp_path: Path) -> None:
    path = write(tmp_path, row("0"), row("1"))
    for size in (16, 100, 512, 4096):
        trace = load(path, reblock=size)
        assert trace.block_tokens == size
        assert np.diff(trace.block_offsets).tolist() == [-(-1555 // size)] * 2
        assert traces.lru_hit_rate(trace, np.inf) == 0.5


def test_lengths_beside_it_with_a_prefix_and_compressed(tmp_path: Path) -> None:
    path = write(tmp_path, row("0"), prefix="ragpulse_", zipped=True)
    zipped = tmp_path / "ragpulse_0_trace.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert load(zipped).checksum == load(path).checksum


def test_missing_lengths_are_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path, row("0"), without="3_history.jsonl")
    with pytest.raises(TraceError, match=r"beside it: no 3_history\.jsonl; expected it in .*, plain, \.gz") as error:
        load(path)
    assert error.value.file == str(path)
    for table in ragpulse.TABLES:
        (tmp_path / table).unlink(missing_ok=True)
    with pytest.raises(TraceError, match=r"no 1_sys_prompt\.jsonl, .*5_web_search\.jsonl; expected them in"):
        load(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("soon"), "'timestamp': found \"soon\""),
        (row(None), "'timestamp'"),
        (row("-3"), "'timestamp'"),
        (row("nan"), "'timestamp'"),
        (row("1", ([100], [999], [300], [], [400])), "chunk 999, which no file of lengths has"),
        (row("1", input_length=3), "chunks of 1547 tokens; expected at most input_length = 3"),
        (row("1", hash_ids={"sys_prompt": [100]}), "expected an object of sys_prompt, passages_ids"),
        (row("1", session_id=7), "'session_id': found 7"),
        (row("1", output_length=0), "'output_length'"),
    ],
)
def test_bad_rows(tmp_path: Path, bad: str, message: str) -> None:
    path = write(tmp_path, row("0"), bad)
    with pytest.raises(TraceError) as error:
        load(path)
    assert message in str(error.value)
    assert error.value.line == 2
    skipped = load(path, on_error="skip")
    assert (skipped.n_requests, skipped.skipped_rows) == (1, 1)


def test_bad_lengths(tmp_path: Path) -> None:
    path = write(tmp_path, row("0"))
    table = tmp_path / "2_passages.jsonl"
    table.write_text('{"passage_id": 200, "token_length": 700}\n{"passage_id": 200, "token_length": 701}\n')
    with pytest.raises(TraceError, match=r"2_passages\.jsonl, line 2, .*200 again, of 701 tokens; expected 700"):
        load(path)
    table.write_text('{"passage_id": 200}\n')
    with pytest.raises(TraceError, match=r"2_passages\.jsonl, line 1, field 'token_length': missing"):
        load(path)


def test_real_chunks_are_reused_as_published(real_traces: Path) -> None:
    """In the file's order, an unbounded cache of chunks: the shares that shared/traces/README.md prints."""
    path = real_traces / "ragpulse_0_trace.jsonl.gz"
    lengths = ragpulse.chunk_lengths(path)
    seen: dict[tuple[int, int], int] = {}
    chunks = hits = tokens = hit_tokens = 0
    for _, line in text_lines(gzip.decompress(path.read_bytes())):
        chain, hit = 0, True
        for chunk in ragpulse.chunks_of(json.loads(line)):
            hit = hit and (chain, chunk) in seen
            chain = seen.setdefault((chain, chunk), len(seen) + 1)
            chunks, tokens = chunks + 1, tokens + lengths[chunk]
            hits, hit_tokens = hits + hit, hit_tokens + hit * lengths[chunk]
    assert hits / chunks == pytest.approx(0.1796, abs=5e-5)
    assert hit_tokens / tokens == pytest.approx(0.3153, abs=5e-5)


@pytest.mark.slow
def test_real_trace_in_blocks(real_traces: Path) -> None:
    path = real_traces / "ragpulse_0_trace.jsonl.gz"
    with pytest.raises(TraceError, match="before the row above"):
        load(path)  # one row starts the week anew
    trace = load(path, sort=True)
    assert trace.n_requests == 7106
    assert trace.duration_s == 604_603
    assert trace.input_tokens.mean() == pytest.approx(2943.6, abs=0.05)
    assert trace.output_tokens.mean() == pytest.approx(283.2, abs=0.05)
    assert traces.lru_hit_rate(trace, np.inf) == pytest.approx(0.2864, abs=1e-4)
    assert traces.lru_hit_rate(load(path, sort=True, reblock=64), np.inf) == pytest.approx(0.3108, abs=1e-4)
    assert trace.session_id is not None and trace.session_id.max() == 3989
