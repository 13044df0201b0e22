"""What the indexer API asks of the prefix index: leading matches per medium, and how many blocks there are."""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import check, i4_at, i8_at
from envs.state import ROW_BITS

from .block_table import CPU, DISK, GPU, index_at

COLUMNS = 4  # GPU, CPU, DISK (numbered as in block_table), and any of them
ANY = 3


@compiled
def _go_on(alive, there, first, length, found, column):
    """The instances that go on at a block; for those that stop, `length` is written down."""
    still = alive & there
    ended = alive & ~still
    while ended:
        low = ended & -ended
        bit = 0
        while low >> bit != 1:
            bit += 1
        found[COLUMNS * (first + bit) + column] = length
        ended ^= low
    return still


@compiled
def match_media(at, numbers, count, out):
    """Leading blocks that each instance has on each medium, and on any; what is only assumed (ROUTED) does not count.

    Args are addresses: of the index's header, of int32 [count] block numbers, of int64 [instances, COLUMNS] to fill.
    One walk for 16 instances, that ends where none of them goes on.
    """
    index = index_at(at, 0)
    media = i8_at(index.media)
    ids = i4_at(numbers)
    found = i8_at(out)
    for first in range(0, index.instances, ROW_BITS):
        last = min(first + ROW_BITS, index.instances)
        for p in range(first, last):
            for column in range(COLUMNS):
                found[COLUMNS * p + column] = count
        everyone = (np.int64(1) << (last - first)) - 1
        gpu, cpu, disk, somewhere = everyone, everyone, everyone, everyone
        for i in range(count):
            word = media[check(ids[i], index.capacity) * index.words + (first >> 4)]
            on_gpu, on_cpu, on_disk = word >> (ROW_BITS * GPU), word >> (ROW_BITS * CPU), word >> (ROW_BITS * DISK)
            gpu = _go_on(gpu, on_gpu, first, i, found, GPU)
            cpu = _go_on(cpu, on_cpu, first, i, found, CPU)
            disk = _go_on(disk, on_disk, first, i, found, DISK)
            somewhere = _go_on(somewhere, on_gpu | on_cpu | on_disk, first, i, found, ANY)
            if somewhere == 0:
                break


@compiled
def count_blocks(at, group_of, groups, seen, counts):
    """Distinct blocks that the instances of each group have on some medium.

    Args are addresses (and how many groups): int64 [instances] group of each instance, -1 for none; int64 [groups]
    of -1s, for use here; int64 [groups] of zeros, the result.
    """
    index = index_at(at, 0)
    media = i8_at(index.media)
    group = i8_at(group_of)
    latest = i8_at(seen)
    total = i8_at(counts)
    three_rows = (np.int64(1) << (3 * ROW_BITS)) - 1
    for number in range(index.capacity):
        for w in range(index.words):
            word = media[number * index.words + w] & three_rows
            if word != 0:
                holders = (word | word >> ROW_BITS | word >> (2 * ROW_BITS)) & ((1 << ROW_BITS) - 1)
                for p in range(w * ROW_BITS, min((w + 1) * ROW_BITS, index.instances)):
                    g = group[p]
                    if holders >> (p & 15) & 1 and g >= 0 and latest[check(g, groups)] != number:
                        latest[g] = number
                        total[g] += 1
