"""Admission at arrival: whether a request that has been routed is accepted ([A] 7).

Each gate is one compiled function with the signature `envs.kernel.replay.ADMISSION`. values[0] is the load threshold
(paper G20), 1.0 = the SLO itself. The decode node's own check after the prefill is part of the cluster.
"""

from __future__ import annotations

from envs.kernel.compile import compiled
from envs.kernel.memory import cluster_features, decode_features, prefill_features, request_features
from envs.state import Source

FETCH, RECOMPUTE = int(Source.FETCH), int(Source.RECOMPUTE)


@compiled
def predicted_ttft(observation, decision):
    """Predicted TTFT of a decision."""
    features = prefill_features(observation, decision[0])
    if decision[2] == FETCH:
        return features.ttft_fetch_s
    if decision[2] == RECOMPUTE:
        return features.ttft_recompute_s
    return features.ttft_local_s


@compiled
def _prefill_load(observation, decision):
    return predicted_ttft(observation, decision) / request_features(observation).ttft_slo_s


@compiled
def accept_all(observation, values, decision):
    """No admission."""
    return True


@compiled
def routers_own(observation, values, decision):
    """None but the router's own, for one that rejects by itself; decode nodes check the TBT again."""
    return True


@compiled
def both_slos(observation, values, decision):
    """Algorithm 1's own check: the predicted TTFT and TBT of the chosen pair, all that is assigned to it counted."""
    tbt_s = decode_features(observation, decision[1]).tbt_assigned_s
    return (
        _prefill_load(observation, decision) <= values[0]
        and tbt_s <= values[0] * request_features(observation).tbt_slo_s
    )


@compiled
def baseline(observation, values, decision):
    """Each stage's own gate: here prefill's; decode's comes at the hand-over, when the prefill is done (paper D2)."""
    return _prefill_load(observation, decision) <= values[0]


@compiled
def early(observation, values, decision):
    """Early rejection: the decode pool's load, as it is now, counts at arrival too (paper D3)."""
    load = max(_prefill_load(observation, decision), cluster_features(observation).decode_load_now)
    return load <= values[0]


@compiled
def predictive(observation, values, decision):
    """Early rejection on the decode load forecast for when this request would get there (paper D5)."""
    load = max(_prefill_load(observation, decision), cluster_features(observation).decode_load_forecast)
    return load <= values[0]
