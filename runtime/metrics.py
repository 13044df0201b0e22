"""What the sidecar says of itself: Prometheus metrics, and the HTTP server they are read from.

`METRICS` lists every metric once. A decision is counted by one cheap call; whatever another part counts already, or is
costly to know, is *pulled* from it when somebody scrapes.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .request import Reason

log = logging.getLogger(__name__)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0)
_TBT = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_RATIO = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_DECISION = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
_GAIN = (-30.0, -10.0, -3.0, -1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """A metric: its kind, what it means, its labels, their values known beforehand, and the bounds of its buckets."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()


NONE = "none"  # the reason of what was not rejected
OTHER = "other"  # the tenants that are not among the largest
_REASONS = tuple(("rejected", str(reason)) for reason in Reason)

METRICS: dict[str, Spec] = {
    # decisions
    "conductor_requests_total": Spec(
        COUNTER, "Requests decided, by outcome and reason.", ("outcome", "reason"), (("assigned", NONE), *_REASONS)
    ),
    "conductor_decision_seconds": Spec(HISTOGRAM, "Seconds that a decision took.", buckets=_DECISION),
    "conductor_policy_fallbacks_total": Spec(
        COUNTER,
        "Decisions left to the fallback policy, by cause.",
        ("cause",),
        (("error",), ("deadline",), ("invalid",)),
    ),
    "conductor_shadow_agreement_total": Spec(
        COUNTER, "Decisions of the shadow policy, by whether they agree.", ("agree",), (("true",), ("false",))
    ),
    "conductor_shadow_errors_total": Spec(COUNTER, "Decisions that the shadow policy failed to make."),
    "conductor_shadow_predicted_gain_seconds": Spec(
        HISTOGRAM, "Predicted TTFT of the decision less that of the shadow policy's.", buckets=_GAIN
    ),
    "conductor_canary_decisions_total": Spec(COUNTER, "Decisions made by the canary policy.", ("policy",)),
    "conductor_prefill_load_ratio": Spec(GAUGE, "Least predicted TTFT over the TTFT SLO at the last decision."),
    "conductor_decode_load_ratio": Spec(GAUGE, "Least predicted TBT now over the TBT SLO at the last decision."),
    "conductor_decode_load_forecast_ratio": Spec(
        GAUGE, "Mean predicted TBT at the time of joining over the TBT SLO at the last decision."
    ),
    "conductor_predicted_ttft_seconds": Spec(HISTOGRAM, "TTFT predicted for assigned requests.", buckets=_TTFT),
    "conductor_predicted_tbt_seconds": Spec(HISTOGRAM, "TBT predicted for assigned requests.", buckets=_TBT),
    "conductor_prompt_tokens_total": Spec(COUNTER, "Input tokens of assigned requests."),
    "conductor_reused_tokens_total": Spec(COUNTER, "Input tokens of assigned requests that a cached prefix covers."),
    # what became of requests
    "conductor_ttft_seconds": Spec(HISTOGRAM, "TTFT reported for requests.", buckets=_TTFT),
    "conductor_tbt_seconds": Spec(HISTOGRAM, "TBT reported for requests.", buckets=_TBT),
    "conductor_ttft_prediction_error_ratio": Spec(HISTOGRAM, "Reported over predicted TTFT.", buckets=_RATIO),
    "conductor_tbt_prediction_error_ratio": Spec(HISTOGRAM, "Reported over predicted TBT.", buckets=_RATIO),
    "conductor_requests_completed_total": Spec(COUNTER, "Requests reported finished."),
    "conductor_requests_good_total": Spec(COUNTER, "Requests reported finished within both SLOs: goodput."),
    "conductor_requests_failed_total": Spec(COUNTER, "Requests that failed after assignment, by stage.", ("stage",)),
    "conductor_slo_violations_total": Spec(COUNTER, "Requests that missed an SLO.", ("slo",), (("ttft",), ("tbt",))),
    "conductor_output_tokens_total": Spec(COUNTER, "Output tokens reported."),
    "conductor_good_output_tokens_total": Spec(COUNTER, "Output tokens of requests within both SLOs."),
    "conductor_tenant_tokens_total": Spec(
        COUNTER, "Tokens by tenant; only the largest tenants have a series of their own.", ("tenant", "kind")
    ),
    "conductor_rejected_at_decode_total": Spec(
        COUNTER, "Requests rejected after their prefill: the decode worker could not meet the TBT SLO any more."
    ),
    "conductor_wasted_prefill_seconds_total": Spec(COUNTER, "Prefill time of requests that were rejected after it."),
    "conductor_reservations": Spec(GAUGE, "Requests in flight that hold a reservation."),
    "conductor_leases_expired_total": Spec(COUNTER, "Reservations that ended for want of a report."),
    "conductor_unknown_reports_total": Spec(COUNTER, "Reports on requests that hold no reservation."),
    # workers
    "conductor_worker_up": Spec(GAUGE, "Whether a worker is up.", ("worker", "role")),
    "conductor_worker_queue_seconds": Spec(GAUGE, "Predicted seconds of prefill queued.", ("worker", "role")),
    "conductor_worker_batch_requests": Spec(GAUGE, "Requests in the decode batch.", ("worker", "role")),
    "conductor_worker_kv_tokens": Spec(GAUGE, "Context tokens of the decode batch.", ("worker", "role")),
    "conductor_worker_pending_requests": Spec(
        GAUGE, "Requests queued for prefill, or assigned to decode and not yet joined.", ("worker", "role")
    ),
    "conductor_worker_metrics_age_seconds": Spec(
        GAUGE, "Seconds since a worker's metrics were last read.", ("worker", "role")
    ),
    "conductor_worker_metrics_stale": Spec(GAUGE, "Whether a worker's metrics are too old.", ("worker", "role")),
    "conductor_worker_scrape_errors_total": Spec(COUNTER, "Scrapes that failed, by worker.", ("worker", "kind")),
    # KV events
    "conductor_kv_events_batches_total": Spec(COUNTER, "KV event batches applied.", ("worker",)),
    "conductor_kv_blocks_stored_total": Spec(COUNTER, "KV blocks that workers said they stored.", ("worker",)),
    "conductor_kv_blocks_removed_total": Spec(COUNTER, "KV blocks that workers said they removed.", ("worker",)),
    "conductor_kv_event_gaps_total": Spec(COUNTER, "Gaps in the sequence of KV events.", ("worker",)),
    "conductor_kv_event_replays_total": Spec(COUNTER, "Replays of KV events asked for.", ("worker",)),
    "conductor_kv_event_restarts_total": Spec(COUNTER, "Restarts of a publisher of KV events.", ("worker",)),
    "conductor_kv_event_decode_errors_total": Spec(COUNTER, "KV event messages that could not be read.", ("worker",)),
    "conductor_kv_events_ignored_total": Spec(COUNTER, "KV events passed over, by reason.", ("worker", "reason")),
    "conductor_kv_orphan_blocks_total": Spec(COUNTER, "KV blocks stored whose parent is not known.", ("worker",)),
    "conductor_kv_index_blocks": Spec(GAUGE, "Distinct KV blocks in the index."),
    "conductor_kv_index_capacity_blocks": Spec(GAUGE, "Distinct KV blocks the index has room for."),
    "conductor_kv_index_evictions_total": Spec(COUNTER, "KV blocks dropped from the index for want of room."),
    # Envoy
    "conductor_ext_proc_requests_total": Spec(COUNTER, "Requests that came through ext_proc."),
    "conductor_ext_proc_streams": Spec(GAUGE, "ext_proc streams open."),
    "conductor_ext_proc_protocol_errors_total": Spec(COUNTER, "ext_proc streams that broke the protocol."),
    # the gateway
    "conductor_gateway_requests_total": Spec(COUNTER, "HTTP requests to the gateway, by status.", ("status",)),
    "conductor_gateway_open_requests": Spec(GAUGE, "HTTP requests at the gateway now."),
    "conductor_gateway_leg_failures_total": Spec(
        COUNTER, "Requests to workers that failed, by worker and stage.", ("worker", "stage")
    ),
    "conductor_gateway_retries_total": Spec(
        COUNTER,
        "Requests that went on with another worker, by the stage that failed.",
        ("stage",),
        (("prefill",), ("decode",)),
    ),
    # the decision log
    "conductor_decision_log_rows_total": Spec(
        COUNTER, "Rows of the decision log, by what became of them.", ("result",), (("written",), ("dropped",))
    ),
    "conductor_decision_log_segments_total": Spec(COUNTER, "Segments of the decision log written."),
    "conductor_decision_log_errors_total": Spec(COUNTER, "Segments of the decision log that could not be written."),
    # calibration
    "conductor_prediction_drift_ratio": Spec(
        GAUGE, "Actual over predicted, geometric moving mean; 1 is no drift.", ("worker", "kind")
    ),
    "conductor_prediction_absolute_error_ratio": Spec(
        GAUGE, "Absolute relative error of predictions, moving mean.", ("worker", "kind")
    ),
    "conductor_drift_alarm": Spec(GAUGE, "Whether predictions for a worker have drifted.", ("worker", "kind")),
    "conductor_calibration_slowdown_ratio": Spec(
        GAUGE, "Fitted over configured time of a worker's typical work.", ("worker", "kind")
    ),
    "conductor_calibration_observations_total": Spec(
        COUNTER, "Measurements that the calibration took or refused.", ("result",)
    ),
    # the process
    "conductor_config_reloads_total": Spec(
        COUNTER, "Reloads of the configuration, by result.", ("result",), (("ok",), ("refused",))
    ),
    "conductor_metrics_errors_total": Spec(COUNTER, "Metrics that could not be pulled, by name.", ("metric",)),
    "conductor_build_info": Spec(
        GAUGE, "Always 1; what is running is in the labels.", ("version", "policy", "cluster")
    ),
    "conductor_start_time_seconds": Spec(GAUGE, "Unix time at which the sidecar started."),
}

Labels = tuple[str, ...]
Pulled = float | Mapping[str | Labels, float]


class Histogram:
    """Counts by bucket. About 0.3 us an observation; to be observed from one thread."""

    __slots__ = ("bounds", "counts", "names", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.names = (*(f"{bound:g}" if bound % 1 else f"{bound:.1f}" for bound in bounds), "+Inf")

    def observe(self, value: float) -> None:
        """Count a value; NaN is nothing to count."""
        if value == value:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, how many are not above it), up to +Inf."""
        below = 0
        rows = []
        for name, count in zip(self.names, self.counts, strict=True):
            below += count
            rows.append((name, float(below)))
        return rows


@dataclass(slots=True)
class WorkerGauges:
    """A worker's gauges, where they make sense for its role; None: not shown."""

    worker: str
    role: str
    up: bool
    queue_s: float | None = None
    batch: float | None = None
    kv_tokens: float | None = None
    pending_requests: float | None = None
    metrics_age_s: float | None = None
    metrics_stale: bool | None = None


_WORKER_FIELDS = {
    "conductor_worker_up": "up",
    "conductor_worker_queue_seconds": "queue_s",
    "conductor_worker_batch_requests": "batch",
    "conductor_worker_kv_tokens": "kv_tokens",
    "conductor_worker_pending_requests": "pending_requests",
    "conductor_worker_metrics_age_seconds": "metrics_age_s",
    "conductor_worker_metrics_stale": "metrics_stale",
}


class TenantTokens:
    """Input and output tokens by tenant, with series for the `most` largest only; the rest is one called "other".

    A tenant's counter starts when it becomes one of the largest and never goes back while it is; a newcomer must have
    a quarter more recent tokens than the one it displaces, so that series do not come and go.
    """

    def __init__(self, most: int = 20, remembered: int = 2000, half_life_s: float = 600.0) -> None:
        self.most = most
        self.remembered = max(remembered, 2 * most)
        self.half_life_s = half_life_s
        self.shown: dict[str, list[float]] = {}
        self.other = [0.0, 0.0]
        self._retired: dict[str, list[float]] = {}
        self._recent: dict[str, float] = {}
        self._faded_s: float | None = None

    def add(self, tenant: str, input_tokens: float, output_tokens: float) -> None:
        """Charge a tenant."""
        tokens = input_tokens + output_tokens
        if not 0.0 <= tokens < math.inf:
            return
        row = self.shown.get(tenant, self.other)
        row[0] += input_tokens
        row[1] += output_tokens
        recent = self._recent
        recent[tenant] = recent.get(tenant, 0.0) + tokens
        if len(recent) > self.remembered:
            self._forget()

    def _forget(self) -> None:
        kept = sorted(self._recent, key=self._recent.__getitem__, reverse=True)[: self.remembered // 2]
        self._recent = {tenant: self._recent[tenant] for tenant in kept} | {
            tenant: self._recent[tenant] for tenant in self.shown if tenant in self._recent
        }

    def rebalance(self, now_s: float) -> None:
        """Choose anew who is shown."""
        if self._faded_s is not None and now_s > self._faded_s:
            fade = 0.5 ** ((now_s - self._faded_s) / self.half_life_s)
            self._recent = {tenant: tokens * fade for tenant, tokens in self._recent.items() if tokens * fade > 0.5}
        self._faded_s = now_s
        outside = sorted(
            (tenant for tenant in self._recent if tenant not in self.shown and tenant != OTHER),
            key=self._recent.__getitem__,
            reverse=True,
        )[: self.most]
        for tenant in outside:
            if len(self.shown) >= self.most:
                least = min(self.shown, key=lambda name: self._recent.get(name, 0.0))
                if self._recent[tenant] <= 1.25 * self._recent.get(least, 0.0):
                    break
                self._retired[least] = self.shown.pop(least)
                if len(self._retired) > 4 * self.most:
                    del self._retired[next(iter(self._retired))]
            self.shown[tenant] = self._retired.pop(tenant, [0.0, 0.0])


class SidecarMetrics(Collector):
    """The sidecar's metrics, in a registry of their own.

    `registry` holds them with those of the process; `process` holds the latter alone.

    `observe_decision`, `observe_shadow` and `observe_outcome` belong to one thread, the event loop's; `count` and
    `put` may be called from any.

    Args:
        version, policy, cluster: for `conductor_build_info`.
        tenants: how many of them have a series of their own.
        clock: seconds, for the fading of tenants.
    """

    def __init__(
        self,
        *,
        version: str = "",
        policy: str = "",
        cluster: str = "",
        tenants: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.tenants = TenantTokens(tenants)
        self._clock = clock
        self._lock = threading.Lock()
        self._series: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._pulled: dict[str, Callable[[], Pulled]] = {}
        self._workers: Callable[[], Iterable[WorkerGauges]] | None = None
        self.settle: Callable[[], None] = lambda: None  # has whoever puts counting off count now
        self._failing: set[str] = set()
        for name, spec in METRICS.items():
            if spec.kind == HISTOGRAM:
                self._histograms[name] = Histogram(spec.buckets)
            else:
                start = dict.fromkeys(spec.known, 0.0)
                self._series[name] = {(): 0.0} if spec.kind == COUNTER and not spec.labels else start
        histograms = self._histograms
        self._decision = histograms["conductor_decision_seconds"].observe
        self._predicted_ttft = histograms["conductor_predicted_ttft_seconds"].observe
        self._predicted_tbt = histograms["conductor_predicted_tbt_seconds"].observe
        self._ttft = histograms["conductor_ttft_seconds"].observe
        self._tbt = histograms["conductor_tbt_seconds"].observe
        self._ttft_error = histograms["conductor_ttft_prediction_error_ratio"].observe
        self._tbt_error = histograms["conductor_tbt_prediction_error_ratio"].observe
        self._requests = self._series["conductor_requests_total"]
        self._fallbacks = self._series["conductor_policy_fallbacks_total"]
        self._canary = self._series["conductor_canary_decisions_total"]
        self._agreement = self._series["conductor_shadow_agreement_total"]
        self._loads = (math.nan, math.nan, math.nan)
        self._assigned = self._prompt_tokens = self._reused_tokens = 0
        self._completed = self._good = self._late = self._slow = self._output_tokens = self._good_output_tokens = 0
        self.about(version=version, policy=policy, cluster=cluster)
        self._series["conductor_start_time_seconds"][()] = time.time()
        self.process = CollectorRegistry()
        ProcessCollector(registry=self.process)
        GCCollector(registry=self.process)
        self.registry.register(self)
        self.registry.register(_Others(self.process))

    # --- counting

    def observe_decision(
        self,
        seconds: float,
        reason: str = "",
        *,
        predicted_ttft_s: float = math.nan,
        predicted_tbt_s: float = math.nan,
        prefill_load: float = math.nan,
        decode_load: float = math.nan,
        decode_load_forecast: float = math.nan,
        input_tokens: int = 0,
        reused_tokens: int = 0,
        fell_back: str = "",
        canary: str = "",
    ) -> None:
        """Count a decision.

        Args:
            reason: why it was rejected; "" where it was assigned. fell_back: why the fallback decided, if it did.
            canary: the canary policy's name, where that decided. The loads are those of `CLUSTER_FEATURES`.
        """
        self._decision(seconds)
        if reason:
            key = ("rejected", reason)
            self._requests[key] = self._requests.get(key, 0.0) + 1.0
        else:
            self._assigned += 1
            self._prompt_tokens += input_tokens
            self._reused_tokens += reused_tokens
            self._predicted_ttft(predicted_ttft_s)
            self._predicted_tbt(predicted_tbt_s)
        if prefill_load == prefill_load:
            self._loads = (prefill_load, decode_load, decode_load_forecast)
        if fell_back:
            self._fallbacks[(fell_back,)] = self._fallbacks.get((fell_back,), 0.0) + 1.0
        if canary:
            self._canary[(canary,)] = self._canary.get((canary,), 0.0) + 1.0

    def observe_shadow(self, agrees: bool | None, predicted_gain_s: float = math.nan) -> None:
        """Count a decision of the shadow policy; None: it failed to make one."""
        if agrees is None:
            self.count("conductor_shadow_errors_total")
            return
        key = ("true",) if agrees else ("false",)
        self._agreement[key] += 1.0
        self._histograms["conductor_shadow_predicted_gain_seconds"].observe(predicted_gain_s)

    def observe_outcome(
        self,
        *,
        ttft_s: float = math.nan,
        tbt_s: float = math.nan,
        predicted_ttft_s: float = math.nan,
        predicted_tbt_s: float = math.nan,
        ttft_slo_s: float = math.inf,
        tbt_slo_s: float = math.inf,
        output_tokens: int = 0,
        input_tokens: int = 0,
        tenant: str = "",
        failed: str = "",
    ) -> None:
        """Count what became of a request. NaN: not reported; a request is good unless it is known to miss an SLO.

        Args:
            failed: the stage it failed at; "" where it finished. tenant: whom to charge; "": nobody.
        """
        self._ttft(ttft_s)
        self._tbt(tbt_s)
        if predicted_ttft_s > 0.0:
            self._ttft_error(ttft_s / predicted_ttft_s)
        if predicted_tbt_s > 0.0:
            self._tbt_error(tbt_s / predicted_tbt_s)
        late, slow = ttft_s > ttft_slo_s, tbt_s > tbt_slo_s
        self._late += late
        self._slow += slow
        self._output_tokens += output_tokens
        if failed:
            self.count("conductor_requests_failed_total", failed)
        else:
            self._completed += 1
            if not (late or slow):
                self._good += 1
                self._good_output_tokens += output_tokens
        if tenant:
            self.tenants.add(tenant[:64], input_tokens, output_tokens)

    def count(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter.

        Raises:
            KeyError, ValueError: no such counter, other labels than `METRICS` says, or an amount below 0.
        """
        spec = METRICS[name]
        if spec.kind != COUNTER or len(labels) != len(spec.labels) or not 0.0 <= amount < math.inf:
            raise ValueError(f"{name} is a {spec.kind} with labels {spec.labels}, given {labels} and {amount!r}")
        series = self._series[name]
        with self._lock:
            series[labels] = series.get(labels, 0.0) + amount

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge.

        Raises:
            KeyError, ValueError: no such gauge, or other labels than `METRICS` says.
        """
        spec = METRICS[name]
        if spec.kind != GAUGE or len(labels) != len(spec.labels):
            raise ValueError(f"{name} is a {spec.kind} with labels {spec.labels}, given {labels}")
        with self._lock:
            self._series[name][labels] = value

    def about(self, *, version: str = "", policy: str = "", cluster: str = "") -> None:
        """What is running now, for `conductor_build_info`."""
        self._series["conductor_build_info"] = {(version, policy, cluster): 1.0}

    # --- pulling

    def pull(self, name: str, source: Callable[[], Pulled]) -> None:
        """Ask `source` for a counter or gauge at each scrape: a number, or one per label value(s).

        Raises:
            ValueError: no such counter or gauge.
        """
        if name not in self._series:
            raise ValueError(f"{name!r} is no counter or gauge of `METRICS`")
        self._pulled[name] = source

    def pull_workers(self, source: Callable[[], Iterable[WorkerGauges]]) -> None:
        """Ask `source` for the workers' gauges at each scrape."""
        self._workers = source

    def _failed(self, name: str) -> None:
        self.count("conductor_metrics_errors_total", name)
        if name not in self._failing:
            self._failing.add(name)
            log.exception("%s cannot be pulled; it is left out", name)

    def _pull(self) -> dict[str, dict[Labels, float]]:
        rows: dict[str, dict[Labels, float]] = {}
        for name, source in self._pulled.items():
            labels = METRICS[name].labels
            rows[name] = {}  # where it fails: a counter at 0 would look as if it had started anew
            try:
                pulled = source()
                if isinstance(pulled, Mapping):
                    found = {(key,) if isinstance(key, str) else key: float(value) for key, value in pulled.items()}
                else:
                    found = {(): float(pulled)}
                if any(len(key) != len(labels) for key in found):
                    raise ValueError(f"expected labels {labels}, found {next(iter(found))}")
                rows[name] = found
                self._failing.discard(name)
            except Exception:
                self._failed(name)
        if self._workers is not None:
            try:
                workers = list(self._workers())
                for name, field in _WORKER_FIELDS.items():
                    rows[name] = {
                        (row.worker, row.role): float(value)
                        for row in workers
                        if (value := getattr(row, field)) is not None
                    }
                self._failing.discard("conductor_worker_up")
            except Exception:
                self._failed("conductor_worker_up")
        return rows

    # --- exposing

    def describe(self) -> Iterator[Metric]:
        """The families without their samples."""
        for name in METRICS:
            yield _family(name)

    def collect(self) -> Iterator[Metric]:
        """The families with their samples, as of now."""
        return self.families(self.snapshot())

    def snapshot(self) -> dict[str, dict[Labels, float]]:
        """All counters and gauges, as of now; what is pulled is pulled in this thread."""
        self.settle()
        self.tenants.rebalance(self._clock())
        pulled = self._pull()
        with self._lock:
            series = {name: dict(rows) for name, rows in self._series.items()}
        series["conductor_requests_total"]["assigned", NONE] = float(self._assigned)
        violations = series["conductor_slo_violations_total"]
        violations["ttft",], violations["tbt",] = float(self._late), float(self._slow)
        for name, number in (
            ("conductor_prompt_tokens_total", self._prompt_tokens),
            ("conductor_reused_tokens_total", self._reused_tokens),
            ("conductor_requests_completed_total", self._completed),
            ("conductor_requests_good_total", self._good),
            ("conductor_output_tokens_total", self._output_tokens),
            ("conductor_good_output_tokens_total", self._good_output_tokens),
        ):
            series[name][()] = float(number)
        for name, load in zip(
            ("conductor_prefill_load_ratio", "conductor_decode_load_ratio", "conductor_decode_load_forecast_ratio"),
            self._loads,
            strict=True,
        ):
            if load == load:
                series[name][()] = load
        tokens = series["conductor_tenant_tokens_total"]
        for tenant, (given, made) in (*self.tenants.shown.items(), (OTHER, self.tenants.other)):
            tokens[tenant, "input"] = given
            tokens[tenant, "output"] = made
        return series | pulled

    def families(self, snapshot: dict[str, dict[Labels, float]]) -> Iterator[Metric]:
        """The families with the samples of a snapshot; any thread may do this."""
        for name, spec in METRICS.items():
            family = _family(name)
            if isinstance(family, HistogramMetricFamily):
                histogram = self._histograms[name]
                # a sum that can fall is no counter, and OpenMetrics allows none beside negative bounds
                total = histogram.total if spec.buckets[0] > 0.0 else None
                family.add_metric((), histogram.cumulative(), total)
            else:
                for labels, value in snapshot[name].items():
                    family.add_metric(labels, value)
            yield family


class _Others(Collector):
    """The collectors of another registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    spec = METRICS[name]
    if spec.kind == COUNTER:
        return CounterMetricFamily(name.removesuffix("_total"), spec.help, labels=spec.labels)
    if spec.kind == GAUGE:
        return GaugeMetricFamily(name, spec.help, labels=spec.labels)
    return HistogramMetricFamily(name, spec.help, labels=spec.labels)


# --- over HTTP ----------------------------------------------------------------------------------------------------


class _Collected:
    """Families as prometheus_client's encoders take them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            time.sleep(0)  # let the event loop have the interpreter: it may have a request to decide
            yield family


class MetricsServer:
    """A running server; `port` is the one it got."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        self.runner = runner
        self.host = host
        self.port = port

    async def close(self) -> None:
        """Stop to serve."""
        await self.runner.cleanup()


def application(source: SidecarMetrics | CollectorRegistry, ready: Callable[[], str] | None = None) -> web.Application:
    """GET /metrics, /healthz and /readyz.

    Args:
        source: of the metrics.
        ready: why the sidecar is not ready; "" when it is.
    """

    async def metrics(request: web.Request) -> web.Response:
        # What is pulled belongs to the event loop; writing it down takes longer and is done beside it.
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        families: Iterable[Metric]
        if isinstance(source, SidecarMetrics):
            families = chain(source.families(source.snapshot()), source.process.collect())
        else:
            families = list(source.collect())
        collected = _Collected(families)
        zipped = "gzip" in request.headers.get("Accept-Encoding", "").lower()

        def write() -> bytes:
            text = encode(collected)  # type: ignore[arg-type]
            return gzip.compress(text, 1) if zipped else text

        body = await asyncio.to_thread(write)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        why_not = ready() if ready is not None else ""
        return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app


async def start_http(
    host: str,
    port: int,
    source: SidecarMetrics | CollectorRegistry,
    *,
    ready: Callable[[], str] | None = None,
    routes: Iterable[Callable[[web.Application], None]] = (),
) -> MetricsServer:
    """Serve `application` until it is closed.

    Args:
        source: of the metrics. port: 0 takes a free one. routes: each adds routes of its own.

    Raises:
        OSError: it cannot be bound.
    """
    app = application(source, ready)
    for add in routes:
        add(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    bound = runner.addresses[0]
    return MetricsServer(runner, bound[0], bound[1])
