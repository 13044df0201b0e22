"""Fetching public traces from their upstream repositories.

A download goes to `NAME.part` beside its target and continues there after a cut connection; the
target appears whole and checked, or not at all. Files whose sha256 is known are held against it.
For the others the sum of the first download is written to `SHA256SUMS` in the target folder, and
later downloads are held against that.
"""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from traces.trace import TraceError

RAW = "https://raw.githubusercontent.com"
LFS = "https://media.githubusercontent.com/media"
SUMS = "SHA256SUMS"
CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0

MOONCAKE = "kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release"
AZURE = "Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
BAILIAN = "alibaba-edu/qwen-bailian-usagetraces-anon/main"
BURSTGPT = "HPMLL/BurstGPT/main/data"


@dataclass(frozen=True)
class Source:
    """One public file: where it is, what it is, and its sha256 where known."""

    path: str
    """Owner, repository, revision and path, as in a raw address."""
    about: str
    licence: str
    sha256: str | None = None
    base: str = RAW

    @property
    def file(self) -> str:
        return self.path.rsplit("/", 1)[1]

    def url(self, mirror: str | None = None) -> str:
        return f"{(mirror or self.base).rstrip('/')}/{self.path}"


SOURCES: dict[str, Source] = {
    "conversation": Source(
        f"{MOONCAKE}/traces/conversation_trace.jsonl",
        "Mooncake FAST'25, chat, 12,031 requests",
        "Apache-2.0",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "toolagent": Source(
        f"{MOONCAKE}/traces/toolagent_trace.jsonl",
        "Mooncake FAST'25, tools and agents, 23,608 requests",
        "Apache-2.0",
    ),
    "synthetic": Source(
        f"{MOONCAKE}/traces/synthetic_trace.jsonl",
        "Mooncake FAST'25, long documents, 3,993 requests",
        "Apache-2.0",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    "arxiv": Source(
        f"{MOONCAKE}/arxiv-trace/mooncake_trace.jsonl",
        "Mooncake arXiv 2407.00079, 23,608 requests",
        "Apache-2.0",
    ),
    "dynamo-sample": Source(
        "ai-dynamo/dynamo/main/lib/bench/testdata/mooncake_trace_1000.jsonl",
        "first 1,000 requests of the arXiv trace",
        "Apache-2.0",
        "e2bec9bccd21978f69a2ace7886ee2e5192a64839f7aa2c4dd5d8766fd392510",
    ),
    "azure-conv": Source(
        f"{AZURE}/AzureLLMInferenceTrace_conv.csv",
        "Azure 2023, chat, lengths only, 19,366 requests",
        "CC-BY-4.0",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "azure-code": Source(f"{AZURE}/AzureLLMInferenceTrace_code.csv", "Azure 2023, code, lengths only", "CC-BY-4.0"),
    "burstgpt-1": Source(
        f"{BURSTGPT}/BurstGPT_without_fails_1.csv",
        "BurstGPT, first two months without failed requests, lengths only, 51 MB",
        "CC-BY-4.0",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
        LFS,
    ),
    "qwen-a": Source(
        f"{BAILIAN}/qwen_traceA_blksz_16.jsonl",
        "Qwen-Bailian, to consumers",
        "Apache-2.0",
        None,
        LFS,
    ),
    "qwen-b": Source(
        f"{BAILIAN}/qwen_traceB_blksz_16.jsonl",
        "Qwen-Bailian, to business",
        "Apache-2.0",
        None,
        LFS,
    ),
    "qwen-coder": Source(
        f"{BAILIAN}/qwen_coder_blksz_16.jsonl",
        "Qwen-Bailian, coding, 132 MB",
        "Apache-2.0",
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
        LFS,
    ),
    "qwen-thinking": Source(
        f"{BAILIAN}/qwen_thinking_blksz_16.jsonl",
        "Qwen-Bailian, reasoning, 28 MB",
        "Apache-2.0",
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906",
        LFS,
    ),
}

Progress = Callable[[int, int | None], None]
"""Told the bytes there are so far and, where known, the bytes there will be."""


def download(
    name: str,
    folder: Path,
    *,
    mirror: str | None = None,
    progress: Progress | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Fetch one of `SOURCES` into `folder`; returns the file. One that is there is only checked.

    Raises:
        TraceError: unknown name, no connection, an HTTP error, a cut connection (run again to go
            on where it stopped), or a wrong checksum (the partial file is removed).
    """
    if name not in SOURCES:
        raise TraceError(f"no public trace {name!r}", expected=", ".join(SOURCES))
    source = SOURCES[name]
    target = folder / source.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = source.sha256 or _recorded(folder, source.file)
        if target.exists():
            _check(target, target, known)
            return target
        part = folder / f"{source.file}.part"
        _fetch(source.url(mirror), part, progress, timeout_s)
        digest = _check(part, target, known)
        if known is None:
            with (folder / SUMS).open("a") as sums:
                sums.write(f"{digest}  {source.file}\n")
        os.replace(part, target)
    except OSError as error:
        raise TraceError(f"cannot be written ({error.strerror or error})", file=target) from error
    return target


def _fetch(url: str, part: Path, progress: Progress | None, timeout_s: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            if answer.status != 206:
                have = 0  # the server sends the whole file
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length is not None else None
            with part.open("ab" if have else "wb") as out:
                while chunk := answer.read(CHUNK_BYTES):
                    out.write(chunk)
                    have += len(chunk)
                    if progress is not None:
                        progress(have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            return  # nothing is left to fetch; the checksum decides
        raise TraceError(f"HTTP {error.code} {error.reason}", file=url, expected="the file") from None
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise TraceError(
            f"no answer or cut off ({reason})", file=url, hint="run again to go on where it stopped"
        ) from None
    if total is not None and have < total:
        raise TraceError(
            f"connection cut after {have} of {total} bytes",
            file=url,
            hint="run again to go on where it stopped",
        )


def _check(file: Path, target: Path, known: str | None) -> str:
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    if known is not None and digest != known:
        if file != target:
            file.unlink()
        raise TraceError(
            f"sha256 {digest}",
            file=target,
            expected=f"sha256 {known}",
            hint="not the published file; delete it and download again",
        )
    return digest


def _recorded(folder: Path, file: str) -> str | None:
    sums = folder / SUMS
    if not sums.exists():
        return None
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        if name == file:
            return digest
    return None
