"""All compiled code of `traces/`, in one module.

Numba's on-disk cache of a function is refreshed when the file that defines it changes, and only
then. A compiled helper in another file could change unseen, so there is none. Importing this
module imports Numba; import it where a kernel is called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[Any]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# What a misfit costs when the continued request is chosen: of the time, the uses, the share used
# once, the depth missed, the tail, and of another branch having been there. Found by trying on the
# two released traces; calibration takes up what is left.
W_GAP, W_USES, W_ONCE, W_SHORT, W_TAIL, W_WHOLE = 3.0, 0.3, 3.0, 20.0, 2.0, 6.0

NEVER = np.int64(1) << 62
"""Stack distance of a block that no cache, however large, can hold: its first use."""


@njit(cache=True)
def reach_distances(offsets: Ints, ids: Ints, n_distinct: int) -> Ints:
    """Cache size each block access needs in order to count as a hit, int64[M].

    An LRU cache of C blocks hits an access exactly when at most C distinct blocks, itself
    included, were touched since its last use (Mattson's stack distance). A hit counts only if all
    blocks before it in the request hit, hence the running maximum over the request. Marks of the
    last uses sit in a Fenwick tree over positions: O(M log M).
    """
    m = len(ids)
    tree = np.zeros(m + 1, np.int32)
    last = np.full(n_distinct, -1, np.int64)
    out = np.empty(m, np.int64)
    marks = 0
    for request in range(len(offsets) - 1):
        need = np.int64(0)
        for position in range(offsets[request], offsets[request + 1]):
            block = ids[position]
            before = last[block]
            if before < 0:
                need = NEVER
            else:
                if need < NEVER:
                    up_to = np.int64(0)
                    k = before + 1
                    while k > 0:
                        up_to += tree[k]
                        k -= k & -k
                    distance = marks - up_to + 1
                    need = max(need, distance)
                k = before + 1
                while k <= m:
                    tree[k] -= 1
                    k += k & -k
                marks -= 1
            k = position + 1
            while k <= m:
                tree[k] += 1
                k += k & -k
            marks += 1
            last[block] = position
            out[position] = need
    return out


@njit(cache=True)
def use_counts(ids: Ints, n_distinct: int) -> Ints:
    """Uses of every block, int64[n_distinct]."""
    counts = np.zeros(n_distinct, np.int64)
    for block in ids:
        counts[block] += 1
    return counts


@njit(cache=True)
def _sift_down(heap: Ints, where: Ints, uses: Ints, depth: Ints, stamp: Ints, at: int, size: int) -> None:
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _before(heap[child + 1], heap[child], uses, depth, stamp):
            child += 1
        if not _before(heap[child], heap[at], uses, depth, stamp):
            return
        heap[child], heap[at] = heap[at], heap[child]
        where[heap[child]] = child
        where[heap[at]] = at
        at = child


@njit(cache=True)
def _before(a: int, b: int, uses: Ints, depth: Ints, stamp: Ints) -> bool:
    """Whether block a is evicted before block b: fewer uses, then deeper, then older last use."""
    if uses[a] != uses[b]:
        rarer: bool = uses[a] < uses[b]
        return rarer
    if depth[a] != depth[b]:
        deeper: bool = depth[a] > depth[b]
        return deeper
    older: bool = stamp[a] < stamp[b]
    return older


@njit(cache=True)
def lfu_hits(offsets: Ints, ids: Ints, n_distinct: int, capacity: int, deepest_first: bool) -> int:
    """Hit blocks, up to the first miss of each request, of a least-frequently-used cache.

    A block's use count starts afresh when it is evicted; ties evict the least recently used, or first of all the one
    that stood deepest in the request it was last used by.
    """
    depth = np.zeros(n_distinct, np.int64)
    uses = np.zeros(n_distinct, np.int64)
    stamp = np.zeros(n_distinct, np.int64)
    where = np.full(n_distinct, -1, np.int64)
    heap = np.empty(capacity + 1, np.int64)
    size = 0
    hits = 0
    for request in range(len(offsets) - 1):
        missed = False
        for position in range(offsets[request], offsets[request + 1]):
            block = ids[position]
            stamp[block] = position
            if deepest_first:
                depth[block] = position - offsets[request]
            if where[block] >= 0:
                if not missed:
                    hits += 1
                uses[block] += 1
                _sift_down(heap, where, uses, depth, stamp, where[block], size)
                continue
            missed = True
            if capacity == 0:
                continue
            if size == capacity:
                victim = heap[0]
                where[victim] = -1
                uses[victim] = 0
                size -= 1
                heap[0] = heap[size]
                where[heap[0]] = 0
                if size == 0:
                    where[victim] = -1
                else:
                    _sift_down(heap, where, uses, depth, stamp, 0, size)
            uses[block] = 1
            heap[size] = block
            where[block] = size
            at = size
            size += 1
            while at > 0:
                parent = (at - 1) // 2
                if not _before(heap[at], heap[parent], uses, depth, stamp):
                    break
                heap[at], heap[parent] = heap[parent], heap[at]
                where[heap[at]] = at
                where[heap[parent]] = parent
                at = parent
    return hits


@njit(cache=True)
def walk_prefixes(
    offsets: Ints, ids: Ints, n_distinct: int, popular: Bools
) -> tuple[Ints, Ints, Ints, Ints, Ints, Bools]:
    """How each request reuses what came before it.

    Args:
        popular: bool[n_distinct], blocks that belong to a shared system prompt (a trunk).

    Returns, int64[N] each: depth of the trunk (leading popular blocks), matched blocks beyond it,
    how many of the matched were used by two or more requests already, earlier uses of the deepest
    matched block, the request that last touched it (-1: nothing matched), and whether that one
    was the last to touch the first matched block, too.
    """
    n = len(offsets) - 1
    trunk = np.zeros(n, np.int64)
    matched = np.zeros(n, np.int64)
    covered = np.zeros(n, np.int64)
    uses = np.zeros(n, np.int64)
    owner = np.full(n, -1, np.int64)
    whole = np.zeros(n, np.bool_)
    count = np.zeros(n_distinct, np.int64)
    toucher = np.full(n_distinct, -1, np.int64)
    for i in range(n):
        start, stop = offsets[i], offsets[i + 1]
        depth = start
        while depth < stop and popular[ids[depth]]:
            depth += 1
        trunk[i] = depth - start
        at = depth
        while at < stop and count[ids[at]] > 0:
            if count[ids[at]] > 1:
                covered[i] += 1
            at += 1
        matched[i] = at - depth
        if at > depth:
            owner[i] = toucher[ids[at - 1]]
            uses[i] = count[ids[at - 1]]
            whole[i] = toucher[ids[depth]] == owner[i]
        for k in range(start, stop):
            count[ids[k]] += 1
            toucher[ids[k]] = i
    return trunk, matched, covered, uses, owner, whole


@njit(cache=True)
def grow_prefix_tree(
    arrival_s: Floats,
    offsets: Ints,
    trunk: Ints,
    path_offsets: Ints,
    paths: Ints,
    n_trunk_blocks: int,
    gap_s: Floats,
    matched: Ints,
    uses: Floats,
    once: Floats,
    tail: Ints,
    whole: Bools,
    reach: int,
) -> tuple[Ints, Ints]:
    """Lay the blocks of a synthesised trace: which earlier request each request extends.

    A request's blocks are its trunk's path, then blocks of the earlier request it continues, then
    new ones. Among requests of the same trunk near the wanted time, that one is chosen whose
    prefix fits best: long enough, last touched by that very request, used before as often as
    wanted.

    Args:
        arrival_s: float64[N] ascending.
        offsets: int64[N + 1], block ranges of the requests.
        trunk: int64[N], index of each request's system prompt.
        path_offsets, paths: the trunks' block lists, numbered among trunk blocks.
        n_trunk_blocks: distinct trunk blocks.
        gap_s: float64[N], wanted time since the last use of the deepest matched block; negative
            for a request that continues nothing.
        matched: int64[N], wanted matched blocks beyond the trunk.
        uses: float64[N], wanted earlier uses of the deepest matched block.
        once: float64[N], wanted share of those that only one request used before.
        tail: int64[N], wanted blocks of the continued request beyond the match.
        whole: bool[N], whether the continued request shall be the last to have touched any of the
            matched blocks, rather than only the deepest (no other branch was used since).
        reach: requests looked at on either side of the wanted time, at first.

    Returns: block ids int32[M] in order of first appearance, session ids int32[N].
    """
    n = len(arrival_s)
    room = offsets[n]
    ids = np.empty(room, np.int32)
    toucher = np.full(room, -1, np.int64)
    session = np.empty(n, np.int32)
    shared = np.zeros(n, np.int64)
    used = np.zeros(room, np.int32)
    named = np.full(n_trunk_blocks, -1, np.int32)
    issued = np.int32(0)
    sessions = np.int32(0)
    for i in range(n):
        at = offsets[i]
        stop = offsets[i + 1]
        for p in range(path_offsets[trunk[i]], path_offsets[trunk[i] + 1]):
            if at == stop:
                break
            if named[paths[p]] < 0:
                named[paths[p]] = issued
                issued += 1
            ids[at] = named[paths[p]]
            at += 1
        base = at - offsets[i]
        want = min(matched[i], stop - at)
        best, best_cost, best_depth = np.int64(-1), np.inf, np.int64(0)
        if gap_s[i] >= 0 and want >= 1 and i > 0:
            aim = min(np.searchsorted(arrival_s, arrival_s[i] - gap_s[i]), i - 1)
            span = i - aim
            width = reach
            while True:
                for j in range(max(0, aim - width), min(i, aim + width + 1)):
                    if trunk[j] != trunk[i]:
                        continue
                    beyond = offsets[j + 1] - offsets[j] - base
                    if beyond < 1:
                        continue
                    got = min(want, beyond)
                    known = min(shared[j], got)
                    cost = W_GAP * abs(np.log((i - j) / span))
                    cost += W_ONCE * abs((got - known) / got - once[i])
                    cost += W_SHORT * (want - got) / want
                    cost += W_TAIL * abs(np.log((1.0 + beyond - got) / (1.0 + tail[i])))
                    # A later request that went as deep holds the newer use of that block.
                    if cost >= best_cost:
                        continue
                    deepest = ids[offsets[j] + base + got - 1]
                    if toucher[deepest] != j:
                        continue
                    if (toucher[ids[offsets[j] + base]] == j) != whole[i]:
                        cost += W_WHOLE
                    cost += W_USES * abs(np.log(used[deepest] / uses[i]))
                    if cost < best_cost:
                        best, best_cost, best_depth = np.int64(j), cost, got
                if (best >= 0 and best_depth == want) or width >= 16 * reach or width >= i:
                    break
                width *= 4
        if best >= 0:
            session[i] = session[best]
            shift = offsets[best] - offsets[i]
            for _ in range(best_depth):
                ids[at] = ids[at + shift]
                at += 1
            shared[i] = best_depth
            shared[best] = max(shared[best], best_depth)
        else:
            session[i] = sessions
            sessions += 1
        while at < stop:
            ids[at] = issued
            issued += 1
            at += 1
        for k in range(offsets[i], stop):
            toucher[ids[k]] = i
            used[ids[k]] += 1
    return ids, session
