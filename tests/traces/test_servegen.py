"""ServeGen's clients: what is sampled has the files' rates, burstiness and lengths."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

import traces
from tests.traces.test_command_line import refused, run
from traces import TraceError, load
from traces.formats.servegen import _clients, is_folder, read_windows

WINDOWS = [(0, 2.0, "Gamma", 0.25, 2.0), (600, 0.0, "", 0, 0), (1200, 6.0, "Weibull", 0.6, 0.1)]
NARROW = {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{0: 0.5, 7: 0.5}"}
EMPTY = {"input_tokens": "{}", "output_tokens": "{}"}


def write(folder: Path, client: int, windows: list[tuple] = WINDOWS, dataset: dict | None = None) -> None:
    rows = "".join(f"{t},{rate},{1.5},{kind},{a},{b}\n" for t, rate, kind, a, b in windows)
    (folder / f"m_chunk-{client}-trace.csv.gz").write_bytes(gzip.compress(rows.encode()))
    if dataset != {}:
        (folder / f"m_chunk-{client}-dataset.json").write_text(json.dumps(dataset or {"0": NARROW}))


def test_rates_and_lengths_by_window(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 3, [(0, 1.0, "Gamma", 1.0, 1.0), (600, 1.0, "Gamma", 1.0, 1.0), (1200, 0, "", 0, 0)])
    counts = []
    for seed in range(60):
        trace = traces.servegen(tmp_path, 0, 1800, seed)
        assert trace.tenant_id is not None and set(trace.tenant_id) == {0, 3}
        assert not trace.has_blocks
        assert set(trace.input_tokens) == {10, 30} and set(trace.output_tokens) == {1, 7}
        windows = (trace.arrival_s // 600).astype(int)
        counts.append([np.bincount(windows[trace.tenant_id == c], minlength=3) for c in (0, 3)])
    means = np.mean(counts, axis=0)
    expected = np.array([[1200, 0, 3600], [600, 600, 0]])
    spread = np.sqrt(expected * [[4, 1, 2.9], [1, 1, 1]] / 60)  # a renewal process: variance cv^2 times the mean
    assert (abs(means - expected) <= 4 * spread).all(), means
    share = np.mean([(traces.servegen(tmp_path, 0, 1800, s).input_tokens == 30).mean() for s in range(5)])
    assert share == pytest.approx(0.75, abs=0.02)


def test_burstiness(tmp_path: Path) -> None:
    write(tmp_path, 0, [(0, 50.0, "Gamma", 0.25, 0.08), (3600, 50.0, "Weibull", 0.6, 0.01)])
    trace = traces.servegen(tmp_path, 0, 7200, 4)
    for start, cv in ((0, 2.0), (3600, math.sqrt(math.gamma(1 + 2 / 0.6) / math.gamma(1 + 1 / 0.6) ** 2 - 1))):
        gaps = np.diff(trace.window(start, start + 3600).arrival_s)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
        assert 1 / gaps.mean() == pytest.approx(50, rel=0.05)


def test_part_of_the_windows_and_a_rate(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1)
    trace = traces.servegen(tmp_path, 300, 1200, 1, rate=40)
    assert trace.arrival_s.min() >= 0 and trace.arrival_s.max() < 1200
    assert not ((trace.arrival_s >= 300) & (trace.arrival_s < 900)).any()  # both idle then
    assert trace.n_requests / 1200 == pytest.approx(40, rel=0.1)
    early = (trace.arrival_s < 300).mean()
    assert early == pytest.approx(0.25, abs=0.03)  # 2/s and 6/s, scaled alike
    assert trace.checksum == traces.servegen(tmp_path, 300, 1200, 1, rate=40).checksum
    assert trace.checksum != traces.servegen(tmp_path, 300, 1200, 2, rate=40).checksum


def test_a_client_does_not_depend_on_others(tmp_path: Path) -> None:
    write(tmp_path, 0)
    alone = traces.servegen(tmp_path, 0, 600, 5)
    write(tmp_path, 1)
    both = traces.servegen(tmp_path, 0, 600, 5)
    assert both.tenant_id is not None
    np.testing.assert_array_equal(both.arrival_s[both.tenant_id == 0], alone.arrival_s)


def test_lengths_of_windows_without_any_are_the_last_known(tmp_path: Path) -> None:
    later = {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 1.0}"}
    write(tmp_path, 0, dataset={"0": NARROW, "600": EMPTY, "1200": later})
    trace = traces.servegen(tmp_path, 0, 1800)
    assert set(trace.window(0, 600).input_tokens) == {10, 30}
    assert set(trace.window(1200, 1800).input_tokens) == {5}
    write(tmp_path, 0, dataset={"0": EMPTY, "600": later})
    assert set(traces.servegen(tmp_path, 0, 600).input_tokens) == {5}
    write(tmp_path, 0, dataset={"0": EMPTY})
    with pytest.raises(TraceError, match="every distribution is empty"):
        traces.servegen(tmp_path, 0, 600)


def test_invented_sessions(tmp_path: Path) -> None:
    write(tmp_path, 0, dataset={"0": {"input_tokens": "{9000: 1.0}", "output_tokens": "{20: 1.0}"}})
    trace = traces.servegen(tmp_path, 0, 600, sessions=traces.profile("conversation"))
    assert trace.has_blocks and trace.session_id is not None
    assert trace.tenant_id is not None and set(trace.tenant_id) == {0}
    assert traces.lru_hit_rate(trace, np.inf) > 0.02


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 7, dataset={})
    with pytest.raises(TraceError, match=r"client 7 has no chunk-7-dataset\.json; expected both files"):
        traces.servegen(tmp_path, 0, 600)
    trace = traces.servegen(tmp_path, 0, 600, on_error="skip")
    assert trace.skipped_rows == 1
    assert "client 7" in trace.skip_reasons[0]
    assert trace.tenant_id is not None and set(trace.tenant_id) == {0}
    with pytest.raises(TraceError, match="no ServeGen client"):
        traces.servegen(tmp_path / "nowhere", 0, 600)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([(0, -1.0, "Gamma", 1, 1)], "line 1, field 'rate': -1.0"),
        ([(0, 1.0, "Pareto", 1, 1)], "field 'pattern': 'Pareto' at rate 1; expected Gamma or Weibull"),
        ([(0, 1.0, "Gamma", 0, 1)], "field 'arg1': shape 0"),
        ([(0, "fast", "Gamma", 1, 1)], "numbers, and the pattern fourth"),
        ([(600, 1.0, "Gamma", 1, 1), (0, 1.0, "Gamma", 1, 1)], "line 2, field 'start': 0"),
        ([(0, 1.0, "Gamma", 1, "1,1")], "line 1: 7 values; expected start, rate"),
        ([(0, 0, "", 0, 0), (600, 0, "", 0, 0)], "no client is active from 0 s to 600 s"),
    ],
)
def test_bad_windows(tmp_path: Path, windows: list[tuple], message: str) -> None:
    write(tmp_path, 0, windows)
    with pytest.raises(TraceError) as error:
        traces.servegen(tmp_path, 0, 600)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"0": {"input_tokens": "{1: 1.0}"}}, "field '0': found"),
        ({"x": NARROW}, "window 'x'; expected its start in seconds"),
        ({"0": NARROW | {"input_tokens": "{1: 0.5}"}}, "field '0.input_tokens': lengths 1 to 1 with"),
        ({"0": NARROW | {"input_tokens": "nothing"}}, "expected {length: probability, ...}"),
    ],
)
def test_bad_lengths(tmp_path: Path, dataset: dict, message: str) -> None:
    write(tmp_path, 0, dataset=dataset)
    with pytest.raises(TraceError) as error:
        traces.servegen(tmp_path, 0, 600)
    assert message in str(error.value)


def test_bad_times(tmp_path: Path) -> None:
    write(tmp_path, 0)
    for start, duration in ((0, 1801), (1700, 200)):
        with pytest.raises(TraceError, match="expected a time within 0 s to 1800 s"):
            traces.servegen(tmp_path, start, duration)
    for start, duration, rate in ((-1, 5, None), (0, 0, None), (0, math.nan, None), (0, 60, 0)):
        with pytest.raises(TraceError, match="expected"):
            traces.servegen(tmp_path, start, duration, rate=rate)


def test_command_line(tmp_path: Path) -> None:
    folder, out = tmp_path / "clients", tmp_path / "out.parquet"
    folder.mkdir()
    write(folder, 0)
    write(folder, 7, dataset={})
    refused(run("synth", folder, out, "--duration", 600), "client 7", "--on-error skip")
    result = run("synth", folder, out, "--start", 1200, "--duration", 300, "--rate", 3, "--on-error", "skip")
    assert result.returncode == 0, result.stderr
    assert "left out: " in result.stderr and "client 7" in result.stderr
    assert load(out).n_requests == pytest.approx(900, rel=0.3)
    refused(run("synth", folder, out), "no --duration")
    refused(run("synth", folder, out, "--duration", 5, "--requests", 5), "--requests says nothing")
    refused(run("info", folder), "ServeGen's client statistics", "synth FOLDER OUT")
    refused(run("convert", next(folder.glob("*.json")), out), "statistics of a ServeGen client")


def test_real_clients(real_traces: Path) -> None:
    """Per client and window, counts and lengths within the sampling error of bursty arrivals."""
    folder = real_traces / "servegen"
    assert is_folder(folder)
    start, duration = 36_000.0, 1800.0
    clients, left_out = _clients(folder, "skip")
    assert len(clients) == 38 and len(left_out) == 5
    trace = traces.servegen(folder, start, duration, 1, on_error="skip", rate=300)
    total = sum(w.rate for c in clients for w in c.windows if start <= w.start_s < start + duration) * 600
    scale = 300 * duration / total
    assert trace.n_requests == pytest.approx(300 * duration, rel=0.05)
    assert trace.tenant_id is not None
    surprise = []
    for client in clients:
        mine = trace.take(np.flatnonzero(trace.tenant_id == client.number))
        for window in client.windows:
            if not start <= window.start_s < start + duration or window.gaps is None:
                continue
            expected = window.rate * scale * 600
            part = mine.window(window.start_s - start, window.start_s - start + 600)
            cv = np.std(window.gaps.gaps(20_000, np.random.default_rng(0)))
            surprise.append((part.n_requests - expected) / np.sqrt(max(cv**2, 1) * expected + 1))
            if part.n_requests > 200:
                for column, (values, chances) in zip(
                    (part.input_tokens, part.output_tokens), client.distributions(window.start_s).values()
                ):
                    mean = (values * chances).sum()
                    spread = np.sqrt((values**2 * chances).sum() - mean**2)
                    assert abs(column.mean() - mean) < 5 * spread / np.sqrt(part.n_requests) + 1e-6
    z = np.array(surprise)
    assert len(z) > 40
    assert abs(z).max() < 6
    assert abs(z.mean()) < 4 / np.sqrt(len(z))


def test_real_windows(real_traces: Path) -> None:
    rates = [read_windows(p) for p in sorted((real_traces / "servegen").glob("*-trace.csv.gz"))]
    assert len(rates) == 43
    assert {len(windows) for windows in rates} == {2016}
    whole = np.sum([[w.rate for w in windows] for windows in rates], axis=0)
    assert whole.mean() == pytest.approx(1174, abs=0.5)
    assert whole.max() == pytest.approx(3880, abs=0.5)
