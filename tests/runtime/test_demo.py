"""`python serve_policy.py demo`, as a newcomer runs it, with reference workers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import runtime.demo

pytest.importorskip("transformers", reason="needs the extra `worker`")

ROOT = Path(__file__).resolve().parents[2]
START_S = 400.0


@pytest.fixture(scope="module")
def demo() -> Any:
    command = [sys.executable, "serve_policy.py", "demo", "--workers", "reference", "--prefill", "1", "--decode", "1"]
    faces = ["--gateway", "127.0.0.1:0", "--page", "127.0.0.1:0", "--load", "2"]
    process = subprocess.Popen([*command, *faces], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    said, deadline_s = "", time.monotonic() + START_S
    while "Ctrl-C ends it all" not in said and time.monotonic() < deadline_s:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(said + process.stderr.read())
        said += line
    yield process, said
    if process.poll() is None:
        process.kill()


def place(said: str, face: str) -> str:
    found = re.search(rf"^{face} +(\S+)", said, re.M)
    assert found, said
    return found[1]


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_it_answers_shows_and_ends(demo: Any) -> None:
    process, said = demo
    gateway, page = place(said, "gateway"), place(said, "live page")
    assert [model["id"] for model in get(f"{gateway}/models")["data"]] == ["tiny"]
    body = {"model": "tiny", "prompt": list(range(64)) * 2, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    first, second = get(f"{gateway}/completions", body), get(f"{gateway}/completions", body)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] == 4
    deadline_s = time.monotonic() + 120
    state = get(f"{page}/state")
    while state["ended"].get("finished", 0) < 4 and time.monotonic() < deadline_s:  # ours, and some of the load
        time.sleep(0.5)
        state = get(f"{page}/state")
    assert state["ended"]["finished"] >= 4
    assert all(worker["up"] for worker in state["workers"])
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()
    psutil.wait_procs(workers, 10)
    assert not [worker for worker in workers if worker.is_running()]
    assert not Path(place(said, "workers.*logs:")).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "sglang"], "expected vllm or reference"),
        (["--policy", "none"], "none"),
        (["--gateway", "here"], "expected HOST:PORT"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(options: list[str], words: str) -> None:
    command = [sys.executable, "serve_policy.py", "demo", "--workers", "reference", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("going_down", [False, True])
async def test_a_load_whose_gateway_is_gone_ends(going_down: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """On Ctrl-C the gateway may be the first to go: that is no error."""
    gone = "127.0.0.1:9"
    conductor = SimpleNamespace(draining=False)

    class GoingDown(dict[str, str]):
        def __getitem__(self, face: str) -> str:
            conductor.draining = going_down and face == "grpc"  # the last place that is told
            return super().__getitem__(face)

    sidecar: Any = SimpleNamespace(bound=GoingDown(gateway=gone, live=gone, grpc=gone), conductor=conductor)
    workers: Any = SimpleNamespace(roles=[], folder="nowhere")
    await asyncio.wait_for(runtime.demo._tell(sidecar, workers, 1.0), 60)
    assert ("no more load" in capsys.readouterr().out) is not going_down
