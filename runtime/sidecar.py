"""`Sidecar`: the whole process. Puts the parts together, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from aiohttp.http_exceptions import HttpProcessingError
from grpc_reflection.v1alpha import reflection

from envs.spec import SpecError
from envs.state import Source
from policies import PolicyError

from . import decision_log, ext_proc, gateway
from .calibration import Calibration, CalibrationError
from .conductor import Clock, Conductor, Made
from .decision_log import DecisionLog, Ended, LogRow
from .fairness import TenantShares
from .gateway import Gateway
from .indexer import MODEL, SALT, TENANT, add_routes, stream_of
from .kv_events import KvEventSubscriber, prepare
from .legs import Timeouts
from .live_page import LivePage, is_loopback
from .live_state import Reservation
from .metrics import Pulled, SidecarMetrics, WorkerGauges, start_http
from .prompt_tokens import TokenizerError
from .proto import conductor_pb2
from .request import Assignment, Rejection
from .server import ConductorService, add_to_server
from .snapshot import Cursor, SnapshotError, capture, encode, fetch, read, restore, write
from .telemetry import EngineMetrics, Scraper
from .tracing import TracingError, tracer
from .workers import LiveCluster, Role, Worker, load_live_cluster, resized

log = logging.getLogger(__name__)

TICK_S = 0.05  # leases end, and predicted steps are taken, at least this often;
BUSY_TICK_S = 0.004  # while requests are in flight, so that the next one finds little left to do
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
    live: str = ""
    live_outside: bool = False
    gateway: str = ""
    tokenizer: str = ""
    leg_timeout_s: float = 300.0
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
    log_keep_gib: float = 0.0
    snapshot: str = ""
    snapshot_every_s: float = 30.0
    peer: str = ""
    calibrate: bool = True
    scrape_interval_s: float = 0.25
    approximate_ttl_s: float = 300.0
    external_clock: bool = False
    observe_responses: bool = False
    ext_proc_fallbacks: int = 0
    base_models: str = ""
    max_message_bytes: int = 16 << 20
    max_concurrent: int = 4096
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    otel_endpoint: str = ""
    config: str = ""
    drain_s: float = 10.0
    seed: int = 0


NO_LOADS = (math.nan, math.nan, math.nan)
RELOADABLE = ("policy", "fallback", "shadow", "canary", "canary_share", "tenants")
FAULTS = (ConfigError, SpecError, PolicyError, SnapshotError, TokenizerError, TracingError, OSError)
"""What `Sidecar` raises for wrong options, files and addresses; the messages are for the user."""


def read_config(path: Path) -> dict[str, Any]:
    """The file of options that may change while serving.

    Raises:
        ConfigError: naming the file, the field and what was expected.
    """
    try:
        fields = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: expected a mapping of {', '.join(RELOADABLE)}, found {type(fields).__name__}")
    for name, value in fields.items():
        if name not in RELOADABLE:
            raise ConfigError(f"{path}: {name}: no such field; expected {', '.join(RELOADABLE)}")
        if name == "tenants":
            good = isinstance(value, dict) and all(isinstance(w, int | float) and w > 0 for w in value.values())
            expected = "a weight above 0 for each tenant"
        elif name == "canary_share":
            good, expected = isinstance(value, int | float) and 0 <= value <= 1, "a number in 0 .. 1"
        else:
            good, expected = isinstance(value, str), "the name of a policy"
        if not good:
            raise ConfigError(f"{path}: {name}: expected {expected}, found {value!r}")
    return fields


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """The parts of HOST:PORT.

    Raises:
        ConfigError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"--{name.replace('_', '-')}: expected HOST:PORT, found {address!r}")
    return host.strip("[]"), int(port)


class Sidecar:
    """A conductor with its faces, its senses and its memory.

    Attributes:
        bound: the addresses that were bound, by face (`grpc`, `ext_proc`, `metrics`, `indexer`, `live`,
            `gateway`).

    Raises (when made):
        ConfigError, SpecError, PolicyError: an option, the cluster file or a policy that cannot be.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bound: dict[str, str] = {}
        for name in ("grpc", "ext_proc", "metrics", "indexer", "live", "gateway"):
            if getattr(options, name):
                host_and_port(name, getattr(options, name))
        if options.live and not options.live_outside and not is_loopback(host_and_port("live", options.live)[0]):
            raise ConfigError(
                f"--live: {options.live} may be reached from other machines, and the page shows what requests are "
                "asked of whom; --live-outside allows it"
            )
        if options.peer:
            host_and_port("peer", options.peer)
        if bool(options.tls_certificate) != bool(options.tls_key):
            raise ConfigError("--tls-certificate and --tls-key are needed together")
        if options.tls_client_ca and not options.tls_key:
            raise ConfigError("--tls-client-ca needs --tls-certificate and --tls-key")
        if options.canary_share and not options.canary:
            raise ConfigError("--canary-share needs --canary")
        self._given = {name: getattr(options, name) for name in RELOADABLE}
        self._wanted = self._given
        self._seen: dict[Path, int | None] = {}  # the files that are watched, and when they were last changed
        self._seen = self._stamps()
        if options.config:
            fields = read_config(Path(options.config))
            self._wanted = self._wants(fields)
            for name, value in fields.items():
                setattr(options, name, value)
            self._seen = self._stamps() | self._seen
        self._listed = load_live_cluster(options.cluster)
        self.conductor = Conductor(
            self._listed,
            options.policy,
            fallback=options.fallback,
            shadow=options.shadow,
            canary=options.canary,
            canary_share=options.canary_share,
            deadline_s=options.deadline_ms / 1000.0,
            blocks=options.blocks,
            in_flight=options.in_flight,
            lease_s=options.lease_s,
            assumed_s=options.approximate_ttl_s,
            clock=Clock(external=options.external_clock),
            shares=TenantShares(options.tenants),
            seed=options.seed,
        )
        self.reloads: dict[str, float] = {"ok": 0, "refused": 0}
        self.subscribers: dict[str, KvEventSubscriber] = {}
        self.tracer = tracer(options.otel_endpoint)
        self.service = ConductorService(
            self.conductor,
            note=self._note,
            kv_cursor=self.kv_cursor,
            snapshot=self._snapshot,
            membership=self.membership,
            tracer=self.tracer,
        )
        self.endpoint_picker: ext_proc.ExternalProcessor | None = None
        self.gateway: Gateway | None = None
        self.decision_log: DecisionLog | None = None
        self.calibration: Calibration | None = None
        self.metrics = SidecarMetrics(
            version=_version(), policy=self.conductor.policy.name, cluster=self.conductor.state.spec.name
        )
        self.scraper: Scraper | None = None
        self._saved_fits: Any = None
        self._servers: list[grpc.aio.Server] = []
        self._http: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._reloading = asyncio.Lock()

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM; the process's exit status.

        Raises:
            OSError, SnapshotError: an address that cannot be bound, a snapshot that cannot be restored.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, lambda: self._later(self.reload()))
        try:
            await self.start()
        except BaseException:
            await self._close(0.0)
            raise
        gc.freeze()  # libraries and tables stay: no collection, which is a pause, need look at them again
        gc.set_threshold(10 * gc.get_threshold()[0])
        await self._stopping.wait()
        log.info("stopping; calls may go on for %g s", self.options.drain_s)
        await self.stop()
        return 0

    async def start(self) -> None:
        """Come up: memory first, then senses, faces last."""
        options, conductor = self.options, self.conductor
        prepare()
        cursors = await self._warm_start()
        if options.log:
            self.decision_log = DecisionLog(
                options.log,
                conductor.state.block_tokens,
                conductor.state.spec.name,
                keep_bytes=round(options.log_keep_gib * 2**30) or None,
                clock=conductor.clock.now,
                cluster=conductor.state.spec,
            )
        self.scraper = Scraper(self._engine_metrics, on_up=self._worker_up, interval_s=options.scrape_interval_s)
        await self.scraper.start()
        self._follow_workers(cursors)
        conductor.on_made.append(self._made)
        conductor.on_ended.append(self._ended)
        conductor.tells_later = True  # `_tick` catches up
        self._pull_metrics()
        await self._serve_grpc()
        await self._serve_http()
        if options.gateway:
            await self._serve_gateway()
        self._tasks += [asyncio.create_task(self._tick()), asyncio.create_task(self._watch())]
        if options.snapshot:
            self._tasks.append(asyncio.create_task(self._keep_snapshots()))
        for face, address in self.bound.items():
            log.info("%s on %s", face, address)
        log.info("%s decides for %s", conductor.policy.name, conductor.state.spec.name)

    async def stop(self) -> None:
        """Go down in order: no new requests, calls in flight end, what is known is written."""
        self.conductor.draining = True
        await self._close(self.options.drain_s)
        if self.options.snapshot:
            self._write_snapshot(self._snapshot())
        self.tracer.close()
        if self.decision_log is not None:
            for reservation in list(self.conductor.state.reservations.values()):
                self.conductor.state.end(reservation, "shutdown")
            self.decision_log.close()

    async def _close(self, drain_s: float) -> None:
        """No more faces, tasks and senses."""
        if self.gateway is not None:
            await self.gateway.drain(drain_s)
            await self.gateway.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(drain_s) for server in self._servers))
        for server in self._http:
            await server.close()
        for subscriber in self.subscribers.values():
            await subscriber.close()
        if self.scraper is not None:
            await self.scraper.close()

    # --- faces -------------------------------------------------------------------------------------------------------

    async def _serve_grpc(self) -> None:
        options = self.options
        faces = {"grpc": options.grpc, "ext_proc": options.ext_proc}
        settings = ext_proc.Options(
            observe_responses=options.observe_responses,
            fallbacks=options.ext_proc_fallbacks,
            base_models=frozenset(filter(None, options.base_models.split(","))),
            max_body_bytes=options.max_message_bytes,
            max_streams=options.max_concurrent,
        )
        by_address: dict[str, list[str]] = {}
        for face, address in faces.items():
            if address:
                by_address.setdefault(address, []).append(face)
        for address, here in by_address.items():
            server = grpc.aio.server(
                options=ext_proc.server_options(settings), maximum_concurrent_rpcs=2 * options.max_concurrent
            )
            self._servers.append(server)
            names = [reflection.SERVICE_NAME]
            if "grpc" in here:
                add_to_server(self.service, server)
                names.append(SERVICE)
            if "ext_proc" in here:
                self.endpoint_picker = ext_proc.add_to_server(server, self.conductor, options=settings)
                names.append(ext_proc.SERVICE)
            ext_proc.add_health(server, self.conductor, services=[SERVICE])
            names.append("grpc.health.v1.Health")
            reflection.enable_server_reflection(names, server)
            host, port = host_and_port(here[0], address)
            place = f"[{host}]" if ":" in host else host
            try:
                if options.tls_key:
                    bound = server.add_secure_port(f"{place}:{port}", self._credentials())
                else:
                    bound = server.add_insecure_port(f"{place}:{port}")
            except RuntimeError as error:
                raise ConfigError(f"--{here[0].replace('_', '-')}: cannot bind {address}: {error}") from None
            await server.start()
            self.bound |= dict.fromkeys(here, f"{place}:{bound}")

    def _credentials(self) -> grpc.ServerCredentials:
        options = self.options
        parts = {}
        for name in ("tls_certificate", "tls_key", "tls_client_ca"):
            path = getattr(options, name)
            try:
                parts[name] = Path(path).read_bytes() if path else None
            except OSError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
        name = "tls-certificate"
        try:  # gRPC would find out when the first client comes
            checked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            checked.load_cert_chain(options.tls_certificate, options.tls_key, password="")
            name = "tls-client-ca"
            if options.tls_client_ca:
                checked.load_verify_locations(options.tls_client_ca)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--{name}: not in PEM form, or of another key: {error}") from None
        return grpc.ssl_server_credentials(
            [(parts["tls_key"] or b"", parts["tls_certificate"] or b"")],
            root_certificates=parts["tls_client_ca"],
            require_client_auth=bool(options.tls_client_ca),
        )

    async def _serve_http(self) -> None:
        by_address: dict[str, list[str]] = {}
        for face in ("metrics", "indexer", "live"):
            if getattr(self.options, face):
                by_address.setdefault(getattr(self.options, face), []).append(face)
        for address, here in by_address.items():
            host, port = host_and_port(here[0], address)
            logging.getLogger("aiohttp.server").addFilter(_no_malformed)
            routes = []
            if "indexer" in here:
                routes.append(add_routes(self))
            if "live" in here:
                routes.append(LivePage(self.conductor, self._worker_gauges, self._note).add_routes)
            try:
                server = await start_http(host, port, self.metrics, ready=self._ready, routes=routes)
            except OSError as error:
                raise ConfigError(f"--{here[0]}: cannot bind {address}: {error.strerror or error}") from None
            self._http.append(server)
            place = f"[{host}]" if ":" in host else host
            self.bound |= dict.fromkeys(here, f"{place}:{server.port}")

    async def _serve_gateway(self) -> None:
        options = self.options
        host, port = host_and_port("gateway", options.gateway)
        settings = gateway.Options(
            base_models=frozenset(filter(None, options.base_models.split(","))),
            tokenizer=options.tokenizer,
            max_body_bytes=options.max_message_bytes,
            timeouts=Timeouts(prefill_s=options.leg_timeout_s, decode_s=options.leg_timeout_s),
        )
        self.gateway = gateway.Gateway(self.conductor, self.metrics, settings, mark=self._worker_up)
        try:
            bound = await self.gateway.start(host, port)
        except OSError as error:
            raise ConfigError(f"--gateway: cannot bind {options.gateway}: {error.strerror or error}") from None
        self.bound["gateway"] = f"{f'[{host}]' if ':' in host else host}:{bound}"

    def _ready(self) -> str:
        return "draining" if self.conductor.draining else ""

    # --- senses ------------------------------------------------------------------------------------------------------

    def membership(self) -> None:
        """The workers have changed."""
        self._follow_workers()

    def _follow_workers(self, cursors: dict[str, Cursor] | None = None) -> None:
        """Listen to the workers there are, and to no others."""
        state = self.conductor.state
        listened = {worker.id: worker for worker in state.prefills if worker.kv_events}
        for worker_id, subscriber in list(self.subscribers.items()):
            worker = listened.get(worker_id)
            heard = subscriber.endpoint, subscriber.replay_endpoint, subscriber.stream
            if worker is None or (*_endpoints(worker), stream_of(worker)) != heard:
                del self.subscribers[worker_id]
                self._later(subscriber.close())
            else:
                subscriber.instance = state.prefill_of[worker_id]
        for worker_id, worker in listened.items():
            if worker_id not in self.subscribers:
                cursor = (cursors or {}).get(worker_id)
                self.subscribers[worker_id] = self._subscribe(worker, cursor)
        if self.scraper is not None:
            known = {telemetry.worker.id: telemetry.worker for telemetry in self.scraper}
            wanted = {worker.id: worker for worker in state.cluster.workers if worker.metrics_url}
            for worker_id, worker in known.items():
                if wanted.get(worker_id) != worker:
                    self.scraper.remove(worker_id)
            for worker_id, worker in wanted.items():
                if worker_id not in self.scraper:
                    self.scraper.add(worker)
        registered = Counter(tuple(w.labels.get(label, "") for label in (MODEL, SALT, TENANT)) for w in state.prefills)
        self.conductor.cached_under = registered.most_common(1)[0][0]
        self.metrics.about(version=_version(), policy=self.conductor.policy.name, cluster=state.spec.name)
        self._calibrate()

    def _subscribe(self, worker: Worker, cursor: Cursor | None) -> KvEventSubscriber:
        state = self.conductor.state
        endpoint, replay = _endpoints(worker)
        subscriber = KvEventSubscriber(
            state.index, state.prefill_of[worker.id], endpoint, replay, name=worker.id, stream=stream_of(worker)
        )
        if cursor is not None:
            subscriber.resume(*cursor)
        subscriber.start()
        return subscriber

    def _peer_credentials(self) -> grpc.ChannelCredentials | None:
        """What a replica shows to its peer: the same as to its clients."""
        options = self.options
        if not options.tls_key:
            return None
        authority = options.tls_client_ca or options.tls_certificate
        try:
            parts = [Path(name).read_bytes() for name in (authority, options.tls_key, options.tls_certificate)]
        except OSError as error:
            raise ConfigError(f"--peer: {error}") from None
        return grpc.ssl_channel_credentials(*parts)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    def _engine_metrics(self, worker_id: str, metrics: EngineMetrics) -> None:
        if not self.conductor.clock.external:
            self.conductor.catch_up()
        self.conductor.state.engine_metrics(worker_id, metrics)

    def _worker_up(self, worker_id: str, up: bool) -> None:
        log.warning("worker %s is %s", worker_id, "up again" if up else "down")
        self.conductor.state.mark(worker_id, up)

    def _note(self, worker_id: str) -> str:
        if self.scraper is not None and worker_id in self.scraper:
            telemetry = self.scraper[worker_id]
            if not telemetry.up:
                return f"down: {telemetry.last_error}"
            if telemetry.stale:
                return f"stale: {telemetry.last_error or 'no metrics yet'}"
        return ""

    def kv_cursor(self, worker_id: str) -> tuple[int, bool]:
        """The last batch of a worker's KV events that was applied, -1 for none; whether its stream is followed."""
        subscriber = self.subscribers.get(worker_id)
        return (-1, False) if subscriber is None else (subscriber.last_seq, subscriber.synced)

    # --- fitting -----------------------------------------------------------------------------------------------------

    def _calibrate(self) -> None:
        """Fit the latencies of the workers there are now."""
        state = self.conductor.state
        if not self.options.calibrate:
            return
        names = [w.id for w in state.prefills], [w.id for w in state.decodes]
        if self.calibration is None:
            self.calibration = Calibration(state.observer.parameters, *names)
            if self._saved_fits is not None:
                try:
                    self.calibration.restore(self._saved_fits)
                except CalibrationError as error:
                    log.warning("fits of the snapshot are left out: %s", error)
        elif self.calibration.parameters is not state.observer.parameters:
            self.calibration.rebind(state.observer.parameters, *names)

    def _learn(self, reservation: Reservation) -> None:
        """A request has been reported from end to end."""
        if self.calibration is None:
            return
        state = self.conductor.state
        p, d = reservation.prefill, reservation.decode
        if reservation.prefill_reported and reservation.source != Source.FETCH:
            bandwidth = float(state.observer.parameters.prefill["h2d_bytes_per_s"][p])
            self.calibration.prefill_observed(
                p,
                reservation.input_tokens,
                reservation.reused_tokens,
                reservation.prefill_s,
                load_s=reservation.loaded_blocks * state.block_bytes / bandwidth,
                drain_s=reservation.drain_s,
            )
        if reservation.output_tokens > 1 and not math.isnan(reservation.batch):
            iteration_s = reservation.decode_s / (reservation.output_tokens - 1)
            self.calibration.decode_observed(d, reservation.batch, reservation.kv_tokens, iteration_s)
        self.calibration.joined(
            p,
            d,
            predicted_ttft_s=reservation.predicted_ttft_s,
            ttft_s=reservation.ttft_s,
            predicted_tbt_s=reservation.predicted_tbt_s,
            tbt_s=reservation.tbt_s,
        )

    # --- memory ------------------------------------------------------------------------------------------------------

    async def _warm_start(self) -> dict[str, Cursor]:
        """Restore the snapshot, or the peer's state; the workers' places in their KV events."""
        options = self.options
        if options.snapshot:
            data = read(Path(options.snapshot))
            cursors = None if data is None else self._restored(data, options.snapshot)
            if cursors is not None:
                return cursors
        if options.peer:
            try:
                cursors = self._restored(await fetch(options.peer, self._peer_credentials()), options.peer)
            except SnapshotError as error:
                log.warning("starting cold: %s", error)
            else:
                if cursors is not None:
                    return cursors
        return {}

    def _restored(self, data: bytes, source: str) -> dict[str, Cursor] | None:
        """The workers' places in their KV events, of a snapshot that is restored; None where it cannot be."""
        try:
            restored = restore(self.conductor, data)
        except SnapshotError as error:
            log.warning("not restored: %s: %s", source, error)
            return None
        self._saved_fits = restored["calibration"]
        log.info("restored %d blocks from %s", self.conductor.state.index.used, source)
        cursors: dict[str, Cursor] = restored["cursors"]
        return cursors

    def _snapshot(self) -> dict[str, Any]:
        cursors = {name: (each.last_seq, each.last_mark) for name, each in self.subscribers.items()}
        return capture(self.conductor.state, cursors, self.calibration.state() if self.calibration else None)

    def _write_snapshot(self, captured: dict[str, Any]) -> None:
        try:
            write(Path(self.options.snapshot), encode(captured))
        except OSError as error:
            log.error("the snapshot %s cannot be written: %s", self.options.snapshot, error)

    async def _keep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(self.options.snapshot_every_s)
            await asyncio.to_thread(self._write_snapshot, self._snapshot())

    async def _tick(self) -> None:
        """Leases end and predictions come due even while no request comes."""
        while True:
            await asyncio.sleep(BUSY_TICK_S if self.conductor.state.flying else TICK_S)
            try:
                if self.conductor.clock.external:
                    self.conductor.tell()
                else:
                    self.conductor.catch_up()
            except Exception:
                log.exception("what was due could not be done")

    # --- reloading ---------------------------------------------------------------------------------------------------

    async def reload(self) -> bool:
        """Read the configuration and the cluster file anew; all of it is taken, or nothing. Whether it was taken.

        New policies are loaded and tried beside the present ones, which go on deciding meanwhile.
        """
        options, conductor = self.options, self.conductor
        async with self._reloading:
            try:
                fields = read_config(Path(options.config)) if options.config else {}
                wanted = self._wants(fields)
                listed = load_live_cluster(options.cluster)
                if listed.spec.block_tokens != conductor.state.block_tokens:
                    raise ConfigError(
                        f"{options.cluster}: block_tokens cannot change while serving "
                        f"({conductor.state.block_tokens} now)"
                    )
                made = await asyncio.to_thread(conductor.load_policies, {name: wanted[name] for name in RELOADABLE[:4]})
                live = self._with_registered(listed)
                conductor.use_policies(made, float(wanted["canary_share"]))
                conductor.shares.weigh(wanted["tenants"])
                if live != conductor.state.cluster:
                    conductor.change_cluster(live)
                self._listed, self._wanted = listed, wanted
                self._seen = {file: self._seen.get(file, stamp) for file, stamp in self._stamps().items()}
            except Exception as error:
                self.reloads["refused"] += 1
                log.error("not reloaded: %s", error, exc_info=not isinstance(error, (*FAULTS, ValueError)))
                return False
            self.reloads["ok"] += 1
            self._follow_workers()
            log.info("reloaded: %s decides for %s", conductor.policy.name, conductor.state.spec.name)
            return True

    def _with_registered(self, listed: LiveCluster) -> LiveCluster:
        """The cluster of a file, and with it the workers that came by registration; who has not changed in the file
        stays as registered last.

        Raises:
            SpecError: they make no cluster together.
        """
        present = self.conductor.state.cluster
        if listed == self._listed:
            return present
        named = {worker.id for worker in (*listed.workers, *self._listed.workers)}
        registered = tuple(worker for worker in present.workers if worker.id not in named)
        if not registered:
            return listed
        return resized(listed.spec, (*listed.workers, *registered), self.options.cluster)

    def _stamps(self) -> dict[Path, int | None]:
        """The files that are watched, and when they were last changed."""
        names = [self.options.config, self.options.cluster, *(self._wanted[role] for role in RELOADABLE[:4])]
        files = (Path(name) for name in names if name)
        return {file: _stamp(file) for file in files if file in self._seen or file.is_file()}

    def _wants(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The options that may change: those of the command line, and over them the file's `fields`.

        Raises:
            ConfigError: they do not go together.
        """
        wanted = self._given | fields
        if fields.get("canary_share") and not wanted["canary"]:
            raise ConfigError(f"{self.options.config}: canary_share needs canary")
        return wanted

    async def _watch(self) -> None:
        """Reload when a file changes, as Kubernetes changes a mounted ConfigMap."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._stamps()
            if now != self._seen and None not in now.values():
                self._seen = now
                await self.reload()

    # --- what is counted, logged and learnt --------------------------------------------------------------------------

    def _made(self, made: Made) -> None:
        if made.request.dry_run:
            return
        answer, observation = made.answer, made.observation
        canary = self.conductor.canary
        load, load_now, load_forecast = NO_LOADS if observation is None else self.conductor.state.observer.loads()
        if isinstance(answer, Assignment):
            self.metrics.observe_decision(
                made.seconds,
                predicted_ttft_s=answer.predicted_ttft_s,
                predicted_tbt_s=answer.predicted_tbt_s,
                input_tokens=answer.input_tokens,
                reused_tokens=answer.reused_tokens,
                fell_back=answer.fell_back,
                canary=answer.policy if canary is not None and answer.policy == canary.name else "",
                prefill_load=load,
                decode_load=load_now,
                decode_load_forecast=load_forecast,
            )
        else:
            self.metrics.observe_decision(
                made.seconds,
                answer.reason.value,
                fell_back=answer.fell_back,
                prefill_load=load,
                decode_load=load_now,
                decode_load_forecast=load_forecast,
            )
        if self.conductor.shadow is not None and observation is not None:
            self._compare(made, observation)
        if self.decision_log is not None:
            self._log(made)

    def _compare(self, made: Made, observation: Any) -> None:
        """The shadow policy's decision beside the one that was made."""
        action = made.shadow_action
        if action is None:
            self.metrics.observe_shadow(None)
            return
        gain_s = math.nan
        if action and made.action:
            gain_s = self._predicted(observation, made.action) - self._predicted(observation, action)
        self.metrics.observe_shadow(action == made.action, gain_s)

    def _predicted(self, observation: Any, action: int) -> float:
        pair, source = divmod(action - 1, 3)
        p = pair // observation.decode.shape[1]
        return float(self.conductor.state.ttft_s[source][p])

    def _log(self, made: Made) -> None:
        answer, observation, request = made.answer, made.observation, made.request
        assert self.decision_log is not None
        state = self.conductor.state
        row = LogRow(
            request.request_id,
            made.arrival_s,
            len(request.tokens) if request.tokens is not None else request.input_tokens,
            action=made.action,
            block_ids=made.hashes,
            expected_output_tokens=made.expected_output_tokens,
            tenant=request.tenant,
            policy=answer.policy,
            fell_back=answer.fell_back,
            propensity=made.probability,
            ttft_slo_s=request.ttft_slo_s or state.spec.slo.ttft_s,
            tbt_slo_s=request.tbt_slo_s or state.spec.slo.tbt_s,
            prefills=len(state.prefills),
            decodes=len(state.decodes),
        )
        if observation is not None and self.decision_log.observations:
            row.observation = decision_log.pack(observation)
        if isinstance(answer, Rejection):
            row.status, row.reason = Ended.REJECTED_AT_ARRIVAL, answer.reason.value
            self.decision_log.record(row)
            return
        row.prefill, row.decode = answer.prefill.id, answer.decode.id
        row.predicted_ttft_s, row.predicted_tbt_s = answer.predicted_ttft_s, answer.predicted_tbt_s
        if made.reservation is not None:
            made.reservation.note = row

    def _ended(self, reservation: Reservation) -> None:
        finished = reservation.end == "finished"
        known = finished and reservation.reported
        if known or not finished:
            self.metrics.observe_outcome(
                ttft_s=reservation.ttft_s if known else math.nan,
                tbt_s=reservation.tbt_s if known else math.nan,
                predicted_ttft_s=reservation.predicted_ttft_s,
                predicted_tbt_s=reservation.predicted_tbt_s,
                ttft_slo_s=reservation.ttft_slo_s,
                tbt_slo_s=reservation.tbt_slo_s,
                output_tokens=reservation.output_tokens,
                input_tokens=reservation.input_tokens,
                tenant=reservation.tenant,
                failed="" if finished else reservation.end,
            )
        if known:
            self._learn(reservation)
        row = reservation.note
        if self.decision_log is not None and isinstance(row, LogRow):
            ends = {"recheck": Ended.REJECTED_AT_DECODE, "expired": Ended.EXPIRED, "shutdown": Ended.EXPIRED}
            row.status = ends.get(reservation.end, Ended.FAILED)
            if finished:
                row.status = Ended.COMPLETED if known else Ended.EXPIRED
            row.reason = "" if finished else reservation.end
            row.output_tokens = reservation.output_tokens
            if known:
                row.ttft_s, row.tbt_s = reservation.ttft_s, reservation.tbt_s
                row.prefill_s = reservation.prefill_s
            self.decision_log.record(row)

    # --- what is shown -----------------------------------------------------------------------------------------------

    def _pull_metrics(self) -> None:
        """What the metrics ask for when they are scraped."""
        metrics, state_of = self.metrics, lambda: self.conductor.state
        metrics.settle = self.conductor.tell  # a scrape right after an answer has it
        metrics.pull("conductor_reservations", lambda: len(state_of().flying))
        metrics.pull("conductor_leases_expired_total", lambda: state_of().expired)
        metrics.pull("conductor_unknown_reports_total", lambda: self.service.unknown_reports)
        metrics.pull("conductor_kv_index_blocks", lambda: state_of().index.used)
        metrics.pull("conductor_kv_index_capacity_blocks", lambda: state_of().index.capacity)
        metrics.pull("conductor_kv_index_evictions_total", lambda: state_of().index.evicted)
        metrics.pull("conductor_config_reloads_total", lambda: dict(self.reloads.items()))
        metrics.pull("conductor_rejected_at_decode_total", lambda: float(state_of().clock["rejected_at_decode"]))
        metrics.pull("conductor_wasted_prefill_seconds_total", lambda: float(state_of().clock["wasted_prefill_s"]))
        metrics.pull("conductor_gateway_open_requests", lambda: self.gateway.open if self.gateway is not None else 0)
        metrics.pull_workers(self._worker_gauges)

        def of_subscribers(attribute: str) -> Any:
            return lambda: {name: getattr(each, attribute) for name, each in self.subscribers.items()}

        for name, attribute in (
            ("conductor_kv_events_batches_total", "batches"),
            ("conductor_kv_blocks_stored_total", "blocks_stored"),
            ("conductor_kv_blocks_removed_total", "blocks_removed"),
            ("conductor_kv_event_gaps_total", "gaps"),
            ("conductor_kv_event_replays_total", "replays"),
            ("conductor_kv_event_restarts_total", "restarts"),
            ("conductor_kv_event_decode_errors_total", "decode_errors"),
            ("conductor_kv_orphan_blocks_total", "orphans"),
        ):
            metrics.pull(name, of_subscribers(attribute))
        metrics.pull(
            "conductor_kv_events_ignored_total",
            lambda: {(name, why): n for name, each in self.subscribers.items() for why, n in each.ignored.items()},
        )
        metrics.pull(
            "conductor_worker_scrape_errors_total",
            lambda: {(t.worker.id, kind): n for t in self.scraper or () for kind, n in t.errors.items()},
        )
        if self.options.ext_proc:

            def of_picker(attribute: str) -> Any:
                return lambda: getattr(self.endpoint_picker, attribute, 0)

            metrics.pull("conductor_ext_proc_requests_total", of_picker("requests"))
            metrics.pull("conductor_ext_proc_streams", of_picker("streams_open"))
            metrics.pull("conductor_ext_proc_protocol_errors_total", of_picker("protocol_errors"))
        if self.decision_log is not None:
            written = self.decision_log
            metrics.pull(
                "conductor_decision_log_rows_total",
                lambda: {"written": written.rows_written, "dropped": written.rows_dropped},
            )
            metrics.pull("conductor_decision_log_segments_total", lambda: written.segments_written)
            metrics.pull("conductor_decision_log_errors_total", lambda: written.segments_failed)
        if self.calibration is not None:
            for name in self.calibration.gauges():
                metrics.pull(name, self._fitted(name))

    def _fitted(self, name: str) -> Callable[[], Pulled]:
        def pull() -> Pulled:
            return {} if self.calibration is None else dict(self.calibration.gauges()[name].items())

        return pull

    def _worker_gauges(self) -> list[WorkerGauges]:
        state = self.conductor.state
        now_s = float(state.clock["now_s"])
        rows = []
        for worker in state.cluster.workers:
            p, d = state.prefill_of.get(worker.id), state.decode_of.get(worker.id)
            up = bool(state.up_prefill[p] if p is not None else state.up_decode[d])
            row = WorkerGauges(worker.id, worker.role.value, up)
            if p is not None:
                prefill = state.prefill[p]
                running_s = max(0.0, float(prefill["running_end_s"]) - now_s) if prefill["running"] else 0.0
                row.queue_s = running_s + float(prefill["queued_s"])
                row.pending_requests = float(prefill["queue_requests"])
            if d is not None:
                decode = state.decode[d]
                row.batch, row.kv_tokens = float(decode["batch"]), float(decode["kv_tokens"])
                if worker.role != Role.BOTH:
                    row.pending_requests = float(decode["pending_requests"])
            if self.scraper is not None and worker.id in self.scraper:
                telemetry = self.scraper[worker.id]
                row.metrics_age_s, row.metrics_stale = telemetry.age_s, telemetry.stale
            rows.append(row)
        return rows


def _no_malformed(record: logging.LogRecord) -> bool:
    """Not a traceback for everything that is no HTTP; it is answered with 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _endpoints(worker: Worker) -> tuple[str, str | None]:
    return worker.kv_events, worker.kv_replay or None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("conductor-gym")
    except PackageNotFoundError:
        return "unknown"


def _stamp(file: Path) -> int | None:
    """Changes when the file does; None while it is not there (it is being replaced)."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
