"""The integers of long JSON arrays, without an object for each."""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import i4_at, lowest_bit

from .xxh3 import load8, load64, start_of, u8_at

NO_ARRAY = -(1 << 40)
MOST_TOKEN_ID = (1 << 32) - 1
_MASK = np.uint64((1 << 64) - 1)
_EACH = np.uint64(0x0101010101010101)  # times a byte: that byte in each
_HIGH = _EACH * np.uint64(0x80)
_LONG = 1024  # bytes of an array that is worth reading in two places
_SPACE, _QUOTE, _COMMA, _ZERO, _NINE, _OPEN, _CLOSE = 0x20, 0x22, 0x2C, 0x30, 0x39, 0x5B, 0x5D


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
    return 8 if others == np.uint64(0) else lowest_bit(np.int64(others)) >> 3


@compiled
def _value_of(word, digits):
    """The number that the lowest 1 .. 8 bytes of a word, all digits, spell: pairs, then fours, then eight at once."""
    v = (word << np.uint64(64 - 8 * digits)) & (_EACH * np.uint64(0x0F))
    v = ((v * np.uint64(10 * (1 << 8) + 1)) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    v = ((v * np.uint64(100 * (1 << 16) + 1)) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (v * np.uint64(10000 * (1 << 32) + 1)) >> np.uint64(32)


@compiled
def _element(data, i, most):
    """An element of up to six digits with its comma and a space, which are in one word: its value and the byte after.
    That is `i` itself where there is something else. The 8 bytes must be there."""
    word = load64(data + i)
    digits = _digits_ahead(word)
    if 0 < digits < 7 and (digits == 1 or np.int64(word & np.uint64(0xFF)) != _ZERO):
        value = _value_of(word, digits)
        after = np.int64((word >> np.uint64(8 * digits)) & np.uint64(0xFFFF))
        if after & 0xFF == _COMMA and value <= most:
            return np.int64(value), i + digits + (2 if after >> 8 == _SPACE else 1)
    return np.int64(0), i


@compiled
def _in_two_places(data, i, size, most, out):
    """`_element`s from byte i on, read from there and from the middle at once, as where each begins is known only once
    the one before it is read; how many, and the byte after. `out` uint32 has room for as many as there can be."""
    middle = i + (size - i) // 2
    while middle < size and np.int64(load8(data + middle)) != _COMMA:
        middle += 1
    middle += 1
    if middle < size and np.int64(load8(data + middle)) == _SPACE:
        middle += 1
    apart = (middle - i) // 2  # an element has two bytes at least
    first = second = 0
    j = middle
    while i < middle and j + 8 <= size:
        value, after = _element(data, i, most)
        other, behind = _element(data, j, most)
        if after == i or behind == j:
            break
        out[first] = value
        out[apart + second] = other
        first += 1
        second += 1
        i = after
        j = behind
    while i < middle and i + 8 <= size:
        value, after = _element(data, i, most)
        if after == i:
            break
        out[first] = value
        first += 1
        i = after
    if i != middle:  # the array is over, or there is something else, before the other place
        return first, i
    for k in range(second):
        out[first + k] = out[apart + k]
    return first + second, j


@compiled
def scan_integers(data, size, limit, quoted, out, room):
    """Unsigned integers of a JSON array of nothing else, at an address, to uint64 [room] at another.

    `limit` is the largest allowed, as the int64 of the same bits; where it is below 2^32 they go to uint32 [room]. With
    `quoted` they may be strings of digits.
    Returns how many; -1 - i where element i is none; NO_ARRAY where there is no array.
    """
    return _scan(data, size, limit, quoted, out, room)[0]


@compiled
def scan_token_ids(body, start, ids):
    """`scan_integers` from byte `start` of a body uint8[], to ids uint32[]; and where the array ends."""
    count, stop = _scan(start_of(body) + start, len(body) - start, MOST_TOKEN_ID, 0, start_of(ids), len(ids))
    return count, start + stop


@compiled
def _scan(data, size, limit, quoted, out, room):
    """`scan_integers`, and the byte after the array."""
    words = u8_at(out)
    halves = i4_at(out)
    narrow = 0 <= limit < 1 << 32
    most = np.uint64(limit)
    ten = np.uint64(10)
    top, rest = _MASK // ten, _MASK % ten
    i = _past_space(data, 0, size)
    if i >= size or np.int64(load8(data + i)) != _OPEN:
        return NO_ARRAY, i
    i = _past_space(data, i + 1, size)
    if i < size and np.int64(load8(data + i)) == _CLOSE:
        return 0, i + 1
    count = 0
    if narrow and size - i > _LONG and room >= (size - i) // 2:
        count, i = _in_two_places(data, i, size, most, halves)
    while i < size and count < room:
        if i + 8 <= size:
            value, after = _element(data, i, most)
            if after > i:
                if narrow:
                    halves[count] = value
                else:
                    words[count] = np.uint64(value)
                count += 1
                i = after
                continue
        i = _past_space(data, i, size)
        in_quotes = quoted != 0 and np.int64(load8(data + i)) == _QUOTE
        if in_quotes:
            i += 1
        start = i
        number = np.uint64(0)
        if i + 8 <= size:
            word = load64(data + i)
            digits = _digits_ahead(word)
            if digits > 0:
                number = _value_of(word, digits)
                i += digits
        while i < size:
            byte = np.int64(load8(data + i))
            if byte < _ZERO or byte > _NINE:
                break
            digit = np.uint64(byte - _ZERO)
            if i - start >= 19 and (number > top or (number == top and digit > rest)):  # would not fit 64 bits
                return -1 - count, i
            number = number * ten + digit
            i += 1
        if i == start or number > most:
            return -1 - count, i
        if i - start > 1 and not in_quotes and np.int64(load8(data + start)) == _ZERO:  # no number of JSON
            return -1 - count, i
        if in_quotes:
            if i >= size or np.int64(load8(data + i)) != _QUOTE:
                return -1 - count, i
            i += 1
        if narrow:
            halves[count] = np.int64(number)
        else:
            words[count] = number
        i = _past_space(data, i, size)
        if i >= size:
            return -1 - count, i
        byte = np.int64(load8(data + i))
        if byte == _CLOSE:
            return count + 1, i + 1
        if byte != _COMMA:
            return -1 - count, i
        count += 1
        i += 1
    return -1 - count, i
