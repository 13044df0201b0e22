"""Real vLLM workers: that KV moves, that answers are right, that the decisions heed what the engines say."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from runtime.proto import conductor_pb2 as pb
from runtime.vllm_workers import BLOCK_TOKENS, VllmWorkers

from ..runtime.test_server import metric
from ..waiting import eventually
from .conftest import GREEDY, KV_TOKENS, Live, ids, prompt, serving

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def split(environment: Path) -> Iterator[Live]:
    """Two that prefill, one that decodes, by NIXL. The policy rejects nobody, so that the re-check is seen."""
    with (
        VllmWorkers(2, 1, kv_tokens=KV_TOKENS, environment=environment) as workers,
        serving(workers, workers.cluster_file, "--policy", "conductor+none", "--scrape-interval-s", "0.1") as live,
    ):
        yield live


def cached(live: Live, worker: str, tokens: list[int]) -> float:
    """How many of a prompt's tokens the sidecar takes to be cached on a prefill worker."""
    request = pb.ScheduleRequest(tokens=np.array(tokens, "<u4").tobytes(), dry_run=True, explain=True)
    shown = live.sidecar.stub().Schedule(request, timeout=60).explanation.prefills
    return next(view.local_tokens for view in shown if view.id == worker)


def test_kv_moves_and_the_answer_is_that_of_one_worker(split):
    """Decode computes nothing of the prompt, and its tokens, in float32, are those of a worker that does both."""
    for seed, length in ((1, 300), (2, 64), (3, 1000), (4, 33)):
        before = split.sources("d0")
        asked = GREEDY | {"prompt": prompt(seed, length), "max_tokens": 24}
        status, answer, headers = split.post(asked)
        assert status == 200 and headers["x-conductor-pair"] in ("p0,d0", "p1,d0")
        after = split.sources("d0")
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == length
        assert after["local_compute"] == before["local_compute"] == 0
        alone = split.post(asked, to="p0")[1]
        assert ids(answer) == ids(alone) and len(set(ids(answer))) > 3
        other = split.post(asked | {"prompt": [*prompt(seed, length - 1), 31]}, to="p0")[1]
        assert ids(other) != ids(alone), "the answer depends on the prompt, or this would show nothing"


def test_text_conversations_and_streams(split):
    text = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, "prompt": "A prompt of some words, in ASCII. " * 4}
    status, whole, _ = split.post(text)
    assert status == 200 and whole["usage"]["completion_tokens"] == 12
    status, events, _ = split.post(text | {"stream": True})
    assert status == 200 and events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    same = split.post(text | {"prompt": list(text["prompt"].encode())})[1]
    assert same["choices"][0]["text"] == whole["choices"][0]["text"]
    talk = {
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Hello? " * 20}],
    }
    status, whole, _ = split.post(talk, "/v1/chat/completions")
    assert status == 200 and whole["choices"][0]["message"]["role"] == "assistant"
    assert whole["usage"]["prompt_tokens"] > 100
    status, events, _ = split.post(talk | {"stream": True}, "/v1/chat/completions")
    assert status == 200 and events[-1] == "[DONE]"
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert said == whole["choices"][0]["message"]["content"]
    log = split.workers.log("d0").read_text()
    for path in ("/v1/completions/render", "/v1/chat/completions/render"):
        assert f'"POST {path} HTTP/1.1" 200' in log, "the engine has told the tokens"


@pytest.mark.parametrize("holder", ["p0", "p1"])
def test_kv_events_change_later_decisions(split, holder):
    """What a prefill worker was given by others is known from its events, and draws requests with the same prefix."""
    prefix = prompt(100 + int(holder[1]), 20 * BLOCK_TOKENS)
    assert cached(split, holder, [*prefix, 1]) == 0
    split.post({"prompt": prefix, "max_tokens": 1}, to=holder)
    eventually(lambda: cached(split, holder, [*prefix, 1]) == len(prefix), 20.0)
    for i in range(3):
        before = split.sources(holder)
        status, _, headers = split.post(GREEDY | {"prompt": [*prefix, *prompt(200 + i, 40)], "max_tokens": 4})
        assert status == 200 and headers["x-conductor-pair"] == f"{holder},d0"
        after = split.sources(holder)
        assert after["local_cache_hit"] - before["local_cache_hit"] == len(prefix)
        assert after["local_compute"] - before["local_compute"] == 40


def test_evictions_are_believed(split):
    prefix = prompt(300, 20 * BLOCK_TOKENS)
    split.post({"prompt": prefix, "max_tokens": 1}, to="p1")
    eventually(lambda: cached(split, "p1", [*prefix, 1]) == len(prefix), 20.0)
    for i in range(5):  # more than its cache holds
        split.post({"prompt": prompt(310 + i, KV_TOKENS // 4), "max_tokens": 1}, to="p1")
    eventually(lambda: cached(split, "p1", [*prefix, 1]) == 0, 20.0)
    assert metric(split.sidecar, "conductor_kv_blocks_removed_total", worker="p1") >= 20
    before = split.sources("p1")
    split.post({"prompt": [*prefix, 1], "max_tokens": 1}, to="p1")
    assert split.sources("p1")["local_cache_hit"] == before["local_cache_hit"], "they were gone indeed"


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_client_that_goes_away_leaves_nothing(split, stage):
    host, port = split.url.removeprefix("http://").split(":")
    length, output = (8000, 10) if stage == "prefill" else (500, 7000)
    body = {"model": "tiny", "prompt": prompt(400, length), "max_tokens": output, "ignore_eos": True, "stream": True}
    failed = metric(split.sidecar, "conductor_requests_failed_total", stage="client")
    client = http.client.HTTPConnection(host, int(port), timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    if stage == "prefill":
        eventually(lambda: not (split.idle("p0") and split.idle("p1")), 20.0)
    else:
        assert client.getresponse().read1(100).startswith(b"data: ")
        assert not split.idle("d0")
    client.sock.close() if stage == "prefill" else client.close()
    eventually(lambda: all(split.idle(name) for name in ("p0", "p1", "d0")), 20.0)
    eventually(lambda: metric(split.sidecar, "conductor_requests_failed_total", stage="client") == failed + 1, 20.0)
    assert metric(split.sidecar, "conductor_reservations") == 0


def test_kv_of_a_request_rejected_after_its_prefill_is_freed(split):
    """At once, not when its lease of 30 s ends."""
    status, answer, headers = split.post({"prompt": prompt(500, 600), "max_tokens": 4}, x_llm_d_slo_tpot_ms="0.001")
    assert status == 429 and answer["error"]["code"] == "rejected-recheck" and int(headers["retry-after"]) >= 1
    assert metric(split.sidecar, "conductor_rejected_at_decode_total") == 1
    assert metric(split.sidecar, "conductor_wasted_prefill_seconds_total") > 0
    eventually(lambda: all(split.idle(name) for name in ("p0", "p1", "d0")), within_s=10)


def test_errors_of_the_engine_reach_the_client(split):
    status, answer, _ = split.post({"prompt": prompt(600, 9000), "max_tokens": 4})
    assert status == 400 and answer["error"]["code"] and answer["error"]["message"]


def test_one_worker_does_both(split, tmp_path):
    """The same workers, without a second leg."""
    cluster = split.workers.cluster()
    both = [row for row in cluster["workers"] if row["role"] == "prefill"]
    for row in both:
        row["role"] = "both"
        del row["connector"]
    file = tmp_path / "coupled.yaml"
    file.write_text(yaml.safe_dump(cluster | {"workers": both}))
    with serving(split.workers, file, "--policy", "conductor+none") as coupled:
        asked = GREEDY | {"prompt": prompt(700, 300), "max_tokens": 16}
        status, answer, headers = coupled.post(asked)
        assert status == 200 and headers["x-conductor-pair"] in ("p0,p0", "p1,p1")
        assert ids(answer) == ids(split.post(asked)[1])
        assert coupled.post(asked | {"stream": True})[1][-1] == "[DONE]"


def test_a_prefill_worker_that_is_killed_is_routed_around(split):
    """Last: it does not come back. In the middle of requests, none of which fails."""
    split.workers.kill("p0")
    for i in range(6):
        status, answer, headers = split.post(GREEDY | {"prompt": prompt(800 + i, 200), "max_tokens": 4})
        assert status == 200 and headers["x-conductor-pair"] == "p1,d0", answer
    eventually(lambda: metric(split.sidecar, "conductor_worker_up", worker="p0") == 0, 20.0)
