"""Two real workers, a prefill and a decode process, over HTTP: the contract, the KV that moves, and what goes wrong."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.telemetry import Parser
from runtime.worker.__main__ import app
from runtime.workers import Engine

from .processes import HAND_OVER, MODEL, TINY, WorkerProcess
from .test_text import byte_tokenizer

Pair = tuple[WorkerProcess, WorkerProcess]
Oracle = Callable[[list[int], int], list[int]]
Prompts = Callable[..., list[int]]
SOURCE = "vllm:prompt_tokens_by_source_total"


def hand_over(prefill: WorkerProcess, prompt: list[int]) -> dict[str, Any]:
    """What the prefill leg's answer has for the decode leg."""
    body = prefill.complete(prompt, 1, kv_transfer_params=HAND_OVER)
    params: dict[str, Any] = body["kv_transfer_params"]
    return params


def test_a_prefill_and_a_decode_worker_say_what_one_says(pair: Pair, oracle: Oracle, prompts: Prompts) -> None:
    prefill, decode = pair
    before = {source: decode.metric(SOURCE, source=source) for source in ("local_compute", "external_kv_transfer")}
    for length in (5, 64, 333):
        prompt = prompts(length, 1000 + length)
        params = hand_over(prefill, prompt)
        assert set(params) == {
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
            "remote_host", "remote_port", "tp_size", "remote_num_tokens",
        }  # fmt: skip
        assert params["do_remote_prefill"] and not params["do_remote_decode"]
        assert params["remote_num_tokens"] == length and len(params["remote_block_ids"][0]) == -(-length // 16)
        body = decode.complete(prompt, 24, kv_transfer_params=params)
        assert body["choices"][0]["token_ids"] == oracle(prompt, 24)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == length
    assert decode.metric(SOURCE, source="local_compute") == before["local_compute"]
    assert decode.metric(SOURCE, source="external_kv_transfer") == before["external_kv_transfer"] + 402
    assert prefill.idle() and decode.idle()


def test_many_at_a_time(pair: Pair, oracle: Oracle, prompts: Prompts) -> None:
    prefill, decode = pair
    wanted = [prompts(20 + 13 * i, 2000 + i) for i in range(8)]
    said: dict[int, list[int]] = {}

    def both_legs(i: int) -> None:
        params = hand_over(prefill, wanted[i])
        said[i] = decode.complete(wanted[i], 16, kv_transfer_params=params)["choices"][0]["token_ids"]

    threads = [threading.Thread(target=both_legs, args=(i,)) for i in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, prompt in enumerate(wanted):
        assert said[i] == oracle(prompt, 16)
    assert prefill.idle() and decode.idle()


def test_a_prefix_is_fetched_from_a_holder(pair: Pair, oracle: Oracle, prompts: Prompts) -> None:
    holder, other = pair
    prompt = prompts(100, 3000)
    holder.complete(prompt, 2)
    host, _, port = holder.where["transfer"].rpartition(":")
    longer = [*prompt, *prompts(20, 3001)]
    params = {"prefix_holder": {"host": host, "port": int(port)}}
    body = other.complete(longer, 8, kv_transfer_params=params)
    assert body["choices"][0]["token_ids"] == oracle(longer, 8)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    again = other.complete(longer, 8)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 112
    assert holder.idle() and other.idle()


def test_streams(pair: Pair, oracle: Oracle, prompts: Prompts) -> None:
    prefill, decode = pair
    prompt = prompts(40, 4000)
    expected = oracle(prompt, 6)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    events = list(decode.events("/v1/completions", body | {"stream_options": {"include_usage": True}}))
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 6
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(f" {token}" for token in expected)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["length"]
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    assert len({event["id"] for event in events}) == 1
    # through both, and stopped by a string
    stop = f" {expected[3]}"
    first = next(i for i, token in enumerate(expected) if f" {token}".startswith(stop))
    streamed = body | {"kv_transfer_params": hand_over(prefill, prompt), "stop": [stop]}
    *events, done = decode.events("/v1/completions", streamed)
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(f" {each}" for each in expected[:first])
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == stop
    assert prefill.idle() and decode.idle()


BAD: list[tuple[Any, int, str | None]] = [
    (b"{", 400, None),
    (b"[1]", 400, None),
    (b"\xff", 400, None),
    ({}, 400, None),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": "text"}, 400, None),
    ({"prompt": [512]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [[1], [2]]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [1] * 1024}, 400, "prompt"),
    ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": [1], "max_tokens": 1024}, 400, "max_tokens"),
    ({"prompt": [1], "max_tokens": "1"}, 400, "max_tokens"),
    ({"prompt": [1], "temperature": -1}, 400, "temperature"),
    ({"prompt": [1], "top_p": 0}, 400, "top_p"),
    ({"prompt": [1], "n": 2}, 400, "n"),
    ({"prompt": [1], "logprobs": 1}, 400, "logprobs"),
    ({"prompt": [1], "seed": 1 << 70}, 400, "seed"),
    ({"prompt": [1], "stop_token_ids": [512]}, 400, "stop_token_ids"),
    ({"prompt": [1], "model": "other"}, 404, "model"),
    ({"prompt": [1], "kv_transfer_params": HAND_OVER}, 400, "kv_transfer_params"),
    ({"prompt": [1], "kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
    ({"prompt": [1], "kv_transfer_params": {"prefix_holder": {"host": "h", "port": 0}}}, 400,
     "kv_transfer_params.prefix_holder"),
    ({"prompt": [1], "kv_transfer_params": {"fetch_prefix": True}}, 400, "kv_transfer_params"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_requests_are_told_so(pair: Pair, body: Any, status: int, param: str | None) -> None:
    _, decode = pair
    found, answer = decode.request("/v1/completions", body)
    assert found == status
    assert answer["error"]["code"] == status and answer["error"]["message"] and answer["error"]["type"]
    assert answer["error"]["param"] == param


def test_a_prompt_that_is_not_what_was_handed_over_is_refused(pair: Pair, prompts: Prompts) -> None:
    prefill, decode = pair
    prompt = prompts(40, 5000)
    params = hand_over(prefill, prompt)
    status, body = decode.request("/v1/completions", {"prompt": prompts(60, 1), "kv_transfer_params": params})
    assert status == 400 and "3 blocks were left" in body["error"]["message"]
    decode.complete(prompt, 2, kv_transfer_params=params)
    status, body = decode.request("/v1/completions", {"prompt": prompt, "kv_transfer_params": params})
    assert status == 500 and "nothing is kept here" in body["error"]["message"], "it was pulled, and is gone"
    assert prefill.idle() and decode.idle()


def test_what_there_is_to_see(pair: Pair) -> None:
    _, decode = pair
    assert decode.request("/health")[0] == 200
    assert decode.request("/load") == (200, {"server_load": 0})
    status, models = decode.request("/v1/models")
    assert status == 200 and models["data"][0]["id"] == "tiny" and models["data"][0]["max_model_len"] == 1024
    assert decode.request("/kv_event_sources") == (200, {})
    assert decode.request("/nowhere")[1]["error"]["code"] == 404
    _, rendered = decode.request("/v1/completions/render", {"prompt": [1, 2], "max_tokens": 3})
    assert rendered[0]["token_ids"] == [1, 2]
    _, text = decode.request("/metrics")
    metrics = Parser(Engine.VLLM).parse(text)
    assert metrics.block_tokens == 16 and metrics.gpu_blocks == 1024 and metrics.running == metrics.waiting == 0
    assert metrics.skipped == 0
    for name in ("kv_usage", "ttft_count", "itl_count", "queue_count", "prefill_count", "decode_count", "e2e_count"):
        assert getattr(metrics, name) is not None, name
    assert metrics.transfer_failures is not None and metrics.transfer_count is not None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_nothing(pair: Pair, prompts: Prompts, stream: bool) -> None:
    prefill, decode = pair
    prompt = prompts(200, 6000 + stream)
    body = {"prompt": prompt, "max_tokens": 800, "stream": stream, "ignore_eos": True}
    body["kv_transfer_params"] = hand_over(prefill, prompt)
    client = http.client.HTTPConnection(decode.where["address"], timeout=30.0)
    client.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        assert client.getresponse().readline().startswith(b"data: ")
    else:
        deadline = time.monotonic() + 20.0
        while not decode.metric("vllm:num_requests_running"):
            assert time.monotonic() < deadline
    aborted = decode.metric("vllm:request_success_total", finished_reason="abort") if stream else 0.0
    assert client.sock is not None
    client.sock.shutdown(socket.SHUT_RDWR)
    client.close()
    assert decode.idle() and prefill.idle()
    assert decode.metric("vllm:request_success_total", finished_reason="abort") > aborted


def test_a_prefill_that_is_killed_in_a_transfer_is_an_error_of_the_request(
    pair: Pair, oracle: Oracle, prompts: Prompts
) -> None:
    _, decode = pair
    doomed = WorkerProcess("--role", "prefill")
    doomed.wait()
    try:
        prompt = prompts(400, 7000)
        params = hand_over(doomed, prompt)
        host, port = params["remote_host"], params["remote_port"]
        between = socket.create_server(("127.0.0.1", 0))

        def relay() -> None:
            """The first 100 kB of the KV go through, then the prefill worker is killed."""
            client, _ = between.accept()
            with client, socket.create_connection((host, port)) as holder:
                holder.sendall(client.recv(65536))
                passed = 0
                while content := holder.recv(10000):
                    client.sendall(content)
                    passed += len(content)
                    if passed > 100_000:
                        doomed.process.kill()
                        doomed.process.wait()
                        break

        thread = threading.Thread(target=relay)
        thread.start()
        params["remote_port"] = between.getsockname()[1]
        status, body = decode.request("/v1/completions", {"prompt": prompt, "kv_transfer_params": params})
        thread.join()
        between.close()
        assert status == 500 and "the connection was lost" in body["error"]["message"]
        params["remote_port"] = port
        status, body = decode.request(
            "/v1/completions", {"prompt": prompt, "kv_transfer_params": params, "stream": True}
        )
        assert status == 500 and str(port) in body["error"]["message"]
        assert decode.idle()
        assert decode.complete(prompt, 4)["choices"][0]["token_ids"] == oracle(prompt, 4)
    finally:
        doomed.end()


def test_text_chat_events_tiers_and_the_end(tmp_path: Path, prompts: Prompts) -> None:
    """A worker with a model folder, all tiers and KV events, ended while it answers."""
    TINY.build(torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    worker = WorkerProcess(
        *("--model", str(tmp_path), "--served-model-name", "chatty", "--kv-events", "127.0.0.1:0"),
        *("--advertise", "localhost", "--drain-s", "120"),
        *("--device-blocks", "70", "--host-blocks", "40", "--disk-blocks", "40", "--disk-path", str(tmp_path)),
    )
    try:
        worker.wait()
        _, tokenized = worker.request("/tokenize", {"prompt": "hello"})
        assert tokenized["count"] == len(tokenized["tokens"]) == 3
        status, body = worker.request("/v1/completions", {"prompt": "hello", "max_tokens": 5, "temperature": 0})
        assert status == 200 and body["usage"]["prompt_tokens"] == 3
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
        status, body = worker.request("/v1/chat/completions", chat | {"model": "chatty", "return_token_ids": True})
        assert status == 200 and body["object"] == "chat.completion"
        _, tokenized = worker.request("/tokenize", {"messages": chat["messages"]})
        assert body["prompt_token_ids"] == tokenized["tokens"]
        whole = body["choices"][0]["message"]["content"]
        *events, done = worker.events("/v1/chat/completions", chat)
        assert done == "[DONE]" and events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == whole
        _, sources = worker.request("/kv_event_sources")
        assert sources["0"]["endpoint"].replace("127.0.0.1", "localhost") == worker.where["kv_events"]
        assert worker.where["address"].startswith("localhost:") and worker.where["transfer"].startswith("localhost:")
        for seed in range(5):
            worker.complete(prompts(500, seed), 2)
        assert worker.metric("vllm:kv_host_blocks_cached") == worker.metric("vllm:kv_disk_blocks_cached") == 40
        assert worker.request("/reset_prefix_cache", {})[0] == 200
        assert worker.metric("vllm:kv_host_blocks_cached") == 0
        events_of_stream = worker.events("/v1/completions", {"prompt": [1, 2], "max_tokens": 300, "ignore_eos": True})
        next(events_of_stream)
        worker.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert len(list(events_of_stream)) == 300, "the stream was to end well"
        assert worker.process.wait(60) == 0
    finally:
        worker.end()


def test_options_that_cannot_be_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        wrong = [
            (["--http", at], f"--http {at}: Address already in use"),
            (["--http", "here"], "expected HOST:PORT"),
            (["--http", "127.0.0.1:0", "--model", "/no/such/folder"], "expected a folder"),
            (["--http", "127.0.0.1:0", "--device", "abacus"], "--device"),
            (["--http", "127.0.0.1:0", *MODEL, "--transfer", at], "in use"),
            (["--http", "127.0.0.1:0", *MODEL, "--kv-events", at], "in use"),
            (["--http", "127.0.0.1:0", *MODEL, "--max-num-seqs", "600"], "--max-num-seqs"),
        ]
        for options, reason in wrong:
            result = CliRunner().invoke(app, options)
            assert result.exit_code == 2 and result.stdout == ""
            assert reason in result.stderr and result.stderr.count("\n") == 1, result.stderr
