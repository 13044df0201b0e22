"""The workers of a live cluster: who they are, where they are, and the file that lists them.

A cluster file is a `ClusterSpec` with one more section:

    workers:
      - {id: prefill-0, role: prefill, address: "192.0.2.1:8000", kv_events: "tcp://192.0.2.1:5557"}
      - {id: decode-0, role: decode, address: "192.0.2.2:8000"}

Without it, the instances of the pools are called prefill-0 .. and decode-0 .. and have no address until they register.
Where the gateway runs the legs, `connector` says how KV moves: nixl (vLLM's default), mooncake, store or sglang.
"""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from envs.spec import ClusterSpec, SpecError, load_cluster, validate_cluster

_HOST = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]", re.ASCII)
_ZMQ = re.compile(r"tcp://([\w.-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]):[0-9]{1,5}|ipc://\S+", re.ASCII)
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s#]*)?", re.ASCII)
BOOTSTRAP_PORT = 8998  # vLLM's and SGLang's default


class Role(StrEnum):
    """What a worker does. BOTH: a coupled instance, which prefills and decodes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Engine(StrEnum):
    """Whose metric names and event forms a worker speaks."""

    VLLM = "vllm"
    SGLANG = "sglang"
    MOONCAKE = "mooncake"


class Connector(StrEnum):
    """How KV gets from a prefill to a decode worker (`runtime.legs`)."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    STORE = "store"
    SGLANG = "sglang"


_OF_ENGINE = {Engine.VLLM: Connector.NIXL, Engine.SGLANG: Connector.SGLANG, Engine.MOONCAKE: Connector.MOONCAKE}


class Worker(BaseModel):
    """One worker process (one data-parallel rank)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=128)
    role: Role
    address: str = Field(default="", description="host:port of its HTTP server; empty: not reachable (yet)")
    engine: Engine = Engine.VLLM
    kv_events: str = Field(default="", description="ZMQ endpoint of its KV events, e.g. tcp://192.0.2.1:5557")
    kv_replay: str = Field(default="", description="ZMQ endpoint that replays KV events")
    metrics: str = Field(default="", description="URL of its Prometheus metrics; default http://ADDRESS/metrics")
    bootstrap: str = Field(default="", description="host:port of its KV transfer bootstrap server")
    connector: Connector | None = Field(default=None, description="how its KV moves; none: as its engine's does")
    dp_rank: int = Field(default=0, ge=0)
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("address", "bootstrap")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        if not value:
            return value
        host, colon, port = value.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ValueError(f"expected host:port, found {value!r}")
        if not _HOST.fullmatch(host):
            raise ValueError(f"expected a host name or an address before the port, found {value!r}")
        if host.startswith("[") != host.endswith("]"):
            raise ValueError(f"expected [IPv6]:port, found {value!r}")
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        return value

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value and not _ZMQ.fullmatch(value):
            raise ValueError(f"expected tcp://HOST:PORT or ipc://PATH, found {value!r}")
        return value

    @field_validator("metrics")
    @classmethod
    def _url(cls, value: str) -> str:
        if value and not _URL.fullmatch(value):
            raise ValueError(f"expected http://HOST[:PORT]/PATH, found {value!r}")
        return value

    @property
    def kv_connector(self) -> Connector:
        """How its KV moves."""
        return self.connector or _OF_ENGINE[self.engine]

    @property
    def bootstrap_address(self) -> str:
        """host:port of its bootstrap server: by default on its own host."""
        return self.bootstrap or f"{self.address.rpartition(':')[0]}:{BOOTSTRAP_PORT}"

    @property
    def metrics_url(self) -> str:
        """Where its metrics are; "" where it has neither `metrics` nor an address."""
        return self.metrics or (f"http://{self.address}/metrics" if self.address else "")


class LiveCluster(BaseModel):
    """A cluster and the workers that make it up."""

    model_config = ConfigDict(frozen=True)

    spec: ClusterSpec
    workers: tuple[Worker, ...]

    @model_validator(mode="after")
    def _distinct(self) -> LiveCluster:
        seen: set[str] = set()
        for worker in self.workers:
            if worker.id in seen:
                raise ValueError(f"two workers are called {worker.id!r}")
            seen.add(worker.id)
        for role in (Role.PREFILL, Role.DECODE):
            if not any(worker.role in (role, Role.BOTH) for worker in self.workers):
                raise ValueError(f"no worker does {role.value}")
        return self

    @property
    def prefills(self) -> tuple[Worker, ...]:
        """Prefill instances in order of their index."""
        return tuple(worker for worker in self.workers if worker.role != Role.DECODE)

    @property
    def decodes(self) -> tuple[Worker, ...]:
        """Decode instances in order of their index."""
        return tuple(worker for worker in self.workers if worker.role != Role.PREFILL)


def load_live_cluster(name: str | Path) -> LiveCluster:
    """A cluster file with a `workers` section, or anything `envs.spec.load_cluster` takes.

    Raises:
        SpecError: naming the file, the field and what was expected.
    """
    path = Path(name)
    if not path.is_file():
        return named_after_pools(load_cluster(name))
    try:
        fields = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML: {error}") from None
    if not isinstance(fields, dict) or "workers" not in fields:
        return named_after_pools(load_cluster(path))
    rows = fields.pop("workers")
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"{path}: workers: expected a list with at least one worker, found {rows!r}")
    workers = []
    for i, row in enumerate(rows):
        try:
            workers.append(Worker.model_validate(row))
        except ValidationError as error:
            raise SpecError("\n".join(_lines(error, f"{path}: workers.{i}"))) from None
    spec = validate_cluster({"name": path.stem} | fields, str(path), path.parent)
    return resized(spec, tuple(workers), str(path))


def resized(spec: ClusterSpec, workers: tuple[Worker, ...], where: str = "cluster") -> LiveCluster:
    """The cluster with its pools as large as there are workers: the last pool of a role grows, or pools shrink.

    Raises:
        SpecError: two workers of one name, or none of a role.
    """
    prefills = sum(worker.role != Role.DECODE for worker in workers)
    decodes = sum(worker.role != Role.PREFILL for worker in workers)
    fields = spec.model_dump()
    fields["prefill"] = _sized(fields["prefill"], prefills)
    fields["decode"] = _sized(fields["decode"], decodes)
    try:
        if not fields["prefill"] or not fields["decode"]:
            raise SpecError(f"{where}: workers: at least one that prefills and one that decodes is needed")
        return LiveCluster(spec=validate_cluster(fields, where), workers=workers)
    except ValidationError as error:
        raise SpecError("\n".join(_lines(error, f"{where}: workers"))) from None


def named_after_pools(spec: ClusterSpec) -> LiveCluster:
    """Workers without addresses, prefill-0 .. and decode-0 .., one for each instance of the spec."""
    prefills = [Worker(id=f"prefill-{i}", role=Role.PREFILL) for i in range(spec.n_prefill)]
    decodes = [Worker(id=f"decode-{i}", role=Role.DECODE) for i in range(spec.n_decode)]
    return LiveCluster(spec=spec, workers=(*prefills, *decodes))


def _sized(pools: Any, count: int) -> list[dict[str, Any]]:
    """Pools with `count` instances in all."""
    kept: list[dict[str, Any]] = []
    for pool in pools:
        here = min(pool["count"], count)
        if here:
            kept.append(pool | {"count": here})
        count -= here
    if count and kept:
        kept[-1]["count"] += count
    return kept


def _lines(error: ValidationError, where: str) -> list[str]:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        message = "no such field" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{where}{'.' if field else ''}{field}: {message.removeprefix('Value error, ')}")
    return lines
