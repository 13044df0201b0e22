"""A store that both workers share, with real vLLM workers. A module of its own: the others have ended by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.vllm_workers import BLOCK_TOKENS, VllmWorkers
from runtime.workers import Connector

from .conftest import GREEDY, KV_TOKENS, ids, prompt, serving

pytestmark = pytest.mark.live


def test_a_store_that_both_share(environment: Path) -> None:
    """Whole blocks come from there, the rest decode computes; the answer is the same."""
    with (
        VllmWorkers(1, 1, connector=Connector.STORE, kv_tokens=KV_TOKENS, environment=environment) as workers,
        serving(workers, workers.cluster_file, "--policy", "conductor+none") as live,
    ):
        length = 10 * BLOCK_TOKENS + 5
        asked = GREEDY | {"prompt": prompt(900, length), "max_tokens": 16}
        before = live.sources("d0")
        status, answer, headers = live.post(asked)
        assert status == 200 and headers["x-conductor-pair"] == "p0,d0"
        after = live.sources("d0")
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == 10 * BLOCK_TOKENS
        assert ids(answer) == ids(live.post(asked, to="p0")[1])
