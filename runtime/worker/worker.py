"""A whole worker: model, engine, transfers, events and HTTP put together, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from aiohttp import web

from .blocks import BlockStore
from .engine import Engine
from .events import EventPublisher
from .exchange import Exchange
from .kvcache import Tier
from .metrics import WorkerMetrics
from .model import ModelError, PagedModel, TinyModel, load_model
from .openai import Limits
from .pool import LIBRARIES, Pool
from .server import Server
from .text import Text, TextError, load_tokenizer
from .transfer import TransferServer

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class OptionError(ValueError):
    """An option that cannot be; the message names it."""


@dataclass(frozen=True)
class Options:
    """As the command line has them (`python -m runtime.worker --help`)."""

    role: str
    http: str
    transfer: str
    advertise: str
    kv_events: str
    kv_replay: str
    kv_topic: str
    model: str
    served_model_name: str
    dtype: str
    device: str
    threads: int
    block_size: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    disk_path: str
    max_num_seqs: int
    max_num_batched_tokens: int
    keep_s: float
    transfer_timeout_s: float
    store: str
    store_blocks: int
    drain_s: float
    tiny: TinyModel


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OptionError, ModelError, TextError, OSError: it cannot start; the message is one line.
    """
    if options.max_num_seqs > options.max_num_batched_tokens:
        raise OptionError("--max-num-seqs: every sequence needs a token of --max-num-batched-tokens")
    with _bound(options.http, "--http") as http:  # first: a port in use is told before a model is loaded
        torch.set_num_threads(options.threads)
        device = _device(options.device)
        dtype = DTYPES[options.dtype]
        if options.model == "tiny":
            model, text = options.tiny.build(dtype), Text(None)
        else:
            folder = Path(options.model)
            model, text = load_model(folder, dtype), load_tokenizer(folder)
        paged = PagedModel(model, device, options.block_size)
        asyncio.run(_serve(options, paged, text, http))


async def _serve(options: Options, model: PagedModel, text: Text, http: socket.socket) -> None:
    name = options.served_model_name or Path(options.model).name
    capacities = (options.device_blocks, options.host_blocks, options.disk_blocks)
    folder = Path(options.disk_path or tempfile.gettempdir())
    store = BlockStore(model.block_shape, capacities, next(model.model.parameters()).dtype, model.device, folder)
    metrics = WorkerMetrics(name)
    metrics.cache_config(options.block_size, *capacities)
    limits = Limits(
        context=min(model.context, options.device_blocks * options.block_size),
        vocabulary=model.vocabulary,
        block_tokens=options.block_size,
        pulls=options.role != "prefill",
        hands_over=options.role != "decode",
        pool=bool(options.store),
    )
    async with contextlib.AsyncExitStack() as ends:  # the last to start is the first to end
        publisher = None
        if options.kv_events:
            replay = options.kv_replay or f"{options.kv_events.rpartition(':')[0]}:0"
            events = f"tcp://{options.kv_events}"
            publisher = EventPublisher(events, f"tcp://{replay}", options.kv_topic, options.block_size)
            ends.callback(publisher.close)
        pool = None
        if options.store:
            pool = _pool(options, model.fingerprint, store.block_bytes)
            ends.callback(pool.close)
        engine = Engine(
            model,
            store,
            capacities,
            metrics,
            publisher,
            max_sequences=options.max_num_seqs,
            step_tokens=options.max_num_batched_tokens,
            keep_s=options.keep_s,
        )
        if limits.hands_over:
            engine.pool = pool
        _watch(metrics, engine)
        engine.start()
        ends.callback(engine.stop)
        exchange = Exchange(engine, options.transfer_timeout_s, pool)
        transfers = TransferServer(exchange.lend, options.transfer_timeout_s)
        host, port = _host_port(options.transfer, "--transfer")
        port = await transfers.start(host, port)
        ends.push_async_callback(transfers.close)
        ends.push_async_callback(exchange.close)
        server = Server(engine, exchange, publisher, text, name, limits, options.advertise or host, port)
        stopping = _stop_signals()
        runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        ends.push_async_callback(runner.cleanup)
        await web.SockSite(runner, http).start()
        print(json.dumps(_addresses(options, server, publisher, http)), flush=True)
        await stopping.wait()
        await _drain(server, options.drain_s)


def _pool(options: Options, fingerprint: int, block_bytes: int) -> Pool:
    host = options.advertise or _host_port(options.transfer, "--transfer")[0]
    try:
        return Pool(options.store, host, fingerprint, block_bytes, options.store_blocks)
    except ImportError as error:
        needed = f"pip install 'conductor-gym[store]', and {LIBRARIES}"
        raise OptionError(f"--store: {error}; it needs {needed}") from None


async def _drain(server: Server, drain_s: float) -> None:
    """No new requests; those in flight, and KV that is still to be pulled, have some time."""
    server.draining = True
    log.info("draining: %d requests in flight, KV of %d to be pulled", server.in_flight, len(server.engine.kept))
    deadline = asyncio.get_running_loop().time() + drain_s
    while (server.in_flight or server.engine.kept) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


def _stop_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second one ends the process as usual."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


def _watch(metrics: WorkerMetrics, engine: Engine) -> None:
    cache = engine.cache
    metrics.watch("num_requests_running", "Sequences in the steps", lambda: len(engine.running))
    metrics.watch(
        "num_requests_waiting",
        "Requests that are not in the steps yet",
        lambda: len(engine.waiting) + len(engine.pulling),
    )
    metrics.watch(
        "kv_cache_usage_perc",
        "Share of the device blocks in use",
        lambda: cache.in_use() / cache.capacities[Tier.DEVICE],
    )
    metrics.watch("kv_handovers_kept", "Requests whose KV waits to be pulled", lambda: len(engine.kept))
    for tier in Tier:
        name = tier.name.lower()
        metrics.watch(f"kv_{name}_blocks_in_use", f"Blocks in use, {name}", partial(cache.in_use, tier))
        metrics.watch(f"kv_{name}_blocks_cached", f"Idle blocks, {name}", cache.idle[tier].__len__)


def _addresses(
    options: Options, server: Server, publisher: EventPublisher | None, http: socket.socket
) -> dict[str, str]:
    """What others need to know, as the fields of a cluster file have it."""
    host, port = http.getsockname()[:2]
    at = f"{options.advertise or host}:{port}"
    where = {
        "role": options.role,
        "model": server.name,
        "url": f"http://{at}",
        "address": at,
        "transfer": f"{server.transfer_host}:{server.transfer_port}",
        "engine_id": server.engine.id,
    }
    if publisher is not None:
        for name, endpoint in (("kv_events", publisher.endpoint), ("kv_replay", publisher.replay_endpoint)):
            bound, _, number = endpoint.removeprefix("tcp://").rpartition(":")
            where[name] = f"tcp://{options.advertise or bound}:{number}"
    return where


def _bound(where: str, option: str) -> socket.socket:
    host, port = _host_port(where, option)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OptionError(f"{option} {where}: {error.strerror}") from None
    return bound


def _host_port(where: str, option: str) -> tuple[str, int]:
    host, colon, port = where.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise OptionError(f"{option}: expected HOST:PORT, found {where!r}")
    return host.strip("[]"), int(port)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device: expected auto, cpu or cuda[:N], found {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device: there is no CUDA device")
    return device


FAULTS = (OptionError, ModelError, TextError, OSError)
