"""A decision's two looks at the cluster: what a policy decides on, and what its choice means."""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.live import observe_request
from envs.kernel.memory import decode_allowed, decode_features, i8_at, prefill_features, prefill_of, source_allowed
from envs.kernel.prefill import find_holder
from envs.state import Source

from .block_table import find_tokens, instance_of
from .ledger import index_of, ledger_of, observation_of, parameters_of, state_of

FETCH, RECOMPUTE = int(Source.FETCH), int(Source.RECOMPUTE)


@compiled
def count_blocks(at):
    """Bring the used shares of the cache tiers up to date with the index, which KV events change."""
    ledger = ledger_of(at)
    state = state_of(ledger)
    index = index_of(ledger)
    for p in range(state.prefills):
        place = instance_of(index, p)
        prefill = prefill_of(state, p)
        prefill.host_used = place.host + i8_at(ledger.fetching)[p]
        prefill.device_used = place.device


@compiled
def observe(at, numbers, known, input_tokens, arrival_s, ttft_slo_s, tbt_slo_s):
    """A request arrives whose leading blocks are the first `known` of int32 `numbers`; fill the observation for it."""
    ledger = ledger_of(at)
    count_blocks(at)
    observe_request(
        state_of(ledger),
        parameters_of(ledger),
        arrival_s,
        ttft_slo_s,
        tbt_slo_s,
        input_tokens,
        np.int64(numbers.ctypes.data),
        known,
        observation_of(ledger),
        ledger.matched,
        ledger.forecast,
    )


@compiled
def observe_tokens(at, tokens, seed, root_extra, hashes, numbers, arrival_s, ttft_slo_s, tbt_slo_s):
    """`block_table.find_tokens`, then `observe`; how many leading blocks are known."""
    known = find_tokens(ledger_of(at).index, tokens, seed, root_extra, hashes[:0], hashes, numbers)
    observe(at, numbers, known, len(tokens), arrival_s, ttft_slo_s, tbt_slo_s)
    return known


@compiled
def place(at, p, d, source, pairs):
    """What a choice means for the request observed last: (whom it fetches from or -1, predicted TTFT, TBT).

    `pairs` int64[K, 2] gets what could be chosen instead, as `alternatives` has it.
    """
    ledger = ledger_of(at)
    state = state_of(ledger)
    observation = observation_of(ledger)
    features = prefill_features(observation, p)
    alternatives(observation, p, d, pairs)
    holder = np.int64(-1)
    ttft_s = features.ttft_local_s
    if source == FETCH:
        holder = np.int64(find_holder(state, i8_at(ledger.matched + 8 * state.prefills), p))
        ttft_s = features.ttft_fetch_s
    elif source == RECOMPUTE:
        ttft_s = features.ttft_recompute_s
    return holder, ttft_s, decode_features(observation, d).tbt_assigned_s


@compiled
def alternatives(observation, prefill, decode, pairs):
    """Fill `pairs` int64[K, 2] with the next best (prefill by least TTFT, decode by least TBT), -1 beyond the last.

    Where one pool has no other instance left, the chosen one stays in the pair.
    """
    for k in range(len(pairs)):
        best_p, best_d = -1, -1
        least = np.inf
        for p in range(observation.prefills):
            taken = p == prefill or not source_allowed(observation, p, 0)
            for j in range(k):
                taken = taken or pairs[j, 0] == p
            features = prefill_features(observation, p)
            ttft_s = min(features.ttft_local_s, features.ttft_fetch_s)
            if not taken and ttft_s < least:
                least = ttft_s
                best_p = p
        least = np.inf
        for d in range(observation.decodes):
            taken = d == decode or not decode_allowed(observation, d)
            for j in range(k):
                taken = taken or pairs[j, 1] == d
            tbt_s = decode_features(observation, d).tbt_assigned_s
            if not taken and tbt_s < least:
                least = tbt_s
                best_d = d
        if best_p < 0 and best_d < 0:
            pairs[k:] = -1
            return
        pairs[k, 0] = best_p if best_p >= 0 else prefill
        pairs[k, 1] = best_d if best_d >= 0 else decode
