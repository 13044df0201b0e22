"""The set scorer of `policies.networks`, compiled: a router as any other, its weights are the router's values.

It decides as the torch module does, to the last bits of float32, in microseconds and without the GIL; so a trained
policy runs inside replays and in the branches of `trainers.rollout`. `tests/policies/test_compiled_scorer.py` holds the
two together. `policies.networks` says what every step means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envs.kernel.compile import compiled
from envs.kernel.memory import decode_allowed, f8_at, source_allowed

if TYPE_CHECKING:
    from .networks import SetScorer

# Sizes and constants of `policies.networks`, which is not imported here because it needs torch.
REQUEST, CONTEXT, PREFILL, DECODE, DECODE_COLUMNS, CLUSTER = 5, 9, 13, 11, 10, 7
TTFT_WEIGHT, TBT_WEIGHT, REJECT_WEIGHT = 100.0, 200.0, 100.0
MOST_REJECT, NO_ROOM = 10.0, 12.0
LARGEST, LARGEST_SCALED = 1e9, 10.0
TYPICAL = 8000.0  # tokens of a context that every decode instance is taken to have besides those it has
BUSY = 0.2  # SLOs of TTFT in the queue of a prefill instance that is not idle at all
MOST_POSITIVE = np.expm1(LARGEST_SCALED)
HEADER = 9  # values before the weights: hidden units, anchored, margin, gate [4], trained, rejects
GATE, TRAINED, REJECTS = 3, 7, 8


def packed(scorer: SetScorer, rejects: bool = True) -> NDArray[np.float64]:
    """A scorer's weights as the values of the router `set_scorer`: the header, then float32 numbers two to a value.

    Without `rejects` it takes every request it can. One whose heads are all zero needs no more than its prior. Matrices
    lie by input, so that one input is added to all hidden units at once.
    """
    state = {name: tensor.detach().cpu().numpy().astype(np.float32) for name, tensor in scorer.state_dict().items()}
    hidden = len(state["pool.bias"])
    weights = [
        state["prefill.weight"].T,
        state["prefill.bias"],
        state["prefill_context.weight"].T,
        state["decode.weight"].T,
        state["decode.bias"],
        state["decode_context.weight"].T,
        state["pool.weight"].T,
        state["pool.bias"],
        state["prefill_score.weight"].T,
        state["prefill_pool.weight"].T,
        state["prefill_pool.bias"],
        state["decode_score.weight"].T,
        state["decode_pool.weight"].T,
        state["decode_pool.bias"],
        state["prefill_head.weight"],
        state["prefill_head.bias"],
        state["decode_head.weight"],
        state["decode_head.bias"],
        state["reject_head.weight"],
        state["reject_head.bias"],
    ]
    flat = np.concatenate([np.ravel(weight) for weight in weights])
    if len(flat) % 2:
        flat = np.append(flat, np.float32(0.0))
    trained = any(tensor.any() for name, tensor in state.items() if "_head." in name)
    header = np.array([hidden, scorer.anchored, state["margin"], *state["gate"], trained, rejects], np.float64)
    return np.concatenate([header, flat.view(np.float64)])


@compiled
def _clean(x):
    return 0.0 if np.isnan(x) else min(max(x, -LARGEST), LARGEST)


@compiled
def _squash_positive(x):
    return np.log(1.0 + min(max(x, 0.0), MOST_POSITIVE))


@compiled
def _squash(x):
    size = min(np.log(1.0 + abs(x)), LARGEST_SCALED)
    return size if x >= 0.0 else -size


@compiled
def _multiple(slos):
    return min(max(slos, 0.0), 2.0) + np.log(max(slos, 2.0) / 2.0)


@compiled
def _add(inputs, first, count, weights, at, target, to, hidden):
    """target[to : to + hidden] += inputs[first : first + count] @ weights, which begin at `at`.

    Four inputs at a time. Slices begin at 0: an index that may be negative would keep the loop from being vectorised.
    """
    sums = target[to : to + hidden]
    rest = weights[at : at + count * hidden]
    i = 0
    while i + 4 <= count:
        x0, x1, x2, x3 = inputs[first + i], inputs[first + i + 1], inputs[first + i + 2], inputs[first + i + 3]
        row0 = rest[:hidden]
        row1 = rest[hidden : 2 * hidden]
        row2 = rest[2 * hidden : 3 * hidden]
        row3 = rest[3 * hidden : 4 * hidden]
        for j in range(hidden):
            sums[j] += x0 * row0[j] + x1 * row1[j] + x2 * row2[j] + x3 * row3[j]
        rest = rest[4 * hidden :]
        i += 4
    while i < count:
        x0 = inputs[first + i]
        for j in range(hidden):
            sums[j] += x0 * rest[j]
        rest = rest[hidden:]
        i += 1


@compiled
def _rectify(values, start, stop):
    some = values[start:stop]
    for j in range(len(some)):
        some[j] = max(some[j], np.float32(0.0))


@compiled
def _pool_of(encoded, up, hidden, pool, at):
    """Mean and max of what is encoded of the instances that are up, to pool[at : at + 2 hidden]; 0 where none is."""
    count = 0
    for i in range(len(up)):
        if not up[i]:
            continue
        count += 1
        for j in range(hidden):
            x = encoded[i * hidden + j]
            pool[at + j] += x
            pool[at + hidden + j] = max(pool[at + hidden + j], x)
    if count > 1:
        for j in range(hidden):
            pool[at + j] /= np.float32(count)


@compiled
def _dot(values, first, weights, at, hidden):
    some = values[first : first + hidden]
    row = weights[at : at + hidden]
    total = np.float32(0.0)
    for j in range(hidden):
        total += some[j] * row[j]
    return total


@compiled
def _prior_costs(observation, gate, prefill_cost, decode_cost):
    """What the prior minimises, to prefill_cost [3 P] and decode_cost [D], infinite where it may not choose.

    Returns the prior's logit of rejecting; infinite where nothing may be chosen. `gate` is a `policies.networks.Gate`.
    """
    request = f8_at(observation.request)
    cluster = f8_at(observation.cluster)
    tokens = max(_clean(request[0]), 1.0)
    ttft_slo_s = max(_clean(request[3]), 1e-6)
    tbt_slo_s = max(_clean(request[4]), 1e-6)
    need = tokens + max(_clean(cluster[2]), 0.0)
    least_prefill = np.float32(np.inf)
    table = f8_at(observation.prefill)
    idle = 0.0
    up = 0
    for p in range(observation.prefills):
        if source_allowed(observation, p, 0) or source_allowed(observation, p, 1) or source_allowed(observation, p, 2):
            idle += 1.0 - min(max(_clean(table[p * PREFILL]) / ttft_slo_s / BUSY, 0.0), 1.0)
            up += 1
        for source in range(3):
            cost = np.float32(np.inf)
            if source_allowed(observation, p, source):
                cost = np.float32(TTFT_WEIGHT * _multiple(_clean(table[p * PREFILL + 6 + source]) / ttft_slo_s))
            prefill_cost[3 * p + source] = cost
            least_prefill = min(least_prefill, cost)
    least_decode = np.float32(np.inf)
    tbt_of_least = 0.0
    longer = 0.0
    decodes = 0
    table = f8_at(observation.decode)
    for d in range(observation.decodes):
        decode_cost[d] = np.inf
        if not decode_allowed(observation, d):
            continue
        row = d * DECODE_COLUMNS
        tbt = _multiple(_clean(table[row + 7]) / tbt_slo_s)
        # one more context, of a typical length, so that an empty instance suits every prompt but the extreme
        contexts = max(_clean(table[row]) + _clean(table[row + 3]) + 1.0, 1.0)
        length = np.log(tokens * contexts / max(_clean(table[row + 1]) + _clean(table[row + 4]) + TYPICAL, 1.0))
        longer += length
        decodes += 1
        cost = TBT_WEIGHT * (tbt + gate[3] * length**2)
        if _clean(table[row + 2]) < need:
            cost += NO_ROOM
        decode_cost[d] = cost
        if decode_cost[d] < least_decode:
            least_decode = decode_cost[d]
            tbt_of_least = tbt
    if least_prefill == np.inf or least_decode == np.inf:
        return np.inf
    of_ttft = gate[0] ** (1.0 - idle / max(up, 1))
    of_tbt = min(gate[1] - gate[2] * longer / decodes, 1.0)
    excess = max(least_prefill / TTFT_WEIGHT - of_ttft, tbt_of_least - of_tbt)
    return min(max(excess * REJECT_WEIGHT, -MOST_REJECT), MOST_REJECT)


@compiled
def _decide_by_prior(reject, prefill_cost, decode_cost, decision):
    decision[0] = -1
    decision[1] = -1
    decision[2] = 0
    if reject < 0.0:
        best = np.argmin(prefill_cost)
        decision[0] = best // 3
        decision[1] = np.argmin(decode_cost)
        decision[2] = best % 3


@compiled
def prior(observation, values, memory, decision):
    """The prior of the learned policy: Algorithm 1 with early rejection by length and load, like contexts together."""
    prefill_cost = np.empty(3 * observation.prefills, np.float32)
    decode_cost = np.empty(observation.decodes, np.float32)
    reject = _prior_costs(observation, values, prefill_cost, decode_cost)
    _decide_by_prior(reject, prefill_cost, decode_cost, decision)


@compiled
def set_scorer(observation, values, memory, decision):
    """What a trained set scorer says: the valid choice with the largest score."""
    prefills, decodes = observation.prefills, observation.decodes
    prefill_cost = np.empty(3 * prefills, np.float32)
    decode_cost = np.empty(decodes, np.float32)
    prior_reject = _prior_costs(observation, values[GATE : GATE + 4], prefill_cost, decode_cost)
    must = prior_reject < np.inf and values[REJECTS] == 0.0
    _decide_by_prior(-1.0 if must else prior_reject, prefill_cost, decode_cost, decision)
    if prior_reject == np.inf or values[TRAINED] == 0.0:
        return
    decision[0] = -1
    decision[1] = -1
    decision[2] = 0
    least_prefill = prefill_cost.min()
    least_decode = decode_cost.min()

    # features
    request = f8_at(observation.request)
    cluster = f8_at(observation.cluster)
    tokens = max(_clean(request[0]), 1.0)
    ttft_slo_s = max(_clean(request[3]), 1e-6)
    tbt_slo_s = max(_clean(request[4]), 1e-6)
    expected = max(_clean(cluster[2]), 0.0)
    context = np.empty(CONTEXT, np.float32)
    context[0] = _squash_positive(tokens / 1000.0)
    context[1] = _squash_positive(_clean(request[1]) / tokens)
    context[2] = _squash_positive(_clean(request[2]) / ttft_slo_s * prefills)
    context[3] = _squash_positive(_clean(cluster[0]) / prefills)
    context[4] = _squash_positive(_clean(cluster[1]) / decodes)
    context[5] = _squash_positive(expected / 100.0)
    context[6] = _squash_positive(_clean(cluster[3]) / ttft_slo_s)
    context[7] = _squash_positive(_clean(cluster[4]))
    context[8] = _squash_positive(_clean(cluster[6]))
    prefill_up = np.zeros(prefills, np.bool_)
    of_prefill = np.empty(prefills * PREFILL, np.float32)
    table = f8_at(observation.prefill)
    for p in range(prefills):
        prefill_up[p] = prefill_cost[3 * p : 3 * p + 3].min() < np.inf
        for i in range(PREFILL):
            x = _clean(table[p * PREFILL + i])
            if i == 0 or 5 <= i <= 8:
                x /= ttft_slo_s
            elif 2 <= i <= 4:
                x /= tokens
            of_prefill[p * PREFILL + i] = _squash_positive(x)
    decode_up = np.zeros(decodes, np.bool_)
    of_decode = np.empty(decodes * DECODE, np.float32)
    table = f8_at(observation.decode)
    for d in range(decodes):
        decode_up[d] = decode_cost[d] < np.inf
        row = d * DECODE_COLUMNS
        batch, kv, free = _clean(table[row]), _clean(table[row + 1]), _clean(table[row + 2])
        pending, pending_tokens = _clean(table[row + 3]), _clean(table[row + 4])
        capacity = max(free + kv + pending_tokens + (batch + pending) * expected, 1.0)
        to = d * DECODE
        of_decode[to] = _squash(batch / 10.0)
        of_decode[to + 1] = _squash(kv / capacity)
        of_decode[to + 2] = _squash(free / capacity)
        of_decode[to + 3] = _squash(pending / 10.0)
        of_decode[to + 4] = _squash(pending_tokens / capacity)
        of_decode[to + 5] = _squash(_clean(table[row + 5]))
        of_decode[to + 6] = _squash(tokens / capacity)
        of_decode[to + 7] = _squash(_clean(table[row + 6]) / tbt_slo_s)
        of_decode[to + 8] = _squash(_clean(table[row + 7]) / tbt_slo_s)
        of_decode[to + 9] = _squash(_clean(table[row + 8]) / tbt_slo_s)
        of_decode[to + 10] = _squash(_clean(table[row + 9]))

    # the network
    hidden = int(values[0])
    weights = values[HEADER:].view(np.float32)
    at = 0
    encoded = np.zeros((prefills + decodes) * hidden, np.float32)
    base = np.zeros(2 * hidden, np.float32)
    pool_inputs = np.zeros(4 * hidden + CONTEXT, np.float32)
    for pool in range(2):
        count = prefills if pool == 0 else decodes
        width = PREFILL if pool == 0 else DECODE
        features = of_prefill if pool == 0 else of_decode
        first = 0 if pool == 0 else prefills * hidden
        bias = at + width * hidden
        for j in range(hidden):
            base[j] = weights[bias + j]
        _add(context, 0, CONTEXT, weights, bias + hidden, base, 0, hidden)
        for i in range(count):
            to = first + i * hidden
            encoded[to : to + hidden] = base[:hidden]
            _add(features, i * width, width, weights, at, encoded, to, hidden)
        _rectify(encoded, first, first + count * hidden)
        at = bias + hidden + CONTEXT * hidden
    _pool_of(encoded[: prefills * hidden], prefill_up, hidden, pool_inputs, 0)
    _pool_of(encoded[prefills * hidden :], decode_up, hidden, pool_inputs, 2 * hidden)
    pool_inputs[4 * hidden :] = context
    pooled = np.empty(hidden, np.float32)
    bias = at + (4 * hidden + CONTEXT) * hidden
    pooled[:] = weights[bias : bias + hidden]
    _add(pool_inputs, 0, 4 * hidden + CONTEXT, weights, at, pooled, 0, hidden)
    _rectify(pooled, 0, hidden)
    at = bias + hidden
    scored = np.empty((prefills + decodes) * hidden, np.float32)
    for pool in range(2):
        count = prefills if pool == 0 else decodes
        first = 0 if pool == 0 else prefills * hidden
        of_pool = at + hidden * hidden
        bias = of_pool + hidden * hidden
        for j in range(hidden):
            base[j] = weights[bias + j]
        _add(pooled, 0, hidden, weights, of_pool, base, 0, hidden)
        for i in range(count):
            to = first + i * hidden
            scored[to : to + hidden] = base[:hidden]
            _add(encoded, to, hidden, weights, at, scored, to, hidden)
        _rectify(scored, first, first + count * hidden)
        at = bias + hidden
    of_source, source_bias = at, at + 3 * hidden
    decode_head = source_bias + 3
    decode_bias = decode_head + hidden
    reject_head = decode_bias + 1
    reject = _dot(pooled, 0, weights, reject_head, hidden) + weights[reject_head + hidden]

    # the best of each pool, and among what the prior would choose
    anchored = values[1] != 0.0
    best_p, best_source, best_d = -1, 0, -1
    anchor_p, anchor_source, anchor_d = -1, 0, -1
    best_of_p = best_of_d = anchor_of_p = anchor_of_d = np.float32(-np.inf)
    for p in range(prefills):
        for source in range(3):
            cost = prefill_cost[3 * p + source]
            if cost == np.inf:
                continue
            score = _dot(scored, p * hidden, weights, of_source + source * hidden, hidden)
            score += weights[source_bias + source] + weights[decode_bias]
            if not anchored:
                score += least_prefill - cost
            if score > best_of_p:
                best_of_p, best_p, best_source = score, p, source
            if cost == least_prefill and score > anchor_of_p:
                anchor_of_p, anchor_p, anchor_source = score, p, source
    for d in range(decodes):
        cost = decode_cost[d]
        if cost == np.inf:
            continue
        score = _dot(scored, (prefills + d) * hidden, weights, decode_head, hidden)
        if not anchored:
            score += least_decode - cost
        if score > best_of_d:
            best_of_d, best_d = score, d
        if cost == least_decode and score > anchor_of_d:
            anchor_of_d, anchor_d = score, d
    best = best_of_p + best_of_d
    if values[REJECTS] == 0.0:
        reject = np.float32(-np.inf)
    if not anchored:
        if best > prior_reject + reject:
            decision[0] = best_p
            decision[1] = best_d
            decision[2] = best_source
        return
    margin = np.float32(values[2])
    anchor = anchor_of_p + anchor_of_d
    if prior_reject <= 0.0:
        anchor += margin
    if prior_reject >= 0.0:
        reject += margin
    if reject >= best and reject >= anchor:
        return
    if anchor >= best:
        best_p, best_source, best_d = anchor_p, anchor_source, anchor_d
    decision[0] = best_p
    decision[1] = best_d
    decision[2] = best_source
