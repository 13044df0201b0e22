"""Real vLLM workers and a real sidecar before them, one after the other: they take a minute to start, and memory."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.telemetry import parse
from runtime.vllm_workers import VllmWorkers, default_environment, is_set_up
from runtime.workers import Engine

from ..runtime.conftest import Process
from ..runtime.gateways import said

KV_TOKENS = 8192
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng((7, seed)).integers(32, 127, length).tolist()


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="session")
def environment() -> Path:
    """vLLM's environment; without one there is nothing to be tested."""
    place = default_environment()
    if not is_set_up(place):
        pytest.skip(f"no vLLM in {place}: python -m runtime.vllm_workers setup")
    return place


class Live:
    """Workers, and a gateway before them."""

    def __init__(self, workers: VllmWorkers, sidecar: Process) -> None:
        self.workers = workers
        self.sidecar = sidecar
        self.url = f"http://127.0.0.1:{sidecar.ports['gateway']}"

    def post(
        self, fields: dict[str, Any], path: str = "/v1/completions", to: str = "", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, answer (JSON or events) and headers; `to` a worker directly, where one is named."""
        url = f"http://{self.workers.address(to)}" if to else self.url
        named = {name.replace("_", "-"): value for name, value in headers.items()} | {
            "content-type": "application/json"
        }
        request = urllib.request.Request(url + path, json.dumps({"model": "tiny", **fields}).encode(), named)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read().decode()
                events = answer.headers.get_content_type() == "text/event-stream"
                found = {name.lower(): value for name, value in answer.headers.items()}
                return answer.status, list(said(text)) if events else json.loads(text), found
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), {name.lower(): value for name, value in error.headers.items()}

    def scraped(self, name: str) -> str:
        """The metrics of a worker."""
        with urllib.request.urlopen(f"http://{self.workers.address(name)}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    def sources(self, name: str) -> dict[str, float]:
        """Where the prompt tokens of a worker came from, so far."""
        found = {}
        for line in self.scraped(name).splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total{"):
                found[line.split('source="')[1].split('"')[0]] = float(line.split()[-1])
        return found

    def idle(self, name: str) -> bool:
        """Whether a worker has no request and no KV in use."""
        metrics = parse(self.scraped(name), Engine.VLLM)
        return metrics.running == 0 and metrics.waiting == 0 and metrics.kv_usage == 0


@contextmanager
def serving(workers: VllmWorkers, cluster: Path, *options: str) -> Iterator[Live]:
    """A sidecar with a gateway, before workers that run."""
    process = Process(["--cluster", str(cluster), "--gateway", "127.0.0.1:0", *options])
    try:
        yield Live(workers, process)
    finally:
        process.stop(signal.SIGKILL)
