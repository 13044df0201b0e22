"""The load generator: prompts that share what the trace's share, arrivals, and what it reports."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.loadgen import Prompts, Replay, Slos, exported, summary
from runtime.token_times import TokenTimes
from traces import Trace, load, save

from .conftest import ROOT
from .engines import Engine, Fabric
from .gateways import Front


def trace(*requests: tuple[float, int, int, list[int]], block_tokens: int = 64) -> Trace:
    """(arrival, input tokens, output tokens, block ids) each."""
    arrivals, inputs, outputs, blocks = zip(*requests, strict=True)
    offsets = np.cumsum([0, *(len(ids) for ids in blocks)])
    ids = np.array([i for each in blocks for i in each], np.int32)
    return Trace(np.array(arrivals), np.array(inputs), np.array(outputs), offsets, ids, block_tokens)


async def replayed(stack: AsyncExitStack, loaded: Trace, **given: Any) -> tuple[Replay, dict[str, Engine]]:
    fabric = Fabric()
    options = {name: given.pop(name) for name in ("scale", "vocabulary") if name in given}
    fields = {name: given.pop(name) for name in ("gap_s", "cut", "status") if name in given}
    policy = given.pop("policy", "conductor")
    workers = {name: await stack.enter_async_context(Engine(fabric, "nixl", **fields)) for name in ("p0", "d0")}
    front = await stack.enter_async_context(Front(policy=policy, **workers))
    replay = Replay(front.url, Prompts(loaded, **options), **given)
    await replay.run()
    return replay, workers


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 64, 2.0])
def test_prompts_share_what_the_trace_shares(scale):
    loaded = load("builtin:conversation").rows(0, 300)
    prompts = Prompts(loaded, scale=scale)
    made = [prompts.tokens(row) for row in range(300)]
    shared = 0
    for a in range(0, 300, 7):
        for b in range(a + 1, 300):
            same = 0
            for left, right in zip(loaded.blocks(a), loaded.blocks(b)):
                if left != right:
                    break
                same += 1
            tokens = min(same * prompts.block_tokens, len(made[a]), len(made[b]))
            assert (made[a][:tokens] == made[b][:tokens]).all()
            after = slice(tokens, tokens + max(32, prompts.block_tokens))
            rest = min(len(made[a]), len(made[b])) - tokens
            if rest >= 4 and prompts.block_tokens >= 4:
                assert (made[a][after][:rest] != made[b][after][:rest]).any()
            shared += same
    assert shared > 100, "or nothing was shown"


def test_lengths_are_scaled_with_the_blocks():
    loaded = trace((0.0, 640, 100, list(range(10))), (1.0, 641, 1, list(range(11))), (2.0, 1, 1, [11]))
    prompts = Prompts(loaded, scale=1 / 4)
    assert prompts.block_tokens == 16
    assert [len(prompts.tokens(row)) for row in range(3)] == [160, 161, 1]
    assert [prompts.output_tokens(row) for row in range(3)] == [25, 1, 1]


def test_prompts_of_a_trace_without_blocks_share_nothing():
    loaded = trace((0.0, 100, 1, []), (1.0, 100, 1, []))
    first, second = (Prompts(loaded).tokens(row) for row in range(2))
    assert len(first) == 100 and (first != second).mean() > 0.9
    assert (Prompts(loaded).tokens(0) == first).all(), "the same each time"
    assert (Prompts(loaded, seed=1).tokens(0) != first).any()
    assert Prompts(loaded, vocabulary=3).tokens(0).max() == 2


# --- a replay --------------------------------------------------------------------------------------------------------


async def test_requests_are_sent_when_they_are_due():
    """Open loop: the first takes longer than all the others have time."""
    async with AsyncExitStack() as stack:
        loaded = trace(*((0.4 * i, 64, 8, [i]) for i in range(6)))
        replay, workers = await replayed(stack, loaded, speed=4.0, gap_s=0.6)
        due_s = 0.1 * np.arange(6)
        sent_s = np.array([result.sent_s for result in replay.results])
        assert (sent_s >= due_s - 1e-3).all() and sent_s.max() < min(result.ended_s for result in replay.results)
        assert all(result.completed and result.output_tokens == 8 for result in replay.results)
        assert {tuple(body["prompt"]) for body in workers["p0"].bodies} == {
            tuple(replay.prompts.tokens(row).tolist()) for row in range(6)
        }
        assert all(body["model"] == "m" for body in workers["p0"].bodies)
        numbers = summary(replay.results, Slos(), 2.0)
        assert numbers["offered"] == numbers["completed"] == numbers["good"] == 6 and numbers["goodput"] == 1.0
        assert 0.6 <= numbers["tbt_p50_s"] < numbers["e2e_p50_s"] and numbers["ttft_p50_s"] < numbers["e2e_p50_s"]
        assert numbers["goodput_per_s"] == 3.0
        assert numbers["output_tokens"] == 48 and numbers["input_tokens"] == 6 * 64
        assert numbers["late_p99_s"] == pytest.approx(np.quantile(sent_s - due_s, 0.99))


async def test_goodput_is_under_the_slos():
    async with AsyncExitStack() as stack:
        loaded = trace((0.0, 64, 8, [0]), (0.0, 64, 8, [1]), (0.0, 64, 1, [2]))
        replay, _ = await replayed(stack, loaded, gap_s=0.1)
        assert summary(replay.results, Slos(tbt_s=0.05), 1.0)["good"] == 1, "one token has no interval"
        assert summary(replay.results, Slos(tbt_s=30.0), 1.0)["good"] == 3
        assert summary(replay.results, Slos(ttft_s=1e-6), 1.0)["good"] == 0


async def test_rejections_and_errors_are_told_apart():
    async with AsyncExitStack() as stack:
        loaded = trace((0.0, 64, 8, [0]), (0.0, 64, 8, [1]))
        turned, _ = await replayed(stack, loaded, policy="conductor+slo", headers={"x-llm-d-slo-ttft-ms": "0.001"})
        numbers = summary(turned.results, Slos(), 1.0)
        assert (numbers["rejected"], numbers["errors"], numbers["completed"]) == (2, 0, 0)
        assert numbers["ttft_p50_s"] is None and numbers["goodput"] == 0.0
        broken, _ = await replayed(stack, loaded, cut=3)
        numbers = summary(broken.results, Slos(), 1.0)
        assert (numbers["rejected"], numbers["errors"], numbers["completed"]) == (0, 2, 0)
        assert "d0" in broken.results[0].error


async def test_records_of_requests():
    async with AsyncExitStack() as stack:
        replay, _ = await replayed(stack, trace((0.0, 64, 4, [0])), gap_s=0.05)
        (record,) = exported(replay.results, 1e9)
        assert record["error"] is None and record["metadata"]["worker_id"] == "p0,d0"
        metrics = record["metrics"]
        assert metrics["output_sequence_length"]["value"] == 4 and metrics["input_sequence_length"]["value"] == 64
        assert 50 <= metrics["inter_token_latency"]["value"] < metrics["request_latency"]["value"]
        assert len(metrics["inter_chunk_latency"]["value"]) == 3
        latency_ns = record["metadata"]["request_end_ns"] - record["metadata"]["request_start_ns"]
        assert latency_ns == pytest.approx(1e6 * metrics["request_latency"]["value"], abs=1e3)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_tbt_of_a_request(share):
    """As docs/physics.md has it."""
    random = np.random.default_rng(3)
    for tokens in (1, 2, 3, 11, 101):
        at_s = np.cumsum(random.random(tokens))
        times = TokenTimes(at_s[0] - 0.5)
        for each in at_s:
            times.token(float(each))
        longest = np.sort(np.diff(at_s))[::-1][: max(1, math.ceil(share * (tokens - 1) - 1e-9))]
        assert times.tbt_s(share) == pytest.approx(longest.mean() if tokens > 1 else 0.0)
        assert times.ttft_s == pytest.approx(0.5)


# --- the command -----------------------------------------------------------------------------------------------------


async def command(*arguments: str, interrupt_when: Callable[[], bool] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "runtime.loadgen", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if interrupt_when is not None:
        async with asyncio.timeout(120):
            while not interrupt_when():
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    save(trace(*((0.01 * i, 600, 30, [i, i + 1]) for i in range(12)), block_tokens=512), path)
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        engines = {name: await stack.enter_async_context(Engine(fabric, "nixl")) for name in ("p0", "d0")}
        front = await stack.enter_async_context(Front(**engines))
        given = ("--url", front.url, "--trace", str(path), "--tokens-scale", "0.0625", "--requests", "9")
        records = tmp_path / "records.jsonl"
        status, out, err = await command(*given, "--json", "-", "--out", str(records), "--ttft-slo-s", "10")
        assert status == 0, err
        numbers = json.loads(out)
        assert numbers["offered"] == numbers["completed"] == 9 and numbers["errors"] == numbers["rejected"] == 0
        names = ("goodput", "ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "tbt_p90_s")
        assert all(isinstance(numbers[name], float) for name in names)
        assert len(records.read_text().splitlines()) == 9
        assert len(engines["p0"].bodies[0]["prompt"]) == 38
        engines["d0"].gap_s = 60.0
        before = len(engines["d0"].bodies)
        status, out, err = await command(
            *given, "--json", "-", interrupt_when=lambda: len(engines["d0"].bodies) > before
        )
        assert status == 130 and json.loads(out)["completed"] == 0, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "http://127.0.0.1:1", "--trace", "builtin:conversation"), "127.0.0.1:1/v1/models"),
        (("--url", "http://127.0.0.1:1", "--trace", "/no/file"), "/no/file"),
        (("--url", "http://127.0.0.1:1", "--trace", "builtin:conversation", "--extra", "[]"), "JSON object"),
    ],
)
async def test_a_load_that_cannot_be(arguments, said):
    status, _, err = await command(*arguments)
    assert status == 2 and said in err and "Traceback" not in err
