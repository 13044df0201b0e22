"""What the indexer API asks of the prefix index: leading matches per medium, and the numbers of long JSON arrays."""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import check, i4_at, i8_at
from envs.state import ROW_BITS

from .block_table import CPU, DISK, GPU, index_at
from .xxh3 import load8, load64, u8_at

COLUMNS = 4  # GPU, CPU, DISK (numbered as in block_table), and any of them
ANY = 3

NO_ARRAY = -(1 << 40)
_MASK = np.uint64((1 << 64) - 1)
_EACH = np.uint64(0x0101010101010101)  # times a byte: that byte in each
_HIGH = _EACH * np.uint64(0x80)
_QUOTE, _COMMA, _ZERO, _NINE, _OPEN, _CLOSE = 0x22, 0x2C, 0x30, 0x39, 0x5B, 0x5D


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


@compiled
def _past_space(data, i, size):
    while i < size:
        byte = np.int64(load8(data + i))
        if byte > 0x20 or not (byte == 0x20 or byte == 0x0A or byte == 0x0D or byte == 0x09):
            break
        i += 1
    return i


@compiled
def _digits_ahead(word):
    """How many of the 8 bytes of a word are digits, from the lowest on; 8 where all are."""
    off = word ^ (_EACH * np.uint64(_ZERO))
    others = (((off & ~_HIGH) + _EACH * np.uint64(0x80 - 10)) | off) & _HIGH
    if others == np.uint64(0):
        return 8
    below = (others & (~others + np.uint64(1))) - np.uint64(1)
    return np.int64(((below & _EACH) * _EACH) >> np.uint64(56)) - 1


@compiled
def _value_of(word, digits):
    """The number that the lowest 1 .. 8 bytes of a word, all digits, spell: pairs, then fours, then eight at once."""
    v = (word << np.uint64(64 - 8 * digits)) & (_EACH * np.uint64(0x0F))
    v = ((v * np.uint64(10 * (1 << 8) + 1)) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    v = ((v * np.uint64(100 * (1 << 16) + 1)) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (v * np.uint64(10000 * (1 << 32) + 1)) >> np.uint64(32)


@compiled
def scan_integers(data, size, limit, quoted, out, room):
    """Unsigned integers of a JSON array of nothing else, at an address, to uint64 [room] at another.

    `limit` is the largest allowed, as the int64 of the same bits; with `quoted` they may be strings of digits.
    Returns how many; -1 - i where element i is none; NO_ARRAY where there is no array.
    """
    words = u8_at(out)
    most = np.uint64(limit)
    ten = np.uint64(10)
    top, rest = _MASK // ten, _MASK % ten
    i = _past_space(data, 0, size)
    if i >= size or np.int64(load8(data + i)) != _OPEN:
        return NO_ARRAY
    i = _past_space(data, i + 1, size)
    if i < size and np.int64(load8(data + i)) == _CLOSE:
        return 0
    count = 0
    while i < size and count < room:
        in_quotes = quoted != 0 and np.int64(load8(data + i)) == _QUOTE
        if in_quotes:
            i += 1
        start = i
        value = np.uint64(0)
        if i + 8 <= size:
            word = load64(data + i)
            digits = _digits_ahead(word)
            if digits > 0:
                value = _value_of(word, digits)
                i += digits
        while i < size:
            byte = np.int64(load8(data + i))
            if byte < _ZERO or byte > _NINE:
                break
            digit = np.uint64(byte - _ZERO)
            if i - start >= 19 and (value > top or (value == top and digit > rest)):  # would not fit 64 bits
                return -1 - count
            value = value * ten + digit
            i += 1
        if i == start or value > most:
            return -1 - count
        if in_quotes:
            if i >= size or np.int64(load8(data + i)) != _QUOTE:
                return -1 - count
            i += 1
        words[count] = value
        i = _past_space(data, i, size)
        if i >= size:
            return -1 - count
        byte = np.int64(load8(data + i))
        if byte == _CLOSE:
            return count + 1
        if byte != _COMMA:
            return -1 - count
        count += 1
        i = _past_space(data, i + 1, size)
    return -1 - count
