"""TBT of one request: the mean of its longest intervals, from the segments it lived through, without listing them.

The intervals of a segment form an arithmetic progression, plus one that is longer by the stall before it. The sum
of the m longest is found by selection over progressions: split the candidates at a pivot, keep the side where the
m-th longest lies.
"""

from __future__ import annotations

import math

from .compile import compiled
from .memory import f8_at, segment_of


@compiled
def tail_mean(world, d, first, last, intervals, share):
    """(mean of the longest `share` of intervals, mean of all) over segments first .. last - 1 of decode d.

    Works in `world.scratch_tail` [4, 2 ring]: of each run of intervals the longest, the step between, how many, and
    how many are at least the pivot.
    """
    stride = 16 * world.ring
    top = f8_at(world.scratch_tail)
    steps = f8_at(world.scratch_tail + stride)
    counts = f8_at(world.scratch_tail + 2 * stride)
    kept = f8_at(world.scratch_tail + 3 * stride)
    wanted = float(max(1, math.ceil(share * intervals - 1e-9)))
    runs = 0
    total = 0.0
    for s in range(first, last):
        segment = segment_of(world, d, s)
        step_s = segment.step_s
        length = segment.count
        if s > first and segment.stall_s > 0.0:
            top[runs] = step_s + segment.stall_s
            steps[runs] = 0.0
            counts[runs] = 1.0
            total += step_s + segment.stall_s
            runs += 1
            step_s += segment.growth_s
            length -= 1.0
        if length > 0.0:
            longest = step_s + segment.growth_s * (length - 1.0)
            top[runs] = longest
            steps[runs] = segment.growth_s
            counts[runs] = length
            total += length * (longest + step_s) / 2.0
            runs += 1
    return _longest_sum(top, steps, counts, kept, runs, wanted) / wanted, total / intervals


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
