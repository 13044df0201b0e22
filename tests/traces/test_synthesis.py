"""Built-in workloads against the published figures, and the profile's own rules."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.test_trace import build
from traces import (
    Trace,
    TraceError,
    WorkloadProfile,
    builtin,
    fit,
    load,
    lru_hit_curve,
    profile,
    statistics_of,
    synthesise_blocks,
    synthesize,
)
from traces.synthesis import BUILTIN_NAMES

SEEDS = (0, 1, 2)

PUBLISHED: dict[str, dict[str, Any]] = {
    # mooncake.md F1 and F2; toolagent also G29. Percentiles that are not published are absent.
    "conversation": {
        "requests": 12_031,
        "duration_s": 3_537,
        "rate": 3.40,
        "input": {"mean": 12_035, "p50": 6_909, "p90": 27_367, "p99": 85_400},
        "output": {"mean": 343, "p50": 350, "p90": 597, "p99": 1_118},
        "never_reused": 0.758,
        "top10": 0.043,
        "distinct": 182_790,
        "lru": (0.044, 0.211, 0.326, 0.355, 0.364, 0.366),
    },
    "synthetic": {
        "requests": 3_993,
        "duration_s": 1_022,
        "rate": 3.91,
        "input": {"mean": 15_325, "p50": 11_587, "p90": 38_611, "p99": 66_456},
        "output": {"mean": 149, "p50": 69, "p90": 389, "p99": 768},
        "never_reused": 0.584,
        "top10": 0.002,
        "distinct": 43_924,
        "lru": (0.082, 0.423, 0.624, 0.640, 0.640, 0.640),
    },
    "toolagent": {
        "requests": 23_608,
        "duration_s": 3_537,
        "rate": 6.67,
        "input": {"mean": 8_596, "p50": 6_346, "p99": 61_525},
        "output": {"mean": 182, "p50": 30},
        "never_reused": 0.785,
        "top10": 0.229,
        "distinct": 183_000,
        "lru": (0.341, 0.460, 0.537, 0.551, 0.552, 0.553),
    },
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_builtin_reproduces_the_published_figures(name: str, seed: int) -> None:
    want = PUBLISHED[name]
    stats = statistics_of(builtin(name, seed=seed))
    assert stats.requests == want["requests"]
    assert stats.duration_s == pytest.approx(want["duration_s"], rel=0.005)
    assert stats.rate == pytest.approx(want["rate"], rel=0.01)
    for kind, mean, percentiles in (
        ("input", stats.input_mean, stats.input_percentiles),
        ("output", stats.output_mean, stats.output_percentiles),
    ):
        found = percentiles | {"mean": mean}
        for label, value in want[kind].items():
            # A few tokens of a short median are a large share of it.
            assert found[label] == pytest.approx(value, rel=0.03, abs=6), (kind, label)
    assert stats.never_reused_share == pytest.approx(want["never_reused"], abs=0.03)
    assert stats.top10_blocks_share == pytest.approx(want["top10"], abs=0.005)
    assert stats.blocks_distinct == pytest.approx(want["distinct"], rel=0.04)
    assert stats.lru_hit is not None
    assert list(stats.lru_hit.values()) == pytest.approx(list(want["lru"]), abs=0.03)


def test_conversation_sits_on_the_three_second_grid() -> None:
    trace = builtin("conversation", seed=5)
    assert np.abs(trace.arrival_s / 3.0 - np.rint(trace.arrival_s / 3.0)).max() < 1e-6
    stats = statistics_of(trace)
    assert 1_150 <= stats.distinct_arrival_times <= 1_180
    assert 18 <= stats.largest_burst <= 36
    # One block opens every request, as in the released trace.
    assert (trace.block_ids[trace.block_offsets[:-1]] == 0).all()


def test_synthetic_arrivals_are_poisson() -> None:
    gaps = np.diff(builtin("synthetic", seed=2).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_toolagent_has_the_published_system_prompts(seed: int) -> None:
    """mooncake.md F1: first-block ids 10,938 / 9,203 / 3,449, top-100 blocks 34.4 % of uses."""
    trace = builtin("toolagent", seed=seed)
    first = np.bincount(trace.block_ids[trace.block_offsets[:-1]])
    three = np.sort(first)[::-1][:3]
    assert three.tolist() == pytest.approx([10_938, 9_203, 3_467], rel=0.01)
    counts = np.sort(np.bincount(trace.block_ids))[::-1]
    assert counts[:100].sum() / counts.sum() == pytest.approx(0.344, abs=0.01)
    # G29: LRU at 1/5/10/25 % of the distinct blocks.
    sizes = [share * trace.n_distinct_blocks for share in (0.01, 0.05, 0.10, 0.25)]
    curve = lru_hit_curve(trace, sizes).tolist()
    assert curve == pytest.approx([0.346, 0.449, 0.508, 0.551], abs=0.03)
    # G29: the median time from a block's first use to its second, system prompts aside.
    assert 90 < _median_first_reuse_s(trace) < 185


def _median_first_reuse_s(trace: Trace) -> float:
    times: dict[int, list[float]] = defaultdict(list)
    for i, at in enumerate(trace.arrival_s.tolist()):
        for block in trace.blocks(i).tolist():
            if len(times[block]) < 2:
                times[block].append(at)
    return float(np.median([t[1] - t[0] for t in times.values() if len(t) == 2]))


def test_toolagent_starts_like_the_published_first_rows(real_traces: Path) -> None:
    real = load(real_traces / "dynamo_mooncake_trace_1000.jsonl.gz")
    ours = [builtin("toolagent", seed=s).rows(0, 1000) for s in SEEDS]
    assert np.mean([t.duration_s for t in ours]) == pytest.approx(real.duration_s, rel=0.08)
    want = statistics_of(real)
    # The real chat prompts of these minutes are a fifth longer than the hour's, which the model
    # does not know: system prompts are a smaller share of what is requested there.
    got = [statistics_of(t) for t in ours]
    assert want.lru_hit is not None
    for capacity, rate in want.lru_hit.items():
        mean = np.mean([g.lru_hit[capacity] for g in got if g.lru_hit])
        assert mean == pytest.approx(rate, abs=0.08), capacity
    firsts = [np.sort(np.bincount(t.block_ids[t.block_offsets[:-1]]))[::-1][:3] for t in ours]
    assert np.mean(firsts, axis=0).tolist() == pytest.approx([486, 361, 153], abs=45)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_same_seed_same_trace(name: str) -> None:
    assert builtin(name, seed=4).checksum == builtin(name, seed=4).checksum
    assert builtin(name, seed=4).checksum != builtin(name, seed=5).checksum


def test_sessions_grow_turn_by_turn() -> None:
    trace = builtin("conversation", seed=0)
    assert trace.session_id is not None
    blocks_of: dict[int, set[int]] = defaultdict(set)
    continued = extends = 0
    for i, session in enumerate(trace.session_id.tolist()):
        own = set(trace.blocks(i).tolist()) - {0}
        earlier = blocks_of[session]
        if earlier:
            continued += 1
            extends += bool(own & earlier)
        blocks_of[session] |= own
    assert 0.3 < continued / trace.n_requests < 0.45
    assert extends == continued
    # Sessions share nothing but the system prompt.
    assert sum(map(len, blocks_of.values())) + 1 == trace.n_distinct_blocks


def test_size_duration_and_rate() -> None:
    chat = profile("conversation")
    assert synthesize(chat, n_requests=500).n_requests == 500
    assert synthesize(chat, n_requests=1).n_requests == 1
    short = synthesize(chat, duration_s=600.0)
    assert short.n_requests == round(600 * chat.arrivals.rate)
    assert short.duration_s == pytest.approx(600, abs=6)
    fast = synthesize(chat, n_requests=3000, rate=30.0)
    assert statistics_of(fast).rate == pytest.approx(30.0, rel=0.05)
    for arguments in (
        {"n_requests": 0},
        {"n_requests": 5, "duration_s": 5.0},
        {"duration_s": -1.0},
        {"duration_s": float("nan")},
        {"rate": 0.0},
        {"rate": float("inf")},
    ):
        with pytest.raises(TraceError):
            synthesize(chat, **arguments)


def test_a_longer_trace_has_the_same_workload() -> None:
    long = statistics_of(builtin("conversation", n_requests=60_000, seed=1))
    assert long.input_mean == pytest.approx(12_035, rel=0.03)
    assert long.lru_hit is not None
    assert long.lru_hit["10000"] == pytest.approx(0.211, abs=0.03)
    assert long.duration_s == pytest.approx(60_000 / 3.4015, rel=0.01)


def test_synthesis_is_fast_once_compiled() -> None:
    builtin("conversation", n_requests=100)
    start = time.process_time()
    builtin("conversation", seed=9)
    assert time.process_time() - start < 1.0
    start = time.process_time()
    builtin("toolagent", seed=9, n_requests=200_000)
    assert time.process_time() - start < 12


# -- fitting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["conversation", "synthetic"])
def test_fit_and_resample_a_real_trace(real_traces: Path, kind: str) -> None:
    real = load(real_traces / f"mooncake_{kind}_trace.jsonl.gz")
    # Half the trace, which the shipped profiles were not fitted to as such.
    half = real.rows(0, real.n_requests // 2)
    want = statistics_of(half)
    again = WorkloadProfile.from_yaml(fit(half).to_yaml())
    assert want.lru_hit is not None and want.never_reused_share is not None
    for seed in SEEDS:
        got = statistics_of(synthesize(again, seed=seed))
        assert got.requests == want.requests
        assert got.duration_s == pytest.approx(want.duration_s, rel=0.01)
        assert got.input_mean == pytest.approx(want.input_mean, rel=0.05)
        assert got.output_mean == pytest.approx(want.output_mean, rel=0.05)
        assert got.never_reused_share == pytest.approx(want.never_reused_share, abs=0.04)
        assert got.lru_hit == pytest.approx(want.lru_hit, abs=0.04)


@pytest.mark.parametrize("kind", ["conversation", "synthetic"])
def test_shipped_profiles_name_the_trace_they_were_fitted_to(real_traces: Path, kind: str) -> None:
    real = load(real_traces / f"mooncake_{kind}_trace.jsonl.gz")
    assert real.checksum in profile(kind).source


def test_fit_of_a_trace_without_blocks(real_traces: Path) -> None:
    azure = load(real_traces / "azure_AzureLLMInferenceTrace_conv.csv.gz")
    again = synthesize(fit(azure), seed=0)
    assert again.input_tokens.mean() == pytest.approx(azure.input_tokens.mean(), rel=0.02)
    assert statistics_of(again).rate == pytest.approx(5.53, rel=0.02)
    assert statistics_of(again).never_reused_share == 1.0


def test_synthesised_blocks_keep_arrivals_and_lengths(real_traces: Path) -> None:
    azure = load(real_traces / "azure_AzureLLMInferenceTrace_conv.csv.gz")
    trace = synthesise_blocks(azure, profile("conversation"), seed=1)
    for column in ("arrival_s", "input_tokens", "output_tokens"):
        assert (getattr(trace, column) == getattr(azure, column)).all()
    assert trace.has_blocks and trace.session_id is not None
    stats = statistics_of(trace)
    assert stats.lru_hit is not None and 0.3 < stats.lru_hit["inf"] < 0.8
    assert trace.checksum == synthesise_blocks(azure, profile("conversation"), seed=1).checksum


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), max_size=5), st.sampled_from([0.0, 1.0, 7.5])),
        min_size=2,
        max_size=40,
    ),
    st.integers(0, 3),
    st.integers(1, 200),
)
def test_any_small_trace_can_be_fitted_and_sampled(rows: list[tuple[list[int], float]], seed: int, n: int) -> None:
    trace = build([ids for ids, _ in rows], np.cumsum([gap for _, gap in rows]).tolist())
    if trace.duration_s == 0:
        with pytest.raises(TraceError, match="cannot fit"):
            fit(trace)
        return
    fitted = WorkloadProfile.from_yaml(fit(trace).to_yaml())
    sampled = synthesize(fitted, n_requests=n, seed=seed)
    assert sampled.n_requests == n
    assert sampled.input_tokens.max() <= trace.input_tokens.max()


# -- profiles as files ------------------------------------------------------------------------


def test_profile_files(tmp_path: Path) -> None:
    chat = profile("conversation")
    (tmp_path / "p.yaml").write_text(chat.to_yaml())
    assert profile(tmp_path / "p.yaml") == chat
    (tmp_path / "p.json").write_text(chat.model_dump_json())
    assert profile(tmp_path / "p.json") == chat
    assert profile("builtin:conversation") == chat


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate: 3.40", "rate: -3.40", "arrivals.rate"),
        ("block_tokens: 512", "block_tokens: many", "block_tokens"),
        ("version: 1", "version: 9", "version"),
        ("name: conversation", "nom: conversation", "name"),
        ("trunks:", "extra: 1\ntrunks:", "extra"),
        ("kind: extends", "kind: expands", "strata.0.kind"),
        ("    gap_s:", "    gaps:", "tables must be"),
        ("reuse_curve: [", "reuse_curve: [7, ", "reuse_curve"),
        ("version: 1", "version: [1", "not YAML"),
    ],
)
def test_bad_profiles_name_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = profile("conversation").to_yaml()
    assert old in text
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError) as caught:
        profile(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_missing_profiles(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="conversation, toolagent, synthetic, or a YAML"):
        profile("no-such-profile")
    with pytest.raises(TraceError, match="no built-in workload"):
        builtin("no-such-workload")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(TraceError, match=r"list\.yaml"):
        profile(tmp_path / "list.yaml")
