"""XXH3-64 against the reference library, and the chain against its definition."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.block_hash import BASE, extra_key, hash_blocks, namespace, xxh3_64

SEEDS = st.integers(0, 2**64 - 1)


def test_every_length() -> None:
    data = random.Random(0).randbytes(1101)
    for seed in (0, 1, 0x9E3779B185EBCA87, 2**64 - 1):
        for length in range(1101):
            part = data[-length:] if length else b""
            assert xxh3_64(part, seed) == xxhash.xxh3_64_intdigest(part, seed), (length, seed)


@settings(deadline=None)
@given(st.binary(max_size=4000), SEEDS)
def test_any_bytes(data: bytes, seed: int) -> None:
    assert xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


def plain_chain(
    tokens: list[int], size: int, seed: int, root_extra: int, parent: int | None, extras: list[int]
) -> list[int]:
    """The contract, word by word."""
    hashes: list[int] = []
    for i in range(len(tokens) // size):
        block = b"".join(t.to_bytes(4, "little") for t in tokens[i * size : (i + 1) * size])
        local = xxhash.xxh3_64_intdigest(block, seed)
        extra = extras[i] if i < len(extras) else 0
        if i == 0 and parent is None:
            extra = (extra + root_extra) % 2**64
        if extra:
            local = xxhash.xxh3_64_intdigest(local.to_bytes(8, "little") + extra.to_bytes(8, "little"), seed)
        above = hashes[-1] if hashes else parent
        if above is not None:
            local = xxhash.xxh3_64_intdigest(above.to_bytes(8, "little") + local.to_bytes(8, "little"), seed)
        hashes.append(local)
    return hashes


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=300),
    st.integers(1, 100),
    st.sampled_from(["", "llama"]),
    st.sampled_from(["", "sql"]),
    st.sampled_from(["", "customer"]),
    st.none() | SEEDS,
    st.lists(SEEDS, max_size=4),
)
def test_chain(
    tokens: list[int], size: int, model: str, lora: str, salt: str, parent: int | None, extras: list[int]
) -> None:
    where = namespace(model, lora, cache_salt=salt)
    made = hash_blocks(tokens, size, namespace=where, parent=parent, extras=np.array(extras, np.uint64))
    expected = plain_chain(tokens, size, where.seed, where.root_extra, parent, extras)
    assert made.tolist() == expected


def test_contract_without_a_namespace_has_seed_0() -> None:
    local = [xxhash.xxh3_64_intdigest(np.array(block, "<u4").tobytes()) for block in ([1, 2], [3, 4])]
    second = xxhash.xxh3_64_intdigest(np.array(local, "<u8").tobytes())
    assert namespace() == BASE
    assert hash_blocks([1, 2, 3, 4, 5], 2).tolist() == [local[0], second]


def test_namespaces_share_nothing() -> None:
    places = [
        namespace(),
        namespace("a"),
        namespace("", "a"),
        namespace(salt="a"),
        namespace(tenant="a"),
        namespace(cache_salt="a"),
        namespace("a", "a"),
        namespace(lora_id=1),
        namespace("", "1"),
        namespace(cache_salt="b"),
    ]
    hashes = [h for place in places for h in hash_blocks(range(64), 16, namespace=place).tolist()]
    assert len(set(hashes)) == len(hashes) == 4 * len(places)
    assert namespace(tenant="default") == BASE


def test_a_prefix_has_the_hashes_of_a_prefix() -> None:
    whole = hash_blocks(range(160), 16)
    assert hash_blocks(range(75), 16).tolist() == whole[:4].tolist()
    rest = hash_blocks(range(64, 160), 16, parent=int(whole[3]))
    assert rest.tolist() == whole[4:].tolist()


def test_extra_key_is_of_what_events_carry() -> None:
    assert extra_key("salt") == xxhash.xxh3_64_intdigest(msgspec.msgpack.encode("salt"))
    assert extra_key(("image", 3)) == extra_key(["image", 3])
    with pytest.raises(ValueError, match="extra key"):
        extra_key(object())


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], [[1, 2]], ["a"], [None]])
def test_bad_tokens(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        hash_blocks(tokens, 1)  # type: ignore[arg-type]


def test_bad_block_size() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        hash_blocks([1], 0)
