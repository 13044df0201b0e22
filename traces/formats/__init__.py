"""Reading and writing traces. The format is found by content, never by name.

| format | module | blocks |
|---|---|---|
| Mooncake / Dynamo JSONL | `mooncake` | 512 tokens, last partial |
| Qwen-Bailian JSONL | `bailian` | 16 tokens |
| RAGPulse JSONL, with its files of chunk lengths | `ragpulse` | any size, last partial |
| kv-cache-tester session JSON | `agent_sessions` | 64 tokens, full only, per session |
| Azure 2023/2024 CSV, BurstGPT CSV | `csv_lengths` | none |
| Parquet of this project, decision log | `parquet` | any size |

Plain, gzip or zstd. Formats without block ids load with none (`has_blocks` False): nothing is
known about reuse. `synthesise_blocks` adds invented sessions where that is wanted.

Two kinds of file hold no requests with times and are sampled instead (`python -m traces synth`): ServeGen's
statistics of clients (`servegen`) and tables of lengths (Vidur's CSV, `traces.arrivals`).
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from traces import released
from traces.formats import agent_sessions, bailian, csv_lengths, mooncake, parquet, ragpulse, servegen
from traces.formats.rows import OnError, Rows, read_bytes, text_lines
from traces.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError, merge

BUILTIN_PREFIX = "builtin:"
DEFAULT_SESSION_RATE = 1 / 60
"""Sessions started per second where session files without a common clock are put together."""
_KNOWN = (
    "Mooncake JSONL, Qwen-Bailian JSONL, RAGPulse JSONL, kv-cache-tester session JSON, Azure CSV, "
    "BurstGPT CSV or this project's Parquet"
)
_SNIFFED_LINES = 20


def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    on_error: OnError = "raise",
    reblock: int | None = None,
    sort: bool = False,
    name: str | None = None,
    session_rate: float = DEFAULT_SESSION_RATE,
    seed: int = 0,
) -> Trace:
    """Load a trace, whatever public format it is in.

    Args:
        path: a file; `builtin:NAME` or `builtin:NAME@RATE` (requests per second) for a built-in
            synthesised workload; `mooncake:NAME` for one of Mooncake's released traces where its
            file is at hand, else, saying so on stderr, for its stand-in; a folder, a list or a glob
            pattern of kv-cache-tester session files, which are put together on one clock, or of the
            Parquet segments of a decision log, which are put in order.
        on_error: `"raise"` on the first bad row, or `"skip"` to drop bad rows and count them in
            `Trace.skipped_rows`. A damaged file (cut off, not decodable) always raises.
        reblock: coarser blocks of this many tokens (a multiple of the file's; any size for RAGPulse).
        sort: order rows by time where the file is not in order; otherwise a row whose time lies
            before the row above it is a bad row.
        name: name of the trace; by default the file's, without suffixes.
        session_rate: session files only: sessions started per second, a Poisson process.
        seed: of that process and of built-in workloads.

    Raises:
        TraceError: naming file, line, field, what was found and what was expected.
    """
    if on_error not in ("raise", "skip"):
        raise TraceError(f"on_error {on_error!r}", expected='"raise" or "skip"')
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if text.startswith(BUILTIN_PREFIX):
            from traces.arrivals import builtin, named_rate

            workload, rate = named_rate(text.removeprefix(BUILTIN_PREFIX))
            trace = builtin(workload, seed=seed, rate=rate)
        elif text.startswith(released.PREFIX):
            found = released.released(text.removeprefix(released.PREFIX), on_error=on_error, sort=sort, seed=seed)
            if found.trace.name != text:
                print(f"{text}: {found.origin}", file=sys.stderr)
            trace = found.trace
        else:
            file = Path(text)
            paths = files_of(file)
            label = name or _stem(file)
            trace = _load_files(paths, on_error, sort, label, session_rate, seed, reblock, listed=True)
    else:
        paths = [Path(p) for p in path]
        if not paths:
            raise TraceError("an empty list of files", expected="at least one trace file")
        trace = _load_files(paths, on_error, sort, name or _stem(paths[0]), session_rate, seed, reblock)
    return trace if reblock is None else trace.reblock(reblock)


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def files_of(path: Path) -> list[Path]:
    """The file itself, a folder's session files or decision log segments, or what a pattern finds.

    Raises:
        TraceError: there is none.
    """
    if path.is_dir():
        return _files_in(path)
    if glob.has_magic(str(path)) and not path.exists():
        found = sorted(Path(name) for name in glob.glob(str(path)))
        if not found:
            raise TraceError("no file of that pattern", file=path, expected="at least one trace file")
        return found
    return [path]


def _files_in(folder: Path) -> list[Path]:
    names = sorted(folder.iterdir())
    if servegen.is_folder(folder):
        raise TraceError(
            "a folder of ServeGen's client statistics, not requests",
            file=folder,
            expected="a trace file, a folder of kv-cache-tester *.json[.gz] files, or a decision log",
            hint="`python -m traces synth FOLDER OUT --duration S` samples requests from it",
        )
    # What begins with a dot is somebody's unfinished file.
    segments = [p for p in names if p.suffix == ".parquet" and not p.name.startswith(".")]
    sessions = [p for p in names if ".json" in p.suffixes and p.is_file() and p.stat().st_size]
    if segments and sessions:
        raise TraceError(
            f"a directory with both {segments[0].name} and {sessions[0].name}",
            file=folder,
            expected="segments of one decision log, or kv-cache-tester sessions, not both",
        )
    if not segments and not sessions:
        raise TraceError(
            "a directory without session files or decision log segments",
            file=folder,
            expected="a trace file, a folder of kv-cache-tester *.json[.gz] files, or a decision log",
        )
    return segments or sessions


def _load_files(
    paths: list[Path],
    on_error: OnError,
    sort: bool,
    name: str,
    session_rate: float,
    seed: int,
    block_tokens: int | None = None,
    *,
    listed: bool = False,
) -> Trace:
    if len(paths) == 1:
        return _load_one(paths[0], on_error, sort, name, block_tokens)[0]
    if all(path.suffix == ".parquet" for path in paths):
        segments = [(Rows(path, on_error, sort), data) for path, data in _contents(paths, listed)]
        return parquet.read_segments(segments, name)
    if not (np.isfinite(session_rate) and session_rate > 0):
        raise TraceError(f"session_rate {session_rate}", expected="sessions per second > 0")
    gaps = np.random.default_rng(seed).exponential(1 / session_rate, len(paths))
    starts = np.cumsum(gaps) - gaps[0]
    parts = []
    for file, start_s in zip(paths, starts):
        trace, is_session = _load_one(file, on_error, sort, name)
        if not is_session:
            raise TraceError(
                "not a session file",
                file=file,
                expected="kv-cache-tester sessions where several files are loaded together",
                hint="load other formats one by one and use traces.merge",
            )
        parts.append(replace(trace, arrival_s=trace.arrival_s + start_s))
    # Sessions are not tenants.
    return replace(merge(parts, name=name), tenant_id=None)


def _contents(paths: list[Path], listed: bool) -> Iterator[tuple[Path, bytes]]:
    """Files and what is in them. `listed`: found in a folder, where a log that is being written may have dropped its
    oldest segments since."""
    for path in paths:
        try:
            yield path, read_bytes(path)
        except TraceError:
            if not listed or path.exists() or path == paths[-1]:
                raise


def _load_one(
    path: Path, on_error: OnError, sort: bool, name: str, block_tokens: int | None = None
) -> tuple[Trace, bool]:
    """The trace, and whether it is one session with a clock of its own.

    `block_tokens`: the blocks that will be asked for, for formats that can be read in any.
    """
    data = read_bytes(path)
    rows = Rows(path, on_error, sort)
    if data.startswith(parquet.MAGIC):
        return parquet.read(data, rows, name), False
    first = data.lstrip()[:1]
    if first == b"{":
        format_ = _sniff_json(data)
        if format_ is agent_sessions:
            document = agent_sessions.parse(data, path)
            return agent_sessions.read(document, path, on_error, name), True
        if format_ is ragpulse:
            return ragpulse.read(data, rows, name, block_tokens or DEFAULT_BLOCK_TOKENS), False
        if format_ is not None:
            return format_.read(data, rows, name), False
    elif first != b"[":
        first_line = next(text_lines(data))[1]
        if csv_lengths.is_csv_trace(first_line):
            return csv_lengths.read(data.lstrip(), rows, name), False
    _explain_known_misfits(data, path)
    shown = data[:40].decode("utf-8", "backslashreplace").splitlines()[0]
    raise TraceError(f"unknown format, starts with {shown!r}", file=path, expected=_KNOWN)


def _explain_known_misfits(data: bytes, path: Path) -> None:
    """Better answers than "unknown format" for files people are likely to try."""
    if data.startswith(b"version https://git-lfs"):
        raise TraceError(
            "a Git LFS pointer, not the file itself",
            file=path,
            expected=_KNOWN,
            hint="fetch it with `git lfs pull` or `python -m traces download`",
        )
    if data.startswith(b"num_prefill_tokens"):
        raise TraceError(
            "lengths without arrival times (Vidur)",
            file=path,
            field="timestamp",
            expected=_KNOWN,
            hint="`python -m traces synth FILE OUT --rate R` or traces.at_rate give it some",
        )
    if servegen.is_client(path):
        raise TraceError(
            "statistics of a ServeGen client, not requests",
            file=path,
            expected=_KNOWN,
            hint="`python -m traces synth FOLDER OUT --duration S` samples requests from a folder of them",
        )


def _sniff_json(data: bytes) -> Any:
    """The module that reads this JSON, judged by the keys of its first lines."""
    lines = text_lines(data)
    for count, (_, line) in enumerate(lines):
        if count == _SNIFFED_LINES:
            break
        try:
            row = orjson.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        for module in (ragpulse, agent_sessions, bailian, mooncake):
            if module.sniff(row):
                return module
    # A session file may be spread over many lines, or be cut off within its only one.
    head = data[:4096]
    if b'"hash_id_scope"' in head or (b'"requests"' in head and b'"block_size"' in head):
        return agent_sessions
    if b'"passages_ids"' in head:
        return ragpulse
    if b'"hash_ids"' in head and b'"timestamp"' in head:
        return bailian if b'"chat_id"' in head else mooncake
    return None


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; the suffix says how: `.parquet`, or `.jsonl` for Mooncake's format.

    `.jsonl.gz` and `.jsonl.zst` compress. The file appears whole or not at all.

    Raises:
        TraceError: unknown suffix, folder missing, or the trace does not fit the format.
    """
    target = Path(path)
    suffixes = "".join(target.suffixes[-2:])
    if target.suffix == ".parquet":
        data = parquet.dump(trace, target)
    elif target.suffix == ".jsonl" or suffixes in (".jsonl.gz", ".jsonl.zst"):
        data = mooncake.dump(trace, target)
    else:
        raise TraceError(f"suffix {suffixes!r}", file=target, expected=".parquet, .jsonl, .jsonl.gz, .jsonl.zst")
    if target.suffix == ".gz":
        import gzip

        # No time stamp inside: the same trace gives the same bytes.
        data = gzip.compress(data, 6, mtime=0)
    elif target.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdCompressor(level=6).compress(data)
    write_whole(target, data)


def write_whole(target: Path, data: bytes) -> None:
    """Write beside the target and rename, so that no half file is ever seen.

    Raises:
        TraceError: the folder is missing or not writable.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise TraceError(f"cannot be written ({error.strerror})", file=target) from error
