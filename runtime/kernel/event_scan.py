"""One pass over the msgpack of a batch of KV events, into arrays.

Events come as positional arrays with the tag first or as maps with a type, from vLLM, SGLang or in Mooncake's standard
form (runtime/kv_events.py has the shapes). Strings are told apart by their XXH3. Nothing is trusted: every read is
checked against the end of the payload, and what is not as expected ends the scan with a code and a position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import f8_at, i8_at, record_at

from .block_table import CPU, DISK, GPU
from .xxh3 import load8, load16, load32, load64, swapped, u4_at, u8_at, xxh3

STORED, REMOVED, CLEARED = 0, 1, 2
EVERY_MEDIUM = -1

EVENT = np.dtype(
    [
        ("kind", "i4"),
        ("medium", "i4"),
        ("first_hash", "i8"),
        ("first_token", "i8"),
        ("first_extra", "i8"),  # -1: no block has extra keys
        ("hashes", "i4"),
        ("tokens", "i4"),
        ("block_tokens", "i4"),
        ("rooted", "i4"),  # no parent: the first block starts a prompt
        ("standard", "i4"),  # its hashes are own hashes, by Mooncake's standard
        ("group", "i4"),  # KV-cache group, -1 if not said
        ("full", "i4"),  # the group is said to be of full attention
        ("spare", "i4"),
        ("parent", "u8"),
        ("seed", "u8"),
        ("root_extra", "u8"),
    ]
)
SCAN = np.dtype(
    [
        # given
        ("events_at", "i8"),
        ("hashes_at", "i8"),
        ("tokens_at", "i8"),
        ("extras_at", "i8"),
        ("room_at", "i8"),  # FIELDS + 4 words
        ("model", "u8"),
        ("salt", "u8"),
        ("tenant", "u8"),
        ("lora", "u8"),
        ("seed", "u8"),
        ("root_extra", "u8"),
        # found
        ("events", "i8"),
        ("dp_rank", "i8"),
        ("unknown_events", "i8"),
        ("unknown_media", "i8"),
        ("other_groups", "i8"),
        ("remote", "i8"),
        ("ts", "f8"),
        ("hashes", "i8"),
        ("tokens", "i8"),
        ("extras", "i8"),
        ("error_at", "i8"),
        # of the event at hand
        ("event_hashes", "i8"),
        ("event_tokens", "i8"),
    ]
)
scan_at: Any = record_at(SCAN)
event_at: Any = record_at(EVENT)

# What was expected where a scan ended.
EXPECTED = (
    "",
    "more bytes",
    "a batch: an array [timestamp, events, ...] or a map with events",
    "an array of events",
    "an event: an array with its tag first, or a map with a type",
    "block hashes: an array of integers, bytes or strings",
    "token ids: an array of integers in 0 .. 2**32 - 1",
    "block_size: a positive integer",
    "a parent hash: an integer, bytes, a string or nil",
    "a string or nil",
    "an integer or nil",
    "extra keys: nil, or an array with nil or an array for each block",
    "a string as the key of a map",
    "nothing after the batch",
    "a timestamp: a number or nil",
)
_SHORT, _BATCH, _EVENTS, _EVENT, _HASHES, _TOKENS, _BLOCK_SIZE = -1, -2, -3, -4, -5, -6, -7
_PARENT, _STRING, _INTEGER, _EXTRAS, _KEY, _END, _TS = -8, -9, -10, -11, -12, -13, -14

(
    _F_HASHES,
    _F_TOKENS,
    _F_PARENT,
    _F_BLOCK_SIZE,
    _F_LORA_ID,
    _F_MEDIUM,
    _F_LORA_NAME,
    _F_EXTRA_KEYS,
    _F_GROUP,
    _F_SPEC,
    _F_LOCALITY,
    _F_CACHE_SALT,
    _F_SALT,
    _F_TENANT,
    _F_TYPE,
    _F_STANDARD_TYPE,
    _F_MM_INFOS,
    _F_NONE,
) = range(18)
FIELDS = 18
_ROOM = 8 * FIELDS  # where in the room words to hash are put


_PHI = 0x9E3779B97F4A7C15


def name_key(name: str) -> int:
    """What `_string_key` makes of a string."""
    data, key = name.encode(), len(name.encode())
    for i in range(0, len(data), 8):
        key = ((key ^ int.from_bytes(data[i : i + 8], "little")) * _PHI) % 2**64
        key ^= key >> 32
    return key


def _keys(*names: str) -> np.ndarray:
    return np.array([name_key(name) for name in names], np.uint64)


# Names of fields in maps, and what field each is; the frequent ones first.
_FIELDS = (
    ("type", _F_TYPE),
    ("block_hashes", _F_HASHES),
    ("parent_block_hash", _F_PARENT),
    ("token_ids", _F_TOKENS),
    ("block_size", _F_BLOCK_SIZE),
    ("lora_id", _F_LORA_ID),
    ("medium", _F_MEDIUM),
    ("lora_name", _F_LORA_NAME),
    ("extra_keys", _F_EXTRA_KEYS),
    ("group_idx", _F_GROUP),
    ("kv_cache_spec_kind", _F_SPEC),
    ("locality", _F_LOCALITY),
    ("cache_salt", _F_CACHE_SALT),
    ("event_type", _F_STANDARD_TYPE),
    ("seq_hashes", _F_HASHES),
    ("parent_hash", _F_PARENT),
    ("additional_salt", _F_SALT),
    ("cache_namespace", _F_SALT),
    ("tenant_id", _F_TENANT),
    ("block_mm_infos", _F_MM_INFOS),
)
_FIELD_KEYS = _keys(*(name for name, _ in _FIELDS))
_FIELD_CODES = np.array([code for _, code in _FIELDS])
# The order of the fields in arrays, after the tag.
_STORED_ORDER = np.array(
    [
        *(_F_HASHES, _F_PARENT, _F_TOKENS, _F_BLOCK_SIZE, _F_LORA_ID, _F_MEDIUM, _F_LORA_NAME, _F_EXTRA_KEYS),
        *(_F_GROUP, _F_SPEC, _F_NONE, _F_LOCALITY, _F_NONE, _F_NONE),
    ]
)
_REMOVED_ORDER = np.array([_F_HASHES, _F_MEDIUM, _F_GROUP])
_KIND_KEYS = _keys("BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared")
_BATCH_KEYS = _keys("ts", "events", "data_parallel_rank", "attn_dp_rank", "dp_rank", "timestamp")
_FULL_KEYS = _keys("full_attention", "mla_attention", "sink_full_attention", "FullAttentionSpec", "MLAAttentionSpec")
_DEFAULT_TENANT, _REMOTE = np.uint64(name_key("default")), np.uint64(name_key("REMOTE"))
# Names of media by how they begin, in lower case: "CPU_PINNED", "cpu_tier2" and the like are all CPU.
_MEDIUM_STARTS = tuple(
    (np.uint64(int.from_bytes(start.encode(), "little")), np.uint64(256 ** len(start) - 1), tier)
    for start, tier in (
        *(("gpu", GPU), ("npu", GPU), ("xpu", GPU), ("hbm", GPU), ("device", GPU), ("cpu", CPU), ("host", CPU)),
        *(("dram", CPU), ("disk", DISK), ("ssd", DISK), ("nvme", DISK), ("file", DISK), ("3fs", DISK), ("nfs", DISK)),
    )
)
_MEDIUM_BEGINS = np.array([start for start, _, _ in _MEDIUM_STARTS], np.uint64)
_MEDIUM_MASKS = np.array([mask for _, mask, _ in _MEDIUM_STARTS], np.uint64)
_MEDIUM_TIERS = np.array([tier for _, _, tier in _MEDIUM_STARTS])


# --- msgpack --------------------------------------------------------------------------------------------------------
# `data` is the address of the payload, `at` a place in it, `end` its length. What reads returns the place after it, or
# a negative code with the place in scan.error_at.


@compiled
def _fail(scan, at, code):
    scan.error_at = at
    return code


@compiled
def _big_endian(address, size):
    if size == 1:
        return load8(address)
    if size == 2:
        return swapped(load16(address)) >> np.uint64(48)
    if size == 4:
        return swapped(load32(address)) >> np.uint64(32)
    return swapped(load64(address))


@compiled
def _skip(scan, data, at, end):
    """After the value at `at`, whatever it is."""
    todo = np.int64(1)
    while todo > 0:
        if at >= end or todo > end - at:
            return _fail(scan, at, _SHORT)
        b = np.int64(load8(data + at))
        at += 1
        todo -= 1
        if b < 0x80 or b >= 0xE0:
            continue
        if b < 0x90:
            todo += 2 * (b & 15)
        elif b < 0xA0:
            todo += b & 15
        elif b < 0xC0:
            at += b & 31
        elif b <= 0xC3:
            continue
        elif 0xCA <= b <= 0xD3:  # numbers
            at += 1 << (b & 3 if b >= 0xCC else 2 + (b & 1))
        elif 0xD4 <= b <= 0xD8:  # fixext
            at += 1 + (1 << (b - 0xD4))
        else:
            width = np.int64(1)  # of the length that follows
            if b >= 0xDC:
                width = np.int64(2) << (b & 1)
            elif b >= 0xD9:
                width = np.int64(1) << (b - 0xD9)
            elif b >= 0xC7:
                width = np.int64(1) << (b - 0xC7)
            else:
                width = np.int64(1) << (b - 0xC4)
            if width > end - at:
                return _fail(scan, at, _SHORT)
            length = np.int64(_big_endian(data + at, width))
            at += width
            if b >= 0xDE:
                todo += 2 * length
            elif b >= 0xDC:
                todo += length
            else:
                at += length + (1 if 0xC7 <= b <= 0xC9 else 0)
    if at > end:
        return _fail(scan, end, _SHORT)
    return at


@compiled
def _is_nil(data, at, end):
    return at < end and load8(data + at) == 0xC0


@compiled
def _container(data, at, end, fixed, wide):
    """(how many elements the array or map at `at` has, the place of the first); the count is -1 if it is none."""
    if at >= end:
        return np.int64(-1), at
    b = np.int64(load8(data + at))
    if fixed <= b < fixed + 16:
        return b & 15, at + 1
    if b == wide and end - at > 2:
        return np.int64(_big_endian(data + at + 1, 2)), at + 3
    if b == wide + 1 and end - at > 4:
        return np.int64(_big_endian(data + at + 1, 4)), at + 5
    return np.int64(-1), at


@compiled
def _array(data, at, end):
    return _container(data, at, end, 0x90, 0xDC)


@compiled
def _map(data, at, end):
    return _container(data, at, end, 0x80, 0xDE)


@compiled
def _text(data, at, end, binary):
    """(length of the string, or bytes if `binary`, at `at`; the place of its content); the length is -1 if none."""
    if at >= end:
        return np.int64(-1), at
    b = np.int64(load8(data + at))
    width = np.int64(0)
    length = np.int64(-1)
    if 0xA0 <= b < 0xC0:
        length = b & 31
    elif 0xD9 <= b <= 0xDB:
        width = np.int64(1) << (b - 0xD9)
    elif binary and 0xC4 <= b <= 0xC6:
        width = np.int64(1) << (b - 0xC4)
    else:
        return np.int64(-1), at
    at += 1
    if width > 0:
        if width > end - at:
            return np.int64(-1), at
        length = np.int64(_big_endian(data + at, width))
        at += width
    if length > end - at:
        return np.int64(-1), at
    return length, at


@compiled
def _integer(data, at, end):
    """(the integer at `at` as uint64 of the same bits, whether it is negative, the place after; negative if none)."""
    zero = np.uint64(0)
    if at >= end:
        return zero, False, np.int64(-1)
    b = np.int64(load8(data + at))
    if b < 0x80:
        return np.uint64(b), False, at + 1
    if b >= 0xE0:
        return np.uint64(b - 256), True, at + 1
    if b < 0xCC or b > 0xD3:
        return zero, False, np.int64(-1)
    width = np.int64(1) << (b & 3)
    if width >= end - at:
        return zero, False, np.int64(-1)
    value = _big_endian(data + at + 1, width)
    after = at + 1 + width
    if b < 0xD0:
        return value, False, after
    lost = np.uint64(64 - 8 * width)
    signed = np.int64(value << lost) >> np.int64(lost)
    return np.uint64(signed), signed < 0, after


@compiled
def _string_key(address, length):
    """A key for a string, to tell it from the names that mean something."""
    key = np.uint64(length)
    at = 0
    while at < length:
        word = np.uint64(0)
        if length - at >= 8:
            word = load64(address + at)
        else:
            for i in range(length - at):
                word |= load8(address + at + i) << np.uint64(8 * i)
        key = (key ^ word) * np.uint64(_PHI)
        key ^= key >> np.uint64(32)
        at += 8
    return key


@compiled
def _position(keys, key):
    for i in range(len(keys)):
        if keys[i] == key:
            return i
    return -1


@compiled
def _hash_value(data, at, end):
    """(the block hash at `at` in 64 bits, the place after, negative if there is none).

    An integer is its own bits, bytes and strings are hashed.
    """
    value, _, after = _integer(data, at, end)
    if after >= 0:
        return value, after
    length, start = _text(data, at, end, True)
    if length < 0:
        return np.uint64(0), np.int64(-1)
    return xxh3(data + start, length, np.uint64(0)), start + length


@compiled
def _hashes(scan, data, at, end):
    """The hashes of the event at hand; none if the list is nil or empty and there is another by another name."""
    if _is_nil(data, at, end):
        return at + 1
    count, place = _array(data, at, end)
    if count < 0 or count > end - place:
        return _fail(scan, at, _HASHES)
    made = u8_at(scan.hashes_at)
    for i in range(count):
        value, after = _hash_value(data, place, end)
        if after < 0:
            return _fail(scan, place, _HASHES)
        made[scan.hashes + i] = value
        place = after
    if count > 0:
        scan.event_hashes = count
    return place


@compiled
def _tokens(scan, data, at, end):
    """The tokens of the event at hand."""
    if _is_nil(data, at, end):
        return at + 1
    count, place = _array(data, at, end)
    if count < 0 or count > end - place:
        return _fail(scan, at, _TOKENS)
    made = u4_at(scan.tokens_at + 4 * scan.tokens)
    for i in range(count):
        if place >= end:
            return _fail(scan, place, _SHORT)
        b = np.int64(load8(data + place))
        value = np.uint64(b)
        width = np.int64(0)
        if b >= 0x80:
            if b == 0xCD:
                width = np.int64(2)
            elif b == 0xCE:
                width = np.int64(4)
            elif b == 0xCC:
                width = np.int64(1)
            else:
                value, negative, after = _integer(data, place, end)
                if after < 0 or negative or value > np.uint64(0xFFFFFFFF):
                    return _fail(scan, place, _TOKENS)
                width = after - place - 1
            if width >= end - place:
                return _fail(scan, place, _SHORT)
            if b >= 0xCC and b <= 0xCE:
                value = _big_endian(data + place + 1, width)
        made[i] = np.uint32(value)
        place += 1 + width
    scan.event_tokens = count
    return place


# --- events ---------------------------------------------------------------------------------------------------------


@compiled
def _field(scan, data, at, end, code):
    """One field of the event at hand: its long lists are read, of others the place is noted."""
    if code == _F_HASHES:
        return _hashes(scan, data, at, end)
    if code == _F_TOKENS:
        return _tokens(scan, data, at, end)
    i8_at(scan.room_at)[code] = at
    return _skip(scan, data, at, end)


@compiled
def _string_at(scan, data, end, code, name_hash):
    """(0 or a failure; key of a field's string, or its XXH3 if `name_hash`). 0 for a string that is nil, empty or not
    there.
    """
    at = i8_at(scan.room_at)[code]
    if at < 0 or _is_nil(data, at, end):
        return 0, np.uint64(0)
    length, start = _text(data, at, end, False)
    if length < 0:
        return _fail(scan, at, _STRING), np.uint64(0)
    if length == 0:
        return 0, np.uint64(0)
    return 0, xxh3(data + start, length, np.uint64(0)) if name_hash else _string_key(data + start, length)


@compiled
def _integer_at(scan, data, end, code):
    """(0 or a failure; whether there is one; the integer of a field)."""
    at = i8_at(scan.room_at)[code]
    if at < 0 or _is_nil(data, at, end):
        return 0, False, np.int64(0)
    value, _, after = _integer(data, at, end)
    if after < 0:
        return _fail(scan, at, _INTEGER), False, np.int64(0)
    return 0, True, np.int64(value)


@compiled
def _medium(scan, data, end):
    """(0 or a failure; the tier, -2 for a name that means nothing here). Not said means GPU."""
    at = i8_at(scan.room_at)[_F_MEDIUM]
    if at < 0 or _is_nil(data, at, end):
        return 0, np.int64(GPU)
    length, start = _text(data, at, end, False)
    if length < 0:
        return _fail(scan, at, _STRING), np.int64(0)
    begin = np.uint64(0)
    for i in range(min(length, 8)):
        letter = load8(data + start + i)
        if np.uint64(65) <= letter and letter <= np.uint64(90):
            letter |= np.uint64(32)
        begin |= letter << np.uint64(8 * i)
    for i in range(len(_MEDIUM_BEGINS)):
        if begin & _MEDIUM_MASKS[i] == _MEDIUM_BEGINS[i]:
            return 0, np.int64(_MEDIUM_TIERS[i])
    return 0, np.int64(-2)


@compiled
def _seed(scan, lora, salt, tenant):
    """S of the namespace (runtime/block_hash.py, `namespace_seed`)."""
    if lora == scan.lora and salt == scan.salt and tenant == scan.tenant:
        return scan.seed
    room = u8_at(scan.room_at + _ROOM)
    room[0] = scan.model
    room[1] = salt
    room[2] = tenant
    room[3] = lora
    if scan.model | salt | tenant | lora == np.uint64(0):
        return np.uint64(0)
    return xxh3(scan.room_at + _ROOM, 32, np.uint64(0))


@compiled
def _extras(scan, data, at, end, lora, whole):
    """0 or a failure: per block of the event at hand, the sum of the hashes of its keys, without the LoRA name's.

    With `whole` the value of a block is one key, whatever it is.
    """
    if _is_nil(data, at, end):
        return 0
    count, place = _array(data, at, end)
    if count < 0 or count > scan.event_hashes:
        return _fail(scan, at, _EXTRAS)
    made = u8_at(scan.extras_at + 8 * scan.extras)
    for i in range(scan.event_hashes):
        total = np.uint64(0)
        if i < count:
            if _is_nil(data, place, end):
                place += 1
            elif whole:
                after = _skip(scan, data, place, end)
                if after < 0:
                    return after
                total = xxh3(data + place, after - place, np.uint64(0))
                place = after
            else:
                keys, first = _array(data, place, end)
                if keys < 0:
                    return _fail(scan, place, _EXTRAS)
                place = first
                for _ in range(keys):
                    after = _skip(scan, data, place, end)
                    if after < 0:
                        return after
                    length, start = _text(data, place, end, False)
                    if not (length > 0 and lora != 0 and xxh3(data + start, length, np.uint64(0)) == lora):
                        total += xxh3(data + place, after - place, np.uint64(0))
                    place = after
        made[i] = total
    return 0


@compiled
def _stored(scan, data, end, event):
    """What is said of stored blocks besides hashes and tokens: 1 to be recorded, 0 to be passed over, or a failure."""
    room = i8_at(scan.room_at)
    zero = np.uint64(0)
    event.parent = zero
    at = room[_F_PARENT]
    event.rooted = 1
    if at >= 0 and not _is_nil(data, at, end):
        value, after = _hash_value(data, at, end)
        if after < 0:
            return _fail(scan, at, _PARENT)
        event.parent = value
        event.rooted = 0
    failure, said, size = _integer_at(scan, data, end, _F_BLOCK_SIZE)
    if failure < 0 or size < 0 or size > 1 << 30 or (size == 0 and scan.event_tokens > 0):
        return _fail(scan, room[_F_BLOCK_SIZE], _BLOCK_SIZE)
    event.block_tokens = size
    failure, lora = _string_at(scan, data, end, _F_LORA_NAME, True)
    if failure < 0:
        return failure
    if lora == zero:
        failure, said, number = _integer_at(scan, data, end, _F_LORA_ID)
        if failure < 0:
            return failure
        if said:
            i8_at(scan.room_at + _ROOM)[0] = number
            lora = xxh3(scan.room_at + _ROOM, 8, np.uint64(1))
        else:
            lora = scan.lora
    failure, salt = _string_at(scan, data, end, _F_SALT, True)
    if failure < 0:
        return failure
    failure, tenant_key = _string_at(scan, data, end, _F_TENANT, False)
    if failure < 0:
        return failure
    tenant = zero
    if tenant_key != zero and tenant_key != _DEFAULT_TENANT:
        failure, tenant = _string_at(scan, data, end, _F_TENANT, True)
    event.seed = _seed(scan, lora, salt if salt != zero else scan.salt, tenant if tenant != zero else scan.tenant)
    event.root_extra = scan.root_extra
    at = room[_F_CACHE_SALT]
    failure, cache_salt = _string_at(scan, data, end, _F_CACHE_SALT, False)
    if failure < 0:
        return failure
    if cache_salt != zero:
        event.root_extra += xxh3(data + at, _skip(scan, data, at, end) - at, zero)
    event.first_extra = -1
    code = _F_EXTRA_KEYS if room[_F_EXTRA_KEYS] >= 0 and not _is_nil(data, room[_F_EXTRA_KEYS], end) else _F_MM_INFOS
    if room[code] >= 0:
        failure = _extras(scan, data, room[code], end, lora, code == _F_MM_INFOS)
        if failure < 0:
            return failure
        made = u8_at(scan.extras_at + 8 * scan.extras)
        for i in range(scan.event_hashes):
            if made[i] != zero:
                event.first_extra = scan.extras
        # counted below, once the event is known to be recorded
    failure, spec = _string_at(scan, data, end, _F_SPEC, False)
    if failure < 0:
        return failure
    event.full = 0
    if spec != zero:
        if _position(_FULL_KEYS, spec) < 0:
            scan.other_groups += 1
            return 0
        event.full = 1
    return 1


@compiled
def _record(scan, data, end, kind, standard):
    """The event at hand, all of whose fields were come by: record it, or pass it over; 0 or a failure."""
    event = event_at(scan.events_at, scan.events)
    event.kind = kind
    event.standard = standard
    failure, medium = _medium(scan, data, end)
    if failure < 0:
        return failure
    failure, said, group = _integer_at(scan, data, end, _F_GROUP)
    if failure < 0:
        return failure
    event.group = -1
    if said:
        event.group = min(max(group, 0), 1 << 30)
    failure, locality = _string_at(scan, data, end, _F_LOCALITY, False)
    if failure < 0:
        return failure
    event.rooted = 1
    event.full = 0
    event.first_extra = -1
    if kind == STORED:
        wanted = _stored(scan, data, end, event)
        if wanted <= 0:
            return wanted
        if event.full == 0 and event.group > 0:
            scan.other_groups += 1
            return 0
    elif kind == CLEARED and (i8_at(scan.room_at)[_F_MEDIUM] < 0 or _is_nil(data, i8_at(scan.room_at)[_F_MEDIUM], end)):
        medium = np.int64(EVERY_MEDIUM)
    if medium == -2:
        scan.unknown_media += 1
        return 0
    if locality == _REMOTE:
        scan.remote += 1
        return 0
    event.medium = medium
    event.first_hash = scan.hashes
    event.hashes = scan.event_hashes
    event.first_token = scan.tokens
    event.tokens = scan.event_tokens
    scan.events += 1
    scan.hashes += scan.event_hashes
    scan.tokens += scan.event_tokens
    if event.first_extra >= 0:
        scan.extras += scan.event_hashes
    return 0


@compiled
def _event(scan, data, at, end):
    """One event."""
    room = i8_at(scan.room_at)
    for i in range(FIELDS):
        room[i] = -1
    scan.event_hashes = 0
    scan.event_tokens = 0
    kind = np.int64(-1)
    standard = np.int64(0)
    count, place = _array(data, at, end)
    if count > 0:
        length, start = _text(data, place, end, False)
        if length < 0:
            return _fail(scan, place, _EVENT)
        kind = _position(_KIND_KEYS, _string_key(data + start, length))
        place = start + length
        if kind < 0 or kind > CLEARED:
            scan.unknown_events += 1
            return _skip(scan, data, at, end)
        shifted = 0
        for i in range(count - 1):
            code = _F_NONE
            if kind == STORED:
                if i == 8 and place < end:
                    b = np.int64(load8(data + place))
                    if 0x90 <= b < 0xA0 or b == 0xDC or b == 0xDD:
                        shifted = 1  # Dynamo's engines put infos of multimodal blocks before the group
                if shifted and i == 8:
                    code = _F_MM_INFOS
                elif i - shifted < len(_STORED_ORDER):
                    code = _STORED_ORDER[i - shifted]
            elif kind == REMOVED and i < len(_REMOVED_ORDER):
                code = _REMOVED_ORDER[i]
            place = _skip(scan, data, place, end) if code == _F_NONE else _field(scan, data, place, end, code)
            if place < 0:
                return place
    else:
        count, place = _map(data, at, end)
        if count <= 0:
            return _fail(scan, at, _EVENT)
        for _ in range(count):
            length, start = _text(data, place, end, False)
            if length < 0:
                return _fail(scan, place, _KEY)
            which = _position(_FIELD_KEYS, _string_key(data + start, length))
            place = start + length
            if which < 0:
                place = _skip(scan, data, place, end)
            else:
                place = _field(scan, data, place, end, _FIELD_CODES[which])
            if place < 0:
                return place
        code = _F_STANDARD_TYPE if room[_F_STANDARD_TYPE] >= 0 else _F_TYPE
        failure, name = _string_at(scan, data, end, code, False)
        if failure < 0 or room[code] < 0:
            return _fail(scan, at, _EVENT)
        kind = _position(_KIND_KEYS, name)
        if kind < 0:
            scan.unknown_events += 1
            return place
        kind %= 3
        if code == _F_STANDARD_TYPE:
            standard = np.int64(1)
    failure = _record(scan, data, end, kind, standard)
    return failure if failure < 0 else place


@compiled
def _number_field(scan, data, at, end, timestamp):
    """A timestamp or a rank of the batch."""
    after = _skip(scan, data, at, end)
    if after < 0:
        return after
    b = np.int64(load8(data + at))
    if b == 0xC0:
        return after
    value, _, whole = _integer(data, at, end)
    if timestamp:
        if whole >= 0:
            scan.ts = np.float64(np.int64(value))
        elif b == 0xCB:
            bits = i8_at(scan.room_at + _ROOM)
            bits[0] = np.int64(_big_endian(data + at + 1, 8))
            scan.ts = f8_at(scan.room_at + _ROOM)[0]
        elif b != 0xCA:  # a short float is read as no timestamp; nothing depends on it
            return _fail(scan, at, _TS)
    elif whole >= 0:
        scan.dp_rank = np.int64(value)
    else:
        return _fail(scan, at, _INTEGER)
    return after


@compiled
def _events(scan, data, at, end):
    count, place = _array(data, at, end)
    if count < 0 or count > end - place:
        return _fail(scan, at, _EVENTS)
    for _ in range(count):
        place = _event(scan, data, place, end)
        if place < 0:
            return place
    return place


@compiled
def _batch(scan, data, end):
    count, place = _array(data, 0, end)
    if count >= 0:
        if count < 2:
            return _fail(scan, 0, _BATCH)
        place = _number_field(scan, data, place, end, True)
        if place < 0:
            return place
        place = _events(scan, data, place, end)
        for i in range(count - 2):
            if place < 0:
                return place
            place = _number_field(scan, data, place, end, False) if i == 0 else _skip(scan, data, place, end)
        return place
    count, place = _map(data, 0, end)
    if count <= 0:
        return _fail(scan, 0, _BATCH)
    single = True
    first = place
    for _ in range(count):
        length, start = _text(data, place, end, False)
        if length < 0:
            return _fail(scan, place, _KEY)
        which = _position(_BATCH_KEYS, _string_key(data + start, length))
        place = start + length
        if which == 1:
            single = False
        place = _skip(scan, data, place, end)
        if place < 0:
            return place
    if single:
        return _event(scan, data, 0, end)  # in the standard form an event may come alone
    place = first
    for _ in range(count):
        length, start = _text(data, place, end, False)
        which = _position(_BATCH_KEYS, _string_key(data + start, length))
        place = start + length
        if which == 1:
            place = _events(scan, data, place, end)
        elif which < 0:
            place = _skip(scan, data, place, end)
        else:
            place = _number_field(scan, data, place, end, which == 0 or which == 5)
        if place < 0:
            return place
    return place


@compiled
def scan_payload(at, data, size):
    """Scan a payload of `size` bytes at an address into the tables of the SCAN header at an address.

    0, or -code of what was expected (`EXPECTED`) at header.error_at. The tables must have room for `size` hashes,
    tokens and extra keys, and size / 8 + 8 events.
    """
    scan = scan_at(at, 0)
    scan.events = 0
    scan.hashes = 0
    scan.tokens = 0
    scan.extras = 0
    scan.ts = 0.0
    scan.dp_rank = -1
    scan.unknown_events = 0
    scan.unknown_media = 0
    scan.other_groups = 0
    scan.remote = 0
    after = _batch(scan, data, size)
    if after < 0:
        return after
    if after != size:
        return _fail(scan, after, _END)
    return 0
