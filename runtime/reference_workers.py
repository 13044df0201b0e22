"""Reference workers on one machine (`runtime.worker`): real prefill and decode where vLLM is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .local_workers import MODEL, LocalWorkers, WorkersError
from .workers import Connector, Role

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TOKENS = 32  # as vLLM's, so that the two can take each other's place
KEEP_S = 30.0  # how long a prefill worker keeps KV that nobody fetches


class ReferenceWorkers(LocalWorkers):
    """Reference workers with the tiny model of `runtime.tiny_model`.

    Args:
        prefill, decode, both, kv_tokens, folder: as `LocalWorkers` has them. Host memory holds as much again.
        connector: nixl, or store for Mooncake Store, to which those that prefill lend as much memory again.
    """

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        *,
        connector: Connector = Connector.NIXL,
        kv_tokens: int = 32768,
        folder: Path | None = None,
    ) -> None:
        if connector not in (Connector.NIXL, Connector.STORE):
            raise WorkersError(f"connector: the reference worker has nixl and store, found {connector}")
        super().__init__(
            "reference",
            prefill,
            decode,
            both,
            connector=connector,
            kv_tokens=kv_tokens,
            block_tokens=BLOCK_TOKENS,
            python=Path(sys.executable),
            folder=folder,
        )

    def prepare(self) -> None:
        """The model.

        Raises:
            WorkersError: what the worker needs is not installed.
        """
        extras = {"torch": "worker", "transformers": "worker"}
        if self.connector == Connector.STORE:
            extras["mooncake"] = "store"
        for name, extra in extras.items():
            if find_spec(name) is None:
                raise WorkersError(f"the reference worker needs {name}: pip install 'conductor-gym[{extra}]'")
        super().prepare()

    def command(self, name: str) -> list[str | Path]:
        """`python -m runtime.worker`."""
        http, transfer, kv_events, kv_replay = (f"127.0.0.1:{port}" for port in self.ports[name])
        options = {
            "role": self.roles[name].value,
            "http": http,
            "transfer": transfer,
            "model": self.folder / "model",
            "served-model-name": MODEL,
            "block-size": self.block_tokens,
            "device-blocks": self.kv_tokens // self.block_tokens,
            "host-blocks": self.kv_tokens // self.block_tokens,
            "keep-s": KEEP_S,
        }
        if self.roles[name] != Role.DECODE:
            options |= {"kv-events": kv_events, "kv-replay": kv_replay}
        if self.connector == Connector.STORE:
            lent = 0 if self.roles[name] == Role.DECODE else self.kv_tokens // self.block_tokens
            options |= {"store": self.master, "store-blocks": lent}
        flags = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        return [self.python, "-m", "runtime.worker", *flags]

    def cluster(self) -> dict[str, Any]:
        """As of `LocalWorkers`; prefill workers hand prefixes out to one another."""
        made = super().cluster()
        for row in made["workers"]:
            if row["role"] != Role.DECODE and self.connector == Connector.NIXL:
                row["bootstrap"] = f"127.0.0.1:{self.ports[row['id']][1]}"
        return made

    def environment(self, name: str) -> dict[str, str]:
        """One core for each; the model is small."""
        return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
