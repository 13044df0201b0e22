"""Scores, intervals and searches, on outcomes made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from envs import metrics
from envs.metrics import Replay
from envs.state import OUTCOME, Status


def replay_of(rows: list[dict[str, float]], block_tokens: int = 512) -> Replay:
    """Requests one second apart, 1000 tokens in and 10 out unless a row says otherwise."""
    outcomes = np.zeros(len(rows), OUTCOME)
    for name in OUTCOME.names or ():
        if name.endswith("_s"):
            outcomes[name] = np.nan
    outputs = np.full(len(rows), 10, np.int32)
    for i, row in enumerate(rows):
        for key, value in row.items():
            if key == "output_tokens":
                outputs[i] = int(value)
            else:
                outcomes[key][i] = value
    arrival_s = np.arange(len(rows), dtype=np.float64)
    inputs = np.full(len(rows), 1000, np.int32)
    return Replay(arrival_s, inputs, outputs, outcomes, block_tokens)


SERVED: dict[str, float] = {
    "status": Status.COMPLETED,
    "prefill_end_s": 1.0,
    "prefill_s": 1.0,
    "tbt_s": 0.05,
}
FIVE: list[dict[str, float]] = [
    {**SERVED, "good": 1, "ttft_s": 1.0, "finish_s": 10.0, "reused_tokens": 600},
    {**SERVED, "good": 0, "ttft_s": 3.0, "finish_s": 31.0, "tbt_s": 0.5},
    {**SERVED, "good": 1, "ttft_s": 2.0, "finish_s": 4.0, "tbt_s": 0.0, "output_tokens": 1},
    {"status": Status.REJECTED_AT_ARRIVAL},
    {"status": Status.REJECTED_AT_DECODE, "prefill_end_s": 9.0, "prefill_s": 2.5, "ttft_s": 99.0},
]


def test_counts_add_up() -> None:
    found = metrics.counts(replay_of(FIVE))
    assert found == {
        "offered": 5,
        "completed": 3,
        "good": 2,
        "violated": 1,
        "rejected_at_arrival": 1,
        "rejected_at_decode": 1,
        "wasted_prefill_s": 2.5,
    }


def test_open_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="not drained"):
        metrics.counts(replay_of([{"status": Status.OPEN}]))


def test_score_counts_only_what_was_served() -> None:
    row = metrics.score([replay_of(FIVE)])
    assert row["goodput"] == 0.4
    assert row["ttft_mean_s"] == 2.0  # the rejected one's 99 s are nobody's TTFT
    assert row["tbt_mean_s"] == pytest.approx((0.05 + 0.5) / 2)  # one token has no interval
    assert row["e2e_p50_s"] == 10.0  # 10, 30, 2
    assert row["prefill_mean_s"] == pytest.approx((1 + 1 + 1 + 2.5) / 4)
    assert row["hit_rate"] == 600 / 4000


def test_nothing_served_is_nan_not_an_error() -> None:
    row = metrics.score([replay_of([{"status": Status.REJECTED_AT_ARRIVAL}] * 3)])
    assert row["goodput"] == 0.0
    assert math.isnan(row["ttft_p90_s"]) and math.isnan(row["hit_rate"])
    assert 0.3 < row["goodput_high"] < 1.0


def test_hit_rate_by_tier_adds_up() -> None:
    rows: list[dict[str, float]] = [
        {**SERVED, "reused_tokens": 900, "device_tokens": 300, "fetched_blocks": 1},
        {**SERVED, "reused_tokens": 100, "device_tokens": 100, "fetched_blocks": 3},
    ]
    row = metrics.score([replay_of(rows)])
    assert row["hit_rate_device"] == 400 / 2000
    assert row["hit_rate_fetched"] == 512 / 2000
    assert row["hit_rate_host"] == pytest.approx(88 / 2000)
    assert row["hit_rate"] == 0.5


def test_violations_are_split_by_the_slo_missed_first() -> None:
    both = {**SERVED, "ttft_s": 31.0, "finish_s": 40.0, "tbt_s": 0.5}
    late = {**both, "tbt_s": 0.05}
    # FIVE has one that is within the TTFT and not the TBT
    replays = [replay_of([*FIVE, both, late]), replay_of([*FIVE, FIVE[0], FIVE[2]])]
    found = metrics.violations(replays, ttft_slo_s=30.0, tbt_slo_s=0.1)
    assert found == {"violated_ttft": 1.0, "violated_tbt": 1.0}
    row = metrics.score(replays)
    assert row["violated"] == found["violated_ttft"] + found["violated_tbt"]
    with pytest.raises(ValueError, match="within TTFT 30 s and TBT 1 s"):
        metrics.violations([replay_of(FIVE)], ttft_slo_s=30.0, tbt_slo_s=1.0)


def test_quantiles_are_the_distribution_of_what_was_served() -> None:
    row = metrics.score([replay_of(FIVE)])
    assert len(row["ttft_quantiles_s"]) == metrics.QUANTILES
    assert row["ttft_quantiles_s"] == sorted(row["ttft_quantiles_s"])
    assert (row["ttft_quantiles_s"][0], row["ttft_quantiles_s"][-1]) == (1.0, 3.0)  # not the rejected one's 99 s
    assert row["tbt_quantiles_s"][0] == 0.05  # one token has no interval
    nothing = metrics.score([replay_of([{"status": Status.REJECTED_AT_ARRIVAL}])])
    assert nothing["ttft_quantiles_s"] == []


def test_counts_are_means_over_seeds() -> None:
    better = [dict(FIVE[0])] * 5
    row = metrics.score([replay_of(FIVE), replay_of(better)], seeds=(0, 7))
    assert row["completed"] == 4.0 and row["offered"] == 5.0
    assert row["goodput"] == pytest.approx(0.7)
    assert [run["seed"] for run in row["runs"]] == [0, 7]


# --- intervals -----------------------------------------------------------------------------------


def correlated(rng: np.random.Generator, requests: int, mean: float, stretch: int) -> np.ndarray:
    """0/1 values [1, requests] that stay as they are for `stretch` requests on average."""
    fresh = rng.random(requests) < 1 / stretch
    fresh[0] = True
    drawn = rng.random(requests) < mean
    return drawn[np.maximum.accumulate(np.where(fresh, np.arange(requests), 0))][None].astype(int)


@pytest.mark.parametrize("stretch", [1, 20])
def test_interval_covers_the_truth_nineteen_times_of_twenty(stretch: int) -> None:
    rng = np.random.default_rng(1)
    blocks = metrics.time_blocks(np.arange(2000) / 2.0)  # 1000 s
    hits = 0
    for _ in range(150):
        found = metrics.interval(correlated(rng, 2000, 0.8, stretch), blocks)
        hits += found.low <= 0.8 <= found.high
    assert hits >= 0.88 * 150


def test_correlated_requests_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    blocks = metrics.time_blocks(np.arange(2000) / 2.0)
    apart = metrics.interval(correlated(rng, 2000, 0.8, 1), blocks)
    together = metrics.interval(correlated(rng, 2000, 0.8, 40), blocks)
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_seeds_that_disagree_widen_the_interval() -> None:
    good = np.stack([np.arange(1000) % 10 < k for k in (9, 9, 9)]).astype(int)
    differing = np.stack([np.arange(1000) % 10 < k for k in (7, 9, 9)]).astype(int)
    blocks = metrics.time_blocks(np.arange(1000.0))
    alike, apart = metrics.interval(good, blocks), metrics.interval(differing, blocks)
    assert apart.high - apart.low > 2 * (alike.high - alike.low)


def test_intervals_stay_within_zero_and_one() -> None:
    good = (np.arange(500) > 3)[None].astype(int)
    found = metrics.interval(good, metrics.time_blocks(np.arange(500.0)))
    assert 0 <= found.low < found.mean < found.high <= 1


def test_all_good_has_a_lower_bound_all_the_same() -> None:
    found = metrics.interval(np.ones((1, 400), int), metrics.time_blocks(np.arange(400.0)))
    assert found.mean == found.high == 1.0
    assert 0.98 < found.low < 1.0


def test_one_instant_gives_wilson_and_no_winner() -> None:
    good = (np.arange(100) < 80)[None].astype(int)
    blocks = metrics.time_blocks(np.zeros(100))
    assert metrics.interval(good, blocks).low == pytest.approx(0.711, abs=1e-3)
    found = metrics.difference(good, 1 - good, blocks)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_pairing_sees_a_difference_that_intervals_hide() -> None:
    rng = np.random.default_rng(3)
    theirs = correlated(rng, 2000, 0.7, 40)
    ours = theirs | (rng.random(theirs.shape) < 0.1)
    blocks = metrics.time_blocks(np.arange(2000) / 2.0)
    a, b = metrics.interval(ours, blocks), metrics.interval(theirs, blocks)
    assert a.low < b.high
    assert metrics.difference(ours, theirs, blocks).low > 0


def test_a_policy_does_not_differ_from_itself() -> None:
    good = correlated(np.random.default_rng(4), 500, 0.5, 5)
    blocks = metrics.time_blocks(np.arange(500.0))
    assert metrics.difference(good, good, blocks) == (0.0, 0.0, 0.0)


def test_blocks_are_a_minute_but_never_fewer_than_ten() -> None:
    assert metrics.time_blocks(np.linspace(0, 3600, 100)).block_s == 60.0
    assert metrics.time_blocks(np.linspace(0, 100, 100)).block_s == 10.0
    assert metrics.time_blocks(np.linspace(0, 36000, 100)).block_s == 180.0
    blocks = metrics.time_blocks(np.linspace(5, 105, 100))
    assert (blocks.bin_of.min(), blocks.bin_of.max(), blocks.bins) == (0, 59, 60)


@pytest.mark.parametrize(("freedom", "expected"), [(5, 2.5706), (9, 2.2622), (59, 2.0010)])
def test_student_t(freedom: float, expected: float) -> None:
    assert metrics._student_t(freedom) == pytest.approx(expected, rel=3e-3)


# --- the highest load ------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.02, 0.3, 0.99, 1.0, 1.7, 13.0, 63.0])
def test_highest_load_is_found_from_below(capacity: float) -> None:
    def attainment(loads: Sequence[float]) -> list[float]:
        return [0.95 if load <= capacity else 0.5 for load in loads]

    found = metrics.highest_load(attainment, 0.9)
    assert found.load is not None
    assert capacity / 1.021 <= found.load <= capacity


def test_highest_load_says_when_there_is_none() -> None:
    never = metrics.highest_load(lambda loads: [0.5] * len(loads), 0.9)
    always = metrics.highest_load(lambda loads: [1.0] * len(loads), 0.9)
    assert never.load is None and "not met" in never.note
    assert always.load is None and "every load" in always.note
