"""TBT of one request: the mean of its longest intervals, from the segments it lived through, without listing them.

The intervals of a segment form an arithmetic progression, a run, plus one that is longer by the stall before it. Runs
of different batches hardly ever overlap, and most stalls are longer than any plain interval: so the m longest are
mostly whole runs, taken in order. Where runs do overlap they are split at a pivot, time and again, to keep the side
where the m-th longest lies.
"""

from __future__ import annotations

import math

from .compile import compiled
from .memory import f8_at, segment_of


@compiled
def tail_mean(world, d, first, last, intervals, share, first_stall_s):
    """(mean of the longest `share` of intervals, mean of all) over segments first .. last - 1 of decode d.

    `first_stall_s`: of the stall before the first segment, what this request was there for.

    Works in `world.scratch_tail` [4, 2 ring]: of each run of intervals the longest, the step between, how many, and
    how many are at least the pivot.
    """
    stride = 16 * world.ring
    top = f8_at(world.scratch_tail)
    steps = f8_at(world.scratch_tail + stride)
    counts = f8_at(world.scratch_tail + 2 * stride)
    kept = f8_at(world.scratch_tail + 3 * stride)
    wanted = float(max(1, math.ceil(share * intervals - 1e-9)))
    total = 0.0
    plain_s = 0.0  # the longest interval without a stall before it
    for s in range(first, last):
        segment = segment_of(world, d, s)
        stalled = segment.stall_s if s > first else first_stall_s
        more = segment.count - 1.0
        longest = segment.step_s + segment.growth_s * more
        total += segment.count * (longest + segment.step_s) * 0.5 + stalled
        plain_s = max(plain_s, longest if more > 0.0 or stalled == 0.0 else 0.0)
    runs = 0
    above = 0
    above_s = 0.0
    for s in range(first, last):
        segment = segment_of(world, d, s)
        stalled = segment.stall_s if s > first else first_stall_s
        more = segment.count - 1.0
        plain = segment.count
        if stalled > 0.0:
            plain = more
            interval_s = segment.step_s + stalled
            if interval_s >= plain_s:
                kept[above] = interval_s
                above += 1
                above_s += interval_s
            else:
                top[runs] = interval_s
                steps[runs] = 0.0
                counts[runs] = 1.0
                runs += 1
        if plain > 0.0:
            top[runs] = segment.step_s + segment.growth_s * more
            steps[runs] = segment.growth_s
            counts[runs] = plain
            runs += 1
    left = wanted
    tail_s = 0.0
    if above <= wanted:
        left -= above
        tail_s = above_s
    else:
        runs = above
        for i in range(runs):
            top[i] = kept[i]
            steps[i] = 0.0
            counts[i] = 1.0
    # the longest first, as long as each run is done with before another one begins
    rounds = 2 * runs
    while left > 0.0 and rounds > 0:
        rounds -= 1
        best = 0
        best_s = top[0]
        next_s = 0.0
        for i in range(1, runs):
            interval_s = top[i]
            next_s = max(next_s, min(interval_s, best_s))
            best = i if interval_s > best_s else best
            best_s = max(interval_s, best_s)
        take = min(counts[best], left)
        if best_s - steps[best] * (take - 1.0) < next_s:
            take = min(take, math.floor((best_s - next_s) / steps[best]) + 1.0)
        tail_s += _sum(best_s, steps[best], take)
        left -= take
        top[best] -= steps[best] * take
        counts[best] -= take
        if counts[best] <= 0.0:
            runs -= 1
            top[best] = top[runs]
            steps[best] = steps[runs]
            counts[best] = counts[runs]
    if left > 0.0:
        tail_s += _longest_sum(top, steps, counts, kept, runs, left)
    return tail_s / wanted, total / intervals


@compiled
def _sum(top, step, count):
    """Sum of the first `count` numbers of a run."""
    return count * top - step * (count * (count - 1.0) / 2.0)


@compiled
def _longest_sum(top, steps, counts, kept, runs, wanted):
    """Sum of the `wanted` largest numbers in `runs` decreasing arithmetic progressions; uses them up."""
    total = 0.0
    while runs > 1:
        # the pivot is the middle number of the middle run
        chosen = runs >> 1
        middle = math.floor((counts[chosen] - 1.0) / 2.0)
        pivot = top[chosen] - steps[chosen] * middle
        for i in range(runs):
            # without branches, so that several runs are counted at once; 1e-300 stands for a step of nothing
            reach = math.floor((top[i] - pivot) / max(steps[i], 1e-300)) + 1.0
            kept[i] = min(max(reach, 0.0), counts[i])
        kept[chosen] = middle + 1.0 if steps[chosen] > 0.0 else counts[chosen]
        at_least = 0.0
        for i in range(runs):
            at_least += kept[i]
        left = 0
        if at_least > wanted:
            # the wanted ones are all among those; the pivot is the least of them, so it and its equals can go
            kept[chosen] -= 1.0 if steps[chosen] > 0.0 else min(at_least - wanted, kept[chosen])
            for i in range(runs):
                top[left] = top[i]
                steps[left] = steps[i]
                counts[left] = kept[i]
                left += kept[i] > 0.0
        else:
            for i in range(runs):
                k = kept[i]
                total += _sum(top[i], steps[i], k)
                top[left] = top[i] - steps[i] * k
                steps[left] = steps[i]
                counts[left] = counts[i] - k
                left += counts[left] > 0.0
            wanted -= at_least
            if wanted <= 0.0:
                return total
        runs = left
    return total + _sum(top[0], steps[0], wanted)
