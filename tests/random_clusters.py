"""Small random clusters and traces in which every branch of docs/physics.md happens often.

Physical parameters are generic floating point values, so that no two unrelated events tie.
"""

from __future__ import annotations

import random
from typing import Any

from tests.reference_simulator import SOURCES, Request

Case = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[Request], random.Random]


def random_case(seed: int) -> Case:
    """(cluster, prefill, decode, requests, decisions_rng) of a seed."""
    rng = random.Random(seed)
    cluster = _cluster(rng)
    prefill_count = rng.choice((1, 2, 2, 3, 3, 4))
    # Tight: few chains, slow NICs and small tiers, so that evictions meet fetches under way.
    tight = rng.random() < 0.4
    if tight:
        sizes = [(8, 18)] * 4
        nic_exponents = (3.8, 5.0)
    else:
        sizes = [rng.choice(((0, 6), (8, 20), (8, 20), (20, 100))) for _ in range(4)]
        nic_exponents = (4.5, 6.2)
        if rng.random() < 0.7:  # a large tier next to small ones, which fetch again and again
            sizes[rng.randrange(prefill_count)] = (60, 150)
    most_nodes = min(4, cluster["layers"])
    prefill = [_prefill(rng, size, nic_exponents, most_nodes) for size in sizes[:prefill_count]]
    decode = [_decode(rng) for _ in range(rng.randint(1, 4))]
    requests = _requests(rng, cluster["block_tokens"], tight)
    _eviction(random.Random(f"eviction of {seed}"), cluster, prefill)
    requests = _unchained(random.Random(f"chains of {seed}"), requests)
    return cluster, prefill, decode, requests, random.Random(rng.random())


def random_decision(rng: random.Random, prefill_count: int, decode_count: int) -> tuple[int, int, str] | None:
    """A decision blind to the state: fetches, hits, misses and a few rejections."""
    if rng.random() < 0.04:
        return None
    source = rng.choices(SOURCES, weights=(1, 6, 3))[0]
    return rng.randrange(prefill_count), rng.randrange(decode_count), source


def _cluster(rng: random.Random) -> dict[str, Any]:
    return {
        "block_tokens": rng.choice((4, 8, 16)),
        "kv_bytes_per_token": rng.uniform(500.0, 2000.0),
        "layers": rng.choice((1, 2, 3, 8, 32)),
        "transfer_latency_s": rng.uniform(0.0005, 0.05),
        "ttft_slo_s": rng.uniform(0.3, 3.0),
        "tbt_slo_s": 10.0 ** rng.uniform(-1.8, -0.7),
        "tbt_tail_share": rng.choice((0.1, 0.5, 1.0)),
        "decode_recheck": rng.random() < 0.5,
        "prior_output_tokens": rng.uniform(5.0, 25.0),
        "prior_decode_s": rng.uniform(0.2, 2.0),
        "decode_time_s": rng.choice((0.0, rng.uniform(0.2, 4.0))),
        "rate_horizon_s": rng.uniform(0.5, 20.0),
    }


def _prefill(
    rng: random.Random,
    host_sizes: tuple[int, int],
    nic_exponents: tuple[float, float],
    most_nodes: int,
) -> dict[str, Any]:
    host_blocks = rng.randint(*host_sizes)
    return {
        "base_s": rng.uniform(0.005, 0.05),
        "linear_s": rng.uniform(0.0003, 0.003),
        "quadratic_s": rng.uniform(1e-6, 1e-5),
        "chunk_tokens": rng.randint(8, 150),
        "chunk_overhead_s": rng.uniform(0.001, 0.01),
        "pipeline_nodes": rng.randint(1, most_nodes),
        "h2d_bytes_per_s": 10.0 ** rng.uniform(5.3, 7.0),
        "nic_bytes_per_s": 10.0 ** rng.uniform(*nic_exponents),
        "device_blocks": rng.randint(0, host_blocks),
        "host_blocks": host_blocks,
    }


def _eviction(rng: random.Random, cluster: dict[str, Any], prefill: list[dict[str, Any]]) -> None:
    """Half of the cases have disks, on some of their instances; half evict by frequency."""
    disks = rng.random() < 0.5
    cluster["eviction"] = rng.choice((0, 0, 1, 2))
    for node in prefill:
        node["disk_bytes_per_s"] = 10.0 ** rng.uniform(4.5, 7.0)
        node["disk_blocks"] = rng.choice((0, rng.randint(1, 6), rng.randint(5, 60))) if disks else 0


def _decode(rng: random.Random) -> dict[str, Any]:
    return {
        "step_base_s": rng.uniform(0.005, 0.03),
        "step_request_s": rng.uniform(0.0005, 0.004),
        "step_token_s": rng.uniform(1e-6, 5e-5),
        "join_bytes_per_s": 10.0 ** rng.uniform(5.5, 7.0),
        "nic_bytes_per_s": 10.0 ** rng.uniform(4.7, 6.2),
        "kv_capacity_tokens": rng.choice((rng.randint(60, 200), rng.randint(150, 900))),
        "max_batch": rng.choice((1, 2, 3, 8)),
    }


def _unchained(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Now and then, block ids that are no hashes of prefixes: any may follow any."""
    if rng.random() > 0.12:
        return requests
    pool = range(rng.choice((16, 30, 60)))
    return [Request(r.arrival_s, r.input_tokens, r.output_tokens, rng.sample(pool, len(r.blocks))) for r in requests]


def _requests(rng: random.Random, block_tokens: int, tight: bool) -> list[Request]:
    """Chains of blocks with shared prefixes and forks; some traces have no blocks at all."""
    without_blocks = rng.random() < 0.1
    gap_s = 10.0 ** rng.uniform(-2.0, 0.0)
    one_token_share = rng.choice((0.02, 0.2))
    roots = 2 if tight else rng.choice((1, 2, 5))  # popular chains
    chains: list[list[int]] = []
    fresh = 0
    requests: list[Request] = []
    t = rng.uniform(0.0, 1.0)
    for _ in range(rng.randint(5, 60)):
        if rng.random() > 0.3:  # else a burst: the same arrival time
            t += rng.expovariate(1.0 / gap_s)
        blocks: list[int] = []
        if chains and rng.random() < (0.9 if tight else 0.75):
            parent = rng.choice(chains[:roots] if rng.random() < (0.8 if tight else 0.5) else chains)
            whole = rng.random() < 0.6  # a longer request of the same session, or a fork
            blocks = parent[: len(parent) if whole else rng.randint(1, len(parent))]
        new = rng.randint(0 if blocks else 1, 6)
        if len(blocks) + new > 14:
            new = max(0, 14 - len(blocks))
        blocks = blocks + list(range(fresh, fresh + new))
        fresh += new
        chains.append(blocks)
        # The last block may be partly filled; sometimes the last tokens have no block.
        tokens = block_tokens * len(blocks) - rng.randint(0, block_tokens - 1)
        if rng.random() < 0.2:
            tokens += block_tokens
        output = 1 if rng.random() < one_token_share else rng.randint(2, 25)
        requests.append(Request(t, tokens, output, [] if without_blocks else list(blocks)))
    return requests
