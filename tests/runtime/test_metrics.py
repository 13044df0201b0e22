"""The exported metrics: their names, what they count, how they are served; the dashboard and alerts that use them."""

from __future__ import annotations

import gzip
import json
import math
import re
import threading
import time
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from runtime.metrics import METRICS, Histogram, SidecarMetrics, TenantTokens, WorkerGauges, start_http

DEPLOY = Path(__file__).parents[2] / "deploy"


def samples(metrics: SidecarMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def value(metrics: SidecarMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def filled() -> SidecarMetrics:
    metrics = SidecarMetrics(version="0.1.0", policy="conductor", cluster="2p2d")
    metrics.observe_decision(3e-5, predicted_ttft_s=1.0, predicted_tbt_s=0.05, prefill_load=0.5, input_tokens=100)
    metrics.observe_shadow(True, 0.25)
    metrics.observe_outcome(ttft_s=1.5, tbt_s=0.05, predicted_ttft_s=1.0, predicted_tbt_s=0.05, tenant='a"\n\\')
    metrics.observe_outcome(failed="prefill")
    metrics.pull_workers(lambda: [WorkerGauges("p0", "prefill", True, queue_s=math.inf, metrics_stale=False)])
    for name, spec in METRICS.items():
        if spec.kind != "histogram" and spec.labels and "worker" in spec.labels and "role" not in spec.labels:
            metrics.pull(name, lambda spec=spec: {tuple("x" for _ in spec.labels): 2.0})  # type: ignore[misc]
    return metrics


# --- names --------------------------------------------------------------------------------------------------------

NOT_BASE = re.compile(r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|percent|perc|kb|mb|gb|kib|mib|gib)(_|$)")


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_the_rules(name: str) -> None:
    spec = METRICS[name]
    assert re.fullmatch(r"conductor_[a-z][a-z0-9_]*[a-z0-9]", name) and "__" not in name
    assert (spec.kind == "counter") == name.endswith("_total")
    assert not name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert not NOT_BASE.search(name), "not a base unit"
    assert not re.search(r"_(counter|gauge|histogram)(_|$)", name)
    assert len(spec.help) > 10 and spec.help.endswith(".") and name not in spec.help
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) and label not in ("le", "quantile") for label in spec.labels)
    assert not any(name.removesuffix("_total").endswith(f"_{label}") for label in spec.labels)
    assert all(len(known) == len(spec.labels) for known in spec.known)
    if spec.kind == "histogram":
        assert name.endswith(("_seconds", "_ratio")) and list(spec.buckets) == sorted(set(spec.buckets))
    else:
        assert not spec.buckets


def test_both_formats_parse_to_the_same() -> None:
    metrics = filled()
    plain = {family.name: family for family in parse_text(generate_latest(metrics.registry).decode())}
    om = {family.name: family for family in parse_openmetrics(generate_openmetrics(metrics.registry).decode())}
    for name, spec in METRICS.items():
        for families in (plain, om):
            family = families[name.removesuffix("_total")]
            assert (family.type, family.documentation) == (spec.kind, spec.help)
        wanted = {(s.name, frozenset(s.labels.items())): s.value for s in plain[name.removesuffix("_total")].samples}
        found = {(s.name, frozenset(s.labels.items())): s.value for s in om[name.removesuffix("_total")].samples}
        assert wanted == found
    assert plain["process_cpu_seconds"].type == "counter"


def test_counters_are_there_before_the_first_event() -> None:
    found = samples(SidecarMetrics())
    for name, spec in METRICS.items():
        if spec.kind == "counter" and not spec.labels:
            assert found[name, frozenset()] == 0.0
    assert found["conductor_policy_fallbacks_total", frozenset({("cause", "deadline")})] == 0.0
    assert found["conductor_slo_violations_total", frozenset({("slo", "tbt")})] == 0.0
    reasons = {dict(labels)["reason"] for name, labels in found if name == "conductor_requests_total"}
    assert reasons >= {"none", "rejected-saturated", "rejected-queue-full"}


# --- counting -----------------------------------------------------------------------------------------------------


def test_decisions() -> None:
    metrics = SidecarMetrics()
    for _ in range(3):
        metrics.observe_decision(
            1.5e-5,
            predicted_ttft_s=0.3,
            predicted_tbt_s=0.04,
            prefill_load=0.5,
            decode_load=0.6,
            decode_load_forecast=0.7,
            input_tokens=1000,
            reused_tokens=400,
        )
    metrics.observe_decision(0.2, "rejected-saturated", fell_back="deadline", canary="new")
    metrics.observe_decision(0.2, "rejected-of-its-own", fell_back="of its own")
    assert value(metrics, "conductor_requests_total", outcome="assigned", reason="none") == 3.0
    assert value(metrics, "conductor_requests_total", outcome="rejected", reason="rejected-saturated") == 1.0
    assert value(metrics, "conductor_requests_total", outcome="rejected", reason="rejected-of-its-own") == 1.0
    assert value(metrics, "conductor_policy_fallbacks_total", cause="deadline") == 1.0
    assert value(metrics, "conductor_canary_decisions_total", policy="new") == 1.0
    assert value(metrics, "conductor_decision_seconds_bucket", le="2e-05") == 3.0
    assert value(metrics, "conductor_decision_seconds_count") == 5.0
    assert value(metrics, "conductor_decision_seconds_sum") == pytest.approx(0.4 + 4.5e-5)
    assert value(metrics, "conductor_predicted_ttft_seconds_count") == 3.0  # of assigned requests only
    assert value(metrics, "conductor_decode_load_forecast_ratio") == 0.7
    assert value(metrics, "conductor_prompt_tokens_total") == 3000.0
    assert value(metrics, "conductor_reused_tokens_total") == 1200.0


def test_outcomes() -> None:
    metrics = SidecarMetrics()
    slos = {"ttft_slo_s": 1.0, "tbt_slo_s": 0.1}
    metrics.observe_outcome(
        ttft_s=0.5, tbt_s=0.05, predicted_ttft_s=0.4, predicted_tbt_s=0.05, output_tokens=10, **slos
    )
    metrics.observe_outcome(ttft_s=2.0, tbt_s=0.05, output_tokens=20, **slos)
    metrics.observe_outcome(ttft_s=2.0, tbt_s=0.2, output_tokens=30, **slos)
    metrics.observe_outcome(output_tokens=5, **slos)  # nothing reported: nothing known against it
    metrics.observe_outcome(failed="transfer", **slos)
    assert value(metrics, "conductor_requests_completed_total") == 4.0
    assert value(metrics, "conductor_requests_good_total") == 2.0
    assert value(metrics, "conductor_requests_failed_total", stage="transfer") == 1.0
    assert value(metrics, "conductor_slo_violations_total", slo="ttft") == 2.0
    assert value(metrics, "conductor_slo_violations_total", slo="tbt") == 1.0
    assert value(metrics, "conductor_output_tokens_total") == 65.0
    assert value(metrics, "conductor_good_output_tokens_total") == 15.0
    assert value(metrics, "conductor_ttft_seconds_count") == 3.0
    assert value(metrics, "conductor_ttft_prediction_error_ratio_bucket", le="1.25") == 1.0
    assert value(metrics, "conductor_ttft_prediction_error_ratio_sum") == pytest.approx(1.25)


def test_shadow() -> None:
    metrics = SidecarMetrics()
    metrics.observe_shadow(True, 0.0)
    metrics.observe_shadow(False, -0.5)
    metrics.observe_shadow(None)
    assert value(metrics, "conductor_shadow_agreement_total", agree="true") == 1.0
    assert value(metrics, "conductor_shadow_agreement_total", agree="false") == 1.0
    assert value(metrics, "conductor_shadow_errors_total") == 1.0
    assert value(metrics, "conductor_shadow_predicted_gain_seconds_bucket", le="-0.3") == 1.0


def test_wrong_names_and_labels_are_refused() -> None:
    metrics = SidecarMetrics()
    with pytest.raises(KeyError):
        metrics.count("conductor_no_such_total")
    with pytest.raises(ValueError, match="labels"):
        metrics.count("conductor_config_reloads_total")
    with pytest.raises(ValueError, match="labels"):
        metrics.count("conductor_config_reloads_total", "ok", amount=-1.0)
    with pytest.raises(ValueError, match="labels"):
        metrics.put("conductor_config_reloads_total", 1.0, "ok")
    with pytest.raises(ValueError, match="no counter"):
        metrics.pull("conductor_decision_seconds", lambda: 1.0)
    metrics.count("conductor_config_reloads_total", "refused")
    metrics.put("conductor_drift_alarm", 1.0, "w", "prefill")
    assert value(metrics, "conductor_config_reloads_total", result="refused") == 1.0
    assert value(metrics, "conductor_drift_alarm", worker="w", kind="prefill") == 1.0


def test_pulled_at_each_scrape_and_left_out_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    metrics = SidecarMetrics()
    calls = 0

    def blocks() -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("gone")
        return 100.0 * calls

    metrics.pull("conductor_kv_index_blocks", blocks)
    metrics.pull("conductor_kv_event_gaps_total", lambda: {"p0": 3, ("p1",): 0})
    metrics.pull("conductor_leases_expired_total", lambda: 1 / (calls - 2))
    metrics.pull("conductor_kv_events_ignored_total", lambda: {"p0": 3})  # a label is missing
    assert calls == 0
    assert value(metrics, "conductor_kv_index_blocks") == 100.0
    found = samples(metrics)
    assert ("conductor_kv_index_blocks", frozenset()) not in found
    assert ("conductor_leases_expired_total", frozenset()) not in found
    assert found["conductor_kv_event_gaps_total", frozenset({("worker", "p0")})] == 3.0
    assert value(metrics, "conductor_kv_index_blocks") == 300.0
    assert value(metrics, "conductor_metrics_errors_total", metric="conductor_kv_index_blocks") == 1.0
    assert value(metrics, "conductor_metrics_errors_total", metric="conductor_kv_events_ignored_total") == 5.0
    assert sum("cannot be pulled" in record.message for record in caplog.records) == 3  # said once each


def test_workers() -> None:
    metrics = SidecarMetrics()
    metrics.pull_workers(
        lambda: [
            WorkerGauges("p0", "prefill", True, queue_s=1.5, metrics_age_s=math.inf, metrics_stale=True),
            WorkerGauges("d0", "decode", False, batch=3, kv_tokens=1000.0, pending_requests=2),
        ]
    )
    assert value(metrics, "conductor_worker_up", worker="p0", role="prefill") == 1.0
    assert value(metrics, "conductor_worker_up", worker="d0", role="decode") == 0.0
    assert value(metrics, "conductor_worker_metrics_age_seconds", worker="p0", role="prefill") == math.inf
    assert value(metrics, "conductor_worker_metrics_stale", worker="p0", role="prefill") == 1.0
    found = samples(metrics)
    assert ("conductor_worker_queue_seconds", frozenset({("worker", "d0"), ("role", "decode")})) not in found


def test_counting_from_threads_loses_nothing() -> None:
    metrics = SidecarMetrics()

    def run() -> None:
        for _ in range(5000):
            metrics.count("conductor_config_reloads_total", "ok")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        generate_latest(metrics.registry)
    for thread in threads:
        thread.join()
    assert value(metrics, "conductor_config_reloads_total", result="ok") == 20000.0


@given(st.lists(st.floats(allow_nan=True), max_size=50))
@settings(max_examples=100, deadline=None)
def test_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 2.5))
    for each in values:
        histogram.observe(each)
    known = [each for each in values if not math.isnan(each)]
    for name, count in histogram.cumulative():
        assert count == sum(each <= float(name) for each in known)


def test_decision_is_cheap() -> None:
    metrics = SidecarMetrics()
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(200):
            metrics.observe_decision(
                1e-4, predicted_ttft_s=1.0, predicted_tbt_s=0.05, prefill_load=0.5, decode_load=0.1, input_tokens=9
            )
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 2e-5  # 1-2 us; the limit allows for a busy machine


# --- tenants ------------------------------------------------------------------------------------------------------


def test_tenants_are_bounded_and_the_largest_are_shown() -> None:
    tenants = TenantTokens(most=3, remembered=50)
    for round_ in range(40):
        for i in range(200):
            tenants.add(f"small-{round_}-{i}", 1.0, 0.0)
        for name, tokens in (("large", 300.0), ("larger", 600.0), ("largest", 900.0)):
            tenants.add(name, tokens, tokens)
        tenants.rebalance(float(round_))
    assert set(tenants.shown) == {"large", "larger", "largest"}
    assert len(tenants._recent) <= 60
    total = sum(map(sum, tenants.shown.values())) + sum(tenants.other)
    assert total == 40 * (200 + 2 * 1800)


@given(
    st.lists(
        st.tuples(st.sampled_from([f"t{i}" for i in range(12)]), st.integers(0, 1000), st.booleans()), max_size=300
    )
)
@settings(max_examples=100, deadline=None)
def test_tenant_series_never_go_back(rows: list[tuple[str, int, bool]]) -> None:
    tenants = TenantTokens(most=3, remembered=8, half_life_s=5.0)
    before: dict[str, float] = {}
    for now, (tenant, tokens, scraped) in enumerate(rows):
        tenants.add(tenant, tokens, 0.0)
        if scraped:
            tenants.rebalance(float(now))
            assert len(tenants.shown) <= 3
            after = {name: row[0] for name, row in (*tenants.shown.items(), ("other", tenants.other))}
            assert all(after[name] >= before[name] for name in after.keys() & before.keys())
            before = after
    assert sum(tokens for _, tokens, _ in rows) == sum(
        row[0] for row in (*tenants.shown.values(), *tenants._retired.values(), tenants.other)
    )


def test_a_tenant_called_other() -> None:
    metrics = SidecarMetrics(tenants=2)
    for tenant in ("other", "a", "x" * 500):
        metrics.observe_outcome(tenant=tenant, input_tokens=7, output_tokens=3)
    metrics.observe_outcome(tenant="", input_tokens=7)
    generate_openmetrics(metrics.registry)
    metrics.observe_outcome(tenant="a", input_tokens=7, output_tokens=3)
    found = {
        dict(labels)["tenant"]: number
        for (name, labels), number in samples(metrics).items()
        if name == "conductor_tenant_tokens_total" and ("kind", "input") in labels
    }
    assert found == {"a": 7.0, "x" * 64: 0.0, "other": 21.0}


# --- over HTTP ----------------------------------------------------------------------------------------------------


async def test_http() -> None:
    metrics = filled()
    why_not = "starting"
    server = await start_http(
        "127.0.0.1",
        0,
        metrics,
        ready=lambda: why_not,
        routes=[lambda app: app.add_routes([web.get("/own", mine)]) and None],
    )
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            async with session.get(f"{base}/metrics", headers={"Accept-Encoding": "identity"}) as answer:
                assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                plain = await answer.text()
            assert {family.name for family in parse_text(plain)} >= {n.removesuffix("_total") for n in METRICS}
            accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
            headers = {"Accept": accept, "Accept-Encoding": "gzip"}
            async with session.get(f"{base}/metrics", headers=headers) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
                assert answer.headers["Content-Encoding"] == "gzip"
                text = gzip.decompress(await answer.read()).decode()
            assert text.endswith("# EOF\n") and len(list(parse_openmetrics(text))) > len(METRICS)
            for path, status, body in (
                ("/healthz", 200, "ok\n"),
                ("/readyz", 503, "starting\n"),
                ("/own", 200, "mine"),
                ("/nothing", 404, None),
            ):
                async with session.get(base + path) as answer:
                    assert answer.status == status
                    assert body is None or await answer.text() == body
            why_not = ""
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 200
            async with session.post(f"{base}/metrics") as answer:
                assert answer.status == 405
            async with session.head(f"{base}/metrics") as answer:
                assert answer.status == 200
    finally:
        await server.close()
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as session, session.get(f"{base}/healthz"):
            pass


async def mine(request: web.Request) -> web.Response:
    return web.Response(text="mine")


async def test_http_of_a_plain_registry_and_a_taken_port() -> None:
    registry = CollectorRegistry()
    Gauge("g", "x", registry=registry).set(4)
    server = await start_http("127.0.0.1", 0, registry)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{server.port}/metrics") as answer:
                assert "g 4.0" in await answer.text()
            async with session.get(f"http://127.0.0.1:{server.port}/readyz") as answer:
                assert answer.status == 200
        with pytest.raises(OSError):
            await start_http("127.0.0.1", server.port, registry)
    finally:
        await server.close()


# --- what uses the names ------------------------------------------------------------------------------------------


def exported() -> set[str]:
    names = {sample.name for family in filled().registry.collect() for sample in family.samples}
    return names | {name for name, spec in METRICS.items() if spec.kind != "histogram"}


def check_expression(expression: str, where: str) -> None:
    names = set(re.findall(r"\b(?:conductor|process)_[a-z0-9_]+", expression))
    assert names, f"{where}: no metric in {expression!r}"
    assert names <= exported(), f"{where}: no such metric: {names - exported()}"
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")
    for name, matchers in re.findall(r"\b(conductor_[a-z0-9_]+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        spec = METRICS.get(name) or METRICS[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert used <= {*spec.labels, "le", "job", "instance"}, f"{where}: {name} has no label {used - {*spec.labels}}"
    for match in re.finditer(r"(rate|increase)\((\w+)", expression):
        if match[2] in METRICS:
            assert METRICS[match[2]].kind == "counter", f"{where}: {match[1]} of {match[2]}"
    for name, spec in METRICS.items():
        if spec.kind == "counter":
            for match in re.finditer(rf"\b{name}\b", expression):
                assert re.search(r"(rate|increase)\($", expression[: match.start()]), f"{where}: {name} without a rate"


def test_dashboard() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels:
        assert panel["targets"] and panel["title"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            check_expression(target["expr"].replace("$__rate_interval", "5m"), panel["title"])
    text = json.dumps(dashboard)
    for name in ("conductor_requests_good_total", "conductor_drift_alarm", "conductor_policy_fallbacks_total"):
        assert name in text


def test_alerts() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names) >= 10 and all(name.startswith("Conductor") for name in names)
    for rule in rules:
        check_expression(rule["expr"], rule["alert"])
        assert re.search(r"[<>=]=?", rule["expr"]) and re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    text = " ".join(rule["expr"] for rule in rules)
    for name in ("fallbacks", "drift_alarm", "metrics_stale", "event_gaps", "requests_total"):
        assert name in text
