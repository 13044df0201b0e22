"""The sidecar: how long a decision takes, and what is left of the transport's own speed.

All in one run, so that the figures are ratios of one machine's mood:

- `stream_vs_echo`: requests per second of `ScheduleStream` over those of a grpc.aio server that echoes the same
  messages.
- `decision_us`: median microseconds of `Conductor.schedule` (hash, match, observe, policy, reservation), by tokens of
  the prompt; `decision_us_learned` with an exported network, `decision_us_list` with the prompt as a list of int, which
  is what `dynamo_us` gets: NVIDIA Dynamo's `SelectionService.select_and_reserve` with as many workers (where it is
  installed, in this environment or in another one named by --dynamo-python).
- `match_128k_us`: a prompt of 131,072 tokens hashed and found in the prefix index.
- `kv_blocks_per_second`: KV events taken in, from payload to index, while requests are decided.
- `envoy_vs_noop`: what this endpoint picker adds to a request through Envoy, over what one adds that always says the
  same.

16 workers (8 prefill, 8 decode), prompts of 8,192 tokens, blocks of 16 tokens, an index of 200,000 blocks.

    python -m benchmarks.sidecar [--only decision,stream,...]
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .report import entry, median, parser, report

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TOKENS, WORKERS, INDEX_BLOCKS, PROMPT_TOKENS = 16, 16, 200_000, 8192
SIZES = (512, 8192, 65536)
PARTS = ("decision", "learned", "dynamo", "match", "events", "stream", "envoy")
STREAM = "/conductor.v1.Conductor/ScheduleStream"
WINDOW = 32  # messages of a stream on their way
SWIFT = {  # a node for which thousands of prompts a second are little: what is measured is the sidecar
    "prefill": {"base_s": 1e-4, "linear_s": 1e-8},
    "decode": {"base_s": 1e-3, "per_request_s": 1e-6, "per_token_s": 1e-11},
    "nic_bytes_per_s": 1e14,
    "h2d_bytes_per_s": 1e14,
    "join_bytes_per_s": 1e14,
    "device_kv_tokens": 1 << 24,
    "host_kv_tokens": 1 << 26,
    "decode_kv_tokens": 1 << 28,
}

CLUSTER: dict[str, Any] = {
    "block_tokens": BLOCK_TOKENS,
    "slo": {"ttft_s": 60.0, "tbt_s": 1.0},  # nothing is turned away
    "prefill": [{"count": WORKERS // 2, "hardware": "h100x8-llama3-70b"}],
    "decode": [{"count": WORKERS // 2, "hardware": "h100x8-llama3-70b"}],
    "workers": [
        *(
            {"id": f"p{i}", "role": "prefill", "address": f"127.0.0.1:{1 + i}", "kv_events": f"tcp://127.0.0.1:{1 + i}"}
            for i in range(WORKERS // 2)
        ),
        *({"id": f"d{i}", "role": "decode", "address": f"127.0.0.1:{100 + i}"} for i in range(WORKERS // 2)),
    ],
}


def conductor(policy: str = "conductor+predictive", cluster: dict[str, Any] = CLUSTER) -> Any:
    """A conductor with a full index."""
    from runtime.block_hash import hash_blocks
    from runtime.conductor import Conductor
    from runtime.prefix_index import Medium
    from runtime.workers import load_live_cluster

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster))
        made = Conductor(load_live_cluster(path), policy, blocks=2 * INDEX_BLOCKS)
    rng = np.random.default_rng(0)
    for i in range(INDEX_BLOCKS // 500):
        tokens = rng.integers(0, 150_000, 500 * BLOCK_TOKENS, dtype=np.uint32)
        made.state.index.store(i % (WORKERS // 2), Medium.GPU, hash_blocks(tokens, BLOCK_TOKENS))
    return made


def prompts(tokens: int, count: int, seed: int = 1) -> list[np.ndarray]:
    """Prompts that share their first half."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 150_000, tokens // 2, dtype=np.uint32)
    rest = tokens - tokens // 2
    return [np.concatenate([shared, rng.integers(0, 150_000, rest, dtype=np.uint32)]) for _ in range(count)]


def decision_us(policy: str, *, as_list: bool = False, rounds: int = 200) -> dict[str, float]:
    """Median microseconds of a decision, by length of the prompt; 32 requests are in flight."""
    from runtime.request import Assignment, Request

    made = conductor(policy)
    result = {}
    for size in SIZES:
        given: list[Any] = [*prompts(size, 64)]
        if as_list:
            given = [prompt.tolist() for prompt in given]
        taken = []
        flying: list[str] = []
        for i in range(rounds + 64):
            name = f"{size}-{i}"
            prompt = given[i % len(given)]
            start = time.perf_counter()
            answer = made.schedule(Request(name, tokens=np.array(prompt, np.uint32) if as_list else prompt))
            taken.append(time.perf_counter() - start)
            if not isinstance(answer, Assignment):
                raise ValueError(f"a request of the benchmark was rejected: {answer}")
            flying.append(name)
            if len(flying) > 32:
                made.finished(flying.pop(0), output_tokens=100)
        for name in flying:
            made.finished(name, output_tokens=100)
        result[str(size)] = round(median(taken[64:]) * 1e6, 1)
    return result


def learned_us() -> dict[str, float] | None:
    """As `decision_us` with a network of the usual size, exported; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("onnxscript") is None:
        return None
    from policies.artifact import FORMAT, to_onnx
    from policies.networks import SetScorer
    from policies.run_folder import NETWORK, observation_schema

    hidden = 48
    about = {
        "format": FORMAT,
        "name": "untrained",
        "network": {"kind": NETWORK, "hidden": hidden},
        "recheck": True,
        "observation": observation_schema(),
        "training": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.onnx"
        path.write_bytes(to_onnx(SetScorer(hidden).eval(), about))
        return decision_us(str(path))


DYNAMO = """
import asyncio, json, sys, time, statistics, random
from dynamo._core import SelectionService

async def main():
    service = SelectionService()
    for w in range(WORKERS):
        await service.upsert_worker({"worker_id": w, "endpoint": f"http://127.0.0.1:{1000 + w}", "block_size": BLOCK,
            "kv_events_endpoints": {0: f"tcp://127.0.0.1:{2000 + w}"},
            "data_parallel_start_rank": 0, "data_parallel_size": 1})
    rng = random.Random(1)
    result = {}
    for size in SIZES:
        shared = [rng.randrange(150000) for _ in range(size // 2)]
        prompts = [shared + [rng.randrange(150000) for _ in range(size - size // 2)] for _ in range(64)]
        taken, flying = [], []
        for i in range(ROUNDS + 64):
            name = f"{size}-{i}"
            request = {"selection_id": name, "token_ids": prompts[i % 64]}
            start = time.perf_counter()
            await service.select_and_reserve(request)
            taken.append(time.perf_counter() - start)
            flying.append(name)
            if len(flying) > 32:
                await service.free_reservation(flying.pop(0))
        for name in flying:
            await service.free_reservation(name)
        result[str(size)] = round(statistics.median(taken[64:]) * 1e6, 1)
    print("RESULT " + json.dumps(result))
asyncio.run(main())
"""


def dynamo_us(python: str | None, rounds: int = 200) -> dict[str, float] | None:
    """Median microseconds of Dynamo's `select_and_reserve`; None where it is not installed."""
    if python is None:
        if importlib.util.find_spec("dynamo") is None:
            return None
        python = sys.executable
    code = f"WORKERS, BLOCK, ROUNDS, SIZES = {WORKERS}, {BLOCK_TOKENS}, {rounds}, {SIZES}\n{DYNAMO}"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, env=os.environ | {"DYN_LOG": "error"})
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise ValueError(f"Dynamo's selection failed: {ran.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


def match_us(rounds: int = 200) -> float:
    """A prompt of 131,072 tokens, all of whose blocks are known, among 200,000 others."""
    from runtime.block_hash import hash_blocks
    from runtime.prefix_index import Medium

    index = conductor().state.index
    tokens = np.random.default_rng(2).integers(0, 150_000, 131_072, dtype=np.uint32)
    index.store(0, Medium.GPU, hash_blocks(tokens, BLOCK_TOKENS))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        numbers, _ = index.find_tokens(tokens)
        taken.append(time.perf_counter() - start)
        assert len(numbers) == len(tokens) // BLOCK_TOKENS
    return round(median(taken) * 1e6, 1)


def events_per_second(seconds_: float = 3.0) -> float:
    """KV blocks per second stored and removed, from payload to index, with a decision every 5 ms between them."""
    import msgspec

    from runtime.kv_events import decode, new_batch
    from runtime.prefix_index import Tally
    from runtime.request import Request

    made = conductor()
    rng = np.random.default_rng(3)
    payloads = []
    for event in range(64):  # single blocks and long chains, as prefill and decode make them
        count = 1 if event % 2 else 64
        hashes = rng.integers(0, 2**63, count).tolist()
        tokens = rng.integers(0, 150_000, count * BLOCK_TOKENS).tolist()
        stored = ["BlockStored", hashes, None, tokens, BLOCK_TOKENS, None, "GPU"]
        payloads.append(msgspec.msgpack.encode([0.0, [stored], 0]))
        payloads.append(msgspec.msgpack.encode([0.0, [["BlockRemoved", hashes, "GPU"]], 0]))
    tally, room = Tally(), new_batch()
    prompt = prompts(PROMPT_TOKENS, 1)[0]
    start = turn = time.perf_counter()
    decided = i = 0
    while (now := time.perf_counter()) - start < seconds_:  # a payload stores, the next one removes
        made.state.index.apply(i // 2 % 8, decode(payloads[i % len(payloads)], into=room), tally)
        i += 1
        if now - turn >= 0.005:
            turn = now
            decided += 1
            made.schedule(Request(str(decided), tokens=prompt))
            made.finished(str(decided), output_tokens=10)
    return round((tally["stored"] + tally["removed"]) / (time.perf_counter() - start))


# --- over the wire ----------------------------------------------------------------------------------------------------


async def echo_server() -> None:
    """A grpc.aio server that answers every request of a stream with itself; says its port."""
    import grpc

    from runtime.proto import conductor_pb2 as pb

    async def echo(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request

    handler = grpc.stream_stream_rpc_method_handler(
        echo, pb.ScheduleRequest.FromString, pb.ScheduleRequest.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"PORT {port}", flush=True)
    await server.wait_for_termination()


async def noop_picker() -> None:
    """An endpoint picker that always picks the address it is told (the last argument); says its port."""
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from runtime.ext_proc import SERVICE

    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc  # isort: skip

    address = sys.argv[-1]

    async def process(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        body = bytearray()
        async for message in requests:
            kind = message.WhichOneof("request")
            if kind == "request_headers" and not message.request_headers.end_of_stream:
                continue
            if kind == "request_body":
                body += message.request_body.body
                if not message.request_body.end_of_stream:
                    continue
            answer = ext_proc.ProcessingResponse()
            answer.request_headers.response.clear_route_cache = True
            option = answer.request_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = "x-gateway-destination-endpoint", address.encode()
            answer.dynamic_metadata["envoy.lb"] = {"x-gateway-destination-endpoint": address}
            yield answer
            for start in range(0, len(body), 62_000):
                chunk = ext_proc.ProcessingResponse()
                streamed = chunk.request_body.response.body_mutation.streamed_response
                streamed.body = bytes(body[start : start + 62_000])
                streamed.end_of_stream = start + 62_000 >= len(body)
                yield chunk
            return

    handler = grpc.stream_stream_rpc_method_handler(
        process, ext_proc.ProcessingRequest.FromString, ext_proc.ProcessingResponse.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    await healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"PORT {port}", flush=True)
    await server.wait_for_termination()


class Server:
    """A server of this file, or the sidecar, in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        own = arguments[0].startswith("--serve-")
        command = [sys.executable, "-m", "benchmarks.sidecar" if own else "serve_policy", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE if own else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if own else subprocess.PIPE,
            text=True,
        )
        self.port = self._wait(own)

    def _wait(self, own: bool) -> int:
        lines = self.process.stdout if own else self.process.stderr
        assert lines is not None
        port, said = 0, []
        for line in lines:
            said.append(line)
            if line.startswith("PORT "):
                return int(line.split()[1])
            if " on 127.0.0.1:" in line:
                port = int(line.rsplit(":", 1)[1])
            if " decides for " in line:
                return port
        raise ValueError("a server did not start: " + "".join(said[-3:]))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


async def messages_per_second(port: int, method: str, count: int, check: Callable[[Any], bool]) -> float:
    """Requests per second on one stream, with `WINDOW` of them on their way; all answers must pass a check."""
    import grpc

    from runtime.proto import conductor_pb2 as pb

    given = prompts(PROMPT_TOKENS, 64)
    messages = [
        pb.ScheduleRequest(tokens=prompt.tobytes(), unreported=True, lease_s=1.0).SerializeToString()
        for prompt in given
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        # bytes in, bytes out: the client costs the same for both
        call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)(None)
        room = asyncio.Semaphore(WINDOW)

        async def send() -> None:
            for i in range(count):
                await room.acquire()
                await call.write(messages[i % len(messages)])
            await call.done_writing()

        sending = asyncio.create_task(send())
        start = time.perf_counter()
        answers = []
        while (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            answers.append(answer)
            room.release()
        taken = time.perf_counter() - start
        await sending
    if len(answers) != count or not all(check(answer) for answer in answers):
        raise ValueError(f"{method}: {len(answers)} answers to {count} messages, or one that is no assignment")
    return count / taken


def stream_rates(rounds: int = 5, count: int = 3000) -> dict[str, float]:
    """Messages per second of the echo and of the sidecar, in turns; medians, and the median of their ratios.

    Nobody reports: requests end as predicted, some 50 ms after they were assigned, so that dozens are in flight.
    """
    from runtime.proto import conductor_pb2 as pb
    from runtime.snapshot import capture, encode, write

    def assigned(answer: bytes) -> bool:
        return bool(pb.ScheduleResponse.FromString(answer).HasField("assignment"))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        workers = [{k: v for k, v in worker.items() if k != "address"} for worker in CLUSTER["workers"]]
        nodes = [{"count": WORKERS // 2, "hardware": SWIFT}]
        swift = CLUSTER | {"prefill": nodes, "decode": nodes, "prior_decode_s": 0.05, "workers": workers}
        path.write_text(yaml.safe_dump(swift))
        index = Path(folder) / "index.npz"  # with it, the sidecar takes over what was expected of a request
        write(index, encode(capture(conductor(cluster=swift).state, {})))
        serve = (
            "--cluster",
            str(path),
            "--grpc",
            "127.0.0.1:0",
            "--blocks",
            str(2 * INDEX_BLOCKS),
            "--snapshot",
            str(index),
        )
        with Server("--serve-echo") as echo, Server(*serve) as sidecar:
            pairs = []
            for i in range(rounds + 1):
                pair = [
                    asyncio.run(messages_per_second(echo.port, "/echo/Stream", count, bool)),
                    asyncio.run(messages_per_second(sidecar.port, STREAM, count, assigned)),
                ]
                if i:
                    pairs.append(pair)
    return {
        "echo_per_second": round(median([pair[0] for pair in pairs])),
        "stream_per_second": round(median([pair[1] for pair in pairs])),
        "stream_vs_echo": round(median([pair[1] / pair[0] for pair in pairs]), 3),
    }


async def envoy_added(rounds: int = 20, each: int = 15) -> dict[str, float]:
    """Median milliseconds that the two endpoint pickers add to a request through Envoy, in turns."""
    import aiohttp

    from tests.runtime.backends import Backend
    from tests.runtime.envoy import Envoy

    async with Backend() as backend:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            workers = [
                {"id": "p0", "role": "prefill", "address": backend.address},
                *({"id": f"d{i}", "role": "decode", "address": backend.address} for i in range(WORKERS - 1)),
            ]
            path.write_text(yaml.safe_dump(CLUSTER | {"workers": workers}))
            serve = ("--cluster", str(path), "--grpc", "127.0.0.1:0", "--ext-proc", "127.0.0.1:0")
            body = json.dumps({"model": "m", "prompt": prompts(PROMPT_TOKENS, 1)[0].tolist(), "max_tokens": 1}).encode()
            for name in ("a", "b"):
                (Path(folder) / name).mkdir()
            with Server("--serve-picker", backend.address) as noop, Server(*serve) as sidecar:
                async with (
                    Envoy(Path(folder) / "a", noop.port) as plain,
                    Envoy(Path(folder) / "b", sidecar.port) as ours,
                    aiohttp.ClientSession() as session,
                ):
                    taken: dict[str, list[float]] = {}
                    urls = {"direct": f"http://{backend.address}", "noop": plain.url, "ours": ours.url}
                    for i in range(rounds + 1):
                        for name, url in urls.items():
                            for _ in range(each):
                                start = time.perf_counter()
                                async with session.post(url + "/v1/completions", data=body) as answer:
                                    await answer.read()
                                    if answer.status != 200:
                                        raise ValueError(f"{name}: HTTP {answer.status}")
                                if i:
                                    taken.setdefault(name, []).append(time.perf_counter() - start)
    direct = median(taken["direct"])
    added = {name: median(taken[name]) - direct for name in ("noop", "ours")}
    return {
        "envoy_noop_ms": round(added["noop"] * 1e3, 3),
        "envoy_ours_ms": round(added["ours"] * 1e3, 3),
        "envoy_vs_noop": round(added["ours"] / added["noop"], 3),
    }


def main() -> None:
    if "--serve-echo" in sys.argv:
        asyncio.run(echo_server())
        return
    if "--serve-picker" in sys.argv:
        asyncio.run(noop_picker())
        return
    options = parser(__doc__ or "")
    options.add_argument("--only", default=",".join(PARTS), help="parts to run (default: %(default)s)")
    options.add_argument("--dynamo-python", metavar="FILE", help="an interpreter that has ai-dynamo-runtime")
    given = options.parse_args()
    wanted = given.only.split(",")
    if not set(wanted) <= set(PARTS):
        raise ValueError(f"--only: expected some of {', '.join(PARTS)}, found {given.only}")
    result: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "decision": lambda: {"decision_us": decision_us("conductor+predictive")},
        "learned": lambda: {"decision_us_learned": learned_us()},
        "dynamo": lambda: {
            "decision_us_list": decision_us("conductor+predictive", as_list=True),
            "dynamo_us": dynamo_us(given.dynamo_python),
        },
        "match": lambda: {"match_128k_us": match_us()},
        "events": lambda: {"kv_blocks_per_second": events_per_second()},
        "stream": stream_rates,
        "envoy": lambda: asyncio.run(envoy_added()),
    }
    for name in PARTS:
        if name in wanted:
            print(f"{name} ...", file=sys.stderr)
            result |= parts[name]()
    report(result, given.json)


if __name__ == "__main__":
    entry(main)
