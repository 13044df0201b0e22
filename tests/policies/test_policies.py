"""Every compiled router and admission against the plain reading of its rule, on observations from real episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.simulator import Simulator
from envs.spec import load_cluster
from envs.state import Observation
from policies import ADMISSIONS, ROUTERS, CompiledPolicy, Policy, PolicyError, make_policy
from traces import builtin

P, D = 5, 4


@pytest.fixture(scope="module")
def observations() -> Observation:
    """One observation of each of 48 clusters, each somewhere in an overloaded episode, a few instances down."""
    trace = builtin("synthetic", seed=2, n_requests=900)
    simulator = Simulator.for_trace(load_cluster(f"{P}p{D}d"), trace, clusters=48)
    rng = np.random.default_rng(0)
    for c in range(simulator.clusters):
        simulator.load(c, trace, speed=float(rng.uniform(0.5, 4.0)))
        simulator.begin(c)
        if c % 4 == 0:
            simulator.batch.state.prefill["up"][c, rng.integers(P)] = 0
            simulator.batch.state.decode["up"][c, rng.integers(D)] = 0
        policy = make_policy(("conductor+none", "random+none", "cache_aware+predictive")[c % 3])
        assert isinstance(policy, CompiledPolicy)
        policy.reset(48, c)
        policy.replay(simulator, c, limit=int(rng.integers(20, 700)))
        assert simulator.observe(c)
    return simulator.observation_tables


def one(observations: Observation, c: int) -> dict[str, np.ndarray]:
    return {
        "request": observations.request[c, 0],
        "prefill": observations.prefill[c],
        "decode": observations.decode[c],
        "cluster": observations.cluster[c, 0],
        "sources": observations.prefill_mask[c].astype(bool),
        "up": observations.decode_mask[c].astype(bool),
    }


def argmin(costs: list[tuple[int, float]]) -> int:
    return min(costs, key=lambda pair: (pair[1], pair[0]))[0]


def lightest_decode(o: dict) -> int:
    need = o["request"]["input_tokens"] + o["cluster"]["expected_output_tokens"]
    ups = [d for d in range(D) if o["up"][d]]
    roomy = [d for d in ups if o["decode"]["free_tokens"][d] >= need] or ups
    return argmin([(d, o["decode"]["tbt_assigned_s"][d]) for d in roomy])


def plain(router: str, o: dict) -> tuple[int, int, int]:
    ups = [p for p in range(P) if o["sources"][p, 0]]
    decode_ups = [d for d in range(D) if o["up"][d]]
    pre, dec, n = o["prefill"], o["decode"], o["request"]["input_tokens"]
    if router == "load_balancing":
        return argmin([(p, pre["queue_s"][p]) for p in ups]), lightest_decode(o), 0
    if router == "cache_aware":
        return argmin([(p, pre["ttft_local_s"][p]) for p in ups]), lightest_decode(o), 0
    if router == "conductor":
        options = []
        for p in ups:
            best = pre["local_tokens"][p] + pre["fetch_tokens"][p]
            fetch = o["sources"][p, 1] and best > 1.5 * pre["local_tokens"][p]
            options.append((pre["ttft_fetch_s" if fetch else "ttft_local_s"][p], p, int(fetch)))
        _, p, source = min(options, key=lambda option: (option[0], option[1]))
        return p, lightest_decode(o), source
    if router == "lmetric":
        busy = pre["queue_requests"] + 1 + (pre["queue_s"] > 0)
        p = argmin([(p, (n - pre["local_tokens"][p]) * busy[p]) for p in ups])
        tokens = dec["kv_tokens"] + dec["pending_tokens"] + n
        d = argmin([(d, tokens[d] * (dec["batch"][d] + dec["pending_requests"][d] + 1)) for d in decode_ups])
        return p, d, 0
    assert router == "dynamo"
    host = (pre["local_tokens"] - pre["device_tokens"]) / 512
    raw = n / 512 + pre["queue_s"] * 9000 / 512
    cost = np.maximum(0.0, raw - pre["device_tokens"] / 512 - 0.75 * host)
    p = argmin([(p, cost[p]) for p in ups])
    return p, argmin([(d, dec["kv_tokens"][d] + dec["pending_tokens"][d]) for d in decode_ups]), 0


def accepts(admission: str, o: dict, p: int, d: int, source: int) -> bool:
    name = ("ttft_local_s", "ttft_fetch_s", "ttft_recompute_s")[source]
    prefill_load = o["prefill"][name][p] / o["request"]["ttft_slo_s"]
    if admission in ("none", "own"):
        return True
    if admission == "slo":
        return prefill_load <= 1 and o["decode"]["tbt_assigned_s"][d] <= o["request"]["tbt_slo_s"]
    if admission == "baseline":
        return prefill_load <= 1
    load = o["cluster"]["decode_load_now" if admission == "early" else "decode_load_forecast"]
    return max(prefill_load, load) <= 1


def decode_action(action: int) -> tuple[int, int, int]:
    pair, source = divmod(action - 1, 3)
    return *divmod(pair, D), source


@pytest.mark.parametrize("router", ["load_balancing", "cache_aware", "conductor", "lmetric", "dynamo"])
def test_routers_do_what_they_say(observations: Observation, router: str) -> None:
    policy = make_policy(f"{router}+none")
    policy.reset(48, 0)
    chosen = [decode_action(int(a)) for a in policy.decide(observations)]
    expected = [plain(router, one(observations, c)) for c in range(48)]
    assert chosen == expected
    assert len(set(chosen)) > 8


def test_routers_differ(observations: Observation) -> None:
    chosen = {}
    for router in ROUTERS:
        policy = make_policy(f"{router}+none")
        policy.reset(48, 0)
        chosen[router] = tuple(policy.decide(observations))
    assert len(set(chosen.values())) == len(ROUTERS)
    assert any(decode_action(a)[2] == 1 for a in chosen["conductor"])


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_admissions_do_what_they_say(observations: Observation, admission: str) -> None:
    policy, everything = make_policy(f"conductor+{admission}"), make_policy("conductor+none")
    policy.reset(48, 0)
    everything.reset(48, 0)
    for c, (action, routed) in enumerate(
        zip(policy.decide(observations), everything.decide(observations), strict=True)
    ):
        accepted = accepts(admission, one(observations, c), *decode_action(int(routed)))
        assert action == (routed if accepted else 0), c
    rejected = (policy.decide(observations) == 0).sum()
    assert rejected == 0 if admission in ("none", "own") else 0 < rejected < 48


@pytest.mark.parametrize("router", ["random", "round_robin", "power_of_two"])
def test_only_instances_that_are_up(observations: Observation, router: str) -> None:
    policy = make_policy(f"{router}+none")
    policy.reset(48, 3)
    seen: set[tuple[int, int]] = set()
    for _ in range(60):
        for c, action in enumerate(policy.decide(observations)):
            p, d, source = decode_action(int(action))
            assert observations.prefill_mask[c, p, 0]
            assert observations.decode_mask[c, d]
            assert source == 0
            seen.add((p, d))
    assert len(seen) >= P * D if router == "random" else len(seen) >= P


def test_random_is_fair_and_seeded(observations: Observation) -> None:
    policy = make_policy("random+none")
    policy.reset(48, 1)
    draws = np.array([[decode_action(int(a))[0] for a in policy.decide(observations)[1:4]] for _ in range(4000)])
    counts = np.bincount(draws.ravel(), minlength=P)
    assert (abs(counts / draws.size - 1 / P) < 0.02).all()
    first = make_policy("random+none")
    first.reset(48, 1)
    again = make_policy("random+none")
    again.reset(48, 1)
    np.testing.assert_array_equal(first.decide(observations), again.decide(observations))


def test_nothing_up_rejects() -> None:
    trace = builtin("synthetic", seed=2, n_requests=5)
    simulator = Simulator.for_trace(load_cluster("2p2d"), trace)
    for pool in ("prefill", "decode"):
        simulator.begin(0)
        getattr(simulator.batch.state, pool)["up"][0] = 0
        simulator.observe(0)
        for router in ROUTERS:
            policy = make_policy(f"{router}+none")
            policy.reset(1, 0)
            assert policy.decide(simulator.observation_tables)[0] == 0, (pool, router)


def test_suffixes() -> None:
    """No suffix: the paper's own check of both SLOs for conductor, none for the others."""
    conductor, random = make_policy("conductor"), make_policy("random")
    assert isinstance(conductor, CompiledPolicy)
    assert isinstance(random, CompiledPolicy)
    assert conductor.admission is ADMISSIONS["slo"].callback
    assert conductor.recheck
    assert random.admission is ADMISSIONS["none"].callback
    assert not random.recheck
    for router in ROUTERS:
        for admission in ADMISSIONS:
            assert isinstance(make_policy(f"{router}+{admission}"), Policy)


def test_options() -> None:
    policy = make_policy("conductor:threshold=3,min_over_both=1+predictive:threshold=0.9")
    assert isinstance(policy, CompiledPolicy)
    assert policy.router_values.tolist() == [3.0, 1.0]
    assert policy.admission_values.tolist() == [0.9]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "no policy is called 'nonsense': expected ROUTER"),
        ("conductor+nonsense", "no admission is called 'nonsense'; there are none, own, slo"),
        ("conductor+", "no admission is called ''"),
        ("conductor:theta=2", "router 'conductor' has no option 'theta'; its options: threshold, min_over_both"),
        ("conductor:threshold=much", "expected option=number, found 'threshold=much'"),
        ("random:x=1", "router 'random' has no option 'x'; its options: none"),
        ("no_such_module:Thing", "cannot import 'no_such_module'"),
        ("json:Nothing", "module 'json' has no 'Nothing'"),
        ("json:JSONDecoder", "JSONDecoder has no decide"),
    ],
)
def test_errors_say_what_was_expected(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message.replace("(", r"\(").replace("+", r"\+")):
        make_policy(name)


def test_a_module_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished_policy.py").write_text("class Mine:\n    def decide(self")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyError, match="cannot import 'unfinished_policy': SyntaxError"):
        make_policy("unfinished_policy:Mine")


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no weights")


class Slots:
    __slots__ = ()

    def decide(self, observation: Observation) -> np.ndarray:
        return np.ones(len(observation.request), np.int64)


def test_a_users_class(observations: Observation) -> None:
    policy = make_policy("tests.policies.test_policies:Slots")
    policy.reset(48, 0)
    assert policy.name == "tests.policies.test_policies:Slots"
    assert policy.recheck
    assert (policy.decide(observations) == 1).all()
    with pytest.raises(PolicyError, match=r"Broken\(\) raised RuntimeError: no weights"):
        make_policy("tests.policies.test_policies:Broken")
    with pytest.raises(PolicyError, match="expected option=number, found 'threshold=nan'"):
        make_policy("conductor:threshold=nan")
