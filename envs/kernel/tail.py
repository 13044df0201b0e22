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

    Works in `world.scratch_tail` [2 ring, 5]; columns 0 to 2 of a run: longest interval, step between, count.
    """
    runs = f8_at(world.scratch_tail)
    wanted = float(max(1, math.ceil(share * intervals - 1e-9)))
    count = 0
    total = 0.0
    for s in range(first, last):
        segment = segment_of(world, d, s)
        step = segment.step_s
        length = segment.count
        if s > first and segment.stall_s > 0.0:
            runs[5 * count] = step + segment.stall_s
            runs[5 * count + 1] = 0.0
            runs[5 * count + 2] = 1.0
            total += step + segment.stall_s
            count += 1
            step += segment.growth_s
            length -= 1.0
        if length > 0.0:
            runs[5 * count] = step + segment.growth_s * (length - 1.0)
            runs[5 * count + 1] = segment.growth_s
            runs[5 * count + 2] = length
            total += length * (runs[5 * count] + step) / 2.0
            count += 1
    return _longest_sum(runs, count, wanted) / wanted, total / intervals


@compiled
def _longest_sum(runs, count, wanted):
    """Sum of the `wanted` largest numbers in `count` decreasing arithmetic progressions; reorders `runs`."""
    total = 0.0
    while count > 1:
        # the pivot is the middle number of some run; columns 3 and 4: how many of each run are >= and > pivot
        chosen = count >> 1
        middle = math.floor((runs[5 * chosen + 2] - 1.0) / 2.0)
        pivot = runs[5 * chosen] - runs[5 * chosen + 1] * middle
        at_least = 0.0
        above = 0.0
        for i in range(count):
            if i == chosen:
                runs[5 * i + 3] = middle + 1.0 if runs[5 * i + 1] > 0.0 else runs[5 * i + 2]
                runs[5 * i + 4] = middle if runs[5 * i + 1] > 0.0 else 0.0
            else:
                _count_at_least(runs, i, pivot)
            at_least += runs[5 * i + 3]
            above += runs[5 * i + 4]
        kept = 0
        if above >= wanted:  # all wanted ones are above the pivot
            for i in range(count):
                if runs[5 * i + 4] > 0.0:
                    runs[5 * kept] = runs[5 * i]
                    runs[5 * kept + 1] = runs[5 * i + 1]
                    runs[5 * kept + 2] = runs[5 * i + 4]
                    kept += 1
        else:
            taken = 4 if at_least >= wanted else 3
            for i in range(count):
                k = runs[5 * i + taken]
                total += k * runs[5 * i] - runs[5 * i + 1] * (k * (k - 1.0) / 2.0)
            if taken == 4:  # the rest are equal to the pivot
                return total + (wanted - above) * pivot
            wanted -= at_least
            for i in range(count):
                k = runs[5 * i + 3]
                if k < runs[5 * i + 2]:
                    runs[5 * kept] = runs[5 * i] - runs[5 * i + 1] * k
                    runs[5 * kept + 1] = runs[5 * i + 1]
                    runs[5 * kept + 2] = runs[5 * i + 2] - k
                    kept += 1
        count = kept
    return total + wanted * runs[0] - runs[1] * (wanted * (wanted - 1.0) / 2.0)


@compiled
def _count_at_least(runs, i, pivot):
    """Columns 3 and 4 of run i: how many of its numbers are >= pivot, and > pivot."""
    top = runs[5 * i]
    step = runs[5 * i + 1]
    if top < pivot:
        runs[5 * i + 3] = 0.0
        runs[5 * i + 4] = 0.0
    elif step <= 0.0:
        runs[5 * i + 3] = runs[5 * i + 2]
        runs[5 * i + 4] = runs[5 * i + 2] if top > pivot else 0.0
    else:
        k = min(runs[5 * i + 2], math.floor((top - pivot) / step) + 1.0)
        runs[5 * i + 3] = k
        runs[5 * i + 4] = k - 1.0 if top - step * (k - 1.0) == pivot else k
