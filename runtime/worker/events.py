"""KV events over ZMQ as vLLM publishes them (vllm/distributed/kv_events.py): a PUB socket, and a ROUTER for replays."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from .kvcache import Cleared, Event, Removed, Stored, Tier

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
BUFFERED_BATCHES = 10_000  # as many as vLLM keeps for replays
_HWM = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes what comes to and goes from the cache.

    Attributes:
        endpoint, replay_endpoint: as bound, with their ports.

    Args:
        endpoint, replay_endpoint: tcp://HOST:PORT; port 0 takes a free one.

    Raises:
        OSError: an endpoint that cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, block_tokens: int) -> None:
        self.topic = topic
        self.block_tokens = block_tokens
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_BATCHES)
        self._events, self._replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = _bind(self._events, endpoint)
            self.replay_endpoint = _bind(self._replays, replay_endpoint)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="kv-event-replays", daemon=True)
        self._thread.start()

    def source(self) -> dict[str, Any]:
        """What vLLM's `/kv_event_sources` says of a publisher."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFERED_BATCHES,
            "hwm": _HWM,
            "max_queue_size": _HWM,
            "topic": self.topic,
        }

    def publish(self, events: Sequence[Event]) -> None:
        """One batch; nothing for no events. From one thread only."""
        if not events:
            return
        payload = msgspec.msgpack.encode([time.time(), _merged(events, self.block_tokens), 0])
        with self._lock:
            number, self._sequence = self._sequence, self._sequence + 1
            self._buffer.append((number, payload))
        self._events.send_multipart([self.topic.encode(), number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._events.close(0)
        self._replays.close(0)
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        while not self._stopping.is_set():
            if not self._replays.poll(100):
                continue
            frames = self._replays.recv_multipart()
            if len(frames) < 2 or len(frames[-1]) != 8:
                continue  # not a request for a replay
            start = int.from_bytes(frames[-1], "big")
            with self._lock:
                wanted = [each for each in self._buffer if each[0] >= start]
            for number, payload in wanted:
                self._replays.send_multipart([frames[0], b"", number.to_bytes(8, "big"), payload])
            self._replays.send_multipart([frames[0], b"", _END, b""])


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HWM)
    try:
        socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{endpoint}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _merged(events: Sequence[Event], block_tokens: int) -> list[dict[str, Any]]:
    """Events in vLLM's form; blocks that follow each other become one event."""
    merged: list[dict[str, Any]] = []
    for event in events:
        last = merged[-1] if merged else {}
        if isinstance(event, Cleared):
            merged.append({"type": "AllBlocksCleared"})
        elif isinstance(event, Removed):
            if last.get("type") == "BlockRemoved" and last["medium"] == MEDIA[event.tier]:
                last["block_hashes"].append(event.hash)
            else:
                merged.append({"type": "BlockRemoved", "block_hashes": [event.hash], "medium": MEDIA[event.tier]})
        else:
            _add_stored(merged, last, event, block_tokens)
    return merged


def _add_stored(merged: list[dict[str, Any]], last: dict[str, Any], event: Stored, block_tokens: int) -> None:
    block, medium = event.block, MEDIA[event.tier]
    keys = [block.extra] if block.extra else None
    if (
        last.get("type") == "BlockStored"
        and last["medium"] == medium
        and block.parent is not None
        and last["block_hashes"][-1] == block.parent
    ):
        last["block_hashes"].append(block.hash)
        last["token_ids"].extend(block.tokens)
        last["extra_keys"].append(keys)
        return
    merged.append(
        {
            "type": "BlockStored",
            "block_hashes": [block.hash],
            "parent_block_hash": block.parent,
            "token_ids": list(block.tokens),
            "block_size": block_tokens,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": [keys],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    )
