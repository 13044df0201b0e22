"""An upper bound on good requests: no schedule of a trace on a cluster has more, not even one that knows the future.

A linear program over x_i in [0, 1], which request is good, maximises their number. It relaxes docs/physics.md: each
step below only ever allows more. Times are seconds, T is the TBT SLO, `step(B, K) = a + b B + c K`.

**Prefill.** A good request occupies the (first) stage of one instance for at least `compute(h)`, without interruption
and alone, and its TTFT says that this lies between its arrival and arrival + TTFT SLO. So of the requests whose
arrival and deadline lie within [s, t], those that are good have together at most (number of instances) (t - s) of it.
`h` is at most what a prefix allows whose every block another request has that arrives before the deadline: blocks
come from prefills only, and these are over before the request's own begins. Loading, fetching, queues and evictions
are left out.

**Decode.** A good request with o > 1 outputs is in o - 1 iterations of one instance. m of its intervals are averaged
to its TBT, `m = max(1, ceil(q (o - 1)))`, and no interval is shorter than its iteration. So at most m - 1 of its
iterations are *slow*, longer than T; the others are *fast*. The good members of a fast iteration together have `sum(b
+ c k) <= T - a`, with k their contexts, hence it takes at least `a + sum(b + c k) >= T / (T - a) sum(b + c k)`: each
good member costs the instance `T / (T - a) (b + c k)` of its time. In a slow iteration each costs at least `b + c k`.

When do these iterations happen? Call an iteration *blocked* when at its start the head of the FIFO did not fit: the
batch is full, or the members and the head together need more than `kv_capacity_tokens`. Where every blocked iteration
is longer than T (the least step of a full batch and of that many tokens says whether; where not, decode is left out
of the program), blocked ones are slow, and a good request is in few of them: in f at most, with `f blocked + (m - f)
(a + b + c n) <= m T`. These may cost nothing. Measure time by a clock that stands still in stalls and blocked
iterations. On this clock a request that lands joins after at most one iteration, and from then on it is in every one
until it leaves, after (o - 1) T at most, since the mean of all its intervals is no more than that of the longest. So
its iterations lie between its arrival and `arrival + TTFT SLO + landing_s + longest iteration + (o - 1) T` on a clock
that never runs faster than time: again at most (number of instances) (t - s) of cost in [s, t]. VRAM over time is
implied: where blocked iterations are slow, a request's share of it is less than its share of decode time.

The one premise is `landing_s`: that the KV of a good request has landed so long after the end of its prefill. Nothing
in the physics says so (a schedule could jam the NICs with fetches), so it must be held against replays.

The bound is far from what can be had where stalls matter: requests that join together stall nobody, so that stalls are
left out altogether. And what a cluster does after the last arrival counts, which helps short traces most.

A request that could not be good alone has x = 0. Requests before the counted ones only lend their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traces import Trace

from .spec import ClusterSpec
from .state import Parameters, Records

LANDING_S = 10.0
"""More than 200 times what the KV of a mean request of Mooncake's traces takes a NIC of the papers' nodes."""
GRID = 32
"""Times between which windows are laid; more make the bound tighter, and cost their square."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def most_good(
    cluster: ClusterSpec | Parameters,
    traces: Sequence[Trace],
    *,
    speed: float = 1.0,
    warmup: int = 0,
    landing_s: float = LANDING_S,
) -> int:
    """At most so many of a trace's requests can be good, whatever is decided (see the module's text).

    Args:
        traces: one, or several that differ in arrivals only: the bound then holds for each, by taking a request to have
            arrived at its earliest and to be due at its latest.
        speed: arrivals so many times as fast.
        warmup: requests that come first and do not count.
        landing_s: longest time from the end of a good request's prefill until its KV has landed.

    Raises:
        RuntimeError: the solver gave up.
    """
    from scipy.optimize import linprog  # half a second to import; only this needs it
    from scipy.sparse import block_array, coo_array

    parameters = cluster if isinstance(cluster, Parameters) else cluster.parameters()
    shared = parameters.cluster[0]
    slo_s = float(shared["ttft_slo_s"])
    trace = traces[0]
    # From the first arrival on, as the simulator counts: traces need not begin at the same time.
    arrivals_s = np.stack([(t.arrival_s - t.arrival_s[0]) / speed for t in traces])
    earliest_s, latest_s = arrivals_s.min(axis=0), arrivals_s.max(axis=0)
    reused = _most_reused(trace, earliest_s, latest_s + slo_s)
    arrival_s, deadline_s = earliest_s[warmup:], latest_s[warmup:] + slo_s
    # Of each kind of instance: what a request costs it, until when, whether it could be good, how many there are.
    prefills, decodes = [], []
    for kind, count in _kinds(parameters.prefill):
        work_s = _compute_s(kind, trace.input_tokens[warmup:], reused[warmup:])
        prefills.append((work_s, deadline_s, work_s <= slo_s, count))
    for kind, count in _kinds(parameters.decode):
        cost_s, longest_s, possible = _decode(kind, shared, trace, warmup)
        decodes.append((cost_s, deadline_s + landing_s + longest_s, possible, count))
    # A variable for each request on each pair of kinds where it could be good alone.
    pairs = [np.flatnonzero(first[2] & second[2]) for first in prefills for second in decodes]
    request = np.concatenate(pairs)
    pair = np.repeat(np.arange(len(pairs)), [len(rows) for rows in pairs])
    if not len(request):
        return 0
    columns = np.arange(len(request))
    once = coo_array((np.ones(len(request)), (request, columns)), shape=(len(arrival_s), len(request)))
    blocks: list[list[object]] = [[once]]
    most = [np.ones(len(arrival_s))]
    on_kinds = [(kind, pair // len(decodes) == p) for p, kind in enumerate(prefills)]
    on_kinds += [(kind, pair % len(decodes) == d) for d, kind in enumerate(decodes)]
    for (cost_s, until_s, _, count), here in on_kinds:
        mine = columns[here & (cost_s[request] > 0)]
        rows = request[mine]
        if not len(mine):
            continue
        # Costs are summed over requests of the same grid cells first, so that windows are sums of few.
        grid = np.linspace(arrival_s[rows].min(), until_s[rows].max(), GRID)
        first = np.searchsorted(grid, arrival_s[rows], "right") - 1
        last = np.searchsorted(grid, until_s[rows], "left")
        cells, cell = np.unique(np.stack([first, last]), axis=1, return_inverse=True)
        costs = coo_array((cost_s[rows], (cell.ravel(), mine)), shape=(cells.shape[1], len(request)))
        start, end = np.triu_indices(GRID, 1)
        within = (cells[0] >= start[:, None]) & (cells[1] <= end[:, None])
        filled = within.any(axis=1)
        for row in blocks:
            row.append(None)
        nothing = [None] * (len(blocks[0]) - 2)
        blocks.append([costs, *nothing, coo_array(-np.eye(cells.shape[1]))])
        blocks.append([None, *nothing, coo_array(within[filled].astype(np.float64))])
        most += [np.zeros(cells.shape[1]), count * (grid[end] - grid[start])[filled]]
    limits = block_array(blocks, format="csr")
    gain = np.zeros(limits.shape[1])
    gain[columns] = -1.0
    found = linprog(gain, A_ub=limits, b_ub=np.concatenate(most), bounds=(0.0, None), method="highs")
    if found.status != 0:
        raise RuntimeError(f"no bound: {found.message}")
    return math.floor(1e-4 - float(found.fun))


def _kinds(instances: Records) -> list[tuple[Records, int]]:
    """The different instances of a pool, and how many there are of each."""
    kinds, counts = np.unique(instances, return_counts=True)
    return list(zip(kinds, counts.tolist(), strict=True))


def _most_reused(trace: Trace, arrival_s: Floats, deadline_s: Floats) -> Ints:
    """Tokens of each request's prefix whose blocks other requests have that arrive before its deadline: int64[N]."""
    n = trace.n_requests
    lengths = np.diff(trace.block_offsets)
    row = np.repeat(np.arange(n), lengths)
    # For each block the first request that has it, and the first other one.
    order = np.lexsort((row, trace.block_ids))
    block, of = trace.block_ids[order], row[order]
    new = np.ones(len(block), np.bool_)
    new[1:] = (block[1:] != block[:-1]) | (of[1:] != of[:-1])
    block, of = block[new], of[new]
    starts = np.searchsorted(block, np.arange(trace.n_distinct_blocks))
    owner = of[starts]
    follows = np.minimum(starts + 1, len(block) - 1)
    second_s = np.where(block[follows] == np.arange(len(starts)), arrival_s[of[follows]], np.inf)
    second_s[follows == starts] = np.inf
    known = (owner[trace.block_ids] != row) | (second_s[trace.block_ids] <= deadline_s[row])
    depth = np.arange(len(row)) - np.repeat(trace.block_offsets[:-1], lengths)
    leading = lengths.copy()
    np.minimum.at(leading, row[~known], depth[~known])
    tokens: Ints = np.minimum(leading * trace.block_tokens, trace.input_tokens - 1).astype(np.int64)
    return tokens


def _compute_s(kind: Records, input_tokens: NDArray[np.int32], reused: Ints) -> Floats:
    """Seconds of the first stage for what is not reused."""
    n, h = input_tokens.astype(np.float64), reused.astype(np.float64)
    chunks = np.ceil((n - h) / kind["chunk_tokens"])
    terms = kind["quadratic_s"] * (n**2 - h**2) + kind["linear_s"] * (n - h)
    seconds: Floats = (terms + kind["base_s"] + kind["chunk_overhead_s"] * (chunks - 1)) / kind["pipeline_nodes"]
    return seconds


def _decode(kind: Records, shared: Records, trace: Trace, warmup: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Of the counted requests on an instance: seconds of it they cost, seconds from landing to leaving, whether they
    could be good alone."""
    a, b, c = (float(kind[label]) for label in ("step_base_s", "step_request_s", "step_token_s"))
    room, most_members = float(kind["kv_capacity_tokens"]), min(float(kind["max_batch"]), trace.n_requests)
    slo_s = float(shared["tbt_slo_s"])
    n, o = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    joins = (o > 1) & (n + o <= room)
    # The least that a blocked iteration takes: by members that fill the room but for the head's, or the batch.
    blocked_s = 0.0
    if joins.any():
        needs = (n + o)[joins]
        fullest = np.min((b + c * n[joins]) / needs) * max(0.0, room - needs.max())
        blocked_s = a + min(fullest, float(kind["max_batch"]) * (b + c * n[joins].min()))
    n, o, joins = n[warmup:], o[warmup:], joins[warmup:]
    longest = np.maximum(1.0, np.ceil(float(shared["tbt_tail_share"]) * (o - 1) - 1e-9))
    alone_s = a + b + c * (n + o - 1 - (longest + 1) / 2)  # mean of its last iterations
    possible = (o == 1) | (joins & (alone_s <= slo_s * (1 + 1e-9)))
    stays_s = a + b * most_members + c * room + (o - 1) * slo_s
    cost_s = np.zeros(len(n))
    if blocked_s > slo_s > a:
        first_s = b + c * n
        fast = o - longest
        blocked = np.floor(longest * np.maximum(0.0, slo_s - a - first_s) / (blocked_s - a - first_s) + 1e-9)
        slow_s = np.maximum(0.0, longest - 1 - blocked) * first_s
        cost_s = slo_s / (slo_s - a) * fast * (first_s + c * (fast - 1) / 2) + slow_s
        cost_s = np.where((o > 1) & possible, cost_s, 0.0)
    return cost_s, stays_s, possible
