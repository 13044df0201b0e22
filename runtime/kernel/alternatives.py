"""Where else a request could go, should its own instances fail."""

from __future__ import annotations

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import decode_allowed, decode_features, prefill_features, source_allowed


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
