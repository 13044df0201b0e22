"""No schedule of any random cluster has more good requests than its bound; by hand, the bound is what can be had."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.bound import most_good
from envs.simulator import Simulator
from envs.spec import validate_cluster
from envs.state import CLUSTER_PARAMETERS, DECODE_PARAMETERS, PREFILL_PARAMETERS, Parameters, Records
from policies import CompiledPolicy, make_policy
from tests.envs.test_against_reference import SOURCES, as_trace, records
from tests.random_clusters import random_case, random_decision
from traces import Trace

POLICIES = ("conductor", "conductor+none", "cache_aware+none", "random", "load_balancing+early", "llmd+slo")


def outcomes_of(parameters: Parameters, trace: Trace, name: str, seed: int, speed: float = 1.0) -> Records:
    """Of a replay under a policy, or of decisions that look at nothing."""
    simulator = Simulator.for_trace(parameters, trace)
    if name == "blind":
        rng = random.Random(seed)
        simulator.load(0, trace, speed=speed, recheck=rng.random() < 0.5)
        while simulator.observe(0):
            decision = random_decision(rng, len(parameters.prefill), len(parameters.decode))
            if decision is None:
                simulator.decide(0, -1)
            else:
                simulator.decide(0, decision[0], decision[1], SOURCES[decision[2]])
    else:
        policy = make_policy(name)
        assert isinstance(policy, CompiledPolicy)
        policy.reset(1, seed)
        simulator.load(0, trace, speed=speed, recheck=policy.recheck)
        policy.replay(simulator, 0)
    return simulator.outcomes(0).copy()


def check(parameters: Parameters, trace: Trace, seed: int, speed: float = 1.0) -> int:
    """The bound; no policy is above it."""
    found = [outcomes_of(parameters, trace, name, seed, speed) for name in (*POLICIES, "blind", "blind")]
    landed = np.concatenate(found)
    took = (landed["kv_ready_s"] - landed["prefill_end_s"])[landed["good"] == 1]
    landing_s = float(np.nanmax(took, initial=0.0)) + 1e-6
    most = most_good(parameters, [trace], speed=speed, landing_s=landing_s)
    for outcomes in found:
        assert outcomes["good"].sum() <= most
    return most


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_policy_is_above_the_bound(seed: int) -> None:
    cluster, prefill, decode, requests, _ = random_case(seed)
    parameters = Parameters(
        records(CLUSTER_PARAMETERS, [cluster]), records(PREFILL_PARAMETERS, prefill), records(DECODE_PARAMETERS, decode)
    )
    check(parameters, as_trace(requests, cluster["block_tokens"]), seed)


def crowd(rng: random.Random) -> tuple[Parameters, Trace]:
    """Many requests of one to three prompts, where decode has room for more members than its SLO allows."""
    pool = {"hardware": "a800x8-llama2-70b"}
    times = {"base_s": rng.uniform(0.005, 0.02), "per_request_s": rng.uniform(0.005, 0.02), "per_token_s": 1e-7}
    spec = validate_cluster(
        {
            "prefill": [{"count": rng.randint(1, 3), **pool}],
            "decode": [
                {"count": rng.randint(1, 2), **pool, "times": times, "max_batch": rng.choice((16, 64))},
                {"count": 1, **pool, "times": times | {"per_request_s": 0.01}, "max_batch": 32},
            ][: rng.randint(1, 2)],
            "slo": {
                "ttft_s": rng.uniform(0.5, 3),
                "tbt_s": rng.uniform(0.06, 0.12),
                "tbt_tail_share": rng.choice((0.1, 1)),
            },
            "decode_recheck": rng.random() < 0.5,
        },
        "crowd",
    )
    n = rng.randint(20, 150)
    prompts = [rng.randint(600, 4000) for _ in range(rng.randint(1, 3))]
    chosen = [rng.randrange(len(prompts)) for _ in range(n)]
    blocks = [[100 * p + b for b in range(prompts[p] // 512)] for p in chosen]
    first = {id_: number for number, id_ in enumerate(dict.fromkeys(b for row in blocks for b in row))}
    trace = Trace(
        arrival_s=np.cumsum([rng.expovariate(20) for _ in range(n)]),
        input_tokens=np.array([prompts[p] for p in chosen], np.int32),
        output_tokens=np.array([rng.randint(1, 200) for _ in range(n)], np.int32),
        block_offsets=np.cumsum([0, *map(len, blocks)]),
        block_ids=np.array([first[b] for row in blocks for b in row], np.int32),
    )
    return spec.parameters(), trace


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_nor_where_decode_is_what_lacks(seed: int) -> None:
    parameters, trace = crowd(random.Random(seed))
    check(parameters, trace, seed, speed=random.Random(seed).choice((1.0, 3.0)))


def test_the_crowd_is_where_decode_lacks() -> None:
    """The test above would say nothing where the bound were that of prefill, or all requests."""
    binds = 0
    for seed in range(12):
        parameters, trace = crowd(random.Random(seed))
        alone = replace_decode(parameters, step_request_s=1e-9, step_token_s=0.0)
        binds += most_good(parameters, [trace]) < most_good(alone, [trace])
    assert binds >= 6


def replace_decode(parameters: Parameters, **fields: float) -> Parameters:
    decode = parameters.decode.copy()
    for name, value in fields.items():
        decode[name] = value
    return parameters._replace(decode=decode)


def cluster(slo: dict[str, Any], decode: dict[str, Any] | None = None, prefill: int = 1) -> Parameters:
    hardware = "a800x8-llama2-70b"
    fields = {
        "prefill": [{"count": prefill, "hardware": hardware, "times": {"base_s": 1.0, "linear_s": 1e-9}}],
        "decode": [{"count": 1, "hardware": hardware} | (decode or {})],
        "slo": slo,
    }
    return validate_cluster(fields, "by hand").parameters()


def same(n: int, output: int, apart_s: float = 0.0) -> Trace:
    return Trace(
        arrival_s=apart_s * np.arange(n),
        input_tokens=np.full(n, 100, np.int32),
        output_tokens=np.full(n, output, np.int32),
        block_offsets=np.zeros(n + 1, np.int64),
        block_ids=np.zeros(0, np.int32),
    )


def test_prefill_by_hand() -> None:
    """Ten at once, a second each, 4 s for each, and a little: four fit one instance, eight fit two."""
    for instances, fit in ((1, 4), (2, 8)):
        parameters = cluster({"ttft_s": 4.1}, prefill=instances)
        assert most_good(parameters, [same(10, 1)]) == fit
        assert outcomes_of(parameters, same(10, 1), "conductor", 0)["good"].sum() == fit
    assert most_good(cluster({"ttft_s": 0.9}), [same(10, 1)]) == 0


def test_of_several_traces_the_bound_holds_for_each() -> None:
    parameters, early = cluster({"ttft_s": 4.1}), same(10, 1)
    late = replace(early, arrival_s=np.arange(10.0))
    assert most_good(parameters, [late]) == 10
    assert most_good(parameters, [early, late]) == 10
    assert most_good(parameters, [early], warmup=7) == 3


def test_decode_by_hand() -> None:
    """A batch of four takes 0.1 s, the SLO; 200 outputs take it 20 s. What comes at once is prefilled within 30 s and
    lands 10 s later: (30 + 10 + 20 s) of four at a time are three such batches, and a little for slow iterations."""
    decode = {"times": {"base_s": 0.02, "per_request_s": 0.02, "per_token_s": 0.0}, "max_batch": 64}
    parameters = cluster({"ttft_s": 30.0, "tbt_s": 0.1}, decode, prefill=64)
    assert 12 <= most_good(parameters, [same(100, 200)]) <= 15
    assert most_good(parameters, [same(100, 200)], landing_s=0.0) <= 12
    # Where a full batch keeps the SLO, requests may wait for it as long as they like.
    patient = replace_decode(parameters, max_batch=4)
    assert most_good(patient, [same(100, 200)]) == 100


def test_what_cannot_be_good_alone_is_not() -> None:
    slow = {"times": {"base_s": 0.2, "per_request_s": 0.0, "per_token_s": 0.0}}
    assert most_good(cluster({"ttft_s": 30.0, "tbt_s": 0.1}, slow), [same(5, 2)]) == 0
    assert most_good(cluster({"ttft_s": 30.0, "tbt_s": 0.1}, slow), [same(5, 1)]) == 5
    assert most_good(cluster({"ttft_s": 30.0}, {"decode_kv_tokens": 100}), [same(5, 2)]) == 0


def test_blocks_of_others_may_be_reused() -> None:
    """Ten requests for one prompt of 100 blocks: but for a token it may be there already."""
    times = {"base_s": 0.0, "linear_s": 1e-3}
    hardware = "a800x8-llama2-70b"
    fields: dict[str, Any] = {
        "prefill": [{"count": 1, "hardware": hardware, "times": times}],
        "decode": [{"count": 1, "hardware": hardware}],
    }
    parameters = validate_cluster(fields, "reuse").parameters()
    trace = Trace(
        arrival_s=np.zeros(10),
        input_tokens=np.full(10, 20 * 512, np.int32),
        output_tokens=np.ones(10, np.int32),
        block_offsets=20 * np.arange(11),
        block_ids=np.tile(np.arange(20, dtype=np.int32), 10),
    )
    assert most_good(parameters, [trace]) == 10
    alone = replace(trace, block_ids=np.arange(200, dtype=np.int32))
    assert most_good(parameters, [alone]) == 2  # 10.24 s each, within 30 s
