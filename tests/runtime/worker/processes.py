"""Real workers: processes on free ports of the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.worker.model import TinyModel

ROOT = Path(__file__).resolve().parents[3]
TINY = TinyModel(layers=2, hidden=64, heads=4, kv_heads=2, vocabulary=512, context=1024)
HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


MODEL = [  # as options
    word
    for name in ("layers", "hidden", "heads", "kv_heads", "vocabulary", "context")
    for word in (f"--{name.replace('_', '-')}", str(getattr(TINY, name)))
]


class WorkerProcess:
    """A worker. `where`: what it says of itself, after `wait`."""

    def __init__(self, *more: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtime.worker", "--http", "127.0.0.1:0", *MODEL, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.where: dict[str, Any] = {}

    def wait(self) -> None:
        """Until it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # ends with the process at the latest
        if not line:
            raise AssertionError("the worker did not start:\n" + self.said())
        self.where = json.loads(line)

    def said(self) -> str:
        """Its log so far."""
        self.log.seek(0)
        return self.log.read()

    def request(self, path: str, body: Any = None, timeout_s: float = 30.0) -> tuple[int, Any]:
        """(status, JSON or text)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.where["url"] + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                status, content = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion that must succeed; `tokens` of it are in its `token_ids`."""
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
        status, body = self.request("/v1/completions", {"prompt": prompt, "max_tokens": tokens, **fields})
        assert status == 200, body
        found: dict[str, Any] = body
        return found

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The events of a stream, decoded; "[DONE]" as it is."""
        data = json.dumps(body | {"stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.where["url"] + path, data), timeout=30.0) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for line in response:
                if line.startswith(b"data: "):
                    content = line[6:].strip().decode()
                    yield content if content == "[DONE]" else json.loads(content)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a series over all labels but those given."""
        _, text = self.request("/metrics")
        total, found = 0.0, False
        for line in text.splitlines():
            match = re.fullmatch(r"(\S+?)\{(.*)\} (\S+)", line)
            if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
                total, found = total + float(match[3]), True
        assert found, f"{name} is not exported"
        return total

    def idle(self, within_s: float = 10.0) -> bool:
        """Whether nothing is left of any request, soon."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            names = ("num_requests_running", "num_requests_waiting", "kv_device_blocks_in_use", "kv_handovers_kept")
            if not any(self.metric(f"vllm:{name}") for name in names):
                return True
            time.sleep(0.05)
        return False

    def end(self, number: int = signal.SIGKILL) -> int:
        """End it; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
