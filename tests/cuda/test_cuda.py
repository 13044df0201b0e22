"""What only a GPU can show (`make test-cuda DEVICE=cuda`): training on one, and workers whose KV is in its memory.

Skipped, and said so, where there is none. The same code runs on the CPU in the other tests.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import leaderboard
import train

from ..runtime.worker.processes import HAND_OVER, TINY, WorkerProcess

DEVICE = os.environ.get("CONDUCTOR_TEST_DEVICE", "cuda")  # cpu: to see that the tests themselves are right
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("algorithm", ["ppo", "bc"])
def test_training_on_a_gpu(algorithm: str, tmp_path: Path) -> None:
    """What was trained there is a policy anywhere."""
    run, result = tmp_path / algorithm, tmp_path / "result.json"
    sizes = ("--steps", "20000", "--eval-every", "20000") if algorithm == "ppo" else ()
    assert train.main(["--algo", algorithm, "--device", DEVICE, "--out", str(run), *sizes]) == 0
    assert DEVICE == "cpu" or torch.cuda.max_memory_allocated() > 0, "nothing was computed on it"
    goodput = []
    for _ in range(2):
        one_cell = ("--trace", "builtin:conversation", "--load", "1.5", "--seeds", "1")
        assert leaderboard.main(["--policies", f"{run},conductor", *one_cell, "--json", str(result)]) == 0
        goodput.append([row["goodput"] for row in json.loads(result.read_text())["rows"]])
    assert goodput[0] == goodput[1] and len(goodput[0]) == 2


@pytest.fixture(scope="module")
def split() -> Iterator[tuple[WorkerProcess, WorkerProcess, WorkerProcess]]:
    """A prefill and a decode worker, and one that does both."""
    common = ("--device", DEVICE, "--dtype", "float32", "--block-size", "16")
    transfer = ("--transfer", "127.0.0.1:0")
    workers = (
        WorkerProcess(*common, *transfer, "--role", "prefill"),
        WorkerProcess(*common, *transfer, "--role", "decode"),
        WorkerProcess(*common, "--role", "both", "--device-blocks", "256", "--host-blocks", "4096"),
    )
    try:
        for worker in workers:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.end(signal.SIGTERM)


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TINY.vocabulary, length).tolist()


@pytest.mark.parametrize("length", [5, 64, 333, 900])
def test_prefill_and_decode_apart_say_what_one_says(split: Any, length: int) -> None:
    prefill, decode, both = split
    prompt = _prompt(length, length)
    params = prefill.complete(prompt, 1, kv_transfer_params=HAND_OVER)["kv_transfer_params"]
    apart = decode.complete(prompt, 24, kv_transfer_params=params)
    assert apart["choices"][0]["token_ids"] == both.complete(prompt, 24)["choices"][0]["token_ids"]
    assert apart["usage"]["prompt_tokens_details"]["cached_tokens"] == length
    assert prefill.idle() and decode.idle() and both.idle()


def test_kv_that_was_moved_to_host_memory_comes_back_the_same(split: Any) -> None:
    """More prompts than the GPU's blocks hold; the first one again."""
    both = split[2]
    first = _prompt(7, 640)
    told = both.complete(first, 8)["choices"][0]["token_ids"]
    for seed in range(40):
        both.complete(_prompt(1000 + seed, 640), 1)
    before = both.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert both.complete(first, 8)["choices"][0]["token_ids"] == told
    assert both.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - before <= 16, "its KV was kept"
