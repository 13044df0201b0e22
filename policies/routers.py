"""Routers: which prefill instance, which decode instance, and where the prefix comes from.

Each is one compiled function with the signature `envs.kernel.replay.ROUTER`: it reads an `Observation`, its parameters
`values` and its `memory`, and writes `decision[0:3] = prefill, decode, source` (prefill -1 rejects). The same
machine code runs inside a replay and on a live observation. The cost functions of other systems are in `peers`.
"""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import (
    cluster_features,
    decode_allowed,
    decode_features,
    prefill_features,
    request_features,
    source_allowed,
)
from envs.kernel.splitmix import random_below
from envs.state import Source

LOCAL, FETCH = int(Source.LOCAL), int(Source.FETCH)


@compiled
def choose(decision, p, d, source):
    """Write a decision; it rejects where no instance of one pool is up (negative)."""
    decision[0] = p if d >= 0 else -1
    decision[1] = d
    decision[2] = source


@compiled
def random_prefill(observation, memory):
    """A random prefill instance that is up; -1 if none is."""
    up = 0
    for p in range(observation.prefills):
        up += source_allowed(observation, p, LOCAL)
    chosen = random_below(memory, up) if up > 0 else 0
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            if chosen == 0:
                return p
            chosen -= 1
    return -1


@compiled
def random_decode(observation, memory):
    """A random decode instance that is up; -1 if none is."""
    up = 0
    for d in range(observation.decodes):
        up += decode_allowed(observation, d)
    chosen = random_below(memory, up) if up > 0 else 0
    for d in range(observation.decodes):
        if decode_allowed(observation, d):
            if chosen == 0:
                return d
            chosen -= 1
    return -1


@compiled
def lightest_decode(observation):
    """The decode instance with the least predicted TBT, among those with KV room if any has it (paper B4)."""
    need = request_features(observation).input_tokens + cluster_features(observation).expected_output_tokens
    best = -1
    best_roomy = False
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        features = decode_features(observation, d)
        roomy = features.free_tokens >= need
        if (
            best < 0
            or (roomy and not best_roomy)
            or (roomy == best_roomy and features.tbt_assigned_s < decode_features(observation, best).tbt_assigned_s)
        ):
            best = d
            best_roomy = roomy
    return best


@compiled
def random(observation, values, memory, decision):
    """Any prefill and any decode instance."""
    p = random_prefill(observation, memory)
    d = random_decode(observation, memory)
    choose(decision, p, d, LOCAL)


@compiled
def round_robin(observation, values, memory, decision):
    """Each pool in turn."""
    # memory[1] and memory[2] count
    decision[0] = -1
    decision[1] = -1
    decision[2] = LOCAL
    for _ in range(observation.decodes):
        d = np.int64(memory[2] % np.uint64(observation.decodes))
        memory[2] += np.uint64(1)
        if decode_allowed(observation, d):
            decision[1] = d
            break
    if decision[1] < 0:
        return
    for _ in range(observation.prefills):
        p = np.int64(memory[1] % np.uint64(observation.prefills))
        memory[1] += np.uint64(1)
        if source_allowed(observation, p, LOCAL):
            decision[0] = p
            break


@compiled
def load_balancing(observation, values, memory, decision):
    """The prefill instance with the least queued work, blind to caches (paper B5)."""
    best = -1
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL) and (
            best < 0 or prefill_features(observation, p).queue_s < prefill_features(observation, best).queue_s
        ):
            best = p
    choose(decision, best, lightest_decode(observation), LOCAL)


@compiled
def power_of_two(observation, values, memory, decision):
    """Of two random instances of each pool, the one with less to do."""
    p = random_prefill(observation, memory)
    other = random_prefill(observation, memory)
    if p >= 0 and prefill_features(observation, other).queue_s < prefill_features(observation, p).queue_s:
        p = other
    d = random_decode(observation, memory)
    other = random_decode(observation, memory)
    if d >= 0 and decode_features(observation, other).tbt_assigned_s < decode_features(observation, d).tbt_assigned_s:
        d = other
    choose(decision, p, d, LOCAL)


@compiled
def cache_aware(observation, values, memory, decision):
    """Least predicted TTFT with what each instance has itself: KVCache never moves (paper B5, "local")."""
    best = -1
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL) and (
            best < 0 or prefill_features(observation, p).ttft_local_s < prefill_features(observation, best).ttft_local_s
        ):
            best = p
    choose(decision, best, lightest_decode(observation), LOCAL)


@compiled
def conductor(observation, values, memory, decision):
    """Algorithm 1 of [A]: least predicted TTFT, where an instance fetches the best prefix if it is worth it.

    values[0]: kvcache_balancing_threshold; an instance fetches when the best prefix is longer than its own by more
    than this factor. values[1]: 1 to fetch only where that is also predicted to be faster (paper G4), 0 for the
    algorithm as printed.
    """
    threshold = values[0]
    best = -1
    best_s = np.inf
    best_source = LOCAL
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        source = LOCAL
        ttft_s = features.ttft_local_s
        if (
            source_allowed(observation, p, FETCH)
            and features.local_tokens + features.fetch_tokens > threshold * features.local_tokens
            and (values[1] == 0.0 or features.ttft_fetch_s < ttft_s)
        ):
            source = FETCH
            ttft_s = features.ttft_fetch_s
        if ttft_s < best_s:
            best = p
            best_s = ttft_s
            best_source = source
    choose(decision, best, lightest_decode(observation), best_source)
