"""Reference workers over a real Mooncake Store: prompts go there, prefixes come from there, hot ones are replicated."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="needs the extra `worker`")
pytest.importorskip(
    "mooncake.store",
    reason="needs the extra `store`, and Debian's libibverbs1, librdmacm1 and libnuma1",
    exc_type=ImportError,
)

from runtime.reference_workers import BLOCK_TOKENS, ReferenceWorkers
from runtime.workers import Connector

from ..network import own_network
from ..waiting import eventually
from .stores import clients, objects
from .test_reference_workers import completed, sources

BLOCKS, REST = 5, 7
FROM_STORE = {"external_kv_transfer": BLOCKS * BLOCK_TOKENS, "local_compute": REST, "local_cache_hit": 0}
COMPUTED = {"external_kv_transfer": 0, "local_compute": BLOCKS * BLOCK_TOKENS + REST, "local_cache_hit": 0}


@pytest.fixture(scope="module")
def workers() -> Iterator[ReferenceWorkers]:
    with own_network(), ReferenceWorkers(2, 1, connector=Connector.STORE, kv_tokens=4096) as started:
        yield started


def prompt(factor: int) -> list[int]:
    return [(factor * i) % 250 for i in range(BLOCKS * BLOCK_TOKENS + REST)]


async def served(
    workers: ReferenceWorkers, asked: list[int], prefill: str, holder: str | None = None
) -> tuple[str, dict[str, float], dict[str, float]]:
    """What a prompt is completed with, and where its tokens came from: to the prefill worker, to the decode worker."""
    before = [sources(workers, name) for name in (prefill, "d0")]
    text, _ = await completed(workers, asked, prefill, holder)
    after = [sources(workers, name) for name in (prefill, "d0")]
    mine, its = [{key: now[key] - then[key] for key in now} for then, now in zip(before, after)]
    return text, mine, its


def forget(workers: ReferenceWorkers, name: str) -> None:
    """What a worker has cached itself."""
    asked = urllib.request.Request(f"http://{workers.address(name)}/reset_prefix_cache", b"")
    with urllib.request.urlopen(asked, timeout=30):
        pass


def replicated(workers: ReferenceWorkers, name: str) -> float:
    with urllib.request.urlopen(f"http://{workers.address(name)}/metrics", timeout=30) as answer:
        found = re.search(r"^vllm:kv_replicated_blocks_total\{.*\} (\S+)$", answer.read().decode(), re.M)
    assert found
    return float(found[1])


async def test_decode_reads_from_the_store_what_prefill_put_there(workers: ReferenceWorkers) -> None:
    had = objects(workers)
    text, prefill, decode = await served(workers, prompt(7), "p0")
    assert prefill == COMPUTED and decode == FROM_STORE
    assert objects(workers) == had + BLOCKS
    forget(workers, "d0")
    again, prefill, _ = await served(workers, prompt(7), "p1")
    assert prefill == COMPUTED, "a prefix is fetched only where that was decided"
    assert again == text
    assert objects(workers) == had + BLOCKS, "the same blocks"


async def test_a_hot_prefix_outlives_the_node_that_made_it(workers: ReferenceWorkers) -> None:
    """It was fetched, and so replicated; what was not is gone with its node."""
    hot, cold = prompt(11), prompt(13)
    made = {name: (await served(workers, asked, "p0"))[0] for name, asked in (("hot", hot), ("cold", cold))}
    fetched, prefill, _ = await served(workers, hot, "p1", holder="p0")
    assert fetched == made["hot"] and prefill == FROM_STORE
    eventually(lambda: replicated(workers, "p1") == BLOCKS, 30)
    alive = clients(workers)
    workers.kill("p0")
    eventually(lambda: clients(workers) == alive - 1, 60)
    for name in ("p1", "d0"):
        forget(workers, name)
    again, prefill, decode = await served(workers, hot, "p1", holder="p0")
    assert again == made["hot"] and prefill == FROM_STORE and decode == FROM_STORE
    computed, prefill, _ = await served(workers, cold, "p1", holder="p0")
    assert computed == made["cold"] and prefill == COMPUTED
