"""Calibration against a server whose latency follows a law that is known: the fit must find it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from envs.calibrate import Plan, app, calibrate, fit
from envs.hardware import HardwareProfile
from envs.spec import load_cluster
from envs.worker_timing import LiveWorker, WorkerError

# Tens of milliseconds, of which a busy machine adds few.
PREFILL = {"base_s": 0.04, "linear_s": 1e-4, "quadratic_s": 3e-8}
STEP = {"base_s": 0.02, "per_request_s": 0.004, "per_token_s": 3e-6}
LATENCY_S, HAND_OVER_S, NIC_BYTES_PER_S, KV_BYTES = 0.03, 0.05, 1.5e7, 1000
JOIN_BYTES_PER_S = 1e7
BLOCK, BESIDE = 32, 1.6


class Law:
    """Prefill and decode workers in one server (/p, /d), as vLLM's look from outside, that take the time of a law.

    One prompt is prefilled at a time; all that are decoded get their tokens together. Where the two share a machine, a
    prefill that begins while others are decoded takes `BESIDE` times as long.
    """

    def __init__(self, context: int = 4096, kv: bool = True, shared: bool = False) -> None:
        self.context, self.kv, self.shared = context, kv, shared
        self.cached: set[tuple[int, ...]] = set()
        self.moved = self.joining_bytes = 0
        self.batch: dict[asyncio.Queue[float], int] = {}
        self.url = ""

    async def start(self) -> web.AppRunner:
        self.prefilling = asyncio.Lock()
        self.joined = asyncio.Event()
        app = web.Application()
        for worker in ("p", "d"):
            app.router.add_get(f"/{worker}/v1/models", self.models)
            app.router.add_get(f"/{worker}/metrics", self.metrics)
            app.router.add_post(f"/{worker}/v1/completions", self.complete)
        app.router.add_get("/page/v1/models", self.page)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.iterations = asyncio.create_task(self.iterate())
        return runner

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "law", "max_model_len": self.context}]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="1024"}} 1.0\n'
            f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.moved}\n'
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, params = tuple(body["prompt"]), body.get("kv_transfer_params") or {}
        if len(prompt) + body["max_tokens"] > self.context:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        fetched = params.get("do_remote_prefill", False)
        if fetched:
            self.moved += KV_BYTES * len(prompt)
            await asyncio.sleep(HAND_OVER_S + KV_BYTES * len(prompt) / NIC_BYTES_PER_S)
            cached = 0
        else:
            cached = await self.prefill(prompt)
        if not body.get("stream"):
            await asyncio.sleep(LATENCY_S)
            answer: dict[str, Any] = {"usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
            if params.get("do_remote_decode") and self.kv:
                answer["kv_transfer_params"] = {"do_remote_prefill": True}
            return web.json_response(answer)
        out = web.StreamResponse()
        await out.prepare(request)
        tokens: asyncio.Queue[float] = asyncio.Queue()
        self.batch[tokens] = len(prompt)
        self.joining_bytes += KV_BYTES * len(prompt) if fetched else 0
        self.joined.set()
        try:
            for _ in range(body["max_tokens"]):
                await tokens.get()
                await out.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        finally:
            del self.batch[tokens]
        await out.write(b"data: [DONE]\n\n")
        return out

    async def prefill(self, prompt: tuple[int, ...]) -> int:
        async with self.prefilling:
            n = len(prompt)
            h = next((k for k in range((n - 1) // BLOCK * BLOCK, 0, -BLOCK) if prompt[:k] in self.cached), 0)
            terms = PREFILL["base_s"], PREFILL["linear_s"] * (n - h), PREFILL["quadratic_s"] * (n * n - h * h)
            await asyncio.sleep(sum(terms) * (BESIDE if self.shared and self.batch else 1))
            self.cached.update(prompt[:k] for k in range(BLOCK, n + 1, BLOCK))
            return h

    async def iterate(self) -> None:
        due_s = time.monotonic()
        while True:
            if not self.batch:
                self.joined.clear()
                await self.joined.wait()
                due_s = time.monotonic()
            members = list(self.batch)
            context = sum(self.batch.values())
            due_s += STEP["base_s"] + STEP["per_request_s"] * len(members) + STEP["per_token_s"] * context
            due_s += self.joining_bytes / JOIN_BYTES_PER_S
            self.joining_bytes = 0
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))  # what a sleep is late by, the next makes good
            for tokens in members:
                if tokens in self.batch:
                    self.batch[tokens] += 1
                    tokens.put_nowait(due_s)


def served(law: Law) -> Iterator[Law]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(law.start(), loop).result(10)
    yield law
    law.iterations.cancel()
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture
def law() -> Iterator[Law]:
    yield from served(Law())


def test_the_law_is_found(law: Law, tmp_path: Path) -> None:
    """Whatever waits is told apart from what keeps a worker busy, and the profile is one of a cluster."""
    files = {name: tmp_path / name for name in ("profile.yaml", "cluster.yaml", "fit.png")}
    called = CliRunner().invoke(
        app,
        f"--prefill-url {law.url}/p --decode-url {law.url}/d --out {files['profile.yaml']} --json - --repeats 2 "
        f"--cluster {files['cluster.yaml']} --plot {files['fit.png']} --most-requests 6 --longest-tokens 768".split(),
    )
    assert called.exit_code == 0, called.output
    said = json.loads(called.stdout)
    profile = HardwareProfile.model_validate(yaml.safe_load(files["profile.yaml"].read_text()))
    long = 768
    prefill = profile.prefill
    taken = prefill.base_s + prefill.linear_s * long + prefill.quadratic_s * long**2
    assert taken == pytest.approx(
        PREFILL["base_s"] + PREFILL["linear_s"] * long + PREFILL["quadratic_s"] * long**2, rel=0.15
    )
    assert prefill.base_s == pytest.approx(PREFILL["base_s"], rel=0.4)
    decode = profile.decode
    for batch, context in ((1, 100), (6, 2000)):
        step = decode.base_s + decode.per_request_s * batch + decode.per_token_s * context
        law_s = STEP["base_s"] + STEP["per_request_s"] * batch + STEP["per_token_s"] * context
        assert step == pytest.approx(law_s, rel=0.15)
    assert profile.join_bytes_per_s == pytest.approx(JOIN_BYTES_PER_S, rel=0.4)
    assert 1 / profile.nic_bytes_per_s + 1 / profile.join_bytes_per_s == pytest.approx(
        1 / NIC_BYTES_PER_S + 1 / JOIN_BYTES_PER_S, rel=0.25
    )
    assert said["cluster"]["model"]["kv_bytes_per_token"] == KV_BYTES
    assert said["cluster"]["transfer_latency_s"] == pytest.approx(LATENCY_S + HAND_OVER_S, abs=0.03)
    for part in ("prefill", "decode", "join", "hand-over"):
        assert said["fit"][part]["held_out"] >= 3 and said["fit"][part]["median_relative_error"] < 0.15
    spec = load_cluster(files["cluster.yaml"])
    assert spec.prefill[0].profile == profile and spec.transfer_latency_s == said["cluster"]["transfer_latency_s"]
    assert profile.decode_kv_tokens == 1024 * BLOCK
    assert files["fit.png"].read_bytes().startswith(b"\x89PNG")


def test_on_one_machine_prefills_are_timed_beside_a_decode() -> None:
    """They take as long as they do in service; on an idle machine they would seem faster than they will be."""
    for law in served(Law(shared=True)):
        prefill, decode = LiveWorker(f"{law.url}/p"), LiveWorker(f"{law.url}/d")
        plan = Plan(longest_tokens=512, most_requests=2, repeats=1)
        found = calibrate(prefill, decode, plan, one_machine=True).profile.prefill
        for n in (256, 512):
            alone = PREFILL["base_s"] + PREFILL["linear_s"] * n + PREFILL["quadratic_s"] * n**2
            assert found.base_s + found.linear_s * n + found.quadratic_s * n**2 == pytest.approx(
                BESIDE * alone, rel=0.2
            )
        prefill.close()
        decode.close()


def test_one_worker_that_does_both(law: Law, tmp_path: Path) -> None:
    """Nothing moves, and nothing is said of it."""
    worker = LiveWorker(f"{law.url}/p")
    found = calibrate(worker, worker, Plan(longest_tokens=512, most_requests=2, repeats=1))
    assert [part.name for part in found.parts] == ["prefill", "decode"]
    assert "model" not in found.cluster and set(found.latency_s) == {"prefill"}
    worker.close()


def test_errors_are_of_points_that_were_not_fitted() -> None:
    import numpy as np

    terms = np.stack([np.ones(40), np.arange(1.0, 41.0)], axis=1)
    seconds = terms @ [0.1, 0.02]
    exact = fit("exact", terms, seconds.tolist())
    assert exact.coefficients == pytest.approx([0.1, 0.02]) and exact.errors["p90_relative_error"] < 1e-9
    wrong = seconds.copy()
    wrong[exact.held_out] *= 1.25
    apart = fit("wrong", terms, wrong.tolist())
    assert apart.coefficients == pytest.approx([0.1, 0.02]), "what is held out changes nothing"
    assert apart.errors["median_relative_error"] == pytest.approx(0.2)


def test_what_cannot_be_measured_is_said_in_a_line(law: Law, tmp_path: Path) -> None:
    def said(arguments: str) -> str:
        called = CliRunner().invoke(app, [*arguments.split(), "--out", str(tmp_path / "profile.yaml")])
        assert called.exit_code == 2 and not (tmp_path / "profile.yaml").exists()
        lines = called.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("calibrate: "), called.stderr
        return lines[0]

    assert "expected --url, or --prefill-url and --decode-url" in said("")
    assert "expected --url, or --prefill-url and --decode-url" in said(f"--prefill-url {law.url}/p")
    assert "no server answers there" in said("--url http://127.0.0.1:1")
    assert "expected a URL like" in said("--url 127.0.0.1:8000")
    assert "status 404; expected an OpenAI-compatible server" in said(f"--url {law.url}/v1")
    assert "expected an OpenAI-compatible server" in said(f"--url {law.url}/page")
    assert "expected a file in a folder that exists" in said(f"--url {law.url}/p --plot /no/such/folder.png")


def test_a_context_that_is_too_small() -> None:
    for law in served(Law(context=256)):
        worker = LiveWorker(f"{law.url}/p")
        with pytest.raises(WorkerError, match="takes 224 tokens; expected 512 or more"):
            calibrate(worker, worker, Plan())
        with pytest.raises(WorkerError, match="status 400: too long"):
            worker.complete(worker.tokens(300))
        worker.close()


def test_a_prefill_worker_that_hands_nothing_over() -> None:
    for law in served(Law(kv=False)):
        prefill, decode = LiveWorker(f"{law.url}/p"), LiveWorker(f"{law.url}/d")
        with pytest.raises(WorkerError, match="no kv_transfer_params; expected a prefill worker"):
            prefill.hand_over(decode, 64)
        prefill.close()
        decode.close()
