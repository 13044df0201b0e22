"""Calibration: it learns what a worker really does, and nothing from outliers, and says when predictions drift."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware import profiles
from envs.kernel.latency import compute_time, drain_time
from envs.spec import validate_cluster
from envs.state import Parameters
from runtime.calibration import Alarm, Calibration, CalibrationError, Drift, Fit, Kind, Mode

SLOW, FAST, OLD = "a800x8-llama2-70b", "h100x8-llama3-70b", "a100x8-llama2-70b-2023"
SMALL = "h100-llama3-8b"
PAIRS = [(SLOW, FAST), (FAST, SLOW), (OLD, SMALL), (SMALL, OLD), (FAST, FAST)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def cluster(hardware: str, count: int = 1, **fields: Any) -> Parameters:
    pool = [{"count": count, "hardware": hardware}]
    return validate_cluster({"prefill": pool, "decode": pool} | fields, "test").parameters()


class Truth:
    """A worker of another profile: what it takes, with noise and outliers."""

    def __init__(self, hardware: str, seed: int = 0, *, noise: float = 0.1, outliers: float = 0.05) -> None:
        self.prefill, self.decode = profiles()[hardware].prefill, profiles()[hardware].decode
        self.random = np.random.default_rng(seed)
        self.noise, self.outliers = noise, outliers
        self.slower = 1.0

    def measured(self, seconds: float) -> float:
        outlier = 10.0 if self.random.random() < self.outliers else 1.0
        return float(self.slower * seconds * math.exp(self.noise * self.random.normal()) * outlier)

    def prompt(self) -> tuple[int, int]:
        n = int(math.exp(self.random.uniform(math.log(64), math.log(100_000))))
        return n, int(n * self.random.uniform(0.0, 0.9)) if self.random.random() < 0.5 else 0

    def batch(self) -> tuple[int, float]:
        b = int(self.random.integers(1, 128))
        return b, float(b * self.random.uniform(100.0, 8000.0))

    def prefill_s(self, n: int, h: int) -> float:
        times = self.prefill
        return times.base_s + times.linear_s * (n - h) + times.quadratic_s * (float(n) ** 2 - float(h) ** 2)

    def step_s(self, b: float, k: float) -> float:
        return self.decode.base_s + self.decode.per_request_s * b + self.decode.per_token_s * k

    def observe(self, calibration: Calibration, count: int, index: int = 0) -> None:
        for _ in range(count):
            n, h = self.prompt()
            calibration.prefill_observed(index, n, h, self.measured(self.prefill_s(n, h)))
            b, k = self.batch()
            calibration.decode_observed(index, b, k, self.measured(self.step_s(b, k)))

    def errors(self, parameters: Parameters, index: int = 0) -> tuple[float, float]:
        """Mean absolute relative error of the tables' predictions: prefill, decode."""
        p, d = parameters.prefill[index], parameters.decode[index]
        prefill, decode = [], []
        for _ in range(400):
            n, h = self.prompt()
            fitted = p["base_s"] + p["linear_s"] * (n - h) + p["quadratic_s"] * (float(n) ** 2 - float(h) ** 2)
            prefill.append(abs(fitted / self.prefill_s(n, h) - 1.0))
            b, k = self.batch()
            fitted = d["step_base_s"] + d["step_request_s"] * b + d["step_token_s"] * k
            decode.append(abs(fitted / self.step_s(b, k) - 1.0))
        return float(np.mean(prefill)), float(np.mean(decode))


# --- the fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("start", "real"), PAIRS)
def test_learns_another_hardware_from_noisy_outcomes(start: str, real: str, seed: int) -> None:
    parameters = cluster(start)
    calibration, truth = Calibration(parameters), Truth(real, seed)
    before = truth.errors(parameters)
    truth.observe(calibration, 64)
    soon = truth.errors(parameters)
    truth.observe(calibration, 192)
    after = truth.errors(parameters)
    if start != real:
        assert min(before) > 0.5 and max(soon) < 0.12
    assert max(after) < 0.05, (before, soon, after)


def test_few_data_change_little() -> None:
    parameters = cluster(FAST)
    calibration, truth = Calibration(parameters, write_every=1), Truth(FAST, outliers=0.0)
    truth.observe(calibration, 4)
    assert max(truth.errors(parameters)) < 0.1


def test_outliers_alone_do_not_move_it() -> None:
    parameters = cluster(FAST)
    calibration, truth = Calibration(parameters), Truth(FAST, 1, noise=0.02, outliers=0.0)
    truth.observe(calibration, 200)
    before = truth.errors(parameters)
    for _ in range(3):  # three bursts of four, each 10 times too long
        truth.outliers = 1.0
        truth.observe(calibration, 4)
        truth.outliers = 0.0
        truth.observe(calibration, 12)
    assert max(before) < 0.01 and max(truth.errors(parameters)) < 0.02
    assert not calibration.alarms


def test_tables_are_written_every_so_often_and_read_at_once() -> None:
    parameters = cluster(SLOW)
    calibration, truth = Calibration(parameters, write_every=10), Truth(FAST)
    kept = parameters.prefill.copy()
    configured = compute_time(parameters.prefill[0], 8192, 0)
    truth.observe(calibration, 9)
    assert (parameters.prefill == kept).all()
    truth.observe(calibration, 91)
    assert (parameters.prefill != kept).all()
    fitted = compute_time(parameters.prefill[0], 8192, 0)
    assert fitted == pytest.approx(truth.prefill_s(8192, 0), rel=0.1) and fitted < 0.6 * configured


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.FROZEN])
def test_modes_that_leave_the_predictions_alone(mode: Mode) -> None:
    parameters = cluster(SLOW)
    kept = [table.copy() for table in parameters]
    calibration, truth = Calibration(parameters, mode=mode), Truth(FAST)
    truth.observe(calibration, 300)
    assert not calibration.enabled
    assert all((table == old).all() for table, old in zip(parameters, kept, strict=True))
    reports = {report.kind: report for report in calibration.reports()}
    if mode is Mode.FROZEN:
        assert reports[Kind.PREFILL].alarm and reports[Kind.PREFILL].ratio < 0.8  # it sees that they are wrong
        assert math.isfinite(reports[Kind.PREFILL].absolute_error)
        assert calibration.state()["fits"] == {}
    else:
        assert reports[Kind.PREFILL].slowdown < 0.6


def test_requests_all_alike_do_not_blow_up() -> None:
    parameters = cluster(SLOW)
    calibration, truth = Calibration(parameters), Truth(FAST, outliers=0.02)
    fit = calibration._fit("prefill-0", Kind.PREFILL)
    for _ in range(10_000):
        calibration.prefill_observed(0, 4096, 0, truth.measured(truth.prefill_s(4096, 0)))
    coefficients = np.array(fit.coefficients)
    assert fit.predict((1.0, 4096.0, 4096.0**2)) == pytest.approx(truth.prefill_s(4096, 0), rel=0.04)
    # what cannot be told apart has moved together, from the profile's ratios
    multiples = coefficients / np.array(fit.prior)
    assert (multiples > 0.05).all() and (multiples < 1.5).all()
    assert np.linalg.cond(np.array(fit.information)) < 1e6
    truth.observe(calibration, 300)  # and it can still learn
    assert truth.errors(parameters)[0] < 0.05


def test_nearly_alike_requests_stay_bounded() -> None:
    parameters = cluster(FAST)
    calibration, truth = Calibration(parameters), Truth(FAST, outliers=0.05)
    for _ in range(5000):
        n = int(4096 + truth.random.integers(-40, 41))
        calibration.prefill_observed(0, n, 0, truth.measured(truth.prefill_s(n, 0)))
        calibration.decode_observed(0, 32, 32_000.0, truth.measured(truth.step_s(32, 32_000.0)))
    for n in (512, 16_384):
        fitted = compute_time(parameters.prefill[0], n, 0)
        assert 0.3 < fitted / truth.prefill_s(n, 0) < 3.0


def test_follows_a_worker_that_becomes_slower_and_then_recovers() -> None:
    parameters = cluster(FAST)
    calibration, truth = Calibration(parameters), Truth(FAST)
    for slower in (1.0, 1.5, 5.0, 1.0):
        truth.slower = slower
        truth.observe(calibration, 250)
        rows = [report for report in calibration.reports() if report.kind is Kind.PREFILL]
        assert rows[0].slowdown == pytest.approx(slower, rel=0.1)
        assert rows[0].ratio == pytest.approx(1.0, abs=0.1) and not rows[0].alarm


def test_a_coefficient_that_the_profile_has_as_zero_can_be_learnt() -> None:
    pool = [{"count": 1, "hardware": FAST, "times": {"linear_s": 3.8e-5, "base_s": 0.0}}]
    decode = [{"count": 1, "hardware": FAST, "times": {"base_s": 0.01, "per_request_s": 0.0, "per_token_s": 0.0}}]
    parameters = validate_cluster({"prefill": pool, "decode": decode}, "test").parameters()
    calibration, truth = Calibration(parameters), Truth(FAST, outliers=0.0)
    truth.observe(calibration, 400)
    assert max(truth.errors(parameters)) < 0.05


def test_chunks_and_loads_are_taken_into_account() -> None:
    times = {"base_s": 0.01, "linear_s": 1e-4, "quadratic_s": 1e-9, "chunk_tokens": 2048, "chunk_overhead_s": 0.02}
    pool = [{"count": 1, "hardware": FAST, "times": times}]
    parameters = validate_cluster({"prefill": pool, "decode": [{"count": 1, "hardware": FAST}]}, "test").parameters()
    calibration = Calibration(parameters, write_every=1)
    kept = parameters.prefill.copy()
    for n in (1000, 3000, 20_000, 7000):
        calibration.prefill_observed(0, n, 0, compute_time(parameters.prefill[0], n, 0))
    assert np.allclose(parameters.prefill["linear_s"], kept["linear_s"], rtol=1e-6)
    taken = calibration.taken
    calibration.prefill_observed(0, 20_000, 19_000, 5.0, load_s=4.9)  # the load was the longer one
    assert (calibration.taken, calibration.refused) == (taken, 1)
    calibration.prefill_observed(0, 20_000, 10_000, 1.4, load_s=0.1)
    assert calibration.taken == taken + 1


def test_a_pipelined_group_is_fitted_by_what_one_node_takes() -> None:
    times = {"base_s": 0.01, "linear_s": 1e-4, "quadratic_s": 1e-9, "chunk_tokens": 2048, "chunk_overhead_s": 0.02}
    pool = [{"count": 1, "hardware": FAST, "times": times, "pipeline_nodes": 4}]
    parameters = validate_cluster({"prefill": pool, "decode": [{"count": 1, "hardware": FAST}]}, "test").parameters()
    truth = parameters.prefill[0].copy()

    def seconds(n: int, h: int) -> float:
        return float(compute_time(truth, n, h) + drain_time(truth, n, h))

    calibration = Calibration(parameters)
    for n, h in ((1000, 0), (3000, 512), (20_000, 0), (7000, 4096)):
        calibration.prefill_observed(0, n, h, seconds(n, h), drain_s=drain_time(truth, n, h))
    assert all(row.ratio == pytest.approx(1.0) for row in calibration.reports())
    # a node that is 1.5 times slower, by requests of all lengths
    for name in ("base_s", "linear_s", "quadratic_s", "chunk_overhead_s"):
        truth[name] *= 1.5
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(200, 60_000))
        calibration.prefill_observed(0, n, 0, seconds(n, 0))
    fitted = parameters.prefill[0]
    for n in (1000, 8000, 50_000):
        assert compute_time(fitted, n, 0) + drain_time(fitted, n, 0) == pytest.approx(seconds(n, 0), rel=0.05)
    taken = calibration.taken
    calibration.prefill_observed(0, 1000, 0, 1.0, drain_s=0.9)  # most of it behind another request
    assert (calibration.taken, calibration.refused) == (taken, 1)


def test_transfers() -> None:
    parameters = cluster(FAST, 2)
    calibration = Calibration(parameters)
    random = np.random.default_rng(0)
    for _ in range(300):
        size = float(random.uniform(1e8, 2e10))
        flows = float(random.integers(1, 4))
        seconds = (0.05 + flows * size / 40e9) * math.exp(0.05 * random.normal())
        calibration.transfer_observed(1, size, seconds, flows=flows)
    assert parameters.prefill[1]["nic_bytes_per_s"] == pytest.approx(40e9, rel=0.05)
    assert parameters.prefill[0]["nic_bytes_per_s"] == 190e9
    assert parameters.cluster[0]["transfer_latency_s"] == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
def test_what_cannot_be_measured_is_refused_and_counted(seconds: float) -> None:
    calibration = Calibration(cluster(FAST))
    calibration.prefill_observed(0, 100, 0, seconds)
    calibration.decode_observed(0, 1, 100.0, seconds)
    calibration.transfer_observed(0, 100.0, seconds)
    calibration.joined(0, 0, predicted_ttft_s=1.0, ttft_s=seconds, predicted_tbt_s=seconds, tbt_s=0.1)
    calibration.prefill_observed(0, 100, 100, 1.0)
    calibration.prefill_observed(0, 100, -1, 1.0)
    calibration.decode_observed(0, 0, 100.0, 1.0)
    calibration.decode_observed(0, 1, math.nan, 1.0)
    calibration.decode_observed(0, 1, 1.0, 1.0, stall_s=1.0)
    calibration.transfer_observed(0, math.nan, 1.0)
    assert (calibration.taken, calibration.refused) == (0, 9)
    assert not calibration.reports()


ANY = st.one_of(st.floats(), st.floats(1e-9, 1e5), st.sampled_from([1e-9, 1e-300, 86_399.0]))
EVENT = st.one_of(
    st.tuples(st.just("prefill"), st.integers(-1, 1 << 41), st.integers(-1, 1 << 20), ANY),
    st.tuples(st.just("prefill"), st.just(1000), st.just(0), st.floats(1e-8, 1e4)),
    st.tuples(st.just("decode"), ANY, ANY, ANY),
    st.tuples(st.just("decode"), st.integers(1, 500), st.floats(0, 1e9), st.floats(1e-8, 1e4)),
    st.tuples(st.just("transfer"), ANY, ANY, ANY),
    st.tuples(st.just("joined"), ANY, ANY, ANY),
)


@given(st.lists(EVENT, max_size=80), st.sampled_from([2.0, 10.0, 1000.0]))
@settings(max_examples=200, deadline=None)
def test_whatever_is_observed_the_tables_stay_sane(events: list[tuple[Any, ...]], memory: float) -> None:
    parameters = cluster(FAST)
    kept = [table.copy() for table in parameters]
    calibration = Calibration(parameters, write_every=1, memory=memory)
    for kind, a, b, c in events:
        if kind == "prefill":
            calibration.prefill_observed(0, a, b, c)
        elif kind == "decode":
            calibration.decode_observed(0, a, b, c)
        elif kind == "transfer":
            calibration.transfer_observed(0, a, b, flows=c)
        else:
            calibration.joined(0, 0, predicted_ttft_s=a, ttft_s=b, predicted_tbt_s=c, tbt_s=a)
        for table, old in zip(parameters, kept, strict=True):
            for name in table.dtype.names or ():
                value, first = float(table[name][0]), float(old[name][0])
                assert math.isfinite(value) and value >= 0.0
                assert 0.0099 * first <= value <= 101.0 * first
    for report in calibration.reports():
        assert math.isfinite(report.ratio) and math.isfinite(report.absolute_error)
    again = Calibration(cluster(FAST), memory=memory)
    again.restore(json.loads(json.dumps(calibration.state())))
    assert again.state() == calibration.state()


# --- drift --------------------------------------------------------------------------------------------------------


def alarms_of(errors: Iterator[float] | np.ndarray) -> list[int]:
    drift = Drift()
    raised = []
    for i, error in enumerate(errors):
        if drift.update(float(error)) and drift.alarm:
            raised.append(i)
    return raised


@pytest.mark.parametrize(("noise", "outliers"), [(0.02, 0.05), (0.1, 0.0), (0.1, 0.05), (0.3, 0.05), (0.6, 0.0)])
def test_no_alarm_in_100_000_stationary_requests(noise: float, outliers: float) -> None:
    random = np.random.default_rng(7)
    errors = noise * random.normal(size=100_000) + math.log(10.0) * (random.random(100_000) < outliers)
    assert alarms_of(errors) == []


@pytest.mark.parametrize(("noise", "within"), [(0.05, 16), (0.1, 16), (0.2, 30), (0.3, 75)])
@pytest.mark.parametrize("slower", [1.5, 1 / 1.5])
def test_alarm_soon_after_a_worker_changes_its_speed(noise: float, within: int, slower: float) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        errors = noise * random.normal(size=1500) + math.log(10.0) * (random.random(1500) < 0.05)
        errors[500:] += math.log(slower)
        raised = alarms_of(errors)
        assert 500 <= raised[0] < 500 + within, seed


def test_no_alarm_while_the_fit_works_and_one_when_the_worker_slows_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alarms: list[Alarm] = []
    parameters = cluster(FAST)
    calibration, truth = Calibration(parameters, on_alarm=alarms.append), Truth(FAST, 3)
    truth.observe(calibration, 3000)
    assert not alarms and not calibration.alarms
    truth.slower = 1.5
    truth.observe(calibration, 20)
    assert calibration.alarms == {("prefill-0", Kind.PREFILL), ("decode-0", Kind.DECODE)}
    assert all(alarm.raised and alarm.ratio > 1.1 for alarm in alarms)
    assert "prefill of prefill-0 drifts" in caplog.text
    truth.observe(calibration, 400)  # the fit has caught up
    assert not calibration.alarms and len(alarms) == 4
    assert "decode of decode-0 is as predicted again" in caplog.text


def test_an_alarm_has_hysteresis_and_clears() -> None:
    drift, changes = Drift(), []
    for i in range(3000):
        wave = 0.25 if 1000 <= i < 2000 else 0.0
        if drift.update(wave + 0.05 * math.sin(i)):
            changes.append((i, drift.alarm))
    assert [alarm for _, alarm in changes] == [True, False]
    assert 1000 < changes[0][0] < 1030 and 2030 < changes[1][0] < 2100


def test_predictions_joined_with_outcomes() -> None:
    calibration = Calibration(cluster(FAST, 2), ["p-a", "p-b"], ["d-a", "d-b"], mode=Mode.FROZEN)
    random = np.random.default_rng(0)
    for _ in range(300):
        noise = math.exp(0.05 * random.normal())
        calibration.joined(0, 1, predicted_ttft_s=1.0, ttft_s=noise, predicted_tbt_s=0.05, tbt_s=0.1 * noise)
        calibration.joined(1, 1, predicted_ttft_s=2.0, ttft_s=math.nan)
    reports = {(report.worker, report.kind): report for report in calibration.reports()}
    assert set(reports) == {("p-a", Kind.TTFT), ("d-b", Kind.TBT)}
    assert reports["p-a", Kind.TTFT].ratio == pytest.approx(1.0, abs=0.05)
    assert reports["p-a", Kind.TTFT].absolute_error == pytest.approx(0.04, abs=0.02)
    assert not reports["p-a", Kind.TTFT].alarm and reports["p-a", Kind.TTFT].observations == 300
    assert calibration.alarms == {("d-b", Kind.TBT)}
    gauges = calibration.gauges()
    assert gauges["conductor_drift_alarm"] == {("p-a", "ttft"): 0.0, ("d-b", "tbt"): 1.0}
    assert gauges["conductor_calibration_slowdown_ratio"] == {}


def test_a_callback_that_fails_does_no_harm() -> None:
    def on_alarm(alarm: Alarm) -> None:
        raise RuntimeError("callback")

    calibration = Calibration(cluster(FAST), on_alarm=on_alarm)
    for _ in range(50):
        calibration.joined(0, 0, predicted_ttft_s=1.0, ttft_s=3.0)
    assert calibration.alarms


def test_gauges_are_metrics() -> None:
    from runtime.metrics import METRICS, SidecarMetrics

    calibration, metrics = Calibration(cluster(FAST)), SidecarMetrics()
    Truth(FAST).observe(calibration, 20)
    gauges = calibration.gauges()
    for name in gauges:
        metrics.pull(name, lambda name=name: calibration.gauges()[name])  # type: ignore[misc]
    for name, rows in gauges.items():
        assert rows and all(len(labels) == len(METRICS[name].labels) for labels in rows)
        assert metrics.snapshot()[name] == rows


# --- restarts and other workers -----------------------------------------------------------------------------------


def test_warm_restart() -> None:
    truth = Truth(FAST)
    first = Calibration(cluster(SLOW, 2))
    truth.observe(first, 200, index=1)
    saved = json.loads(json.dumps(first.state()))
    parameters = cluster(SLOW, 2)
    second = Calibration(parameters)
    assert second.restore(saved) == 2
    assert max(truth.errors(parameters, 1)) < 0.05 and min(truth.errors(parameters, 0)) > 0.5
    assert second.state() == first.state()


def test_restart_with_other_hardware_or_workers() -> None:
    first = Calibration(cluster(SLOW))
    Truth(FAST).observe(first, 100)
    parameters = cluster(OLD)
    kept = parameters.prefill.copy()
    assert Calibration(parameters).restore(first.state()) == 0
    assert (parameters.prefill == kept).all()
    assert Calibration(cluster(SLOW), ["a"], ["b"]).restore(first.state()) == 0


def break_nan(state: dict[str, Any]) -> None:
    state["fits"]["prefill-0"]["prefill"]["multiples"][0] = math.nan


def break_matrix(state: dict[str, Any]) -> None:
    state["fits"]["prefill-0"]["prefill"]["information"][1][1] = -1.0


def break_bounds(state: dict[str, Any]) -> None:
    state["fits"]["decode-0"]["decode"]["multiples"] = [1.0, 1.0, -5.0]


def break_length(state: dict[str, Any]) -> None:
    state["fits"]["decode-0"]["decode"]["multiples"] = [1.0]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (break_nan, r"fits.prefill-0.prefill: multiples: expected a finite number, found nan"),
        (break_matrix, r"fits.prefill-0.prefill: information: expected a positive definite matrix"),
        (break_bounds, r"fits.decode-0.decode: multiples: expected"),
        (break_length, r"fits.decode-0.decode: multiples: expected 3 numbers"),
        (lambda state: state.update(format=9), r"expected format 1, found 9"),
        (lambda state: state.update(fits=[]), r"fits: expected a mapping"),
        (lambda state: state["fits"].update({"decode-0": 3}), r"fits.decode-0: expected a mapping, found 3"),
    ],
)
def test_a_broken_state_is_refused_whole(broken: Callable[[dict[str, Any]], None], message: str) -> None:
    first = Calibration(cluster(SLOW))
    Truth(FAST).observe(first, 100)
    state = first.state()
    broken(state)
    parameters = cluster(SLOW)
    second = Calibration(parameters)
    kept = [table.copy() for table in parameters]
    with pytest.raises(CalibrationError, match=message):
        second.restore(state)
    assert all((table == old).all() for table, old in zip(parameters, kept, strict=True))
    assert second.state()["fits"] == {}
    with pytest.raises(CalibrationError, match="expected format"):
        second.restore(None)


def test_rebinding_keeps_fits_with_their_workers() -> None:
    truth = Truth(FAST)
    calibration = Calibration(cluster(SLOW, 2), ["a", "b"], ["x", "y"])
    truth.observe(calibration, 200, index=0)
    calibration.joined(1, 1, predicted_ttft_s=1.0, ttft_s=1.0)
    parameters = cluster(SLOW, 3)
    calibration.rebind(parameters, ["new", "b", "a"], ["y", "z", "x"])
    assert max(truth.errors(parameters, 2)) < 0.05
    assert min(truth.errors(parameters, 0)) > 0.5
    assert {report.worker for report in calibration.reports()} == {"a", "x", "b"}
    calibration.rebind(cluster(OLD, 1), ["a"], ["x"])  # another profile: starts anew
    assert calibration.state()["fits"] == {}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="prefills: expected 1 different ids"):
        Calibration(cluster(FAST), ["a", "b"])
    with pytest.raises(ValueError, match="decodes"):
        Calibration(cluster(FAST, 2), None, ["a", "a"])
    with pytest.raises(ValueError, match="write_every"):
        Calibration(cluster(FAST), write_every=0)
    with pytest.raises(ValueError, match="memory"):
        Calibration(cluster(FAST), memory=1.0)


def test_cost() -> None:
    fit = Fit((0.01, 1e-4, 1e-9), (0.05, 1e-4, 1e-9), 100.0)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for i in range(50):
            fit.update((1.0, 1000.0 + i, 1e6), 0.12)
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 4e-4  # 20-40 us; the limit allows for a busy machine
