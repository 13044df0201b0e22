"""`Sidecar`: the whole process. Puts the parts together, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_reflection.v1alpha import reflection

from envs.spec import SpecError
from policies import PolicyError

from . import decision_log, ext_proc
from .calibration import Calibration
from .conductor import Clock, Conductor, Made
from .decision_log import DecisionLog, Ended, LogRow
from .fairness import TenantShares
from .kv_events import KvEventSubscriber
from .live_state import Reservation
from .metrics import SidecarMetrics
from .proto import conductor_pb2, conductor_pb2_grpc
from .request import Assignment, Rejection
from .server import ConductorService
from .snapshot import SnapshotError, dump, fetch, restore, write
from .telemetry import EngineMetrics, Scraper
from .workers import LiveCluster, load_live_cluster

log = logging.getLogger(__name__)

TICK_S = 0.05  # leases end, and predicted steps are taken, at least this often
WATCH_S = 1.0
SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].full_name


class ConfigError(ValueError):
    """An option that cannot be; the message names it and what was expected."""


@dataclass
class Options:
    """What `serve_policy.py` takes; see its help."""

    policy: str = "conductor+predictive"
    cluster: str = "2p2d"
    grpc: str = "127.0.0.1:50051"
    ext_proc: str = ""
    metrics: str = ""
    indexer: str = ""
    fallback: str = "conductor+slo"
    shadow: str = ""
    canary: str = ""
    canary_share: float = 0.0
    deadline_ms: float = 5.0
    lease_s: float = 120.0
    blocks: int = 1 << 20
    in_flight: int = 1 << 16
    tenants: dict[str, float] = field(default_factory=dict)
    log: str = ""
    snapshot: str = ""
    snapshot_every_s: float = 30.0
    peer: str = ""
    calibrate: bool = True
    scrape_interval_s: float = 0.25
    approximate_ttl_s: float = 300.0
    external_clock: bool = False
    observe_responses: bool = False
    max_message_bytes: int = 16 << 20
    max_concurrent: int = 4096
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    otel_endpoint: str = ""
    config: str = ""
    drain_s: float = 10.0
    seed: int = 0


RELOADABLE = ("policy", "fallback", "shadow", "canary", "canary_share", "tenants")


class Sidecar:
    """A conductor with its faces, its senses and its memory.

    Attributes:
        bound: the addresses that were bound, by face (`grpc`, `ext_proc`, `metrics`, `indexer`).
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bound: dict[str, str] = {}
        self.cluster: LiveCluster = load_live_cluster(options.cluster)
        if options.config:
            for name, value in read_config(Path(options.config)).items():
                setattr(options, name, value)
        self.conductor = Conductor(
            self.cluster,
            options.policy,
            fallback=options.fallback,
            shadow=options.shadow,
            canary=options.canary,
            canary_share=options.canary_share,
            deadline_s=options.deadline_ms / 1000.0,
            blocks=options.blocks,
            in_flight=options.in_flight,
            lease_s=options.lease_s,
            clock=Clock(external=options.external_clock),
            shares=TenantShares(options.tenants),
            seed=options.seed,
        )
        self.started = asyncio.Event()
        self.reloads: dict[str, int] = {"ok": 0, "refused": 0}
        self.subscribers: dict[str, KvEventSubscriber] = {}
        self._servers: list[grpc.aio.Server] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._watched: dict[Path, float] = {}
