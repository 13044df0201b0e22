"""Off-policy estimates against what is true: in made-up bandits, and in the simulator."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import traces
from envs.metrics import Interval, Replay
from envs.simulator import Simulator, empty_observation
from envs.spec import ClusterSpec, validate_cluster
from envs.state import Observation, Source
from policies import CompiledPolicy, make_policy
from policies.off_policy import (
    FEWEST_EFFECTIVE,
    Calibration,
    Logged,
    Observed,
    agreement,
    by_replay,
    choices,
    direct,
    doubly_robust,
    model_bias,
    parts_of,
    predictions,
    takes,
    weighted,
)
from runtime.decision_log import read_log
from tests.runtime.test_decision_log import always, canary, explore, rows_of, write
from traces import Trace


def bandit(rows: int, seed: int, *, chosen: Any = None, propensity: Any = None) -> tuple[Logged, np.ndarray]:
    """Rows on 2 x 1 instances whose goodness depends on the prefill instance and a context; the context [N].

    Logged with a probability of 0.7 for the instance the context points to, unless given.
    """
    rng = np.random.default_rng(seed)
    context = rng.random(rows) < 0.5
    if chosen is None:
        points = rng.random(rows) < 0.7
        chosen = np.where(points, context, ~context).astype(np.int64)
        propensity = np.where(points, 0.7, 0.3)
    observation = empty_observation(rows, 2, 1)
    observation.request["input_tokens"][:, 0] = context
    observation.prefill["ttft_local_s"] = np.stack([np.where(context, 2.0, 0.5), np.where(context, 0.5, 2.0)], axis=1)
    observation.decode["tbt_assigned_s"] = 0.05
    observation.prefill_mask[..., 0] = 1
    observation.decode_mask[:] = 1
    predicted_s = observation.prefill["ttft_local_s"][np.arange(rows), chosen]
    ttft_s = predicted_s * rng.lognormal(0.0, 0.6, rows)
    logged = Logged(
        arrival_s=np.arange(rows, dtype=np.float64),
        action=1 + 3 * chosen,
        propensity=np.broadcast_to(propensity, rows).astype(np.float64),
        good=(ttft_s <= 1.0).astype(np.float64),
        ttft_s=ttft_s,
        tbt_s=np.full(rows, 0.04),
        ttft_slo_s=np.ones(rows),
        tbt_slo_s=np.full(rows, 0.1),
        completed=np.ones(rows, np.bool_),
        observed=(Observed(np.arange(rows), observation),),
    )
    return logged, context


GOOD = 0.5 * math.erfc(-math.log(2) / 0.6 / math.sqrt(2))
"""Probability that the better instance keeps the SLO of a bandit; of the worse one it is 1 - GOOD."""


# --- taking actions apart, and agreement -------------------------------------------------------------------------


def test_parts_of_actions() -> None:
    logged, _ = bandit(4, 0)
    parts = parts_of(logged, np.array([0, 1, 3, 4]))
    assert parts.prefill.tolist() == [-1, 0, 0, 1]
    assert parts.decode.tolist() == [-1, 0, 0, 0]
    assert parts.source.tolist() == [-1, 0, 2, 0]


def test_agreement_by_part() -> None:
    logged, _ = bandit(1000, 0)
    same = agreement(logged, logged.action)
    assert all(found.mean == 1.0 and found.high == 1.0 for found in same.values())
    other = agreement(logged, np.where(logged.action == 1, 4, 1))
    assert (other["all"].mean, other["accept"].mean, other["prefill"].mean, other["decode"].mean) == (0, 1, 0, 1)
    rejects = agreement(logged, np.zeros(1000, np.int64))
    assert (rejects["all"].mean, rejects["accept"].mean) == (0, 0) and math.isnan(rejects["prefill"].mean)
    assert takes(logged, np.zeros(1000, np.int64)).mean == 0.0


def test_choices_one_at_a_time_and_in_batches() -> None:
    logged, context = bandit(5000, 1)

    def decide(observation: Observation) -> np.ndarray:
        return 1 + 3 * observation.request["input_tokens"][:, 0].astype(np.int64)

    for batched in (True, False):
        assert np.array_equal(choices(logged, decide, batched=batched), 1 + 3 * context)


# --- weights -----------------------------------------------------------------------------------------------------


def estimates(logged: Logged, actions: np.ndarray) -> dict[str, Any]:
    calibration = Calibration.of(logged)
    assert calibration is not None
    return {"ips": weighted(logged, actions), "dr": doubly_robust(logged, actions, calibration)}


def test_known_value_is_covered() -> None:
    """95 % intervals of 30 logs: the true value is in most of them, and estimates are not biased."""
    for better, truth in ((True, GOOD), (False, 1 - GOOD)):
        found: dict[str, list[Any]] = {"ips": [], "dr": []}
        for seed in range(30):
            logged, context = bandit(1000, seed)
            for name, estimate in estimates(logged, 1 + 3 * (context if better else ~context).astype(np.int64)).items():
                found[name].append(estimate.interval)
        for intervals in found.values():
            covered = [low <= truth <= high for _, low, high in intervals]
            assert np.mean(covered) >= 0.85
            assert np.mean([mean for mean, *_ in intervals]) == pytest.approx(truth, abs=0.01)


def test_doubly_robust_is_narrower() -> None:
    logged, _ = bandit(3000, 0)
    found = estimates(logged, np.ones(3000, np.int64))
    ips, dr = found["ips"].interval, found["dr"].interval
    assert dr.high - dr.low < ips.high - ips.low


def test_rejecting_is_known_without_support() -> None:
    logged, _ = bandit(500, 0, chosen=np.zeros(500, np.int64), propensity=1.0)
    for estimate in estimates(logged, np.zeros(500, np.int64)).values():
        assert estimate.interval.mean == 0.0
        assert estimate.interval.high < 0.01


def test_no_support_under_a_deterministic_log() -> None:
    logged, context = bandit(500, 0, chosen=np.zeros(500, np.int64), propensity=1.0)
    for estimate in estimates(logged, 1 + 3 * context.astype(np.int64)).values():
        assert estimate.interval is None
        assert estimate.why_not.startswith("no support: the log never takes the policy's choice on")
        assert estimate.unsupported == pytest.approx(context.mean())


def test_a_little_without_support_widens_the_interval() -> None:
    logged, _ = bandit(2000, 0, chosen=np.zeros(2000, np.int64), propensity=1.0)
    same, other = logged.action, logged.action.copy()
    other[::50] = 4
    narrow, wide = (weighted(logged, actions) for actions in (same, other))
    assert wide.unsupported == pytest.approx(0.02)
    assert narrow.interval is not None and wide.interval is not None
    assert wide.interval.high - wide.interval.low >= narrow.interval.high - narrow.interval.low + 0.019


def test_too_few_effective_requests() -> None:
    logged, context = bandit(60, 0)
    estimate = weighted(logged, 1 + 3 * (~context).astype(np.int64))
    assert estimate.interval is None and estimate.effective < FEWEST_EFFECTIVE
    assert "effective sample size" in estimate.why_not


def test_weights_that_do_not_average_one() -> None:
    """Propensities say that other actions were possible; the policy's never were."""
    logged, _ = bandit(2000, 0, chosen=np.zeros(2000, np.int64), propensity=0.5)
    actions = np.where(np.arange(2000) % 5 == 0, 1, 4)
    estimate = weighted(logged, actions)
    assert estimate.interval is None and "weights average 0.40" in estimate.why_not


def test_rows_without_outcome_or_observation() -> None:
    logged, context = bandit(1000, 0)
    logged.good[::4] = np.nan
    (group,) = logged.observed
    kept = np.arange(500, 1000)
    half = Logged(
        **{name: getattr(logged, name) for name in logged.__dataclass_fields__ if name != "observed"},
        observed=(Observed(kept, Observation(*(table[kept] for table in group.observation))),),
    )
    decide = choices(half, lambda seen: np.full(len(seen.request), 1), batched=True)
    assert (decide[:500] == -1).all() and (decide[500:] == 1).all()
    found = estimates(half, decide)
    assert found["ips"].interval is not None
    assert found["ips"].effective < 500 * 0.75
    nothing = logged.tail(1000)
    assert weighted(nothing, np.zeros(0, np.int64)).why_not.startswith("no support")
    assert Calibration.of(nothing) is None
    later = half.tail(600)
    assert np.array_equal(later.observed[0].rows, np.arange(400))
    assert np.array_equal(later.action, logged.action[600:]) and len(context) == 1000


# --- the direct method -------------------------------------------------------------------------------------------


def straight(logged: Logged, actions: np.ndarray) -> Interval:
    calibration = Calibration.of(logged)
    assert calibration is not None
    found = direct(logged, actions, calibration).interval
    assert found is not None and found.low <= found.mean <= found.high
    return found


def test_predictions_are_those_of_the_choice() -> None:
    logged, context = bandit(200, 3)
    ttft_s, tbt_s = predictions(logged, 1 + 3 * context.astype(np.int64))
    assert (ttft_s == 0.5).all() and (tbt_s == 0.05).all()
    assert np.isnan(predictions(logged, np.zeros(200, np.int64))[0]).all()


def test_direct_corrects_by_measured_errors() -> None:
    for better, truth in ((True, GOOD), (False, 1 - GOOD)):
        found = []
        for seed in range(15):
            logged, context = bandit(4000, seed)
            actions = 1 + 3 * (context if better else ~context).astype(np.int64)
            found.append(straight(logged, actions))
        assert np.mean([low <= truth <= high for _, low, high in found]) >= 0.8
        assert np.mean([mean for mean, *_ in found]) == pytest.approx(truth, abs=0.01)


def test_direct_says_when_choices_hardly_agree() -> None:
    logged, context = bandit(500, 0, chosen=np.zeros(500, np.int64), propensity=1.0)
    calibration = Calibration.of(logged)
    assert calibration is not None
    same, other = (direct(logged, np.full(500, action), calibration) for action in (1, 4))
    assert same.why_not == "" and same.effective == 500
    assert "hardly agree" in other.why_not and other.interval is not None
    assert len(context) == 500


def test_direct_counts_requests_that_did_not_complete() -> None:
    logged, _ = bandit(2000, 0)
    logged.completed[::2] = False
    logged.good[::2] = 0.0
    assert straight(logged, logged.action).high < 0.55


def test_beyond_what_was_logged() -> None:
    logged, context = bandit(500, 0)
    (group,) = logged.observed
    calibration = Calibration.of(logged)
    assert calibration is not None
    group.observation.prefill["ttft_local_s"][:100] *= 100
    assert calibration.beyond(logged, 1 + 3 * context.astype(np.int64)) == pytest.approx(0.2)


# --- in the simulator --------------------------------------------------------------------------------------------


def uneven(ttft_s: float = 4.0) -> ClusterSpec:
    """Two prefill instances, one of them four times as slow: who goes there matters even where nobody waits."""
    fast = {"count": 1, "hardware": "a800x8-llama2-70b"}
    slow = {**fast, "times": {"base_s": 0.2, "linear_s": 4.4e-4, "quadratic_s": 3e-9}}
    fields = {"prefill": [fast, slow], "decode": [{**fast, "count": 2}], "slo": {"ttft_s": ttft_s, "tbt_s": 0.2}}
    return validate_cluster(fields, "uneven")


@pytest.fixture(scope="module")
def calm() -> Trace:
    """So few requests that none waits for another; what is reusable is still shared."""
    return traces.builtin("conversation", n_requests=1500).jitter(0).speed_up(0.002)


def logged_by(choose: Any, trace: Trace, folder: Path, spec: ClusterSpec) -> Logged:
    write(folder, rows_of(trace, spec, choose)[0], spec)
    return read_log(folder).logged


def goodput(name: str, trace: Trace, spec: ClusterSpec) -> float:
    return float(replay_of(name, trace, spec).good.mean())


def replay_of(name: str, trace: Trace, spec: ClusterSpec) -> Replay:
    policy = make_policy(name)
    assert isinstance(policy, CompiledPolicy)
    simulator = Simulator.for_trace(spec, trace)
    policy.reset(1, 0)
    simulator.begin(0, recheck=None)
    policy.replay(simulator)
    outcomes = simulator.outcomes(0).copy()
    return Replay(trace.arrival_s, trace.input_tokens, trace.output_tokens, outcomes, spec.block_tokens)


def actions_of(name: str, logged: Logged) -> np.ndarray:
    policy = make_policy(name)
    policy.reset(1, 0)
    return choices(logged, policy.decide, batched=False)


@pytest.mark.parametrize("name", ["conductor", "round_robin", "random", "power_of_two+predictive"])
def test_the_logging_policy_agrees_with_itself(name: str, tmp_path: Path) -> None:
    """Those that remember or draw too: one row after the other, as they were decided."""
    trace = traces.builtin("conversation", n_requests=400)
    spec = uneven()
    logged = logged_by(always(name), trace, tmp_path, spec)
    actions = actions_of(name, logged)
    assert np.array_equal(actions, logged.action)
    true = float(logged.good.mean())
    assert true == pytest.approx(goodput(name, trace, spec))
    for estimate in estimates(logged, actions).values():
        assert estimate.interval is not None
        assert estimate.interval.mean == pytest.approx(true)
        assert estimate.interval.low <= true <= estimate.interval.high
    assert straight(logged, actions).mean == pytest.approx(true)


@pytest.mark.parametrize("name", ["load_balancing", "cache_aware", "cache_aware+baseline"])
def test_exploration_covers_the_true_goodput_where_requests_do_not_meet(name: str, calm: Trace, tmp_path: Path) -> None:
    """Nobody queues, so one-step estimates are of the thing itself, but for what is cached where."""
    spec = uneven()
    logged = logged_by(explore("random", 0.9, 0), calm, tmp_path, spec)
    assert (logged.propensity < 1).all()
    true = goodput(name, calm, spec)
    assert abs(true - logged.good.mean()) > 0.1, "the policies differ by more than the estimates' error"
    actions = actions_of(name, logged)
    for estimate in estimates(logged, actions).values():
        assert estimate.interval is not None, estimate.why_not
        assert estimate.interval.low <= true <= estimate.interval.high


def test_a_canary_has_its_own_goodput_estimated(calm: Trace, tmp_path: Path) -> None:
    spec = uneven()
    logged = logged_by(canary("random", "cache_aware", 0.2, 1), calm, tmp_path, spec)
    true = goodput("cache_aware", calm, spec)
    found = estimates(logged, actions_of("cache_aware", logged))
    for estimate in found.values():
        assert estimate.interval is not None, estimate.why_not
        assert estimate.interval.low <= true <= estimate.interval.high


def test_one_step_truth_under_load(tmp_path: Path) -> None:
    """Where requests do meet, what is estimated is what another choice for one request makes of that request.

    That truth is had by forking: each request in turn is decided by the candidate, all others as logged."""
    spec = uneven(8.0)
    trace = traces.builtin("conversation", n_requests=500).speed_up(0.8)
    choose = explore("load_balancing", 0.8, 3)
    candidate = make_policy("cache_aware")
    candidate.reset(1, 0)
    simulator = Simulator.for_trace(spec, trace, clusters=2)
    simulator.begin(0)
    folder = tmp_path / "log"
    rows, _ = rows_of(trace, spec, choose)
    write(folder, rows, spec)
    logged = read_log(folder).logged
    go = partial(_carry_out, simulator)
    true = []
    for i in range(trace.n_requests):
        assert simulator.observe(0)
        action = int(candidate.decide(Observation(*(table[:1] for table in simulator.observation_tables)))[0])
        simulator.fork(0, 1)
        go(1, action)
        for later in rows[i + 1 : i + 60]:
            if not simulator.observe(1) or simulator.outcomes(1)["status"][i]:
                break
            go(1, later.action)
        while simulator.outcomes(1)["status"][i] == 0 and simulator.observe(1):
            go(1, 0)
        true.append(int(simulator.outcomes(1)["good"][i]))
        go(0, rows[i].action)
    actions = actions_of("cache_aware", logged)
    for estimate in estimates(logged, actions).values():
        assert estimate.interval is not None, estimate.why_not
        assert estimate.interval.low <= np.mean(true) <= estimate.interval.high


def _carry_out(simulator: Simulator, cluster: int, action: int) -> None:
    pair, source = divmod(action - 1, 3)
    prefill, decode = divmod(pair, simulator.decodes) if action else (-1, -1)
    simulator.decide(cluster, prefill, decode, Source(source) if action else Source.LOCAL)


# --- replay ------------------------------------------------------------------------------------------------------


def test_the_model_has_no_bias_on_its_own_log(calm: Trace, tmp_path: Path) -> None:
    spec, trace = uneven(), calm
    logged = logged_by(always("cache_aware"), trace, tmp_path, spec)
    base, other = replay_of("cache_aware", trace, spec), replay_of("random", trace, spec)
    bias = model_bias(logged, [base])
    assert tuple(bias["bias"]) == (0.0, 0.0, 0.0)
    assert bias["ttft_simulated_s"] == pytest.approx(bias["ttft_logged_s"])
    found = by_replay(logged, [other], [base])
    true = float(other.good.mean())
    assert found["goodput"] is not None and found["goodput"].mean == pytest.approx(true)
    assert found["corrected"] is not None and found["corrected"].mean == pytest.approx(true)
    assert found["difference"] is not None and found["difference"].high < 0


def test_a_model_that_is_wrong_says_so_and_is_corrected(calm: Trace, tmp_path: Path) -> None:
    """Logged on a cluster with a tighter SLO than the model's."""
    trace = calm
    real, model = uneven(3.0), uneven(5.0)
    logged = logged_by(always("cache_aware"), trace, tmp_path, real)
    base, other = (replay_of(name, trace, model) for name in ("cache_aware", "random"))
    assert model_bias(logged, [base])["bias"].low > 0
    true = goodput("random", trace, real)
    found = by_replay(logged, [other], [base])
    assert found["corrected"] is not None and found["goodput"] is not None
    assert abs(found["corrected"].mean - true) < abs(found["goodput"].mean - true)
