"""Real workers on one machine: processes of an engine, prefill and decode apart, and the cluster file that has them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from rich.console import Console

from .tiny_model import KV_BYTES_PER_TOKEN, LAYERS, write_model
from .worker.pool import LIBRARIES
from .workers import Connector, Role

MODEL = "tiny"
MASTER = "mooncake_master"
START_S = 600.0

err = Console(stderr=True)


class WorkersError(RuntimeError):
    """Workers that cannot be set up or started; the message is for the user."""


class LocalWorkers(ABC):
    """Running workers of an engine: p0 .., d0 .. and, for those that do both, b0 ...; all have the same tiny model.

    Args:
        name: of the cluster. prefill, decode, both: how many workers. connector: how KV moves; with store, a master
            of Mooncake Store is started beside them.
        kv_tokens: what a worker's KV cache holds. block_tokens: of a KV block. python: of the environment they run in.
        folder: for the model and logs; its own where none is given, removed in the end.

    Attributes:
        cluster_file: lists them.
    """

    def __init__(
        self,
        name: str,
        prefill: int,
        decode: int,
        both: int,
        *,
        connector: Connector,
        kv_tokens: int,
        block_tokens: int,
        python: Path,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.connector = connector
        self.kv_tokens = kv_tokens
        self.block_tokens = block_tokens
        self.python = python
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="conductor-workers-")) if folder is None else folder
        self.roles = (
            {f"p{i}": Role.PREFILL for i in range(prefill)}
            | {f"d{i}": Role.DECODE for i in range(decode)}
            | {f"b{i}": Role.BOTH for i in range(both)}
        )
        self.ports = {name: free_ports(4) for name in self.roles}  # HTTP, KV transfer, KV events, replay
        self.master_ports = free_ports(2)  # RPC, metrics
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster_file = self.folder / "cluster.yaml"

    @abstractmethod
    def command(self, name: str) -> list[str | Path]:
        """What starts a worker."""

    @abstractmethod
    def environment(self, name: str) -> dict[str, str]:
        """Variables of the environment that a worker has beside one's own."""

    def prepare(self) -> None:
        """What the workers need before they start."""
        write_model(self.folder / "model")

    @property
    def node(self) -> dict[str, Any]:
        """A node's hardware in the cluster file. Its times are rough; the sidecar fits them to what it sees."""
        return {
            "source": "a core of a laptop, roughly",
            "prefill": {"base_s": 0.02, "linear_s": 1.5e-4},
            "decode": {"base_s": 0.006, "per_request_s": 1e-3, "per_token_s": 1e-7},
            "nic_bytes_per_s": 5e8,
            "h2d_bytes_per_s": 1e11,  # there is only one memory
            "join_bytes_per_s": 1e11,
            "device_kv_tokens": self.kv_tokens,
            "host_kv_tokens": self.kv_tokens,
            "decode_kv_tokens": self.kv_tokens,
            "max_batch": 64,
        }

    def start(self) -> None:
        """Start them all; returns when they are healthy.

        Raises:
            WorkersError: they are not set up, or one of them does not come up.
        """
        self.prepare()
        self.cluster_file.write_text(yaml.safe_dump(self.cluster(), sort_keys=False))
        if self.connector == Connector.STORE:
            self._start_master()
        for name in self.roles:
            self.launch(name)
        with err.status("") as status:
            started_s = time.monotonic()
            for name in self.roles:
                while not self.healthy(name):
                    self._check(name, time.monotonic() - started_s)
                    up = ", ".join(each for each in self.roles if self.healthy(each)) or "none"
                    status.update(f"workers start ({time.monotonic() - started_s:.0f} s; up: {up})")
                    time.sleep(0.5)

    def launch(self, name: str) -> None:
        """Start one worker, and do not wait for it."""
        self._launch(name, self.command(name), self.environment(name))

    @property
    def master(self) -> str:
        """host:port of Mooncake Store's master."""
        return f"127.0.0.1:{self.master_ports[0]}"

    def _start_master(self) -> None:
        rpc, metrics = self.master_ports
        faces = {"rpc_address": "127.0.0.1", "rpc_port": rpc, "metrics_host": "127.0.0.1", "metrics_port": metrics}
        options = [f"--{name}={value}" for name, value in faces.items()]
        self._launch(MASTER, [self.python, "-m", "mooncake.cli", *options], {})
        started_s = time.monotonic()
        while not listens(self.master):
            self._check(MASTER, time.monotonic() - started_s)
            time.sleep(0.05)

    def _launch(self, name: str, command: list[str | Path], environment: dict[str, str]) -> None:
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=os.environ | environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it may have children; they end together
            )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, name: str) -> Path:
        """Where a worker's output is."""
        return self.folder / f"{name}.log"

    def address(self, name: str) -> str:
        """host:port of a worker."""
        return f"127.0.0.1:{self.ports[name][0]}"

    def healthy(self, name: str) -> bool:
        """Whether a worker answers."""
        return is_healthy(f"http://{self.address(name)}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a worker and its engine, at once by default."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        except ProcessLookupError:
            process.wait()

    def close(self) -> None:
        """End them all, the master last."""
        for name in reversed(list(self.processes)):
            self.kill(name)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cluster(self) -> dict[str, Any]:
        """What the cluster file says."""
        workers = []
        for name, role in self.roles.items():
            _, _, kv_events, kv_replay = self.ports[name]
            row = {"id": name, "role": role.value, "address": self.address(name)}
            if role != Role.DECODE:
                row |= {"kv_events": f"tcp://127.0.0.1:{kv_events}", "kv_replay": f"tcp://127.0.0.1:{kv_replay}"}
            if role != Role.BOTH:
                row["connector"] = self.connector.value
            workers.append(row)
        return {
            "name": self.name,
            "block_tokens": self.block_tokens,
            "model": {"layers": LAYERS, "kv_bytes_per_token": KV_BYTES_PER_TOKEN},
            "slo": {"ttft_s": 5.0, "tbt_s": 0.5},
            "transfer_latency_s": 0.01,
            "prior_output_tokens": 16,
            "prior_decode_s": 0.3,
            "prefill": [{"count": sum(role != Role.DECODE for role in self.roles.values()), "hardware": self.node}],
            "decode": [{"count": sum(role != Role.PREFILL for role in self.roles.values()), "hardware": self.node}],
            "workers": workers,
        }

    def _check(self, name: str, waited_s: float) -> None:
        ended = self.processes[name].poll()
        if ended is None and waited_s < START_S:
            return
        how = f"is not up after {START_S:g} s" if ended is None else f"has ended with status {ended}"
        tail = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-15:])
        what, needs = (name, f"\nMooncake Store needs {LIBRARIES}") if name == MASTER else (f"worker {name}", "")
        raise WorkersError(f"{what} {how}:\n{tail}{needs}")


def is_healthy(url: str) -> bool:
    """Whether a server answers at /health."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def listens(address: str) -> bool:
    """Whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
