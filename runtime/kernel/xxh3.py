"""XXH3-64 with a seed, for bytes at an address; and the chained hash of KV blocks built on it.

Written from the algorithm's specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Numbers are
uint64 throughout: mixing in a signed integer would make Numba compute in floating point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from envs.kernel.compile import compiled
from envs.kernel.memory import _numbers_at as numbers_at

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# The secret's 64-bit little-endian word that starts at each byte.
SECRET = np.array([int.from_bytes(_SECRET_BYTES[i : i + 8], "little") for i in range(185)], np.uint64)

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4, _P64_5 = (
    np.uint64(0x165667B19E3779F9),
    np.uint64(0x85EBCA77C2B2AE63),
    np.uint64(0x27D4EB2F165667C5),
)
_MX_1, _MX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW = np.uint64(0xFFFFFFFF)
_ROOM = np.uint64(16)


@intrinsic
def _fold(typing_context, a, b):
    """The two halves of the 128-bit product of a and b, xored."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        high = builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), high)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _swapped(typing_context, a):
    """The bytes of a in reverse."""

    def generate(context, builder, signature, arguments):
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


def _load(bits: int) -> Any:
    """An intrinsic address -> the little-endian number of so many bits there, aligned or not, as uint64."""

    @intrinsic
    def at(typing_context, address):
        def generate(context, builder, signature, arguments):
            kind = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.int64), generate

    return at


fold: Any = _fold
swapped: Any = _swapped
load8: Any = _load(8)
load16: Any = _load(16)
load32: Any = _load(32)
load64: Any = _load(64)
u4_at = numbers_at(types.uint32)
u8_at = numbers_at(types.uint64)


@compiled
def _rotated(h, left):
    return (h << np.uint64(left)) | (h >> np.uint64(64 - left))


@compiled
def _avalanche(h):
    h = (h ^ (h >> np.uint64(37))) * _MX_1
    return h ^ (h >> np.uint64(32))


@compiled
def _avalanche_short(h):
    h = (h ^ (h >> np.uint64(33))) * _P64_2
    h = (h ^ (h >> np.uint64(29))) * _P64_3
    return h ^ (h >> np.uint64(32))


@compiled
def _mixed(address, secret, seed):
    return fold(load64(address) ^ (SECRET[secret] + seed), load64(address + 8) ^ (SECRET[secret + 8] - seed))


@compiled
def _up_to_8(address, length, seed):
    size = np.uint64(length)
    if length >= 4:
        low = seed & _LOW
        seed ^= (swapped(low) >> np.uint64(32)) << np.uint64(32)
        both = load32(address + length - 4) + (load32(address) << np.uint64(32))
        h = both ^ ((SECRET[8] ^ SECRET[16]) - seed)
        h ^= _rotated(h, 49) ^ _rotated(h, 24)
        h *= _MX_2
        h ^= (h >> np.uint64(35)) + size
        h *= _MX_2
        return h ^ (h >> np.uint64(28))
    if length > 0:
        first, middle, last = load8(address), load8(address + (length >> 1)), load8(address + length - 1)
        both = (first << np.uint64(16)) | (middle << np.uint64(24)) | last | (size << np.uint64(8))
        return _avalanche_short(both ^ (((SECRET[0] ^ SECRET[4]) & _LOW) + seed))
    return _avalanche_short(seed ^ SECRET[56] ^ SECRET[64])


@compiled
def _pair(low, high, size, seed):
    """The hash of 9 to 16 bytes: their first and their last word."""
    low ^= (SECRET[24] ^ SECRET[32]) + seed
    high ^= (SECRET[40] ^ SECRET[48]) - seed
    return _avalanche(size + swapped(low) + high + fold(low, high))


@compiled
def _up_to_240(address, length, seed):
    acc = np.uint64(length) * _P64_1
    end = address + length
    if length <= 128:
        if length > 32:
            if length > 64:
                if length > 96:
                    acc += _mixed(address + 48, 96, seed) + _mixed(end - 64, 112, seed)
                acc += _mixed(address + 32, 64, seed) + _mixed(end - 48, 80, seed)
            acc += _mixed(address + 16, 32, seed) + _mixed(end - 32, 48, seed)
        return _avalanche(acc + _mixed(address, 0, seed) + _mixed(end - 16, 16, seed))
    for i in range(8):
        acc += _mixed(address + 16 * i, 16 * i, seed)
    acc = _avalanche(acc) + _mixed(end - 16, 119, seed)
    for i in range(8, length >> 4):
        acc += _mixed(address + 16 * i, 16 * (i - 8) + 3, seed)
    return _avalanche(acc)


@compiled
def _accumulate(acc, address, secret):
    for i in range(8):
        data = load64(address + 8 * i)
        key = data ^ load64(secret + 8 * i)
        acc[i ^ 1] += data
        acc[i] += (key & _LOW) * (key >> np.uint64(32))


@compiled
def _long(address, length, seed):
    work = np.empty(32, np.uint64)  # accumulators, then the secret of this seed
    acc = work[:8]
    for i in range(0, 24, 2):
        work[8 + i] = SECRET[8 * i] + seed
        work[9 + i] = SECRET[8 * i + 8] - seed
    acc[0], acc[1], acc[2], acc[3] = _P32_3, _P64_1, _P64_2, _P64_3
    acc[4], acc[5], acc[6], acc[7] = _P64_4, _P32_2, _P64_5, _P32_1
    secret = np.int64(work.ctypes.data) + 64
    stripes = (length - 1) >> 6
    for i in range(stripes):
        _accumulate(acc, address + 64 * i, secret + 8 * (i & 15))
        if i & 15 == 15:
            for j in range(8):
                acc[j] = (acc[j] ^ (acc[j] >> np.uint64(47)) ^ load64(secret + 128 + 8 * j)) * _P32_1
    _accumulate(acc, address + length - 64, secret + 121)
    h = np.uint64(length) * _P64_1
    for i in range(4):
        h += fold(acc[2 * i] ^ load64(secret + 11 + 16 * i), acc[2 * i + 1] ^ load64(secret + 19 + 16 * i))
    return _avalanche(h + np.uint64(work[0] & np.uint64(0)))  # the last use of `work` keeps it alive to here


@compiled
def xxh3(address, length, seed):
    """XXH3-64 of `length` bytes at an address, with a uint64 seed."""
    if length > 240:
        return _long(address, length, seed)
    if length > 16:
        return _up_to_240(address, length, seed)
    if length > 8:
        return _pair(load64(address), load64(address + length - 8), np.uint64(length), seed)
    return _up_to_8(address, length, seed)


@compiled
def start_of(array):
    """The address of an array's elements. NumPy's own ways to ask for it take several times as long."""
    return np.int64(array.ctypes.data)


@compiled
def xxh3_of(address, length, seed):
    """XXH3-64 of bytes at an address, for a call from Python: all words are int64."""
    return np.int64(xxh3(address, length, np.uint64(seed)))


@compiled
def xxh3_pair(low, high, seed):
    """XXH3-64 of the 16 bytes of two little-endian words."""
    return _pair(low, high, _ROOM, seed)


@compiled
def block_hash(address, size, extra, seed):
    """Local hash of a block: of its `size` bytes of tokens, and of its extra keys if it has any (`extra` not 0)."""
    local = xxh3(address, size, seed)
    return local if extra == np.uint64(0) else xxh3_pair(local, extra, seed)


@compiled
def next_hash(before, rooted, address, size, extra, seed):
    """Hash of the block whose `size` bytes of tokens are at an address, after `before` or (rooted) at the start."""
    local = block_hash(address, size, extra, seed)
    return local if rooted else xxh3_pair(before, local, seed)


@compiled
def hash_chain(tokens, count, block_tokens, seed, rooted, parent, root_extra, extras, extra_count, hashes):
    """Chained hashes of `count` blocks of the uint32 `tokens` into the uint64 `hashes`; all three are addresses.

    `parent` is the hash of the block before the first, where `rooted` is 0. `root_extra` is added to the extra keys of
    the first block of a root, `extras` [extra_count] to those of each block. Words are passed as int64.
    """
    size = 4 * block_tokens
    before = np.uint64(parent)
    made = u8_at(hashes)
    for i in range(count):
        extra = u8_at(extras)[i] if i < extra_count else np.uint64(0)
        starts = i == 0 and rooted != 0
        if starts:
            extra += np.uint64(root_extra)
        before = next_hash(before, starts, tokens + i * size, size, extra, np.uint64(seed))
        made[i] = before
