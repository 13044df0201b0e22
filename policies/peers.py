"""Routers with the cost functions of other systems, so that they are rows of the same table.

The formulas and defaults are those of the systems' sources in 2026; each docstring names them. What they read is mapped
to the `Observation` in the same way throughout:

- Their workers are prefill and decode instances, scored apart, as their own split mode does. Where a system sums the
  two scores of a pair, the least sum is the pair of the least of each.
- Requests at a prefill instance are those queued and the running one; at a decode instance, the batch and all that is
  assigned to it. Both are exact and of now: no scrape interval, none of the herding that comes of one.
- The prefix match is of the instance itself, in any tier. None of them fetches a prefix from another: source is local.
- KV usage of a decode instance is its batch's tokens over its capacity, which follows from `free_tokens`. A prefill
  instance's is not in the observation (`device_used_share` counts what may be evicted, too), so the term is left out.
- Tokens per second of a decode instance are its batch over its predicted TBT, `tbt_now_s`.

Policies by session or prompt hash (consistent hashing, sticky sessions) have no row: an observation does not say whose
request it is. Ties are broken at random where the system does so, else by the lower index.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
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

from .routers import choose, random_decode

LOCAL = int(Source.LOCAL)
EPSILON = 1e-9


@compiled
def _prefill_requests(features):
    """Requests at a prefill instance: queued, and the running one."""
    return features.queue_requests + (1.0 if features.queue_s > 0.0 else 0.0)


@compiled
def _decode_requests(features):
    """Requests at a decode instance: its batch, and what is assigned to it."""
    return features.batch + features.pending_requests


@compiled
def _kv_usage(observation, d):
    """Share of a decode instance's KV capacity that its batch holds."""
    features = decode_features(observation, d)
    output = _decode_requests(features) * cluster_features(observation).expected_output_tokens
    capacity = features.free_tokens + features.kv_tokens + features.pending_tokens + output
    return min(1.0, max(0.0, features.kv_tokens / capacity)) if capacity > 0.0 else 1.0


@compiled
def _throughput(features):
    """Tokens per second of a decode instance."""
    return features.batch / features.tbt_now_s if features.tbt_now_s > 0.0 else 0.0


@compiled
def _ties(cost, best_cost, ties):
    """How many have the least cost so far, this one counted."""
    return 1 if cost < best_cost else ties + 1 if cost == best_cost else ties


@compiled
def _better(cost, best_cost, ties, memory):
    """Whether a cost takes the place of the best so far: it is lower, or wins the draw among `ties` equal ones."""
    return cost < best_cost or (cost == best_cost and random_below(memory, ties) == 0)


@compiled
def _least_loaded_decode(observation, memory):
    """The decode instance with the fewest requests, any of equals; -1 if none is up."""
    best = -1
    best_cost = np.inf
    ties = 1
    for d in range(observation.decodes):
        if decode_allowed(observation, d):
            cost = _decode_requests(decode_features(observation, d))
            ties = _ties(cost, best_cost, ties)
            if _better(cost, best_cost, ties, memory):
                best = d
                best_cost = cost
    return best


@compiled
def llmd(observation, values, memory, decision):
    """llm-d-router: weighted scores of prefix cache, queue and KV usage, highest wins.

    Sum of prefix * match / n, queue * (max - waiting) / (max - min) over the pool, and kv * (1 - KV usage): the profile
    `prefix-cache-scorer` 3, `queue-scorer` 2, `kv-cache-utilization-scorer` 2 with `max-score-picker` (equals at
    random). With a length weight w the first is w * min(1, match / longest)^2 + (1 - w) * match / n. Decode instances
    have no match. values: prefix, queue, kv, w, longest.
    """
    n = request_features(observation).input_tokens
    low = np.inf
    high = -np.inf
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            low = min(low, prefill_features(observation, p).queue_requests)
            high = max(high, prefill_features(observation, p).queue_requests)
    best = -1
    best_cost = np.inf
    ties = 1
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        length = min(1.0, features.local_tokens / values[4])
        match = values[3] * length * length + (1.0 - values[3]) * features.local_tokens / n
        queue = (high - features.queue_requests) / (high - low) if high > low else 1.0
        cost = -(values[0] * match + values[1] * queue)
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = p
            best_cost = cost
    low = np.inf
    high = -np.inf
    for d in range(observation.decodes):
        if decode_allowed(observation, d):
            low = min(low, decode_features(observation, d).waiting_requests)
            high = max(high, decode_features(observation, d).waiting_requests)
    chosen = -1
    chosen_cost = np.inf
    ties = 1
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        waiting = decode_features(observation, d).waiting_requests
        queue = (high - waiting) / (high - low) if high > low else 1.0
        cost = -(values[1] * queue + values[2] * (1.0 - _kv_usage(observation, d)))
        ties = _ties(cost, chosen_cost, ties)
        if _better(cost, chosen_cost, ties, memory):
            chosen = d
            chosen_cost = cost
    choose(decision, best, chosen, LOCAL)


@compiled
def _bucket(headroom, idle):
    """The lower, the better: within the SLO, beyond it but idle, beyond it."""
    return 0 if headroom >= 0.0 else 1 if idle else 2


@compiled
def _headroom(observation, prefill, i):
    """(headroom to the SLO in seconds, bucket) of an instance; (0, 3) where it is down."""
    request = request_features(observation)
    if prefill:
        if not source_allowed(observation, i, LOCAL):
            return 0.0, 3
        features = prefill_features(observation, i)
        headroom = request.ttft_slo_s - features.ttft_local_s
        return headroom, _bucket(headroom, _prefill_requests(features) == 0.0)
    if not decode_allowed(observation, i):
        return 0.0, 3
    decode = decode_features(observation, i)
    headroom = request.tbt_slo_s - decode.tbt_assigned_s
    return headroom, _bucket(headroom, _decode_requests(decode) == 0.0)


@compiled
def _by_headroom(observation, prefill, most, memory):
    """The instance that llm-d's latency scorer rates highest, any of equals; -1 if none is up."""
    count = observation.prefills if prefill else observation.decodes
    bucket = 3
    low = np.inf
    high = -np.inf
    for i in range(count):
        headroom, group = _headroom(observation, prefill, i)
        if group > bucket or group == 3:
            continue
        if group < bucket:
            bucket = group
            low = np.inf
            high = -np.inf
        low = min(low, abs(headroom))
        high = max(high, abs(headroom))
    best = -1
    best_cost = np.inf
    ties = 1
    for i in range(count):
        headroom, group = _headroom(observation, prefill, i)
        if group != bucket or group == 3:
            continue
        share = (abs(headroom) - low) / (high - low) if high - low > EPSILON else 0.5
        if most == 0.0 or bucket != 0:
            share = 1.0 - share
        cost = -float(int(share * 100.0) + 1)
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = i
            best_cost = cost
    return best


@compiled
def llmd_latency(observation, values, memory, decision):
    """llm-d-router's latency-scorer: the instance whose predicted latency is closest to its SLO, but within it.

    Headroom = SLO - prediction; of those with headroom the least (`least`, its default) or the most wins, in steps of a
    hundredth of the range, equals at random. With none, an idle instance, else the least deficit. Prefill by TTFT and
    decode by TBT: of the blend 0.8 TTFT + 0.2 TPOT the other part is the same for all of a pool. The predictions are
    the observation's (`ttft_local_s`, `tbt_assigned_s`), not those of a regression trained beside it. values: 1 for
    the most headroom.
    """
    best = _by_headroom(observation, True, values[0], memory)
    choose(decision, best, _by_headroom(observation, False, values[0], memory), LOCAL)


@compiled
def prefix_affinity(observation, values, memory, decision):
    """llm-d-router's prefix-cache-affinity-filter: least tokens among instances that have most of the prompt.

    Sticky are those with match / n >= threshold; all are candidates if none is, or if the least queue of a sticky one
    is more than `penalty` seconds longer than the least of the others (0: never). Of the candidates, the least tokens
    in flight and to compute (`token-load-scorer`), equals at random; decode by fewest requests
    (`active-request-scorer`). Tokens in flight are the queued seconds times `tokens_per_s`, so the filter's estimate
    of TTFT is `queue_s`. values: threshold, penalty (s), tokens_per_s, tokens at which the load scorer ends.
    """
    n = request_features(observation).input_tokens
    sticky_s = np.inf
    other_s = np.inf
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            features = prefill_features(observation, p)
            if features.local_tokens / n >= values[0]:
                sticky_s = min(sticky_s, features.queue_s)
            else:
                other_s = min(other_s, features.queue_s)
    stick = sticky_s < np.inf and (values[1] == 0.0 or sticky_s - other_s <= values[1])
    best = -1
    best_cost = np.inf
    ties = 1
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        if stick and features.local_tokens / n < values[0]:
            continue
        cost = min(1.0, (features.queue_s * values[2] + n - features.local_tokens) / values[3])
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = p
            best_cost = cost
    choose(decision, best, _least_loaded_decode(observation, memory), LOCAL)


@compiled
def _aibrix_prefill_ms(tokens):
    return 0.001 * tokens**1.5 + 5.0 if tokens > 0.0 else 0.0


@compiled
def _aibrix_ttft_ms(matched, unmatched, requests, each_ms):
    """The `conductor` prefill score: queue, prefix and prefill with the fixed constants of any model and GPU."""
    prefix_ms = 0.005 * matched + 1.0 if matched > 0.0 else 0.0
    return requests * each_ms + prefix_ms + _aibrix_prefill_ms(unmatched)


@compiled
def _aibrix_prefill(observation, memory, spread, sigma, conductor, parameter):
    """The prefill instance by AIBrix's gates and one of its two scores; -1 if none is up.

    conductor: by its score, `parameter` the milliseconds per queued request; otherwise by `prefix_cache`, `parameter`
    the percent below which a match is none.
    """
    n = request_features(observation).input_tokens
    up = 0.0
    low = np.inf
    high = -np.inf
    total = 0.0
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            requests = _prefill_requests(prefill_features(observation, p))
            up += 1.0
            total += requests
            low = min(low, requests)
            high = max(high, requests)
    mean = total / max(1.0, up)
    squares = 0.0
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            squares += (_prefill_requests(prefill_features(observation, p)) - mean) ** 2
    most = mean + sigma * np.sqrt(squares / max(1.0, up))
    imbalanced = high - low > spread
    best = -1
    best_cost = np.inf
    ties = 1
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        requests = _prefill_requests(features)
        if imbalanced:
            cost = requests
        elif requests > most:
            continue
        elif conductor:
            cost = _aibrix_ttft_ms(features.local_tokens, n - features.local_tokens, requests, parameter)
        else:
            percent = 100.0 * features.local_tokens / n
            cost = (100.0 - (percent if percent >= parameter else 0.0)) * 0.1 + requests / max(1.0, high)
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = p
            best_cost = cost
    return best


@compiled
def _aibrix_decode(observation, memory, spread, throughput_spread, conductor, weight_running, weight_throughput):
    """The decode instance by AIBrix's gates and one of its two scores; -1 if none is up."""
    fewest = np.inf
    most = 1.0
    slowest = np.inf
    fastest = 1.0
    roomiest = 1.0
    for d in range(observation.decodes):
        if decode_allowed(observation, d):
            features = decode_features(observation, d)
            fewest = min(fewest, _decode_requests(features))
            most = max(most, _decode_requests(features))
            slowest = min(slowest, _throughput(features))
            fastest = max(fastest, _throughput(features))
            roomiest = max(roomiest, 100.0 * (1.0 - _kv_usage(observation, d)))
    best = -1
    best_cost = np.inf
    ties = 1
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        features = decode_features(observation, d)
        requests = _decode_requests(features)
        throughput = _throughput(features)
        free = max(0.1, 100.0 * (1.0 - _kv_usage(observation, d)))
        if most - fewest >= spread:
            cost = requests
        elif fastest - slowest > throughput_spread:
            cost = throughput
        elif conductor:
            cost = (1000.0 / throughput if throughput > 0.0 else 20.0) * (1.0 + 1.0 / max(1.0, requests))
            if free < 10.0:
                cost *= 1.5
        else:
            load = weight_running * requests / most + weight_throughput * (1.0 - throughput / fastest)
            cost = load / (free / roomiest)
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = d
            best_cost = cost
    return best


@compiled
def aibrix(observation, values, memory, decision):
    """AIBrix's `conductor` scores: estimated TTFT and TBT with fixed constants for any model and GPU.

    TTFT (ms) = requests * each + (0.005 matched + 1) + (0.001 unmatched^1.5 + 5), a term of no tokens being 0, and each
    the estimate for 512 tokens where no mean prefill time is measured. TBT (ms) = (1000 / tokens per s, or 20) * (1 + 1
    / max(1, requests)), half as much again above 90 % KV usage. Before: prefill instances with more requests than mean
    + sigma standard deviations are left out; where the numbers of requests are more than `spread` apart (decode: as
    many apart), the fewest decides alone, and where throughputs are, the least. Equals at random. Its gate by drain
    rate has no signal here. values: spread, sigma, throughput spread, each (ms; 0: the estimate).
    """
    each_ms = values[3] if values[3] > 0.0 else _aibrix_prefill_ms(512.0)
    p = _aibrix_prefill(observation, memory, values[0], values[1], True, each_ms)
    d = _aibrix_decode(observation, memory, values[0], values[2], True, 1.0, 1.0)
    choose(decision, p, d, LOCAL)


@compiled
def aibrix_prefix(observation, values, memory, decision):
    """AIBrix's split pools by default: prefix match before load, decode by requests, throughput and free KV.

    Prefill `prefix_cache`: (100 - match %) / 10 + requests / max requests. Decode `load_balancing`: (requests / max + 1
    - tokens per s / max) / (free KV / max). Gates as in `aibrix`. values: spread, sigma, throughput spread, percent
    below which a match counts as none, weight of requests, weight of throughput.
    """
    p = _aibrix_prefill(observation, memory, values[0], values[1], False, values[3])
    d = _aibrix_decode(observation, memory, values[0], values[2], False, values[4], values[5])
    choose(decision, p, d, LOCAL)


@compiled
def smg(observation, values, memory, decision):
    """SGLang's gateway (SMG), `cache_aware`: the longest match above a threshold unless the pool is out of balance.

    Out of balance, max - min requests > abs and max > rel * min: least load. Else the longest match if match / n >
    threshold, by least load among equals; else least load. Least load, (queued tokens) / (tokens per s) + kv * k / (1 -
    k): at a prefill instance that time is `queue_s`; at a decode instance, the tokens on their way there over its
    throughput (or the default), k its KV usage. Equals at random. values: threshold, abs, rel, kv (s), tokens_per_s.
    """
    n = request_features(observation).input_tokens
    low = np.inf
    high = -np.inf
    longest = 0.0
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            features = prefill_features(observation, p)
            low = min(low, _prefill_requests(features))
            high = max(high, _prefill_requests(features))
            longest = max(longest, features.local_tokens)
    imbalanced = high - low > values[1] and high > values[2] * low
    by_match = not imbalanced and longest / n > values[0]
    best = -1
    best_cost = np.inf
    ties = 1
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        if by_match and features.local_tokens < longest:
            continue
        cost = features.queue_s
        ties = _ties(cost, best_cost, ties)
        if _better(cost, best_cost, ties, memory):
            best = p
            best_cost = cost
    chosen = -1
    chosen_cost = np.inf
    ties = 1
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        decode = decode_features(observation, d)
        throughput = _throughput(decode)
        k = min(0.999, _kv_usage(observation, d))
        cost = decode.pending_tokens / (throughput if throughput > 0.0 else values[4]) + values[3] * k / (1.0 - k)
        ties = _ties(cost, chosen_cost, ties)
        if _better(cost, chosen_cost, ties, memory):
            chosen = d
            chosen_cost = cost
    choose(decision, best, chosen, LOCAL)


@compiled
def _another_decode(observation, memory, first):
    """A random decode instance that is up, other than `first` where there is one."""
    others = 0
    for d in range(observation.decodes):
        others += decode_allowed(observation, d) and d != first
    if others == 0:
        return first
    left = random_below(memory, others)
    for d in range(observation.decodes):
        if decode_allowed(observation, d) and d != first:
            if left == 0:
                return d
            left -= 1
    return first


@compiled
def vllm_router(observation, values, memory, decision):
    """vllm-router: `kv_aware` prefill, by matched blocks with a credit per tier; `power_of_two` decode.

    The most (tokens on the device + host * those in host memory), by fewest requests among equals; the fewest requests
    where nothing matches. Load has no say in a match, so a text that opens every prompt draws all of them to where it
    is. Decode: of two different random instances the one with fewer requests. Its credits for external memory and disk
    (0.6, 0.3) have no tier here, and it takes the last of equals. values: host.
    """
    best = -1
    best_credit = -1.0
    best_requests = np.inf
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        credit = features.device_tokens + values[0] * (features.local_tokens - features.device_tokens)
        requests = _prefill_requests(features)
        if credit > best_credit or (credit == best_credit and requests < best_requests):
            best = p
            best_credit = credit
            best_requests = requests
    d = random_decode(observation, memory)
    if d >= 0:
        other = _another_decode(observation, memory, d)
        if _decode_requests(decode_features(observation, other)) < _decode_requests(decode_features(observation, d)):
            d = other
    choose(decision, best, d, LOCAL)


@compiled
def production_stack(observation, values, memory, decision):
    """vLLM production-stack, `loadaware`: match / n - beta * (requests - mean) / max(1, mean), highest wins.

    Decode has no match, so the fewest requests. values: beta.
    """
    n = request_features(observation).input_tokens
    total = 0.0
    up = 0.0
    for p in range(observation.prefills):
        if source_allowed(observation, p, LOCAL):
            total += _prefill_requests(prefill_features(observation, p))
            up += 1.0
    mean = total / max(1.0, up)
    best = -1
    best_score = -np.inf
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        score = features.local_tokens / n - values[0] * (_prefill_requests(features) - mean) / max(1.0, mean)
        if score > best_score:
            best = p
            best_score = score
    chosen = -1
    for d in range(observation.decodes):
        if decode_allowed(observation, d) and (
            chosen < 0
            or _decode_requests(decode_features(observation, d))
            < _decode_requests(decode_features(observation, chosen))
        ):
            chosen = d
    choose(decision, best, chosen, LOCAL)


@compiled
def lmetric(observation, values, memory, decision):
    """LMetric (arXiv 2603.15202): new prefill tokens times batch size, no knobs.

    In split pools: prefill by tokens to compute for this request times requests there, decode by tokens there times
    requests there.
    """
    n = request_features(observation).input_tokens
    best = -1
    best_cost = np.inf
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        cost = (n - features.local_tokens) * (features.queue_requests + 1.0 + (features.queue_s > 0.0))
        if cost < best_cost:
            best = p
            best_cost = cost
    chosen = -1
    chosen_cost = np.inf
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        decode = decode_features(observation, d)
        cost = (decode.kv_tokens + decode.pending_tokens + n) * (decode.batch + decode.pending_requests + 1.0)
        if cost < chosen_cost:
            chosen = d
            chosen_cost = cost
    choose(decision, best, chosen, LOCAL)


@compiled
def dynamo(observation, values, memory, decision):
    """NVIDIA Dynamo's cost, prefill and decode chosen apart (its default selector).

    Prefill: load_scale * max(0, blocks to prefill incl. those queued - overlap credit). Decode: blocks in use. A tie
    takes the lower index. values: load_scale, device credit, host credit, tokens per block, tokens per queued second.
    """
    n = request_features(observation).input_tokens
    block = values[3]
    best = -1
    best_cost = np.inf
    for p in range(observation.prefills):
        if not source_allowed(observation, p, LOCAL):
            continue
        features = prefill_features(observation, p)
        device_blocks = features.device_tokens / block
        host_blocks = (features.local_tokens - features.device_tokens) / block
        credit = values[1] * device_blocks + values[2] * host_blocks
        queued_blocks = features.queue_s * values[4] / block
        cost = values[0] * max(0.0, n / block + queued_blocks - credit)
        if cost < best_cost:
            best = p
            best_cost = cost
    chosen = -1
    chosen_cost = np.inf
    for d in range(observation.decodes):
        if not decode_allowed(observation, d):
            continue
        decode = decode_features(observation, d)
        cost = decode.kv_tokens + decode.pending_tokens
        if cost < chosen_cost:
            chosen = d
            chosen_cost = cost
    choose(decision, best, chosen, LOCAL)
