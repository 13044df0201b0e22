"""Arrival processes and sets of lengths."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

import traces
from tests.traces.test_command_line import refused, run
from traces import TraceError, arrivals, load
from traces.arrivals import LENGTH_SETS, Renewal


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps(cv: float) -> None:
    gaps = np.diff(traces.gamma(200_000, 4.0, cv, seed=1))
    assert gaps.mean() == pytest.approx(0.25, rel=5 * cv / np.sqrt(200_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    assert (gaps >= 0).all()


def test_poisson_counts_are_poisson() -> None:
    times = traces.poisson(100_000, 5.0, seed=2)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.02)
    assert counts.var() == pytest.approx(5, rel=0.04)
    np.testing.assert_array_equal(times, traces.poisson(100_000, 5.0, seed=2))
    assert not np.array_equal(times, traces.poisson(100_000, 5.0, seed=3))


@pytest.mark.parametrize(
    "renewal", [Renewal("gamma", 0.1), Renewal("gamma", 1), Renewal("gamma", 4), Renewal("weibull", 0.5)]
)
def test_stationary_windows_keep_the_rate(renewal: Renewal) -> None:
    """A process begun with a whole gap would have too many early or late; the mean count must be exact."""
    rng = np.random.default_rng(0)
    counts = np.array([len(renewal.window(0.5, 30.0, rng)) for _ in range(8000)])
    assert counts.mean() == pytest.approx(15, abs=4 * counts.std() / np.sqrt(len(counts)))
    times = np.concatenate([renewal.window(0.5, 30.0, rng) for _ in range(4000)])
    early, late = (times < 3).sum(), (times >= 27).sum()
    assert early == pytest.approx(late, rel=0.15)
    assert times.min() >= 0 and times.max() < 30


def test_at_rate_keeps_requests_and_reuse() -> None:
    trace = traces.builtin("conversation", n_requests=500)
    sent = traces.at_rate(trace, 7.0, seed=3)
    np.testing.assert_array_equal(sent.block_ids, trace.block_ids)
    np.testing.assert_array_equal(sent.input_tokens, trace.input_tokens)
    assert sent.n_requests / sent.duration_s == pytest.approx(7, rel=0.15)
    for bad in (0, -1, np.nan, np.inf):
        with pytest.raises(TraceError, match="rate"):
            traces.at_rate(trace, bad)
        with pytest.raises(TraceError, match="cv"):
            traces.at_rate(trace, 1, cv=bad)


def test_arrivals_say_nothing_of_lengths() -> None:
    trace = traces.builtin("arxiv-summarization", n_requests=5000, rate=1)
    gaps = np.diff(trace.arrival_s, prepend=0)
    for column in (trace.input_tokens, trace.output_tokens):
        assert abs(np.corrcoef(gaps, np.log(column))[0, 1]) < 0.05


def test_arxiv_summarization() -> None:
    trace = traces.lengths("arxiv-summarization", 20_000)
    assert (trace.arrival_s == 0).all()
    assert trace.input_tokens.mean() == pytest.approx(8088, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx(229, rel=0.01)
    # what Vidur's table, cut at 4,096 tokens in all, shows of it
    assert np.median(trace.input_tokens[trace.input_tokens < 4000]) == pytest.approx(2730, rel=0.03)
    assert np.median(trace.output_tokens) == pytest.approx(167, abs=2)
    assert traces.lru_hit_rate(trace, np.inf) == 0
    assert traces.lengths("arxiv-summarization").input_tokens.mean() == pytest.approx(8088, rel=0.02)


def test_l_eval() -> None:
    trace = traces.lengths("l-eval", 7000)
    assert trace.input_tokens.mean() == pytest.approx(19_019, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx(72, rel=0.02)
    assert 0.80 < traces.lru_hit_rate(trace, np.inf) < 0.86
    # one node's cache (3 M tokens) is enough: questions about a document come close together
    assert traces.lru_hit_rate(trace, 5859) == pytest.approx(traces.lru_hit_rate(trace, np.inf), abs=0.005)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_simulated(size: int) -> None:
    trace = load(f"builtin:simulated-{size}k@0.3")
    assert set(trace.input_tokens) == {size * 1024}
    assert set(trace.output_tokens) == {512}
    assert trace.n_requests / trace.duration_s == pytest.approx(0.3, rel=0.1)
    assert traces.lru_hit_rate(trace, np.inf) == pytest.approx(0.5 - 8 * 0.5 / 1000, abs=1e-9)
    shared = [set(trace.blocks(0)) & set(trace.blocks(i)) for i in range(1, 100)]
    assert {len(s) for s in shared} == {0, size}


def test_hotspot_has_few_prefixes_that_take_most_requests_and_change() -> None:
    trace = load("builtin:hotspot")
    first = trace.block_ids[trace.block_offsets[:-1]]
    hottest = []
    for start in range(0, 10_000, 1000):
        prefixes, counts = np.unique(first[start : start + 1000], return_counts=True)
        order = np.argsort(-counts)[:4]
        assert counts[order].sum() > 500
        hottest.append(frozenset(prefixes[order].tolist()))
    assert len(set(hottest)) == 10


def test_bursty_comes_in_bursts() -> None:
    def dispersion(name: str) -> float:
        arrival_s = load(name).arrival_s
        per_30_s = np.histogram(arrival_s, np.arange(0, arrival_s[-1], 30))[0]
        return float(per_30_s.var() / per_30_s.mean())

    assert dispersion("builtin:bursty") > 8 * dispersion("builtin:hotspot")


@pytest.mark.parametrize("name", LENGTH_SETS)
def test_sets_are_seeded_and_named(name: str) -> None:
    trace = load(f"builtin:{name}")
    assert trace.name == name
    assert trace.n_requests == LENGTH_SETS[name].requests
    assert trace.n_requests / trace.duration_s == pytest.approx(LENGTH_SETS[name].rate, rel=0.1)
    assert trace.checksum == load(f"builtin:{name}").checksum
    assert trace.checksum != load(f"builtin:{name}", seed=1).checksum
    assert traces.builtin(name, duration_s=100, rate=2).n_requests == 200
    assert traces.lengths(name, 1).n_requests == 1


def test_a_rate_behind_any_builtin() -> None:
    trace = load("builtin:synthetic@10")
    assert trace.n_requests / trace.duration_s == pytest.approx(10, rel=0.05)
    for text in ("conversation@", "l-eval@fast", "l-eval@0", "l-eval@-1", "l-eval@inf"):
        with pytest.raises(TraceError, match="expected requests per second > 0 behind the @"):
            load(f"builtin:{text}")
    with pytest.raises(TraceError, match="no built-in workload 'simulated-8k'.*simulated-16k"):
        load("builtin:simulated-8k@1")
    with pytest.raises(TraceError, match="cv 2"):
        traces.builtin("conversation", cv=2)
    with pytest.raises(TraceError, match="both"):
        traces.builtin("l-eval", n_requests=4, duration_s=2)


CSV = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\r\n3772,54,3826,69.8\r\n2015,156,2171,12.9\r\n"


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "arxiv_stats.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    trace = traces.lengths(path)
    assert trace.input_tokens.tolist() == [3772, 2015]
    assert trace.output_tokens.tolist() == [54, 156]
    assert trace.name == "arxiv_stats"
    assert not trace.has_blocks
    more = traces.lengths(path, 50, seed=1)
    assert set(zip(more.input_tokens.tolist(), more.output_tokens.tolist())) == {(3772, 54), (2015, 156)}
    assert arrivals.is_lengths(str(path))
    assert not arrivals.is_lengths(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1, field 'num_prefill_tokens': column missing"),
        (CSV + "x,3,,\n", "line 4, field 'num_prefill_tokens': found x; expected an integer from 1"),
        (CSV + "3,0,,\n", "line 4, field 'num_decode_tokens': found 0"),
        (CSV + "3\n", "line 4, field 'num_decode_tokens': found nothing"),
        (CSV.splitlines()[0] + "\n", "no row of lengths"),
    ],
)
def test_bad_files_of_lengths(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        traces.lengths(path)
    assert message in str(error.value)
    with pytest.raises(TraceError, match="no lengths called 'nothing'; expected one of arxiv"):
        traces.lengths("nothing")
    with pytest.raises(TraceError, match="n_requests 0"):
        traces.lengths("l-eval", 0)


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    result = run("synth", "simulated-16k", out, "--rate", 0.5, "--duration", 200)
    assert result.returncode == 0, result.stderr
    assert load(out).n_requests == 100
    file = tmp_path / "lengths.csv"
    file.write_text(CSV)
    assert run("synth", file, out, "--rate", 2, "--requests", 30, "--cv", 2).returncode == 0
    assert load(out).n_requests == 30
    refused(run("synth", file, out), "without arrival times", "--rate")
    refused(run("synth", "conversation", out, "--cv", 2), "--cv says nothing")
    refused(run("synth", "l-eval", out, "--start", 2), "--start says nothing")
    shown = run("info", "builtin:simulated-16k@1", "--json", "-")
    assert '"requests": 1000' in shown.stdout
    refused(run("info", file), "synth FILE OUT --rate R")


def test_real_vidur(real_traces: Path) -> None:
    trace = traces.lengths(next(real_traces.glob("vidur_*.csv.gz")))
    assert trace.n_requests == 28_257
    assert trace.input_tokens.mean() == pytest.approx(2588.1, abs=0.05)
    assert np.median(trace.output_tokens) == 167
