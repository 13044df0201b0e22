"""The cache oracles against plain Python ones, and the figures of the real traces."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.test_trace import build, prefix_traces
from traces import (
    Trace,
    TraceError,
    length_aware_hit_rate,
    lfu_hit_rate,
    load,
    lru_hit_curve,
    lru_hit_rate,
    statistics_of,
)
from traces.statistics import CAPACITIES


def lru_in_python(trace: Trace, capacity: float) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i in range(trace.n_requests):
        missed = False
        for block in trace.blocks(i).tolist():
            if block in cache:
                hits += not missed
                cache.move_to_end(block)
                continue
            missed = True
            cache[block] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / len(trace.block_ids)


def lfu_in_python(trace: Trace, capacity: int, deepest_first: bool = False) -> float:
    cache: dict[int, tuple[int, int, int]] = {}  # block -> (uses, minus its depth where that counts, last use)
    hits = clock = 0
    for i in range(trace.n_requests):
        missed = False
        for depth, block in enumerate(trace.blocks(i).tolist()):
            clock += 1
            above = -depth if deepest_first else 0
            if block in cache:
                hits += not missed
                cache[block] = (cache[block][0] + 1, above, clock)
                continue
            missed = True
            if capacity == 0:
                continue
            if len(cache) == capacity:
                del cache[min(cache, key=lambda b: cache[b])]
            cache[block] = (1, above, clock)
    return hits / len(trace.block_ids)


def any_traces() -> st.SearchStrategy[Trace]:
    """Chained ids as real traces have them, and ids that repeat in any order."""
    wild = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1, max_size=15).map(build)
    return prefix_traces() | wild


@settings(deadline=None)
@given(any_traces(), st.integers(0, 30))
def test_lru_equals_an_ordered_dict(trace: Trace, capacity: int) -> None:
    assert lru_hit_rate(trace, capacity) == lru_in_python(trace, capacity)


@settings(deadline=None)
@given(any_traces(), st.integers(0, 30))
def test_lfu_and_length_aware_equal_a_dict(trace: Trace, capacity: int) -> None:
    assert lfu_hit_rate(trace, capacity) == lfu_in_python(trace, capacity)
    assert length_aware_hit_rate(trace, capacity) == lfu_in_python(trace, capacity, deepest_first=True)


@settings(deadline=None)
@given(any_traces())
def test_curve_is_the_single_rates_rises_and_ends_unbounded(trace: Trace) -> None:
    sizes = [0.0, 1.0, 2.0, 3.5, 8.0, 1e30, math.inf]
    curve = lru_hit_curve(trace, sizes)
    assert curve.tolist() == [lru_hit_rate(trace, c) for c in sizes]
    assert (np.diff(curve) >= 0).all()
    assert curve[0] == 0
    assert curve[-1] == curve[-2] == lru_in_python(trace, math.inf)
    assert lfu_hit_rate(trace, math.inf) == curve[-1]


def test_hits_count_up_to_the_first_miss_only() -> None:
    # The second request misses block 3, so its block 1 is of no use.
    trace = build([[0, 1], [0, 3, 1]])
    assert lru_hit_rate(trace, math.inf) == 1 / 5


def test_oracles_refuse_nonsense() -> None:
    trace = build([[0, 1]])
    for rate in (lru_hit_rate, lfu_hit_rate, length_aware_hit_rate):
        for capacity in (-1, math.nan):
            with pytest.raises(TraceError, match="number of blocks >= 0"):
                rate(trace, capacity)
        with pytest.raises(TraceError, match="no block ids"):
            rate(build([[]]), 10)


def test_statistics_of_a_small_trace() -> None:
    stats = statistics_of(build([[0, 1], [0, 2], [0, 1, 3], [0]], [0.0, 2.0, 2.0, 8.0]))
    assert (stats.requests, stats.duration_s, stats.rate) == (4, 8.0, 0.5)
    assert (stats.blocks_requested, stats.blocks_distinct) == (8, 4)
    assert stats.never_reused_share == 0.5
    assert stats.input_mean == 32
    assert stats.input_percentiles["p50"] == 32
    assert (stats.distinct_arrival_times, stats.largest_burst) == (3, 2)
    assert stats.lru_hit is not None and list(stats.lru_hit)[-1] == "inf"
    assert stats.lru_hit["inf"] == 4 / 8
    assert stats.top10_blocks_share == 1


def test_statistics_of_odd_traces() -> None:
    alone = statistics_of(build([[0]]))
    assert (alone.duration_s, alone.rate) == (0.0, None)
    none = statistics_of(build([[], []]))
    assert none.lru_hit is None and none.never_reused_share is None
    with pytest.raises(TraceError, match="empty"):
        statistics_of(build([[0]]).rows(0, 0))


@pytest.mark.parametrize(
    ("file", "never", "requested", "lru", "lfu", "top10"),
    [
        (
            "mooncake_conversation_trace.jsonl.gz",
            0.758,
            288_500,
            (0.0445, 0.2112, 0.3257, 0.3546, 0.3637, 0.3664),
            (0.048, 0.132, 0.276, 0.344, 0.363, 0.366),
            0.043,
        ),
        (
            "mooncake_synthetic_trace.jsonl.gz",
            0.584,
            121_877,
            (0.082, 0.423, 0.624, 0.640, 0.640, 0.640),
            (0.040, 0.358, 0.626, 0.640, 0.640, 0.640),
            0.002,
        ),
    ],
)
def test_published_reuse_of_real_traces(
    real_traces: Path,
    file: str,
    never: float,
    requested: int,
    lru: tuple[float, ...],
    lfu: tuple[float, ...],
    top10: float,
) -> None:
    """Reference figures: mooncake.md F1 and F2, measured on the released traces."""
    trace = load(real_traces / file)
    stats = statistics_of(trace)
    assert stats.blocks_requested == requested
    assert stats.never_reused_share == pytest.approx(never, abs=0.001)
    assert stats.top10_blocks_share == pytest.approx(top10, abs=0.001)
    assert stats.lru_hit is not None
    assert list(stats.lru_hit.values()) == pytest.approx(list(lru), abs=0.001)
    assert [lfu_hit_rate(trace, c) for c in CAPACITIES] == pytest.approx(list(lfu), abs=0.001)


def test_length_aware_reuse_of_the_conversation_trace(real_traces: Path) -> None:
    """Reference F2: fewest uses first, of these the deepest."""
    trace = load(real_traces / "mooncake_conversation_trace.jsonl.gz")
    rates = [length_aware_hit_rate(trace, c) for c in CAPACITIES]
    assert rates == pytest.approx([0.050, 0.112, 0.203, 0.260, 0.334, 0.366], abs=0.001)


def test_fig9_points_of_the_conversation_trace(real_traces: Path) -> None:
    """Reference F3: hit rate by capacity in tokens, 512-token blocks."""
    trace = load(real_traces / "mooncake_conversation_trace.jsonl.gz")
    tokens = np.array([1e5, 1e6, 2e6, 4e6, 1e7])
    rates = lru_hit_curve(trace, list(tokens // 512))
    assert rates.tolist() == pytest.approx([0.042, 0.053, 0.084, 0.174, 0.285], abs=0.002)


def test_all_capacities_in_one_fast_pass(real_traces: Path) -> None:
    trace = load(real_traces / "mooncake_conversation_trace.jsonl.gz")
    lru_hit_curve(trace, CAPACITIES)
    start = time.process_time()
    lru_hit_curve(trace, CAPACITIES)
    assert time.process_time() - start < 0.5
