"""Workers that are real as far as a sidecar can tell: KV events over ZMQ with replay, metrics over HTTP."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

import msgspec
import numpy as np
import zmq

from runtime.block_hash import hash_blocks

BLOCK = 16


class Publisher:
    """Publishes KV events as Mooncake does, and replays them. `resident`: hashes of what it says it has.

    After `stop`, `start` is the same process again in other clothes: same addresses, numbers from 0, nothing cached.
    """

    def __init__(self, ports: tuple[int, int] | None = None, kept: int = 10_000) -> None:
        self.context = zmq.Context()
        self.ports = ports or (0, 0)
        self.kept = kept
        self.start()

    def start(self) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self.sequence = -1
        self.resident: set[int] = set()
        self._lock = threading.Lock()
        self._events, self._replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.SNDHWM, 0)
        self.ports = self._bind(self._events, self.ports[0]), self._bind(self._replay, self.ports[1])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int) -> int:
        socket.setsockopt(zmq.LINGER, 0)
        if not port:
            return int(socket.bind_to_random_port("tcp://127.0.0.1"))
        deadline = time.monotonic() + 20.0
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:  # of before, not yet closed
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return port

    @property
    def endpoints(self) -> dict[str, str]:
        """Fields of a worker."""
        return {"kv_events": f"tcp://127.0.0.1:{self.ports[0]}", "kv_replay": f"tcp://127.0.0.1:{self.ports[1]}"}

    def publish(
        self, stored: np.ndarray | None = None, removed: list[int] | None = None, *, silent: bool = False
    ) -> None:
        """Blocks that came and went, by hash; `silent`: the message is lost, only a replay has it."""
        events = []
        for kind, given in (("stored", stored), ("removed", removed)):
            if given is not None and len(given):
                hashes = [int(value) for value in given]
                events.append({"event_type": kind, "block_size": BLOCK, "medium": "gpu", "seq_hashes": hashes})
                (self.resident.update if kind == "stored" else self.resident.difference_update)(hashes)
        with self._lock:
            self.sequence += 1
            payload = msgspec.msgpack.encode([time.time(), events])
            self.buffer = [*self.buffer[-self.kept + 1 :], (self.sequence, payload)]
            if not silent:
                self._events.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])

    def send(self, *frames: bytes) -> None:
        """Anything at all."""
        with self._lock:
            self._events.send_multipart(list(frames))

    def again(self, back: int) -> None:
        """The last batch but `back` once more."""
        sequence, payload = self.buffer[-1 - back]
        self.send(b"kv", sequence.to_bytes(8, "big"), payload)

    def prompt(self, length: int, first: int, *, silent: bool = False) -> np.ndarray:
        """Publish the blocks of a prompt; its hashes."""
        hashes = hash_blocks(np.arange(first, first + length, dtype=np.uint32), BLOCK)
        self.publish(hashes, silent=silent)
        return hashes

    def _answer(self) -> None:
        while not self._stopping.is_set():
            if not self._replay.poll(50):
                continue
            frames = self._replay.recv_multipart()
            start = int.from_bytes(frames[-1], "big")
            with self._lock:
                wanted = [each for each in self.buffer if each[0] >= start]
            for sequence, payload in wanted:
                self._replay.send_multipart([frames[0], b"", sequence.to_bytes(8, "big"), payload])
            self._replay.send_multipart([frames[0], b"", (-1).to_bytes(8, "big", signed=True), b""])

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._events.close(0)
        self._replay.close(0)

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)


class Engine:
    """The metrics of an engine at `address`. `mode`: well, hang, garbage."""

    def __init__(self) -> None:
        self.mode = "well"
        self.running = self.waiting = 0
        self.port = 0
        self._released = threading.Event()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if engine.mode == "hang":
                    engine._released.wait(60)
                    return
                lines = [f"vllm:num_requests_{name} {getattr(engine, name)}" for name in ("running", "waiting")]
                body = "\n".join([*lines, "vllm:kv_cache_usage_perc 0.1", ""]).encode()
                if engine.mode == "garbage":
                    body = bytes(range(256)) * 50
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens there any more."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._released = threading.Event()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
