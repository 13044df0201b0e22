"""Downloads from a real HTTP server on loopback: resume, checksums, every way it can go wrong."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.documents import blocks_of, words_of
from traces import TraceError, builtin, load, save
from traces.__main__ import main
from traces.download import SOURCES, SUMS, download

ROOT = Path(__file__).parents[2]


@dataclass
class Upstream:
    """What the server has, and how it behaves."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    state = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append((self.path, wanted))
            data = state.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            start = 0
            if wanted is not None and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(data):
                    self.send_error(416)
                    return
                self.send_response(206)
            else:
                self.send_response(200)
            body = data[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if state.cut_after is None else body[: state.cut_after])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("upstream") / "t.jsonl"
    save(builtin("toolagent", n_requests=3000), path)
    return path.read_bytes()


def offer(upstream: Upstream, name: str, data: bytes) -> None:
    upstream.files["/" + SOURCES[name].path] = data


def pin(monkeypatch: pytest.MonkeyPatch, name: str, digest: str | None) -> None:
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], sha256=digest))


def test_download_with_pinned_checksum(
    upstream: Upstream, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, "conversation", hashlib.sha256(content).hexdigest())
    offer(upstream, "conversation", content)
    seen: list[tuple[int, int | None]] = []
    file = download(
        "conversation",
        tmp_path / "new" / "folder",
        mirror=upstream.address,
        progress=lambda have, total: seen.append((have, total)),
    )
    assert file.name == "conversation_trace.jsonl"
    assert file.read_bytes() == content
    assert load(file).n_requests == 3000
    assert seen[-1] == (len(content), len(content))
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    # There already: checked, not fetched again.
    assert download("conversation", file.parent, mirror=upstream.address) == file
    assert len(upstream.requests) == 1


def test_wrong_checksum_leaves_nothing(upstream: Upstream, content: bytes, tmp_path: Path) -> None:
    offer(upstream, "conversation", content)
    with pytest.raises(TraceError, match="sha256 .*expected sha256 b8cbb061"):
        download("conversation", tmp_path, mirror=upstream.address)
    assert list(tmp_path.iterdir()) == []


def test_damaged_file_on_disk_is_noticed(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl").write_text("changed")
    with pytest.raises(TraceError, match="not the published file"):
        download("conversation", tmp_path, mirror=upstream.address)
    assert (tmp_path / "conversation_trace.jsonl").read_text() == "changed"


def test_unpinned_checksum_is_recorded_and_held_against(upstream: Upstream, content: bytes, tmp_path: Path) -> None:
    assert SOURCES["toolagent"].sha256 is None
    offer(upstream, "toolagent", content)
    file = download("toolagent", tmp_path, mirror=upstream.address)
    digest = hashlib.sha256(content).hexdigest()
    assert (tmp_path / SUMS).read_text() == f"{digest}  toolagent_trace.jsonl\n"
    file.unlink()
    offer(upstream, "toolagent", content + b"\n")
    with pytest.raises(TraceError, match=f"expected sha256 {digest}"):
        download("toolagent", tmp_path, mirror=upstream.address)
    assert not file.exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_connection_and_resume(upstream: Upstream, content: bytes, tmp_path: Path, ranges: bool) -> None:
    offer(upstream, "toolagent", content)
    upstream.cut_after = len(content) // 3
    upstream.ranges = ranges
    with pytest.raises(TraceError, match="cut .*run again"):
        download("toolagent", tmp_path, mirror=upstream.address)
    part = tmp_path / "toolagent_trace.jsonl.part"
    assert 0 < part.stat().st_size <= len(content) // 3
    assert not (tmp_path / "toolagent_trace.jsonl").exists()
    have = part.stat().st_size
    upstream.cut_after = None
    file = download("toolagent", tmp_path, mirror=upstream.address)
    assert file.read_bytes() == content
    assert upstream.requests[-1][1] == f"bytes={have}-"
    assert not part.exists()


def test_resume_when_everything_had_arrived(upstream: Upstream, content: bytes, tmp_path: Path) -> None:
    offer(upstream, "toolagent", content)
    (tmp_path / "toolagent_trace.jsonl.part").write_bytes(content)
    assert download("toolagent", tmp_path, mirror=upstream.address).read_bytes() == content


def test_not_found_and_no_server(upstream: Upstream, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="HTTP 404"):
        download("toolagent", tmp_path, mirror=upstream.address)
    with pytest.raises(TraceError, match="no answer or cut off"):
        download("toolagent", tmp_path, mirror="http://127.0.0.1:1", timeout_s=5)
    with pytest.raises(TraceError, match="no public trace"):
        download("nonsense", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written"):
        download("toolagent", tmp_path / "file", mirror=upstream.address)


def test_known_addresses() -> None:
    for name, source in SOURCES.items():
        assert source.url().startswith("https://"), name
        assert source.url().endswith(source.file)
        assert source.sha256 is None or len(bytes.fromhex(source.sha256)) == 32
    assert len({s.file for s in SOURCES.values()}) == len(SOURCES)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traces", "download", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def test_command(upstream: Upstream, content: bytes, tmp_path: Path) -> None:
    offer(upstream, "toolagent", content)
    result = command("toolagent", "--to", tmp_path, "--mirror", upstream.address)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "toolagent_trace.jsonl").read_bytes() == content
    # Of two, one fails: the other still comes, and the exit code tells.
    offer(upstream, "arxiv", content)
    result = command("azure-code", "arxiv", "--to", tmp_path, "--mirror", upstream.address)
    assert result.returncode == 2
    assert "HTTP 404" in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "mooncake_trace.jsonl").read_bytes() == content
    listing = command()
    assert listing.returncode == 0
    for name in SOURCES:
        assert name in listing.stdout


def test_the_command_of_the_documentation(
    upstream: Upstream, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/trace.md has it; only where the files come from, and with which sums, is otherwise."""
    for i, name in enumerate(SOURCES):
        data = content + b"\n" * i
        offer(upstream, name, data)
        pin(monkeypatch, name, hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("CONDUCTOR_TRACE_MIRROR", upstream.address)
    monkeypatch.chdir(tmp_path)
    left_out = [block for block in blocks_of(ROOT / "docs" / "trace.md") if block.why == "downloads"]
    (words,) = [words_of(command) for block in left_out for command in block.commands]
    assert words[:3] == ["python", "-m", "traces"]
    with pytest.raises(SystemExit) as ended:
        main(words[3:])
    assert not ended.value.code
    for i, source in enumerate(SOURCES.values()):
        assert (tmp_path / "data" / source.file).read_bytes() == content + b"\n" * i
