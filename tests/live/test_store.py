"""A real Mooncake Store between real vLLM workers. A module of its own: the others have ended by then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.vllm_workers import BLOCK_TOKENS, VllmWorkers
from runtime.workers import Connector

from ..network import own_network
from ..runtime.stores import objects
from .conftest import GREEDY, KV_TOKENS, Live, ids, prompt, serving

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def stored(environment: Path) -> Iterator[Live]:
    with (
        own_network(),
        VllmWorkers(2, 1, connector=Connector.STORE, kv_tokens=KV_TOKENS, environment=environment) as workers,
        serving(workers, workers.cluster_file, "--policy", "conductor+none") as live,
    ):
        yield live


def test_decode_reads_from_the_store_what_prefill_put_there(stored: Live) -> None:
    """Whole blocks come from there, the rest decode computes; the answer is that of one worker."""
    for i, blocks in enumerate((10, 1, 60, *[4] * 10)):  # of short ones, many would be looked for before they are saved
        asked = GREEDY | {"prompt": prompt(900 + i, blocks * BLOCK_TOKENS + 5), "max_tokens": 16}
        before, had = stored.sources("d0"), objects(stored.workers)
        status, answer, headers = stored.post(asked)
        assert status == 200
        after = stored.sources("d0")
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == blocks * BLOCK_TOKENS
        assert after["local_compute"] - before["local_compute"] == 5
        assert objects(stored.workers) == had + blocks
        prefilled_by = headers["x-conductor-pair"].split(",")[0]
        assert ids(answer) == ids(stored.post(asked, to=prefilled_by)[1]) and len(set(ids(answer))) > 3


def test_a_prefill_worker_fetches_what_another_has_prefilled(stored: Live) -> None:
    prefix = prompt(950, 20 * BLOCK_TOKENS)
    asked = GREEDY | {"prompt": [*prefix, *prompt(951, 40)], "max_tokens": 8}
    had = objects(stored.workers)
    alone = stored.post(asked, to="p0")[1]
    assert objects(stored.workers) == had + 21
    before = stored.sources("p1")
    assert ids(stored.post(asked, to="p1")[1]) == ids(alone)
    after = stored.sources("p1")
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == 21 * BLOCK_TOKENS
    assert after["local_compute"] - before["local_compute"] == 8
