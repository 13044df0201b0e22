"""Reference workers behind the gateway's own legs: KV goes from prefill to decode, and from prefill to prefill."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

pytest.importorskip("transformers", reason="needs the extra `worker`")

from runtime.legs import Call, Upstream, legs_of
from runtime.reference_workers import ReferenceWorkers
from runtime.workers import Worker, load_live_cluster

PROMPT = [(7 * i) % 250 for i in range(160)]  # five blocks


@pytest.fixture(scope="module")
def workers() -> Iterator[ReferenceWorkers]:
    with ReferenceWorkers(2, 1, kv_tokens=4096) as started:
        yield started


def sources(workers: ReferenceWorkers, name: str) -> dict[str, float]:
    """Prompt tokens of a worker by where they came from."""
    with urllib.request.urlopen(f"http://{workers.address(name)}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r'^vllm:prompt_tokens_by_source_total\{.*?source="(\w+)".*?\} (\S+)$', text, re.M)
    return {source: float(tokens) for source, tokens in found}


async def completed(
    workers: ReferenceWorkers, prompt: list[int], prefill: str, holder: str | None
) -> tuple[str, dict[str, Any]]:
    """The text that a prompt is completed with, and the prefill worker's usage."""
    by_id: dict[str, Worker] = {worker.id: worker for worker in load_live_cluster(workers.cluster_file).workers}
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    replies: list[dict[str, Any]] = []
    upstream = Upstream()
    try:
        call = Call("request", "/v1/completions", fields, holder=by_id[holder] if holder else None)
        pair = by_id[prefill], by_id["d0"]
        response = await legs_of(*pair)(upstream, call, *pair, replies.append)
        text = orjson.loads(await response.read())["choices"][0]["text"]
    finally:
        await upstream.close()
    return text, replies[0]["usage"]


async def test_a_prefix_is_fetched_from_its_holder_and_the_answer_is_the_same(workers: ReferenceWorkers) -> None:
    text, _ = await completed(workers, PROMPT, "p0", None)
    before = sources(workers, "p1")
    fetched, usage = await completed(workers, PROMPT, "p1", "p0")
    after = sources(workers, "p1")
    assert fetched == text
    assert after["external_kv_transfer"] - before.get("external_kv_transfer", 0.0) >= 128
    assert after["local_compute"] - before.get("local_compute", 0.0) <= 32
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
    again, usage = await completed(workers, PROMPT, "p1", None)  # the blocks are its own now: a replica
    assert again == text
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 128


async def test_where_the_holder_is_gone_the_prefix_is_computed(workers: ReferenceWorkers) -> None:
    workers.kill("p0")
    PROMPT[0] = 249  # nothing of it is anywhere
    computed, usage = await completed(workers, PROMPT, "p1", "p0")
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")
    again, _ = await completed(workers, PROMPT, "p1", None)
    assert computed == again
