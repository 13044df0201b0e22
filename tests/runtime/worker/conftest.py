"""Engines in this process, and workers in processes of their own, all with the same small random model."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from runtime.worker.blocks import BlockStore
from runtime.worker.engine import Engine, Generation, Sequence, Update
from runtime.worker.events import EventPublisher
from runtime.worker.metrics import WorkerMetrics
from runtime.worker.model import PagedModel, TinyModel

from .processes import TINY, WorkerProcess

BLOCK = 16


@pytest.fixture(scope="session")
def oracle() -> Callable[..., list[int]]:
    """`oracle(prompt, n)`: the greedy continuation by transformers' own `generate`."""
    model: Any = TINY.build(torch.float32).eval()

    def generate(prompt: list[int], tokens: int) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # else it takes token 0 to be padding
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    return generate


@dataclass
class Running:
    """A sequence of a test, and what became of it."""

    sequence: Sequence
    updates: queue.SimpleQueue[Update]
    handed_over: list[int] | None = None
    error: str = ""

    def tokens(self, within_s: float = 30.0) -> list[int]:
        """All tokens, when it has ended."""
        found: list[int] = []
        while True:
            update = self.updates.get(timeout=within_s)
            if update.token is not None:
                found.append(update.token)
            if update.finished:
                self.handed_over, self.error = update.handed_over, update.error
                return found


@dataclass
class LocalEngine:
    """An engine on a thread of this process."""

    engine: Engine

    def begin(self, prompt: list[int], tokens: int, **asked: Any) -> Running:
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        asked = {"ignore_eos": True} | asked
        sequence = self.engine.submit(Generation(prompt, tokens, **asked), updates.put)
        return Running(sequence, updates)

    def generate(self, prompt: list[int], tokens: int, **asked: Any) -> list[int]:
        return self.begin(prompt, tokens, **asked).tokens()

    def ask(self, what: Callable[[], Any]) -> Any:
        """Something of the engine's books, between two steps."""
        return self.engine.call(what).result(30.0)

    def in_use(self) -> list[int]:
        cache = self.engine.cache
        return self.ask(lambda: [cache.in_use(tier) for tier in range(3)])


@pytest.fixture
def local() -> Iterator[Callable[..., LocalEngine]]:
    """`local(device_blocks, host_blocks, disk_blocks, ...)` starts an engine that ends with the test."""
    running: list[LocalEngine] = []

    def start(
        device: int = 64,
        host: int = 0,
        disk: int = 0,
        *,
        publisher: EventPublisher | None = None,
        step_tokens: int = 64,
        max_sequences: int = 8,
        keep_s: float = 60.0,
        model: TinyModel = TINY,
    ) -> LocalEngine:
        paged = PagedModel(model.build(torch.float32), torch.device("cpu"), BLOCK)
        store = BlockStore(paged.block_shape, (device, host, disk), torch.float32, paged.device)
        engine = Engine(
            paged,
            store,
            (device, host, disk),
            WorkerMetrics("tiny"),
            publisher,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            keep_s=keep_s,
        )
        engine.start()
        running.append(LocalEngine(engine))
        return running[-1]

    yield start
    for each in running:
        each.engine.stop()


@pytest.fixture(scope="package")
def pair() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill and a decode worker."""
    prefill = WorkerProcess("--role", "prefill", "--keep-s", "60", "--transfer-timeout-s", "30")
    decode = WorkerProcess("--role", "decode", "--transfer-timeout-s", "30")
    try:
        prefill.wait()
        decode.wait()
        yield prefill, decode
    finally:
        for worker in (prefill, decode):
            worker.end()


@pytest.fixture
def prompts() -> Callable[..., list[int]]:
    """`prompts(n, seed)`: n token ids, others for every seed."""

    def make(n: int, seed: int = 0) -> list[int]:
        return torch.randint(3, TINY.vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make
