"""How fast prompts are looked up in the prefix index, and KV events taken in.

The index holds 200,000 blocks of 16 tokens. Look-ups are of prompts all of whose blocks are known, hashing included.
Events are taken in from msgpack payloads as vLLM sends them, decoded and applied; every block stored is removed again.

    python -m benchmarks.prefix_index
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from runtime.block_hash import hash_blocks
from runtime.kv_events import decode, new_batch
from runtime.prefix_index import Medium, PrefixIndex, Tally

from .report import entry, median, parser, report, seconds

BLOCK_TOKENS = 16
INSTANCES = 16


def filled(blocks: int, rng: np.random.Generator) -> PrefixIndex:
    """An index with room for half as many again, full of chains of 500 blocks."""
    index = PrefixIndex(np.zeros((blocks * 3 // 2, 1), np.int64), BLOCK_TOKENS, instances=INSTANCES)
    for i in range(blocks // 500):
        index.store(i % INSTANCES, Medium.GPU, rng.integers(0, 2**63, 500).astype(np.uint64))
    return index


def microseconds(run: Callable[[], Any], runs: int, *, each: int = 1) -> float:
    """Median microseconds of a call of `run`, over `runs` rounds of `each` calls."""

    def some() -> None:
        for _ in range(each):
            run()

    return median(seconds(some, runs=runs)) / each * 1e6


def stored(rng: np.random.Generator, events: int, blocks: int, mapped: bool) -> tuple[list[Any], list[Any]]:
    """Events that store so many blocks each, with the hashes and tokens of real ones; and those that remove them."""
    adds: list[Any] = []
    gone: list[Any] = []
    for _ in range(events):
        hashes = rng.integers(0, 2**63, blocks).tolist()
        tokens = rng.integers(0, 150_000, blocks * BLOCK_TOKENS).tolist()
        if mapped:
            event: Any = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            gone.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
        else:
            event = ["BlockStored", hashes, None, tokens, BLOCK_TOKENS, None, "GPU", None]
            gone.append(["BlockRemoved", hashes, "GPU"])
        adds.append(event)
    return adds, gone


def ingest(index: PrefixIndex, adds: list[Any], gone: list[Any], runs: int, *, batch: int) -> tuple[float, float]:
    """(blocks stored, blocks removed) per second, from payloads of `batch` events."""
    encode = msgspec.msgpack.encode
    add = [encode([1.0, adds[i : i + batch], 0]) for i in range(0, len(adds), batch)]
    remove = [encode([1.0, gone[i : i + batch], 0]) for i in range(0, len(gone), batch)]
    into, tally = new_batch(), Tally()

    def take(payloads: list[bytes]) -> None:
        for payload in payloads:
            index.apply(0, decode(payload, into=into), tally)

    storing = median(seconds(lambda: take(add), before=lambda: take(remove), runs=runs))
    removing = median(seconds(lambda: take(remove), before=lambda: take(add), runs=runs))
    total = tally["stored"] / (2 * runs + 2)
    return total / storing, total / removing


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--blocks", type=int, default=200_000, help="blocks in the index (default: %(default)s)")
    options = arguments.parse_args()
    if options.blocks < 10_000:
        raise ValueError(f"--blocks must be at least 10000, is {options.blocks}")
    runs, rng = options.runs, np.random.default_rng(0)
    index = filled(options.blocks - 8192, rng)
    result: dict[str, Any] = {"blocks": options.blocks}
    prompt = rng.integers(0, 150_000, 131_072).astype(np.uint32)
    hashes = hash_blocks(prompt, BLOCK_TOKENS)
    index.store(0, Medium.GPU, hashes)
    numbers = index.find(hashes)
    # The caches are as cold as other work leaves them: between look-ups, much else is touched.
    other = np.zeros(1 << 22, np.int64)
    for tokens in (16, 512, 8_192, 131_072):
        part = prompt[:tokens]

        def find(part: Any = part) -> None:
            index.find_tokens(part)

        result[f"find_{tokens}_tokens_us"] = microseconds(find, runs, each=max(1, 65_536 // tokens))
        taken = seconds(find, before=lambda: other.__iadd__(1), runs=max(runs, 20))
        result[f"find_{tokens}_tokens_cold_us"] = median(taken) * 1e6
    hashing = microseconds(lambda: hash_blocks(prompt, BLOCK_TOKENS), runs)
    result["hashing_share_of_find"] = hashing / result["find_131072_tokens_us"]
    blocks = len(hashes)

    def hold() -> None:
        index.hold(numbers)
        index.release(numbers)

    def expect() -> None:
        index.expect(1, numbers)
        index.unexpect(1, numbers)

    def store() -> None:
        index.store(1, Medium.GPU, hashes)
        index.remove(1, Medium.GPU, hashes)

    for name, run in {"hold_and_release": hold, "expect_and_unexpect": expect, "store_and_remove": store}.items():
        result[f"{name}_ns_per_block"] = microseconds(run, runs) * 1000 / blocks
    result["clear_instance_us"] = microseconds(lambda: index.clear(2), runs)
    forms = {
        "events_of_64_blocks": (40, 64, False, 40),
        "events_of_1_block": (2560, 1, False, 64),
        "map_events_of_1_block": (2560, 1, True, 64),
        "payloads_of_1_block": (2560, 1, False, 1),
    }
    for name, (events, size, mapped, batch) in forms.items():
        adds, gone = stored(rng, events, size, mapped)
        into, out = ingest(index, adds, gone, runs, batch=batch)
        result[f"{name}_stored_per_second"] = into
        result[f"{name}_removed_per_second"] = out
    snapshot = index.snapshot()
    result["snapshot_bytes"] = sum(a.nbytes for a in snapshot.values())

    def restore() -> None:
        fresh = PrefixIndex(np.zeros_like(index.blocks), BLOCK_TOKENS, instances=INSTANCES)
        fresh.restore(snapshot)

    result["restore_ms"] = microseconds(restore, runs) / 1000
    report(result, options.json)


if __name__ == "__main__":
    entry(main)
