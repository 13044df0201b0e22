"""Warm restarts: what a sidecar knows of its workers, in one file, or handed to a replica that starts.

The prefix index with each worker's place in its stream of KV events, the moving means, and the fitted latencies. What
is in flight is not in it: its clients ask again, or its lease would have ended. A `.npz` file; nothing in it is code.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from .conductor import Conductor
from .live_state import LiveState
from .proto import conductor_pb2 as pb
from .proto import conductor_pb2_grpc

FORMAT = 1
MEANS = ("expected_output_tokens", "expected_decode_s")
LARGEST = 4 << 30
_writing = threading.Lock()  # one file at a time: they are put together under the same name


Cursor = tuple[int, int]
"""A place in a worker's KV events: `KvEventSubscriber.last_seq` and `last_mark`."""


class SnapshotError(ValueError):
    """A snapshot that cannot be restored; the message says why."""


def capture(state: LiveState, cursors: dict[str, Cursor], calibration: dict[str, Any] | None = None) -> dict[str, Any]:
    """Copies of what is in a snapshot, for `encode`.

    Args:
        cursors: by worker id, number and mark of the last batch of KV events that is in the index.
        calibration: `Calibration.state()`, of plain values.
    """
    meta = {
        "format": FORMAT,
        "block_tokens": state.block_tokens,
        "prefills": [worker.id for worker in state.prefills],
        "cursors": cursors,
        "means": {name: float(state.clock[name]) for name in MEANS},
        "calibration": calibration,
    }
    return {"meta": meta} | {f"index.{name}": array for name, array in state.index.snapshot().items()}


def encode(captured: dict[str, Any]) -> bytes:
    """A snapshot. Takes a while: not for the event loop."""
    out = io.BytesIO()
    meta = np.frombuffer(json.dumps(captured["meta"]).encode(), np.uint8)
    np.savez(out, **captured | {"meta": meta})
    return out.getvalue()


def write(path: Path, data: bytes) -> None:
    """Put a snapshot in place so that a reader, or a crash, never sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    with _writing:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


def restore(conductor: Conductor, data: bytes) -> dict[str, Any]:
    """Restore a snapshot into a conductor that has just been made; returns its `cursors` and `calibration`.

    Workers that are gone since are left out, new ones start empty.

    Raises:
        SnapshotError: it is damaged, or of another block size.
    """
    state = conductor.state
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            meta = json.loads(file["meta"].tobytes())
            arrays = {name.removeprefix("index."): file[name] for name in file.files if name.startswith("index.")}
        if meta["format"] != FORMAT:
            raise SnapshotError(f"format {meta['format']!r}, expected {FORMAT}")
        if meta["block_tokens"] != state.block_tokens:
            raise SnapshotError(f"blocks of {meta['block_tokens']} tokens, the cluster has {state.block_tokens}")
        names = [str(name) for name in meta["prefills"]]
        cursors = {str(name): (int(sequence), int(mark)) for name, (sequence, mark) in meta["cursors"].items()}
        means = {name: float(meta["means"][name]) for name in MEANS}
    except SnapshotError:
        raise
    except Exception as error:  # whatever the readers of zip, npy and JSON make of it
        raise SnapshotError(f"damaged: {type(error).__name__}: {error}") from None
    try:
        state.restore_index(arrays, names)
    except ValueError as error:
        raise SnapshotError(str(error)) from None
    for name, mean in means.items():
        if math.isfinite(mean) and mean > 0:
            state.clock[name] = mean
    return {"cursors": cursors, "calibration": meta.get("calibration")}


def read(path: Path) -> bytes | None:
    """The snapshot at `path`; None where there is none yet.

    Raises:
        SnapshotError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(str(error)) from None


async def fetch(peer: str, credentials: grpc.ChannelCredentials | None = None, timeout_s: float = 30.0) -> bytes:
    """The snapshot of another sidecar (host:port).

    Raises:
        SnapshotError: it cannot be reached, or sends too much.
    """
    options = [("grpc.max_receive_message_length", 8 << 20)]
    channel = (
        grpc.aio.secure_channel(peer, credentials, options) if credentials else grpc.aio.insecure_channel(peer, options)
    )
    chunks = bytearray()
    try:
        async with channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            async for chunk in stub.Snapshot(pb.SnapshotRequest(), timeout=timeout_s):
                chunks += chunk.data
                if len(chunks) > LARGEST:
                    raise SnapshotError(f"{peer} sends more than {LARGEST} bytes")
    except grpc.aio.AioRpcError as error:
        raise SnapshotError(f"{peer}: {error.code().name}: {error.details()}") from None
    return bytes(chunks)
