"""Every peer's cost function against its formula in NumPy, on random observations with ties and instances down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from envs.simulator import empty_observation
from envs.state import Observation
from policies import ROUTERS, CompiledPolicy, PolicyError, make_policy

C, P, D = 400, 5, 4
PEERS = (
    *("llmd", "llmd_latency", "prefix_affinity", "aibrix", "aibrix_prefix", "smg", "vllm_router", "production_stack"),
    *("lmetric", "dynamo"),
)
RANDOM_TIES = ("llmd", "llmd_latency", "prefix_affinity", "aibrix", "aibrix_prefix", "smg")


@pytest.fixture(scope="module")
def observations() -> Observation:
    """Random, and coarse enough that equal costs are common; loads from idle to far out of balance."""
    rng = np.random.default_rng(7)
    made = empty_observation(C, P, D)
    n = 1024 * rng.integers(1, 60, C)
    made.request["input_tokens"][:, 0] = n
    made.request["ttft_slo_s"] = 10.0
    made.request["tbt_slo_s"] = 0.1
    scale = rng.choice([1, 3, 20, 90], (C, 1))
    pre, dec = made.prefill, made.decode
    queued = rng.integers(0, scale + 1, (C, P))
    running = (queued > 0) | (rng.random((C, P)) < 0.5)
    pre["queue_requests"] = queued
    pre["queue_s"] = running * (queued + 1) * rng.choice([0.25, 0.5, 2.0], (C, P))
    share = rng.choice([0, 0, 0.25, 0.5, 0.875, 1 - 1 / 1024], (C, P))
    pre["local_tokens"] = np.floor(n[:, None] * share)
    pre["device_tokens"] = np.floor(pre["local_tokens"] * rng.choice([0, 0.5, 1.0], (C, P)))
    pre["ttft_local_s"] = pre["queue_s"] + (n[:, None] - pre["local_tokens"]) * 2.0**-13
    made.cluster["expected_output_tokens"] = 256.0
    dec["batch"] = rng.integers(0, 2 * scale + 1, (C, D))
    even = rng.random(C) < 0.2  # as many everywhere, but in other stages
    dec["batch"][even] = rng.integers(0, 200, (even.sum(), D))
    dec["kv_tokens"] = dec["batch"] * rng.choice([512, 4096], (C, D))
    dec["pending_requests"] = rng.integers(0, scale + 1, (C, D))
    dec["pending_requests"][even] = 200 - dec["batch"][even]
    dec["waiting_requests"] = rng.integers(0, dec["pending_requests"].astype(int) + 1)
    dec["pending_tokens"] = dec["pending_requests"] * 2048
    capacity = np.maximum(rng.choice([200_000, 800_000], (C, D)), dec["kv_tokens"] * rng.choice([1.0, 1.05, 2], (C, D)))
    assigned = dec["batch"] + dec["pending_requests"]
    dec["free_tokens"] = capacity - dec["kv_tokens"] - dec["pending_tokens"] - 256 * assigned
    dec["tbt_now_s"] = 0.02 + 2.0**-12 * dec["batch"]
    dec["tbt_assigned_s"] = 0.02 + 2.0**-10 * assigned
    up = rng.random((C, P)) < 0.9
    made.prefill_mask[:, :, 0] = up
    made.prefill_mask[:, :, 1:] = up[:, :, None] & (rng.random((C, P, 2)) < 0.5)
    made.decode_mask[:] = rng.random((C, D)) < 0.9
    made.prefill_mask[0] = 0
    made.decode_mask[1] = 0
    for cluster in range(2, C):
        if not made.prefill_mask[cluster, :, 0].any():
            made.prefill_mask[cluster, 0, 0] = 1
        if not made.decode_mask[cluster].any():
            made.decode_mask[cluster, 0] = 1
    return made


class Plain:
    """One observation, only what is up: NumPy columns under the names of the formulas."""

    def __init__(self, o: Observation, c: int) -> None:
        self.ps = np.flatnonzero(o.prefill_mask[c, :, 0])
        self.ds = np.flatnonzero(o.decode_mask[c])
        pre, dec = o.prefill[c, self.ps], o.decode[c, self.ds]
        self.pre, self.dec = pre, dec
        self.n = o.request["input_tokens"][c, 0]
        self.ttft_slo_s, self.tbt_slo_s = o.request["ttft_slo_s"][c, 0], o.request["tbt_slo_s"][c, 0]
        self.match, self.device = pre["local_tokens"], pre["device_tokens"]
        self.requests = pre["queue_requests"] + (pre["queue_s"] > 0)
        self.assigned = dec["batch"] + dec["pending_requests"]
        output = o.cluster["expected_output_tokens"][c, 0]
        capacity = dec["free_tokens"] + dec["kv_tokens"] + dec["pending_tokens"] + self.assigned * output
        self.usage = dec["kv_tokens"] / capacity
        self.throughput = dec["batch"] / dec["tbt_now_s"]


Costs = tuple[np.ndarray, np.ndarray]


def min_max(x: np.ndarray) -> np.ndarray:
    return (x.max() - x) / (x.max() - x.min()) if x.max() > x.min() else np.ones(len(x))


def plain_llmd(o: Plain, prefix: float = 3, length_weight: float = 0) -> Costs:
    match = length_weight * np.minimum(1, o.match / 8192) ** 2 + (1 - length_weight) * o.match / o.n
    return (
        -(prefix * match + 2 * min_max(o.pre["queue_requests"])),
        -(2 * min_max(o.dec["waiting_requests"]) + 2 * (1 - o.usage)),
    )


def headroom_cost(headroom: np.ndarray, idle: np.ndarray, most: bool) -> np.ndarray:
    group = np.where(headroom >= 0, 0, np.where(idle, 1, 2))
    chosen = group == group.min()
    size = np.abs(headroom)
    low, high = size[chosen].min(), size[chosen].max()
    share = (size - low) / (high - low) if high - low > 1e-9 else np.full(len(size), 0.5)
    share = share if most and group.min() == 0 else 1 - share
    return np.where(chosen, -(np.trunc(share * 100) + 1), np.inf)


def plain_llmd_latency(o: Plain, most: bool = False) -> Costs:
    return (
        headroom_cost(o.ttft_slo_s - o.pre["ttft_local_s"], o.requests == 0, most),
        headroom_cost(o.tbt_slo_s - o.dec["tbt_assigned_s"], o.assigned == 0, most),
    )


def plain_prefix_affinity(o: Plain, penalty: float = 18) -> Costs:
    sticky = o.match / o.n >= 0.8
    queue = o.pre["queue_s"]
    if sticky.any() and not sticky.all() and penalty and queue[sticky].min() - queue[~sticky].min() > penalty:
        sticky[:] = False
    if not sticky.any():
        sticky[:] = True
    cost = np.minimum(1, (queue * 15928 + o.n - o.match) / 4194304)
    return np.where(sticky, cost, np.inf), o.assigned


def prefill_ms(tokens: np.ndarray) -> np.ndarray:
    return np.where(tokens > 0, 0.001 * tokens**1.5 + 5, 0)


def gated(o: Plain, prefill: np.ndarray, decode: np.ndarray) -> Costs:
    prefill = np.where(o.requests > o.requests.mean() + o.requests.std(), np.inf, prefill)
    if np.ptp(o.requests) > 16:
        prefill = o.requests
    if max(1, o.assigned.max()) - o.assigned.min() >= 16:
        decode = o.assigned
    elif max(1, o.throughput.max()) - o.throughput.min() > 2048:
        decode = o.throughput
    return prefill, decode


def plain_aibrix(o: Plain) -> Costs:
    matched = np.where(o.match > 0, 0.005 * o.match + 1, 0)
    ttft = o.requests * prefill_ms(np.array(512.0)) + matched + prefill_ms(o.n - o.match)
    each = np.where(o.throughput > 0, 1000 / np.maximum(o.throughput, 1e-300), 20)
    tbt = each * (1 + 1 / np.maximum(o.assigned, 1)) * np.where(1 - o.usage < 0.1, 1.5, 1)
    return gated(o, ttft, tbt)


def plain_aibrix_prefix(o: Plain) -> Costs:
    prefill = (100 - 100 * o.match / o.n) * 0.1 + o.requests / max(1, o.requests.max())
    free = np.maximum(0.1, 100 * (1 - o.usage))
    load = o.assigned / max(1, o.assigned.max()) + 1 - o.throughput / max(1, o.throughput.max())
    return gated(o, prefill, load / (free / max(1, free.max())))


def plain_smg(o: Plain) -> Costs:
    low, high = o.requests.min(), o.requests.max()
    prefill = o.pre["queue_s"]
    if not (high - low > 64 and high > 1.5 * low) and o.match.max() / o.n > 0.3:
        prefill = np.where(o.match == o.match.max(), prefill, np.inf)
    k = np.minimum(o.usage, 0.999)
    seconds = o.dec["pending_tokens"] / np.where(o.throughput > 0, o.throughput, 2000)
    return prefill, seconds + 0.15 * k / (1 - k)


def plain_production_stack(o: Plain, beta: float = 1) -> Costs:
    relative = (o.requests - o.requests.mean()) / max(1, o.requests.mean())
    return -(o.match / o.n - beta * relative), o.assigned


def plain_lmetric(o: Plain) -> Costs:
    tokens = o.dec["kv_tokens"] + o.dec["pending_tokens"] + o.n
    return (o.n - o.match) * (o.requests + 1), tokens * (o.assigned + 1)


def plain_dynamo(o: Plain) -> Costs:
    credit = o.device + 0.75 * (o.match - o.device)
    prefill = np.maximum(0, (o.n + o.pre["queue_s"] * 9000 - credit) / 512)
    return prefill, o.dec["kv_tokens"] + o.dec["pending_tokens"]


FORMULAS: dict[str, Callable[[Plain], Costs]] = {
    "llmd": plain_llmd,
    "llmd:prefix=1,length_weight=0.5": lambda o: plain_llmd(o, 1, 0.5),
    "llmd_latency": plain_llmd_latency,
    "llmd_latency:most=1": lambda o: plain_llmd_latency(o, True),
    "prefix_affinity": plain_prefix_affinity,
    "prefix_affinity:penalty_s=0": lambda o: plain_prefix_affinity(o, 0),
    "aibrix": plain_aibrix,
    "aibrix_prefix": plain_aibrix_prefix,
    "smg": plain_smg,
    "production_stack": plain_production_stack,
    "production_stack:beta=0.25": lambda o: plain_production_stack(o, 0.25),
    "lmetric": plain_lmetric,
    "dynamo": plain_dynamo,
}


def least(cost: np.ndarray) -> np.ndarray:
    """Which costs are the least, but for rounding."""
    return cost <= cost.min() + 1e-9 * max(1.0, abs(float(cost.min())))


def decisions(name: str, observations: Observation, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    policy = make_policy(f"{name}+none")
    policy.reset(C, seed)
    actions = policy.decide(observations)
    assert (actions[:2] == 0).all()  # a pool is down: rejected
    assert (actions[2:] > 0).all()
    pair, source = np.divmod(actions - 1, 3)
    assert (source[2:] == 0).all()
    return np.divmod(pair, D)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_least_cost_is_chosen(name: str, observations: Observation) -> None:
    p, d = decisions(name, observations)
    seen = set()
    for c in range(2, C):
        plain = Plain(observations, c)
        prefill, decode = FORMULAS[name](plain)
        assert p[c] in plain.ps[least(prefill)], (c, prefill)
        assert d[c] in plain.ds[least(decode)], (c, decode)
        seen.add((p[c], d[c]))
    assert len(seen) == P * D


@pytest.mark.parametrize("name", RANDOM_TIES)
def test_equals_are_drawn(name: str, observations: Observation) -> None:
    """Each of equal costs comes, about as often; the same seed decides the same."""
    draws = [decisions(name, observations, seed)[0] for seed in range(60)]
    np.testing.assert_array_equal(draws[3], decisions(name, observations, 3)[0])
    counted = np.zeros(2)
    for c in range(2, C):
        plain = Plain(observations, c)
        tied = plain.ps[least(FORMULAS[name](plain)[0])]
        chosen = {int(draw[c]) for draw in draws}
        assert chosen <= set(tied.tolist())
        if len(tied) == 2:
            counted += [(np.array([draw[c] for draw in draws]) == k).sum() for k in tied]
    assert counted.sum() > 300, "no ties to draw among"
    assert counted[0] / counted.sum() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(counted.sum()))


@pytest.mark.parametrize("name", ["production_stack", "lmetric", "dynamo"])
def test_equals_go_to_the_lower_index(name: str, observations: Observation) -> None:
    p, d = decisions(name, observations)
    for c in range(2, C):
        plain = Plain(observations, c)
        prefill, decode = FORMULAS[name](plain)
        if (least(prefill) == (prefill == prefill.min())).all():
            assert p[c] == plain.ps[np.argmin(prefill)]
        assert d[c] == plain.ds[np.argmin(decode)]


@pytest.mark.parametrize("host", [0.8, 0.0])
def test_vllm_router(host: float, observations: Observation) -> None:
    name = "vllm_router" if host == 0.8 else f"vllm_router:host_credit={host}"
    p, _ = decisions(name, observations)
    picked = np.array([decisions(name, observations, seed)[1] for seed in range(40)])
    without = 0
    for c in range(2, C):
        plain = Plain(observations, c)
        credit = plain.device + host * (plain.match - plain.device)
        best = least(-credit)
        without += credit.max() == 0
        assert p[c] in plain.ps[best][least(plain.requests[best])]
        chosen = set(picked[:, c].tolist())
        assert chosen <= set(plain.ds.tolist())
        worst = plain.ds[plain.assigned == plain.assigned.max()]
        if len(worst) == 1 and len(plain.ds) > 1:
            assert worst[0] not in chosen  # of two different ones it never has fewer
    assert 0 < without < C // 2


def test_power_of_two_draws_pairs_evenly(observations: Observation) -> None:
    """With four decodes of different load, the least comes in 3 of the 6 pairs, the next in 2, the next in 1."""
    c = next(
        c
        for c in range(2, C)
        if observations.decode_mask[c].all() and len(np.unique(Plain(observations, c).assigned)) == D
    )
    order = np.argsort(Plain(observations, c).assigned)
    chosen = np.array([decisions("vllm_router", observations, seed)[1][c] for seed in range(600)])
    counts = np.array([(chosen == d).sum() for d in order]) / 600
    np.testing.assert_allclose(counts, [3 / 6, 2 / 6, 1 / 6, 0], atol=0.08)


def test_gates_matter(observations: Observation) -> None:
    """The observations reach every branch: gates open and shut, matches above and below thresholds."""
    plain = [Plain(observations, c) for c in range(2, C)]
    spread = np.array([np.ptp(o.requests) for o in plain])
    assert 30 < (spread > 16).sum() < C - 30
    slow = np.array([np.ptp(o.assigned) < 16 and np.ptp(o.throughput) > 2048 for o in plain])
    assert 5 < slow.sum() < C - 5
    out = np.array(
        [o.requests.max() - o.requests.min() > 64 and o.requests.max() > 1.5 * o.requests.min() for o in plain]
    )
    assert 5 < out.sum() < C - 5
    longest = np.array([o.match.max() / o.n for o in plain])
    assert 10 < (longest > 0.3).sum() < C - 10
    positive = np.array([(o.ttft_slo_s >= o.pre["ttft_local_s"]).any() for o in plain])
    assert 10 < positive.sum() < C - 10
    assert 5 < sum((o.usage > 0.9).any() for o in plain) < C - 5


def test_options_and_names() -> None:
    assert set(PEERS) < set(ROUTERS)
    for name in PEERS:
        policy = make_policy(name)
        assert isinstance(policy, CompiledPolicy)
        assert len(policy.router_values) == len(ROUTERS[name].options)
        assert not policy.recheck
    policy = make_policy("smg:balance_abs=8,cache_threshold=0.5+early")
    assert isinstance(policy, CompiledPolicy)
    assert policy.router_values.tolist() == [0.5, 8.0, 1.5, 0.15, 2000.0]
    with pytest.raises(PolicyError, match="router 'aibrix' has no option 'gamma'; its options: spread, sigma"):
        make_policy("aibrix:gamma=1")
