"""Hashes of KV blocks: a block's hash names it and all before it, so that equal prefixes have equal hashes.

The contract is the "Hashing standard" of Mooncake's Conductor (kvcache-ai/Mooncake at 3b5a594,
docs/source/api-reference/http/conductor-indexer.md), XXH3-64 with a seed S throughout:

    local[i] = XXH3(the block's tokens as little-endian u32, S)
    seq[0]   = local[0]
    seq[i]   = XXH3(seq[i - 1] as little-endian u64 || local[i] as little-endian u64, S)

That text leaves open where S comes from and how extra keys enter. Here S is 0 without a model, LoRA adapter, salt or
tenant, and otherwise a hash of the four (`namespace`). A block with extra keys (a cache salt on the first block, hashes
of images) has local' = XXH3(local || sum of `extra_key` of each, S), so that what follows it differs too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .kernel.xxh3 import hash_chain, start_of, xxh3_of

Hashes = NDArray[np.uint64]
NO_EXTRAS: Hashes = np.zeros(0, np.uint64)
_UINT32 = np.dtype(np.uint32)
_MASK = (1 << 64) - 1
LORA_ID_SEED = 1  # an adapter known by its number only is hashed with this seed: never the same as a name


class Namespace(NamedTuple):
    """Within what equal tokens are equal blocks: the seed S of all hashes, and the extra keys of every first block."""

    seed: int
    root_extra: int


BASE = Namespace(0, 0)


def address(array: np.ndarray) -> int:
    """Where the elements of a contiguous array are."""
    return array.ctypes.data


def signed(word: int) -> int:
    """A 64-bit word, signed or not, as the int64 of the same bits. Kernels get these: to tell the type of a NumPy
    scalar takes longer than to hash a block, and a large Python integer would be compiled for anew."""
    return word - (word >> 63 << 64) if word >= 0 else word


def xxh3_64(data: bytes, seed: int = 0) -> int:
    """XXH3-64 of some bytes with a seed."""
    return int(xxh3_of(start_of(np.frombuffer(data, np.uint8)), len(data), signed(seed)) & _MASK)


def _name(text: str) -> int:
    return xxh3_64(text.encode()) if text else 0


@lru_cache(4096)
def namespace(
    model: str = "",
    lora_name: str = "",
    *,
    lora_id: int | None = None,
    salt: str = "",
    tenant: str = "",
    cache_salt: str = "",
) -> Namespace:
    """The namespace of a model, a LoRA adapter, a deployment's salt and a tenant (into S), and a request's cache salt.

    The cache salt is an extra key of the first block, as vLLM has it. An empty string means there is none; so does the
    tenant "default". `lora_id` is for engines that name adapters by number only (SGLang, vLLM before lora_name).
    """
    lora = _name(lora_name)
    if not lora_name and lora_id is not None:
        lora = xxh3_64(lora_id.to_bytes(8, "little", signed=True), LORA_ID_SEED)
    seed = namespace_seed(_name(model), lora, _name(salt), _name("" if tenant == "default" else tenant))
    return Namespace(seed, extra_key(cache_salt) if cache_salt else 0)


def namespace_seed(model: int, lora: int, salt: int, tenant: int) -> int:
    """S from the hashes of the four names, 0 for one that is empty. The scan of events computes the same."""
    if not (model or lora or salt or tenant):
        return 0
    return xxh3_64(b"".join(part.to_bytes(8, "little") for part in (model, salt, tenant, lora)))


def extra_key(key: Any) -> int:
    """The hash of one extra key of a block as an engine names it: a string, a number, bytes, or a tuple of these.

    It is the hash of the key's msgpack encoding, which is what KV events carry.

    Raises:
        ValueError: a key that msgpack cannot express.
    """
    try:
        return xxh3_64(msgspec.msgpack.encode(key))
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"an extra key must be a string, number, bytes or a tuple of these, found {key!r}") from error


def token_array(tokens: ArrayLike) -> NDArray[np.uint32]:
    """Token ids as a contiguous uint32 array.

    Raises:
        ValueError: not one-dimensional, or a number that is no uint32.
    """
    if type(tokens) is np.ndarray and tokens.dtype is _UINT32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens
    try:
        given = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"token ids must be a flat list of integers: {error}") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a flat list of integers, found {given.dtype} of shape {given.shape}")
    if given.size and not (given.min() >= 0 and given.max() < 1 << 32):
        raise ValueError(f"token ids must be in 0 .. 2**32 - 1, found {given.min()} .. {given.max()}")
    return np.ascontiguousarray(given, np.uint32)


def hash_blocks(
    tokens: ArrayLike,
    block_tokens: int,
    *,
    namespace: Namespace = BASE,
    parent: int | None = None,
    extras: Hashes = NO_EXTRAS,
) -> Hashes:
    """Chained hashes of the full blocks of `tokens`; a rest that fills no block has none.

    Args:
        tokens: uint32 [n]. block_tokens: tokens of a block. namespace: see `namespace`.
        parent: hash of the block before the first, None at the start of a prompt.
        extras: uint64, per block the sum (modulo 2**64) of its `extra_key`s, 0 for none; may be shorter than the
            blocks are. The cache salt of `namespace` is added to the first by itself.

    Returns:
        uint64 [n // block_tokens].

    Raises:
        ValueError: tokens that are no uint32, or block_tokens below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, found {block_tokens}")
    ids = token_array(tokens)
    hashes = np.empty(len(ids) // block_tokens, np.uint64)
    extras = np.ascontiguousarray(extras, np.uint64)
    hash_chain(
        address(ids),
        len(hashes),
        block_tokens,
        signed(namespace.seed),
        int(parent is None),
        signed(parent or 0),
        signed(namespace.root_extra),
        address(extras),
        len(extras),
        address(hashes),
    )
    return hashes
