"""`python -m experiments sim_to_live`: the same trace on live workers and in the gym, on one calibrated cluster.

Workers are measured (`envs.calibrate`) before the trace is replayed, and again after it, for a shared machine is not as
fast at one time as at another. The gateway decides by what was found before; the gym simulates by all of it.

- accuracy: one prefill and one decode worker. TTFT and TBT as clients see them, their medians and P90s, and the rank
  correlation of the requests' TTFT (Spearman's).
- ordering: two prefill workers and one that decodes (`--ordering`), several policies, each replayed `--repeats` times,
  first one way round and then the other, since a shared machine is not as fast at all times: the mean TTFT of each,
  live and in the gym; of each pair the difference, request by request, with its 95 % interval, live. Where an interval
  leaves 0 out, the gym has to agree.

Reported is the last fifth of the trace, on which nothing was fitted or chosen; `--tuning` takes the first three fifths
instead, on which the procedure was made. Only the speed comes from the trace itself: it is such that its prefills keep
the prefill workers busy for `--load` of the time, by the calibrated gym.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from envs.calibrate import Plan
from envs.metrics import difference_of_means, time_blocks
from runtime.loadgen import Slos

from . import live
from .live import Seen

POLICY = "round_robin"  # where policies are not compared
GYM_SEEDS = 20  # of a random policy in the gym
SLO = {"ttft_s": 5.0, "tbt_s": 0.5}
REPEATS = 2  # of each measurement, before and after
MEDIAN_WITHIN, P90_WITHIN, LEAST_CORRELATION = 0.1, 0.2, 0.8


def run(options: live.Options) -> dict[str, Any]:
    """The comparison."""
    prefills = 2 if options.ordering else 1
    with live.live_workers(options.cluster, prefills, 1) as workers:
        plan = Plan(options.longest_tokens, options.most_requests, REPEATS)
        before = live.measured(workers, plan, options.say)
        cluster = live.calibrated(workers, before, SLO)
        spec = live.spec_of(cluster)
        trace = live.trace_of(options)
        policies = options.policies if options.ordering else (POLICY,)
        sent = live.sent(trace, options.requests, options.longest_tokens)
        speed = options.load * sent.duration_s / live.prefill_busy_s(spec, sent, f"{policies[-1]}+none")
        sent = sent.speed_up(speed)
        slos = Slos(spec.slo.ttft_s, spec.slo.tbt_s, spec.slo.tbt_tail_share)
        told: dict[str, list[Seen]] = {policy: [] for policy in policies}
        for repeat in range(options.repeats if options.ordering else 1):
            for place, policy in enumerate(policies if repeat % 2 == 0 else policies[::-1]):
                seed = 1 + repeat * len(policies) + place
                what = f"repeat {repeat + 1}, {policy}"
                options.say(f"{what}: the gateway starts")
                with live.gateway(cluster, f"{policy}+none") as front:
                    told[policy].append(live.replayed(front.url, sent, slos, seed, options.say, what))
        found = live.measured(workers, plan, options.say, before)
    spec = live.spec_of(live.calibrated(workers, found, SLO))
    result: dict[str, Any] = {
        "trace": trace.name,
        "part": "training" if options.tuning else "test",
        "requests": sent.n_requests,
        "speed": speed,
        "load": options.load,
        "workers": {"prefill": spec.n_prefill, "decode": spec.n_decode},
        "calibration_before": before.report(),
        "calibration": found.report(),
    }
    if not options.ordering:
        return result | accuracy(told[POLICY][0], live.simulated(spec, sent, f"{POLICY}+none"))
    ttft_s = {}
    for policy in policies:
        gym = [live.simulated(spec, sent, f"{policy}+none", seed).ttft_s for seed in range(GYM_SEEDS)]
        ttft_s[policy] = np.stack([seen.ttft_s for seen in told[policy]]), np.stack(gym)
    return result | {"repeats": options.repeats} | ordering(sent.arrival_s, ttft_s)


def accuracy(seen: Seen, simulated: Seen) -> dict[str, Any]:
    """How far the gym is from what was seen: relative differences and the rank correlation, each with its verdict."""
    both = seen.served & simulated.served
    several = both & (seen.tbt_s > 0)  # requests of one token have no interval
    rows = {}
    for name, ours, theirs in (
        ("ttft", simulated.ttft_s[both], seen.ttft_s[both]),
        ("tbt", simulated.tbt_s[several], seen.tbt_s[several]),
    ):
        for share, within in ((0.5, MEDIAN_WITHIN), (0.9, P90_WITHIN)):
            gym_s, live_s = float(np.quantile(ours, share)), float(np.quantile(theirs, share))
            apart = gym_s / live_s - 1
            rows[f"{name}_p{100 * share:.0f}_s"] = {
                "live": live_s,
                "gym": gym_s,
                "difference": apart,
                "within": within,
                "holds": abs(apart) <= within,
            }
    correlation = float(spearmanr(seen.ttft_s[both], simulated.ttft_s[both]).statistic)
    return {
        "served": {"live": int(seen.served.sum()), "gym": int(simulated.served.sum())},
        "accuracy": rows,
        "ttft_rank_correlation": {
            "value": correlation,
            "at_least": LEAST_CORRELATION,
            "holds": correlation >= LEAST_CORRELATION,
        },
    }


def ordering(
    arrival_s: NDArray[np.float64], ttft_s: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
) -> dict[str, Any]:
    """Policies by mean TTFT; a pair of them is told apart where its live interval leaves 0 out.

    Args:
        arrival_s: float64[R]. ttft_s: of each policy, live and in the gym, float64[repeats, R] each.
    """
    blocks = time_blocks(arrival_s)
    pairs = []
    for one, other in combinations(ttft_s, 2):
        (live_one, gym_one), (live_other, gym_other) = ttft_s[one], ttft_s[other]
        apart = difference_of_means(live_one, live_other, blocks)
        gym_s = float(gym_one.mean() - gym_other.mean())
        pairs.append(
            {
                "policies": [one, other],
                "live_s": apart._asdict(),
                "gym_s": gym_s,
                "told_apart": apart.low > 0 or apart.high < 0,
                "agrees": gym_s * apart.mean > 0,
            }
        )
    told_apart = [pair for pair in pairs if pair["told_apart"]]
    means = {
        name: {"live_ttft_s": float(told.mean()), "gym_ttft_s": float(gym.mean())}
        for name, (told, gym) in ttft_s.items()
    }
    return {
        "policies": means,
        "live_order": sorted(means, key=lambda name: means[name]["live_ttft_s"]),
        "gym_order": sorted(means, key=lambda name: means[name]["gym_ttft_s"]),
        "pairs": pairs,
        "told_apart": len(told_apart),
        "holds": bool(told_apart) and all(pair["agrees"] for pair in told_apart),
    }
