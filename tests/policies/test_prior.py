"""The prior of the learned policy: what it takes and what it turns away."""

from __future__ import annotations

import pytest

from envs.simulator import empty_observation
from envs.state import Observation
from policies import make_policy


def observation(tokens: float, ttft_s: float = 1.0, queue_s: float = 0.0, tbt_s: float = 0.02) -> Observation:
    """A request of some tokens at a cluster of 2P2D with SLOs of 30 s and 0.1 s, the same on all instances."""
    seen = empty_observation(1, 2, 2)
    seen.request["input_tokens"], seen.request["ttft_slo_s"], seen.request["tbt_slo_s"] = tokens, 30.0, 0.1
    seen.prefill["queue_s"] = queue_s
    for source in ("local", "fetch", "recompute"):
        seen.prefill[f"ttft_{source}_s"] = ttft_s
    seen.decode["tbt_assigned_s"] = tbt_s
    seen.decode["free_tokens"] = 1e6
    seen.prefill_mask[:, :, 0] = 1
    seen.decode_mask[:] = 1
    return seen


def takes(policy: str, seen: Observation) -> bool:
    made = make_policy(policy)
    made.reset(1, 0)
    return int(made.decide(seen)[0]) > 0


@pytest.mark.parametrize("ttft_s", [1.0, 10.0, 29.0])
def test_idle_prefills_take_what_meets_its_slo(ttft_s: float) -> None:
    policy = "prior:ttft=0.05"
    assert takes(policy, observation(8000, ttft_s, queue_s=0.0))
    assert takes(policy, observation(8000, ttft_s, queue_s=60.0)) == (ttft_s <= 0.05 * 30)
    assert not takes(policy, observation(8000, 31.0, queue_s=0.0))


def test_between_idle_and_busy_the_threshold_is_between() -> None:
    policy = "prior:ttft=0.04"  # half busy, 3 s of queue: a fifth of the SLO, 6 s
    assert takes(policy, observation(8000, 5.9, queue_s=3.0))
    assert not takes(policy, observation(8000, 6.1, queue_s=3.0))


@pytest.mark.parametrize("context", [2000.0, 8000.0, 32000.0])
def test_the_price_is_for_prompts_longer_than_the_contexts_there_are(context: float) -> None:
    def taken(times: float, tbt_s: float) -> bool:
        seen = observation(times * context, tbt_s=tbt_s)
        seen.decode["batch"] = 1000.0
        seen.decode["kv_tokens"] = 1000.0 * context
        return takes("prior:price=0.1", seen)

    assert taken(1.0, 0.099)
    assert not taken(1.0, 0.101)
    assert taken(2.718281828**3, 0.068)
    assert not taken(2.718281828**3, 0.072)
    assert taken(0.1, 0.099)
    assert not taken(0.1, 0.101)  # shorter ones get no more than the SLO
