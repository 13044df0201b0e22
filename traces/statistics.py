"""What a trace looks like: lengths, rates, and how much of it a prefix cache could reuse.

The oracle is one global cache that sees requests in order and starts empty. A request's blocks
are touched in prefix order; hits count up to the request's first miss, because a KV block is of
no use without all blocks before it (Mooncake F2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.trace import Trace, TraceError

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, math.inf)
"""Cache sizes in blocks of Mooncake's Table 1."""
PERCENTILES = (50, 90, 99)


def _reach(trace: Trace) -> NDArray[np.int64]:
    from traces import kernels

    if not trace.has_blocks:
        raise TraceError(
            f"trace {trace.name!r} has no block ids",
            expected="a trace with blocks",
            hint="synthesise_blocks adds invented sessions",
        )
    needed: NDArray[np.int64] = kernels.reach_distances(trace.block_offsets, trace.block_ids, trace.n_distinct_blocks)
    return needed


def lru_hit_rate(trace: Trace, capacity_blocks: float) -> float:
    """Hit blocks over requested blocks of an LRU cache of `capacity_blocks` (may be `math.inf`).

    Raises:
        TraceError: the trace has no blocks, or the capacity is negative or NaN.
    """
    return float(lru_hit_curve(trace, [capacity_blocks])[0])


def lru_hit_curve(trace: Trace, capacities: Sequence[float]) -> NDArray[np.float64]:
    """`lru_hit_rate` for many capacities in one pass over the trace, float64[len(capacities)]."""
    for capacity in capacities:
        if not capacity >= 0:
            raise TraceError(f"capacity {capacity}", expected="a number of blocks >= 0")
    from traces import kernels

    needed = np.sort(_reach(trace))
    limits = np.minimum(np.asarray(capacities, np.float64), float(kernels.NEVER) / 2)
    return np.searchsorted(needed, limits, side="right") / len(needed)


def lfu_hit_rate(trace: Trace, capacity_blocks: float) -> float:
    """As `lru_hit_rate`, evicting the block with fewest uses since it came in, ties by LRU."""
    return _lfu_hit_rate(trace, capacity_blocks, deepest_first=False)


def length_aware_hit_rate(trace: Trace, capacity_blocks: float) -> float:
    """As `lfu_hit_rate`, but of blocks used equally often the one deepest in its request goes first (Mooncake's
    LengthAwareCache)."""
    return _lfu_hit_rate(trace, capacity_blocks, deepest_first=True)


def _lfu_hit_rate(trace: Trace, capacity_blocks: float, deepest_first: bool) -> float:
    from traces import kernels

    if not capacity_blocks >= 0:
        raise TraceError(f"capacity {capacity_blocks}", expected="a number of blocks >= 0")
    if not trace.has_blocks:
        return lru_hit_rate(trace, capacity_blocks)
    capacity = int(min(capacity_blocks, trace.n_distinct_blocks))
    hits = kernels.lfu_hits(trace.block_offsets, trace.block_ids, trace.n_distinct_blocks, capacity, deepest_first)
    return float(hits) / len(trace.block_ids)


@dataclass(frozen=True)
class Statistics:
    """The statistics table of one trace. Block figures are None where it has no blocks."""

    name: str
    checksum: str
    requests: int
    skipped_rows: int
    duration_s: float
    """Last arrival minus first."""
    rate: float | None
    """Requests over `duration_s`; None where all requests arrive at once."""
    input_mean: float
    input_percentiles: dict[str, float]
    output_mean: float
    output_percentiles: dict[str, float]
    sessions: int | None
    distinct_arrival_times: int
    largest_burst: int
    """Most requests that share one timestamp."""
    block_tokens: int
    blocks_requested: int | None
    blocks_distinct: int | None
    never_reused_share: float | None
    """Distinct blocks used exactly once over distinct blocks."""
    top10_blocks_share: float | None
    """References to the ten most used blocks over all references."""
    lru_hit: dict[str, float] | None
    """Capacity in blocks ("inf": unbounded) -> hit blocks over requested blocks."""

    def as_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self)


def statistics_of(trace: Trace, capacities: Sequence[float] = CAPACITIES) -> Statistics:
    """The statistics table.

    Raises:
        TraceError: an empty trace.
    """
    if not trace.n_requests:
        raise TraceError(f"trace {trace.name!r} is empty", expected="at least one request")
    duration_s = trace.duration_s
    _, bursts = np.unique(trace.arrival_s, return_counts=True)
    reuse: dict[str, Any] = dict.fromkeys(
        ("blocks_requested", "blocks_distinct", "never_reused_share", "top10_blocks_share")
    )
    lru_hit = None
    if trace.has_blocks:
        from traces import kernels

        counts = kernels.use_counts(trace.block_ids, trace.n_distinct_blocks)
        rates = lru_hit_curve(trace, capacities)
        lru_hit = {capacity_label(c): float(r) for c, r in zip(capacities, rates)}
        reuse = {
            "blocks_requested": len(trace.block_ids),
            "blocks_distinct": len(counts),
            "never_reused_share": float((counts == 1).mean()),
            "top10_blocks_share": float(np.sort(counts)[-10:].sum() / len(trace.block_ids)),
        }
    sessions = None if trace.session_id is None else len(np.unique(trace.session_id))
    return Statistics(
        name=trace.name,
        checksum=trace.checksum,
        requests=trace.n_requests,
        skipped_rows=trace.skipped_rows,
        duration_s=duration_s,
        rate=trace.n_requests / duration_s if duration_s > 0 else None,
        input_mean=float(trace.input_tokens.mean()),
        input_percentiles=_percentiles(trace.input_tokens),
        output_mean=float(trace.output_tokens.mean()),
        output_percentiles=_percentiles(trace.output_tokens),
        sessions=sessions,
        distinct_arrival_times=len(bursts),
        largest_burst=int(bursts.max()),
        block_tokens=trace.block_tokens,
        lru_hit=lru_hit,
        **reuse,
    )


def capacity_label(capacity: float) -> str:
    return "inf" if math.isinf(capacity) else f"{capacity:g}" if capacity % 1 else str(int(capacity))


def _percentiles(values: NDArray[Any]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, found)}
