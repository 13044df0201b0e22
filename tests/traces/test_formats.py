"""Every reader on good, compressed, bad and hostile input; writing and reading back."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import traces
from traces import Trace, TraceError, load, save
from traces.formats import parquet


def mooncake_row(timestamp: Any = 0, tokens: Any = 1000, output: Any = 5, ids: Any = None) -> str:
    ids = list(range(-(-tokens // 512))) if ids is None else ids
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids})


def bailian_row(chat: int, parent: int, t: float, tokens: int, ids: list[int]) -> str:
    return json.dumps(
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": t,
            "input_length": tokens,
            "output_length": 3,
            "type": "text",
            "turn": 1 if parent < 0 else 2,
            "hash_ids": ids,
        }
    )


MOONCAKE = "\n".join(
    [
        mooncake_row(0, 1000, 5, [10, 11]),
        mooncake_row(1500, 513, 6, [10, 12]),
        mooncake_row(3000, 1, 7, [13]),
    ]
)
BAILIAN = "\n".join(
    [
        bailian_row(1, -1, 0.5, 33, [4, 5, 6]),
        bailian_row(2, -1, 0.75, 16, [9]),
        bailian_row(3, 1, 61.25, 48, [4, 5, 7]),
        bailian_row(4, 77, 62.0, 17, [4]),
    ]
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:16:50,1,1\r\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    '45.5,"GPT-4, turbo",1087,230,1317,API log\n'
)
SESSION: dict[str, Any] = {
    "id": "trace_1",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "system_tokens": 64,
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
        {
            "t": 10.0,
            "type": "subagent",
            "agent_id": "a",
            "requests": [
                {"t": 0.0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 3]},
                {"t": 7.5, "type": "s", "in": 63, "out": 5, "hash_ids": []},
            ],
        },
        {"t": 12.0, "type": "s", "in": 256, "out": 0, "hash_ids": [1, 2, 4, 5]},
    ],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file whose name says nothing about its format."""

    def _write(data: str | bytes, name: str = "file.dat") -> Path:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return _write


def blocks(trace: Trace) -> list[list[int]]:
    return [trace.blocks(i).tolist() for i in range(trace.n_requests)]


# -- good input -------------------------------------------------------------------------------


def test_mooncake(write: Callable[..., Path]) -> None:
    trace = load(write(MOONCAKE + "\n\n"))
    assert trace.arrival_s.tolist() == [0.0, 1.5, 3.0]
    assert trace.input_tokens.tolist() == [1000, 513, 1]
    assert trace.output_tokens.tolist() == [5, 6, 7]
    assert blocks(trace) == [[0, 1], [0, 2], [3]]
    assert (trace.block_tokens, trace.name, trace.skipped_rows) == (512, "file", 0)


def test_bailian_sessions_and_chained_blocks(write: Callable[..., Path]) -> None:
    trace = load(write(BAILIAN))
    assert trace.block_tokens == 16
    assert trace.arrival_s.tolist() == [0.5, 0.75, 61.25, 62.0]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == [0, 1, 0, 2]
    assert blocks(trace) == [[0, 1, 2], [3], [0, 1, 4], [0]]
    assert load(write(BAILIAN), reblock=32).block_tokens == 32
    # The same block hash behind another prefix is another KV block.
    other = load(write(bailian_row(1, -1, 0, 32, [4, 5]) + "\n" + bailian_row(2, -1, 1, 16, [5])))
    assert blocks(other) == [[0, 1], [2]]


def test_azure_counts_from_the_first_row(write: Callable[..., Path]) -> None:
    trace = load(write(AZURE))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.314579, 63.31941], abs=1e-9)
    assert trace.input_tokens.tolist() == [374, 396, 1]
    assert trace.output_tokens.tolist() == [44, 109, 1]
    assert not trace.has_blocks and trace.block_offsets.tolist() == [0, 0, 0, 0]
    assert load(write(AZURE_2024)).arrival_s.tolist() == pytest.approx([0.0, 0.007405])


def test_burstgpt(write: Callable[..., Path]) -> None:
    trace = load(write(BURSTGPT))
    assert trace.arrival_s.tolist() == [5.0, 45.5]
    assert trace.input_tokens.tolist() == [472, 1087]
    assert trace.output_tokens.tolist() == [18, 230]
    assert not trace.has_blocks


def test_session_with_subagents(write: Callable[..., Path]) -> None:
    trace = load(write(json.dumps(SESSION)))
    assert trace.block_tokens == 64
    # The sub-agent's clock starts at its own t; its requests share the session's ids.
    assert trace.arrival_s.tolist() == [0.0, 10.0, 12.0, 17.5]
    assert blocks(trace) == [[0, 1], [0, 1, 2], [0, 1, 3, 4], []]
    assert trace.output_tokens.tolist() == [5, 5, 1, 5]
    assert load(write(json.dumps(SESSION, indent=2))).checksum == trace.checksum


def test_sessions_together_share_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    for k in range(3):
        (folder / f"s{k}.json").write_text(json.dumps(SESSION))
    trace = load(folder, seed=3)
    assert trace.n_requests == 12
    assert trace.n_distinct_blocks == 15
    assert trace.session_id is not None and len(set(trace.session_id.tolist())) == 3
    assert trace.tenant_id is None
    for session in range(3):
        own = trace.arrival_s[trace.session_id == session]
        assert (own - own[0]).tolist() == pytest.approx([0.0, 10.0, 12.0, 17.5])
    assert load(folder, seed=3).checksum == trace.checksum
    assert load(folder, seed=4).checksum != trace.checksum
    assert load(sorted(folder.iterdir()), seed=3).checksum == trace.checksum
    fast = load(folder, seed=3, session_rate=1e6)
    assert fast.duration_s == pytest.approx(17.5, abs=1e-3)


@pytest.mark.parametrize("text", [MOONCAKE, BAILIAN, AZURE, BURSTGPT, json.dumps(SESSION)])
def test_compression_is_found_by_content(write: Callable[..., Path], text: str) -> None:
    plain = load(write(text)).checksum
    data = text.encode()
    zstd = zstandard.ZstdCompressor().compress(data)
    for packed in (
        gzip.compress(data),
        gzip.compress(data[:10]) + gzip.compress(data[10:]),
        zstd,
        zstandard.ZstdCompressor().compress(data[:10]) + zstandard.ZstdCompressor().compress(data[10:]),
    ):
        assert load(write(packed, "misleading.csv")).checksum == plain


def test_builtin_names() -> None:
    assert load("builtin:synthetic", seed=1).checksum == traces.builtin("synthetic", 1).checksum
    with pytest.raises(TraceError, match="conversation, toolagent, synthetic"):
        load("builtin:nonsense")


# -- writing ----------------------------------------------------------------------------------


def test_parquet_round_trip(tmp_path: Path) -> None:
    for trace in (
        traces.builtin("synthetic", n_requests=300),
        load("builtin:conversation").rows(5, 105),
    ):
        for tenant in (None, (np.arange(trace.n_requests) % 3).astype(np.int32)):
            saved = replace(trace, tenant_id=tenant, name="a name")
            save(saved, tmp_path / "t.parquet")
            back = load(tmp_path / "t.parquet")
            assert back.checksum == saved.checksum
            assert back.name == "a name"


def test_parquet_without_blocks(write: Callable[..., Path], tmp_path: Path) -> None:
    trace = load(write(AZURE))
    save(trace, tmp_path / "t.parquet")
    back = load(tmp_path / "t.parquet")
    assert back.checksum == trace.checksum and not back.has_blocks


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_mooncake_round_trip(tmp_path: Path, suffix: str) -> None:
    trace = traces.builtin("conversation", n_requests=200)
    save(trace, tmp_path / f"t{suffix}")
    back = load(tmp_path / f"t{suffix}")
    assert back.block_ids.tolist() == trace.block_ids.tolist()
    assert back.input_tokens.tolist() == trace.input_tokens.tolist()
    assert back.arrival_s.tolist() == pytest.approx(trace.arrival_s.tolist(), abs=5e-4)


def test_writing_what_does_not_fit(write: Callable[..., Path], tmp_path: Path) -> None:
    azure, session = load(write(AZURE)), load(write(json.dumps(SESSION)))
    with pytest.raises(TraceError, match="no block ids"):
        save(azure, tmp_path / "t.jsonl")
    with pytest.raises(TraceError, match="blocks of 64 tokens"):
        save(session, tmp_path / "t.jsonl")
    with pytest.raises(TraceError, match=r"expected \.parquet, \.jsonl"):
        save(azure, tmp_path / "t.xlsx")
    with pytest.raises(TraceError, match="cannot be written"):
        save(azure, tmp_path / "absent" / "t.parquet")
    assert not list(tmp_path.glob("*.jsonl")) and not list(tmp_path.glob(".t*"))


def test_decision_log_columns_are_ignored_and_recycled_ids_renumbered(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = parquet.schema(16, "log").append(pa.field("prefill_instance", pa.int32()))
    table = pa.table(
        {
            "arrival_s": [1.0, 2.0],
            "input_tokens": [32, 20],
            "output_tokens": [1, 2],
            "block_ids": [[900, 7], [900, 3]],
            "prefill_instance": [0, 1],
        },
        schema=schema,
    )
    pq.write_table(table, tmp_path / "log.parquet")
    trace = load(tmp_path / "log.parquet")
    assert blocks(trace) == [[0, 1], [0, 2]]
    assert trace.name == "log"


# -- bad rows ---------------------------------------------------------------------------------

GOOD = mooncake_row(0, 600, 5, [1, 2])
BAD_ROWS = [
    (mooncake_row(-5), "timestamp", "-5"),
    (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), "timestamp", "NaN"),
    (GOOD.replace('"timestamp": 0', '"timestamp": Infinity'), "timestamp", "Infinity"),
    (GOOD.replace('"timestamp": 0', '"timestamp": 1e999'), "timestamp", "Infinity"),
    (GOOD.replace('"timestamp": 0', '"timestamp": "0"'), "timestamp", '"0"'),
    (GOOD.replace('"timestamp": 0', '"timestamp": true'), "timestamp", "true"),
    (GOOD.replace('"timestamp": 0', '"timestamp": null'), "timestamp", "null"),
    (mooncake_row(0, 0, 5, []), "input_length", "0"),
    (mooncake_row(0, -7, 5, []), "input_length", "-7"),
    (mooncake_row(0, 600.5, 5, [1, 2]), "input_length", "600.5"),
    (mooncake_row(0, "600", 5, [1, 2]), "input_length", '"600"'),
    (mooncake_row(0, 2**31, 5, [1, 2]), "input_length", "2147483648"),
    (mooncake_row(0, 10**30, 5, [1, 2]), "input_length", "1e+30"),
    (mooncake_row(0, 600, 0, [1, 2]), "output_length", "0"),
    (mooncake_row(0, 600, True, [1, 2]), "output_length", "true"),
    (mooncake_row(0, 600, 5, [1]), "hash_ids", "1 ids"),
    (mooncake_row(0, 512, 5, [1, 2]), "hash_ids", "2 ids"),
    (mooncake_row(0, 600, 5, "ab"), "hash_ids", '"ab"'),
    (mooncake_row(0, 600, 5, [1, 2.0]), "hash_ids", "2.0"),
    (mooncake_row(0, 600, 5, [1, -2]), "hash_ids", "-2"),
    (mooncake_row(0, 600, 5, [1, None]), "hash_ids", "null"),
    (mooncake_row(0, 600, 5, [1, 2**63]), "hash_ids", "9223372036854775808"),
    (mooncake_row(0, 600, 5, [1, [2]]), "hash_ids", "[2]"),
    ('{"input_length": 600, "output_length": 5, "hash_ids": [1, 2]}', "timestamp", "missing"),
    ('{"timestamp": 0, "output_length": 5, "hash_ids": [1, 2]}', "input_length", "missing"),
    ('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}', "output_length", "missing"),
    ('{"timestamp": 0, "input_length": 600, "output_length": 5}', "hash_ids", "missing"),
    ("[1, 2, 3]", None, "a JSON list"),
    ("17", None, "a JSON int"),
    (GOOD[:30], None, "is not JSON"),
    ("\x00\x01\x02", None, "is not JSON"),
    ("[" * 100_000, None, "is not JSON"),
]


@pytest.mark.parametrize(("row", "field", "found"), BAD_ROWS)
def test_bad_mooncake_rows(write: Callable[..., Path], row: str, field: str | None, found: str) -> None:
    path = write(f"{GOOD}\n\n{row}\n{GOOD}")
    with pytest.raises(TraceError) as caught:
        load(path)
    error = caught.value
    assert (error.file, error.line, error.field) == (str(path), 3, field)
    assert found in error.found
    assert error.expected
    text = str(error)
    assert "line 3" in text and str(path) in text and "\n" not in text
    assert field is None or field in text

    trace = load(path, on_error="skip")
    assert (trace.n_requests, trace.skipped_rows) == (2, 1)
    assert len(trace.skip_reasons) == 1 and "line 3" in trace.skip_reasons[0]


def test_first_row_may_be_the_bad_one(write: Callable[..., Path]) -> None:
    for row, _, _ in BAD_ROWS:
        if row.startswith("{"):
            path = write(row + "\n" + GOOD)
            with pytest.raises(TraceError, match="line 1"):
                load(path)
            assert load(path, on_error="skip").skipped_rows == 1


def test_unsorted_times(write: Callable[..., Path]) -> None:
    path = write("\n".join(mooncake_row(t, 600, k + 1, [k, 90 + k]) for k, t in enumerate((5, 9, 7))))
    with pytest.raises(TraceError, match=r"line 3, field 'timestamp'.*--sort"):
        load(path)
    dropped = load(path, on_error="skip")
    assert (dropped.n_requests, dropped.skipped_rows) == (2, 1)
    ordered = load(path, sort=True)
    assert ordered.arrival_s.tolist() == [0.005, 0.007, 0.009]
    assert ordered.output_tokens.tolist() == [1, 3, 2]
    assert blocks(ordered) == [[0, 1], [2, 3], [4, 5]]


def test_all_rows_bad(write: Callable[..., Path]) -> None:
    path = write("\n".join([mooncake_row(-1)] * 8))
    with pytest.raises(TraceError, match="no usable row .8 bad ones"):
        load(path, on_error="skip")


def test_only_the_first_reasons_are_kept(write: Callable[..., Path]) -> None:
    trace = load(write("\n".join([GOOD] + [mooncake_row(-1)] * 100)), on_error="skip")
    assert trace.skipped_rows == 100
    assert 1 <= len(trace.skip_reasons) <= 10


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("2023-11-16 18:15:45.0,374,44", "TIMESTAMP"),
        ("yesterday,374,44", "TIMESTAMP"),
        ("2023-13-16 18:15:46,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:49,0,44", "ContextTokens"),
        ("2023-11-16 18:15:49,-3,44", "ContextTokens"),
        ("2023-11-16 18:15:49,374,4.5", "GeneratedTokens"),
        ("2023-11-16 18:15:49,374,nan", "GeneratedTokens"),
        ("2023-11-16 18:15:49,374,", "GeneratedTokens"),
        ("2023-11-16 18:15:49,374", None),
        ("2023-11-16 18:15:49,374,44,9", None),
    ],
)
def test_bad_azure_rows(write: Callable[..., Path], line: str, field: str | None) -> None:
    head, first, *rest = AZURE.split("\r\n")
    path = write("\r\n".join([head, first, line, *rest]))
    with pytest.raises(TraceError) as caught:
        load(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    trace = load(path, on_error="skip")
    assert (trace.n_requests, trace.skipped_rows) == (3, 1)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("46,m,10,0,10,x", "Response tokens"),
        ("46,m,0,10,10,x", "Request tokens"),
        ("nan,m,10,10,20,x", "Timestamp"),
        ("inf,m,10,10,20,x", "Timestamp"),
        ("-1,m,10,10,20,x", "Timestamp"),
        ("1,m,10,10,20,x", "Timestamp"),
        ("soon,m,10,10,20,x", "Timestamp"),
    ],
)
def test_bad_burstgpt_rows(write: Callable[..., Path], line: str, field: str) -> None:
    path = write(BURSTGPT + line + "\n")
    with pytest.raises(TraceError) as caught:
        load(path)
    assert (caught.value.line, caught.value.field) == (4, field)
    assert load(path, on_error="skip").skipped_rows == 1


def test_csv_header_lacks_a_column(write: Callable[..., Path]) -> None:
    with pytest.raises(TraceError) as caught:
        load(write("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n"))
    assert (caught.value.line, caught.value.field) == (1, "GeneratedTokens")


def _session(change: Callable[[dict[str, Any]], Any]) -> str:
    session = json.loads(json.dumps(SESSION))
    change(session)
    return json.dumps(session)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s["requests"][0].update(t=-1), "requests[0].t"),
        (lambda s: s["requests"][2].update(out=-1), "requests[2].out"),
        (lambda s: s["requests"][2].update(hash_ids=[1]), "requests[2].hash_ids"),
        (lambda s: s["requests"][0].pop("in"), "requests[0].in"),
        (lambda s: s["requests"][1].pop("t"), "requests[1].t"),
        (lambda s: s["requests"][1].update(requests=7), "requests[1].requests"),
        (
            lambda s: s["requests"][1]["requests"][1].update(hash_ids="x"),
            "requests[1].requests[1].hash_ids",
        ),
        (lambda s: s["requests"].append(7), "requests[3]"),
    ],
)
def test_bad_session_entries(write: Callable[..., Path], change: Callable[[dict[str, Any]], Any], field: str) -> None:
    path = write(_session(change))
    with pytest.raises(TraceError) as caught:
        load(path)
    assert caught.value.field == field
    assert load(path, on_error="skip").skipped_rows == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s.update(hash_id_scope="global"), "hash_id_scope"),
        (lambda s: s.update(block_size=0), "block_size"),
        (lambda s: s.update(requests={}), "requests"),
        (lambda s: s.update(requests=[]), None),
    ],
)
def test_bad_session_heads(
    write: Callable[..., Path], change: Callable[[dict[str, Any]], Any], field: str | None
) -> None:
    for on_error in ("raise", "skip"):
        with pytest.raises(TraceError) as caught:
            load(write(_session(change)), on_error=on_error)
        assert caught.value.field == field


def test_bad_bailian_rows(write: Callable[..., Path]) -> None:
    for bad, field in (
        (bailian_row(9, -2, 70.0, 16, [4]), "parent_chat_id"),
        (bailian_row(9, -1, 70.0, 48, [4]), "hash_ids"),
        (bailian_row(9, -1, 1.0, 16, [4]), "timestamp"),
    ):
        path = write(BAILIAN + "\n" + bad)
        with pytest.raises(TraceError) as caught:
            load(path)
        assert (caught.value.line, caught.value.field) == (5, field)
        assert load(path, on_error="skip").skipped_rows == 1


def _parquet(tmp_path: Path, columns: dict[str, Any], metadata: Any = ...) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if metadata is ...:
        metadata = {parquet.METADATA_KEY: b'{"schema_version": 1, "block_tokens": 16}'}
    table = pa.table(columns).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "p")
    return tmp_path / "p"


COLUMNS: dict[str, Any] = {
    "arrival_s": [0.0, 1.0, 2.0],
    "input_tokens": [32, 32, 32],
    "output_tokens": [1, 1, 1],
    "block_ids": [[5, 6], [5, 7], [5, 6]],
}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("arrival_s", [0.0, -1.0, 2.0]),
        ("arrival_s", [0.0, float("nan"), 2.0]),
        ("arrival_s", [0.0, None, 2.0]),
        ("arrival_s", [1.0, 0.0, 2.0]),
        ("input_tokens", [32, 0, 32]),
        ("input_tokens", [32, None, 32]),
        ("input_tokens", [32, 2**40, 32]),
        ("output_tokens", [1, -1, 1]),
        ("block_ids", [[5, 6], [5, 6, 7], [5, 6]]),
        ("block_ids", [[5, 6], [5, -7], [5, 6]]),
        ("block_ids", [[5, 6], [5, None], [5, 6]]),
    ],
)
def test_bad_parquet_rows(tmp_path: Path, column: str, values: list[Any]) -> None:
    path = _parquet(tmp_path, COLUMNS | {column: values})
    with pytest.raises(TraceError) as caught:
        load(path)
    assert (caught.value.line, caught.value.field) == (2, column)
    trace = load(path, on_error="skip")
    assert (trace.n_requests, trace.skipped_rows) == (2, 1)
    assert blocks(trace) == [[0, 1], [0, 1]]


def test_bad_parquet_files(tmp_path: Path) -> None:
    without = {k: v for k, v in COLUMNS.items() if k != "output_tokens"}
    for columns, metadata, message in (
        (without, ..., "output_tokens.*column missing"),
        (COLUMNS | {"input_tokens": ["a", "b", "c"]}, ..., "input_tokens.*column of type string"),
        (COLUMNS | {"block_ids": [1, 2, 3]}, ..., "block_ids.*column of type int64"),
        (COLUMNS, None, "without trace metadata"),
        (COLUMNS, {parquet.METADATA_KEY: b"{"}, "metadata unreadable"),
        (COLUMNS, {parquet.METADATA_KEY: b'{"schema_version": 1}'}, "metadata.*block_tokens"),
        (
            COLUMNS,
            {parquet.METADATA_KEY: b'{"schema_version": 2, "block_tokens": 16}'},
            "schema version 2; expected at most 1",
        ),
    ):
        with pytest.raises(TraceError, match=message):
            load(_parquet(tmp_path, columns, metadata))
    whole = _parquet(tmp_path, COLUMNS).read_bytes()
    for cut in (4, 20, len(whole) // 2, len(whole) - 5):
        (tmp_path / "p").write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="damaged Parquet"):
            load(tmp_path / "p")


# -- bad files --------------------------------------------------------------------------------


def test_files_that_are_no_traces(write: Callable[..., Path], tmp_path: Path) -> None:
    packed = gzip.compress(MOONCAKE.encode())
    zipped = zstandard.ZstdCompressor().compress(MOONCAKE.encode() * 50)
    broken = bytearray(packed)
    broken[20] ^= 0xFF
    for data, message in (
        (b"", "file is empty"),
        (b"  \n\n", "file is empty"),
        (gzip.compress(b""), "file is empty"),
        (packed[: len(packed) // 2], "gzip stream ends early"),
        (packed[:12], "gzip stream ends early"),
        (bytes(broken), "gzip stream"),
        (zipped[: len(zipped) // 2], "zstd stream"),
        (zipped[:4] + b"\xff" * 30, "zstd stream"),
        (bytes(range(256)) * 20, "unknown format"),
        (b"\xff\xfe\x00junk", "unknown format"),
        (b"hello world\n1,2,3\n", "unknown format"),
        (b"a,b,c\n1,2,3\n", "unknown format"),
        (b"[1, 2, 3]", "unknown format"),
        (b'{"a": 1}\n', "unknown format"),
        (b"{", "unknown format"),
        (b"{" * 10_000, "unknown format"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"num_prefill_tokens,num_decode_tokens\n3,4\n", "without arrival times"),
        (AZURE.encode() + b"\xff\xff,1,1", "not UTF-8"),
        (b'{"hash_id_scope": "local", "requests": [', "not JSON"),
    ):
        path = write(data)
        for on_error in ("raise", "skip"):
            with pytest.raises(TraceError, match=message) as caught:
                load(path, on_error=on_error)
            assert caught.value.file == str(path)
            assert "\n" not in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="a directory without session files"):
        load(tmp_path)
    with pytest.raises(TraceError, match="empty list"):
        load([])
    (tmp_path / "a.json").write_text(MOONCAKE)
    (tmp_path / "b.json").write_text(json.dumps(SESSION))
    with pytest.raises(TraceError, match="not a session file"):
        load(tmp_path)
    with pytest.raises(TraceError, match="session_rate"):
        load([tmp_path / "b.json"] * 2, session_rate=0.0)
    with pytest.raises(TraceError, match="on_error"):
        load(tmp_path / "a.json", on_error="ignore")  # type: ignore[arg-type]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from([MOONCAKE, BAILIAN, AZURE, BURSTGPT, json.dumps(SESSION)]),
    st.integers(0, 400),
    st.binary(max_size=6),
    st.integers(0, 6),
)
def test_damaged_files_give_a_trace_or_one_clear_error(
    tmp_path: Path, text: str, at: int, inserted: bytes, removed: int
) -> None:
    data = text.encode()
    at = min(at, len(data))
    path = tmp_path / "damaged"
    path.write_bytes(data[:at] + inserted + data[at + removed :])
    for on_error in ("raise", "skip"):
        try:
            trace = load(path, on_error=on_error)
        except TraceError as error:
            assert str(path) in str(error)
        else:
            assert trace.n_requests >= 1


# -- the real traces --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "rows", "input_mean", "output_mean", "duration_s", "distinct"),
    [
        ("mooncake_conversation_trace.jsonl.gz", 12_031, 12_035.1, 342.6, 3_537.0, 182_790),
        ("mooncake_synthetic_trace.jsonl.gz", 3_993, 15_325.5, 149.1, 1_022.0, 43_924),
        ("dynamo_mooncake_trace_1000.jsonl.gz", 1_000, 9_792.0, 199.1, 177.1, 12_207),
        ("azure_AzureLLMInferenceTrace_conv.csv.gz", 19_366, 1_154.7, 211.1, 3_501.7, 0),
    ],
)
def test_real_traces(
    real_traces: Path,
    file: str,
    rows: int,
    input_mean: float,
    output_mean: float,
    duration_s: float,
    distinct: int,
) -> None:
    trace = load(real_traces / file)
    assert trace.n_requests == rows
    assert trace.input_tokens.mean() == pytest.approx(input_mean, abs=0.06)
    assert trace.output_tokens.mean() == pytest.approx(output_mean, abs=0.06)
    assert trace.duration_s == pytest.approx(duration_s, abs=0.06)
    assert trace.n_distinct_blocks == distinct


def test_reading_mooncake_is_fast(real_traces: Path) -> None:
    file = real_traces / "mooncake_conversation_trace.jsonl.gz"
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        load(file)
        best = min(best, time.process_time() - start)
    assert best < 0.3


def test_real_sessions(real_traces: Path) -> None:
    files = sorted((real_traces / "kv-cache-tester").glob("*.json.gz"))[:12]
    trace = load(files)
    alone = [load(f) for f in files]
    assert trace.n_requests == sum(t.n_requests for t in alone)
    assert trace.n_distinct_blocks == sum(t.n_distinct_blocks for t in alone)
    hits = sum(round(traces.lru_hit_rate(t, np.inf) * len(t.block_ids)) for t in alone)
    assert 0.93 < hits / len(trace.block_ids) < 0.98
    assert traces.lru_hit_rate(trace, np.inf) == pytest.approx(hits / len(trace.block_ids))


def test_real_vidur_is_refused_clearly(real_traces: Path) -> None:
    with pytest.raises(TraceError, match="without arrival times"):
        load(next(real_traces.glob("vidur_*.csv.gz")))
