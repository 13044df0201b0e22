"""Real sidecars for tests: a process of its own, on free ports of the loopback interface."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from runtime.proto import conductor_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0  # the kernels may have to be compiled first


class Process:
    """A running `serve_policy.py`. `ports`: by face. `log`: its lines on standard error."""

    def __init__(self, arguments: list[str]) -> None:
        faces = ["--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        for face in ("--grpc", "--metrics"):
            if face in arguments:
                at = faces.index(face)
                del faces[at : at + 2]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "serve_policy.py"), *faces, *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.log: list[str] = []
        self.ports: dict[str, int] = {}
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(START_S)
        if self.process.poll() is not None or not self._ready.is_set():
            self.stop(signal.SIGKILL)
            raise AssertionError("the sidecar did not start:\n" + "".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"runtime\.sidecar: (\w+) on \S+:(\d+)$", line.strip())
            if found:
                self.ports[found[1]] = int(found[2])
            if " decides for " in line and "runtime.sidecar" in line:
                self._ready.set()
        self._ready.set()

    def channel(self, face: str = "grpc") -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.ports[face]}")

    def stub(self) -> Any:
        return conductor_pb2_grpc.ConductorStub(self.channel())

    def says(self, text: str, within_s: float = 10.0) -> bool:
        """Whether a line with `text` is logged."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if any(text in line for line in self.log):
                return True
            time.sleep(0.05)
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        self._reader.join(5)
        return self.process.returncode


@pytest.fixture
def serve() -> Iterator[Callable[..., Process]]:
    """`serve(*arguments)` starts a sidecar that ends with the test."""
    running: list[Process] = []

    def start(*arguments: str) -> Process:
        running.append(Process(list(arguments)))
        return running[-1]

    yield start
    for process in running:
        if process.process.poll() is None:
            process.stop(signal.SIGKILL)


@pytest.fixture
def cluster_file(tmp_path: Path) -> Callable[..., Path]:
    """`cluster_file(**fields)` writes a cluster file of small blocks; fields replace its own."""

    def write(**fields: Any) -> Path:
        described = {
            "block_tokens": 16,
            "slo": {"ttft_s": 30.0, "tbt_s": 0.1},
            "prefill": [{"count": 2, "hardware": "h100-llama3-8b"}],
            "decode": [{"count": 2, "hardware": "h100-llama3-8b"}],
            "workers": [
                {"id": "p0", "role": "prefill", "address": "127.0.0.1:1001"},
                {"id": "p1", "role": "prefill", "address": "127.0.0.1:1002"},
                {"id": "d0", "role": "decode", "address": "127.0.0.1:1003"},
                {"id": "d1", "role": "decode", "address": "127.0.0.1:1004"},
            ],
        } | fields
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in described.items() if value is not None}))
        return path

    return write
