"""The columns, their rules, and every transform."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Trace, TraceError, merge
from traces.trace import chain_ids, densify


def build(
    chains: list[list[int]],
    arrival_s: list[float] | None = None,
    block_tokens: int = 16,
    **columns: Any,
) -> Trace:
    """A trace whose requests have the given block ids (any integers), full blocks."""
    lengths = [len(c) for c in chains]
    return Trace(
        arrival_s=np.array(arrival_s if arrival_s is not None else range(len(chains)), float),
        input_tokens=np.array([max(n * block_tokens, 1) for n in lengths]),
        output_tokens=np.ones(len(chains), int),
        block_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(int),
        block_ids=densify(np.array([b for c in chains for b in c], int)),
        block_tokens=block_tokens,
        **columns,
    )


@st.composite
def prefix_traces(draw: st.DrawFn) -> Trace:
    """Traces whose ids are chained: requests are paths in a random tree."""
    n = draw(st.integers(1, 12))
    chains: list[list[int]] = []
    fresh = 0
    for _ in range(n):
        chain: list[int] = []
        reuse: bool = draw(st.booleans())
        if chains and reuse:
            source = draw(st.sampled_from(chains))
            chain = source[: draw(st.integers(0, len(source)))]
        new = draw(st.integers(0 if chain else 1, 5))
        chain = chain + list(range(fresh, fresh + new))
        fresh += new
        chains.append(chain)
    gaps = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=n, max_size=n))
    sessions = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return build(chains, np.cumsum(gaps).tolist(), session_id=np.array(sessions))


def paths(trace: Trace) -> list[list[tuple[int, ...]]]:
    """For each request the identity of each block by the ids before it."""
    return [
        [tuple(trace.blocks(i)[: k + 1].tolist()) for k in range(len(trace.blocks(i)))] for i in range(trace.n_requests)
    ]


def same_sharing(a: list[list[Any]], b: list[list[Any]]) -> bool:
    """Whether two labellings of the same blocks make the same blocks equal."""
    pairs = [(x, y) for row_a, row_b in zip(a, b, strict=True) for x, y in zip(row_a, row_b)]
    return len(set(pairs)) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


def rows_of(trace: Trace) -> list[list[int]]:
    return [trace.blocks(i).tolist() for i in range(trace.n_requests)]


def test_properties_of_a_small_trace() -> None:
    trace = build([[0, 1], [0, 2], [0, 1, 3]], [0.0, 1.0, 4.0])
    assert trace.n_requests == 3
    assert trace.n_distinct_blocks == 4
    assert trace.has_blocks
    assert trace.duration_s == 4.0
    assert trace.blocks(2).tolist() == [0, 1, 3]
    for column, dtype in (
        ("arrival_s", "float64"),
        ("input_tokens", "int32"),
        ("block_offsets", "int64"),
        ("block_ids", "int32"),
    ):
        assert getattr(trace, column).dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": [0.0, 2.0, 1.0]}, "column 'arrival_s', row 2"),
        ({"arrival_s": [-1.0, 2.0, 3.0]}, "column 'arrival_s', row 0: found -1.0; expected"),
        ({"arrival_s": [0.0, np.nan, 3.0]}, "column 'arrival_s', row 1: found nan"),
        ({"arrival_s": [0.0, 1.0, np.inf]}, "column 'arrival_s', row 2: found inf"),
        ({"arrival_s": ["a", "b", "c"]}, "column 'arrival_s'"),
        ({"input_tokens": [32, 0, 48]}, "column 'input_tokens', row 1: found 0"),
        ({"input_tokens": [32, 32]}, "column 'input_tokens': found 2 values; expected 3"),
        ({"input_tokens": [32, 2**40, 48]}, "column 'input_tokens', row 1"),
        ({"input_tokens": [32.5, 32.0, 48.0]}, "column 'input_tokens'"),
        ({"input_tokens": [32, 17, 48]}, None),
        ({"input_tokens": [32, 16, 48]}, "column 'block_offsets', row 1: found 2"),
        ({"output_tokens": [1, -4, 1]}, "column 'output_tokens', row 1: found -4"),
        ({"block_offsets": [0, 2, 4, 6]}, "column 'block_offsets'"),
        ({"block_offsets": [0, 5, 4, 7]}, "column 'block_offsets', row 1"),
        ({"block_ids": [0, 1, 0, 3, 0, 1, 2]}, "column 'block_ids', row 3: found 3"),
        ({"block_ids": [0, 1, -1, 2, 0, 1, 3]}, "column 'block_ids', row 2"),
        ({"block_ids": [1, 0, 1, 2, 0, 1, 3]}, "column 'block_ids', row 0"),
        ({"block_tokens": 0}, "column 'block_tokens'"),
        ({"session_id": [0, 1]}, "column 'session_id': found 2 values"),
        ({"block_ids": [[0, 1], [2, 3]]}, "column 'block_ids': found 2 dimensions"),
    ],
)
def test_validation_names_column_row_and_expectation(change: dict[str, Any], message: str | None) -> None:
    good = build([[0, 1], [0, 2], [0, 1, 3]])
    arrays: dict[str, Any] = {k: np.array(v) if isinstance(v, list) else v for k, v in change.items()}
    if message is None:
        assert replace(good, **arrays).n_requests == 3
        return
    with pytest.raises(TraceError) as caught:
        replace(good, **arrays)
    assert message in str(caught.value)
    assert "expected" in str(caught.value)


def test_checksum_depends_on_every_column_but_not_on_the_name() -> None:
    trace = build([[0, 1], [0, 2]])
    assert replace(trace, name="other").checksum == trace.checksum
    changed = [
        replace(trace, arrival_s=trace.arrival_s + 1),
        replace(trace, input_tokens=trace.input_tokens - 1),
        replace(trace, output_tokens=trace.output_tokens + 1),
        replace(trace, block_ids=np.array([0, 1, 0, 1])),
        replace(trace, session_id=np.array([0, 0])),
        replace(trace, tenant_id=np.array([0, 0])),
    ]
    assert len({t.checksum for t in [trace, *changed]}) == 7


@given(prefix_traces(), st.integers(0, 12), st.integers(0, 12))
def test_rows_keep_sharing_and_are_dense_again(trace: Trace, start: int, stop: int) -> None:
    part = trace.rows(start, stop)
    assert part.n_requests == len(range(*slice(start, stop).indices(trace.n_requests)))
    assert same_sharing(rows_of(part), rows_of(trace)[start:stop]) or not part.has_blocks
    assert part.arrival_s.tolist() == trace.arrival_s[start:stop].tolist()


def test_window_is_half_open_and_can_move_to_zero() -> None:
    trace = build([[0], [1], [2], [0]], [0.0, 1.0, 2.0, 3.0])
    part = trace.window(1.0, 3.0)
    assert part.arrival_s.tolist() == [1.0, 2.0]
    assert part.block_ids.tolist() == [0, 1]
    assert trace.window(1.0, 3.0, rebase=True).arrival_s.tolist() == [0.0, 1.0]
    assert trace.window(10.0, 20.0).n_requests == 0
    with pytest.raises(TraceError, match="start_s <= stop_s"):
        trace.window(3.0, 1.0)


def test_speed_up_halves_gaps_from_the_first_arrival() -> None:
    trace = build([[0], [1], [2]], [10.0, 12.0, 20.0])
    assert trace.speed_up(2).arrival_s.tolist() == [10.0, 11.0, 15.0]
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="speed-up factor"):
            trace.speed_up(factor)


@given(prefix_traces(), st.integers(0, 5))
def test_jitter_stays_inside_the_tick_and_keeps_order(trace: Trace, seed: int) -> None:
    moved = trace.jitter(seed)
    ticks = np.unique(trace.arrival_s)
    if len(ticks) > 1:
        after = np.append(ticks[1:], np.inf)[np.searchsorted(ticks, trace.arrival_s)]
        assert (moved.arrival_s >= trace.arrival_s).all()
        assert (moved.arrival_s < after).all()
    assert moved.block_ids.tolist() == trace.block_ids.tolist()
    assert moved.checksum == trace.jitter(seed).checksum


def test_jitter_spreads_over_the_gap() -> None:
    trace = build([[k] for k in range(2000)], np.repeat(np.arange(20) * 3.0, 100).tolist())
    inside = trace.jitter(1).arrival_s - trace.arrival_s
    assert 1.4 < inside.mean() < 1.6
    assert inside.max() > 2.9
    assert len(np.unique(trace.jitter(1).arrival_s)) == 2000


@given(prefix_traces(), st.integers(1, 4))
def test_reblock_names_coarse_blocks_by_their_whole_chain(trace: Trace, ratio: int) -> None:
    coarse = trace.reblock(16 * ratio)
    expected = [[tuple(row[: (k + 1) * ratio]) for k in range(-(-len(row) // ratio))] for row in rows_of(trace)]
    assert coarse.block_tokens == 16 * ratio
    assert [len(r) for r in rows_of(coarse)] == [len(r) for r in expected]
    assert same_sharing(rows_of(coarse), expected)


def test_reblock_of_unchained_ids_depends_on_what_comes_before() -> None:
    # Block 7 after two different prefixes is two different coarse blocks.
    trace = build([[1, 2, 7, 8], [3, 4, 7, 8], [1, 2, 7, 8]])
    coarse = rows_of(trace.reblock(32))
    assert coarse[0] == coarse[2]
    assert coarse[0][1] != coarse[1][1]


def test_reblock_cannot_split_blocks() -> None:
    for size in (8, 24, 0, -16):
        with pytest.raises(TraceError, match="multiple of the trace's block size, 16"):
            build([[0, 1]]).reblock(size)


@given(prefix_traces(), prefix_traces(), st.booleans())
def test_merge_keeps_blocks_apart_unless_shared(a: Trace, b: Trace, share: bool) -> None:
    both = merge([a, b], share_blocks=share)
    labels = [
        (t, row, [("ab"[k] if not share else "", x) for x in blocks])
        for k, trace in enumerate((a, b))
        for t, row, blocks in zip(trace.arrival_s.tolist(), range(trace.n_requests), rows_of(trace), strict=True)
    ]
    ordered = sorted(labels, key=lambda item: item[0])
    assert both.arrival_s.tolist() == [t for t, _, _ in ordered]
    assert same_sharing(rows_of(both), [blocks for _, _, blocks in ordered])
    assert both.tenant_id is not None and set(both.tenant_id.tolist()) == {0, 1}
    assert both.session_id is not None and a.session_id is not None and b.session_id is not None
    apart = len(set(a.session_id.tolist())) + len(set(b.session_id.tolist()))
    assert len(set(both.session_id.tolist())) == apart


def test_merge_refuses_what_does_not_fit() -> None:
    with pytest.raises(TraceError, match="at least one"):
        merge([])
    with pytest.raises(TraceError, match=r"\[16, 32\] tokens.*reblock"):
        merge([build([[0]]), build([[0]], block_tokens=32)])


@given(prefix_traces())
def test_split_cuts_by_time_and_loses_nothing(trace: Trace) -> None:
    parts = trace.split()
    assert sum(p.n_requests for p in parts) == trace.n_requests
    joined = np.concatenate([p.arrival_s for p in (parts.train, parts.validation, parts.test)])
    assert joined.tolist() == trace.arrival_s.tolist()
    whole = trace.split(1.0, 0.0, 0.0)
    assert whole.train.n_requests == trace.n_requests
    assert trace.split(0.0, 0.0, 1.0).test.n_requests == trace.n_requests


def test_split_shares() -> None:
    trace = build([[k] for k in range(100)])
    parts = trace.split(0.5, 0.25, 0.25)
    assert [p.n_requests for p in parts] == [50, 25, 25]
    with pytest.raises(TraceError, match="sum to 1"):
        trace.split(0.5, 0.5, 0.5)
    with pytest.raises(TraceError, match=">= 0"):
        trace.split(1.5, -0.5, 0.0)


def test_subsample_keeps_whole_sessions() -> None:
    sessions = np.arange(3000) % 1000
    trace = build([[k] for k in range(3000)], session_id=sessions)
    part = trace.subsample_sessions(0.3, seed=1)
    assert part.session_id is not None
    kept, uses = np.unique(part.session_id, return_counts=True)
    assert (uses == 3).all()
    assert 250 < len(kept) < 350
    assert part.checksum == trace.subsample_sessions(0.3, seed=1).checksum
    assert part.checksum != trace.subsample_sessions(0.3, seed=2).checksum
    assert trace.subsample_sessions(1.0, 0).n_requests == 3000
    assert trace.subsample_sessions(0.0, 0).n_requests == 0
    with pytest.raises(TraceError, match="session_id"):
        build([[0]]).subsample_sessions(0.5, 0)
    with pytest.raises(TraceError, match="from 0 to 1"):
        trace.subsample_sessions(1.5, 0)


@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=40))
def test_densify_numbers_by_first_appearance(ids: list[int]) -> None:
    number: dict[int, int] = {}
    expected = [number.setdefault(x, len(number)) for x in ids]
    assert densify(np.array(ids, np.int64)).tolist() == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8))
def test_chain_ids_tell_prefixes_apart(chains: list[list[int]]) -> None:
    trace = build(chains) if any(chains) else None
    if trace is None:
        return
    chained = chain_ids(trace.block_offsets, trace.block_ids)
    offsets = trace.block_offsets
    got = [chained[offsets[i] : offsets[i + 1]].tolist() for i in range(len(chains))]
    assert same_sharing(got, paths(trace))


def test_transforms_of_a_large_trace_are_fast() -> None:
    rng = np.random.default_rng(0)
    n = 100_000
    lengths = rng.integers(1, 40, n)
    trace = Trace(
        arrival_s=np.sort(rng.random(n)) * 1000,
        input_tokens=(lengths * 16).astype(np.int32),
        output_tokens=np.ones(n, np.int32),
        block_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        block_ids=densify(np.minimum(rng.zipf(1.3, lengths.sum()), 10**6)),
        block_tokens=16,
        session_id=rng.integers(0, 1000, n, np.int32),
    )
    start = time.process_time()
    trace.window(100, 900).reblock(512).jitter(0).speed_up(2).subsample_sessions(0.5, 0)
    merge([trace, trace])
    assert time.process_time() - start < 10
