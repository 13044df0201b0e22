"""`python -m experiments live_rejection`: admission in overload, on live workers.

One prefill and one decode worker are measured (`envs.calibrate`); then the same requests are sent at `--load` times
what keeps them busy, under no admission, under the baseline (each stage looks at its own load) and under predictive
early rejection ([A] 7), in turn, `--repeats` times. A request is clean when its client saw both SLOs met. Reported are
the clean ones of each, and by how many predictive early rejection has more than the others: the mean over the repeats,
each paired with the others' of the same repeat, with Student's 95 % interval. `--policies` takes any others, a learned
one say, and compares the last of them with the rest.

Predictive early rejection takes every request to decode for t_d ([A] 7.4), which is known from the training part of the
trace (`decode_time_s`).

The gateway goes on calibrating while it serves, as it does by default: a shared machine is not as fast at all times.

The TBT SLO is what an iteration of `BATCH` requests takes, and answers are so long that decode at that batch is
`DECODE_SHARE` times as busy as prefill: decode is what overflows first, and a prefill that ends there was for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import t as student

from envs.calibrate import Plan
from envs.hardware import DecodeTimes
from policies import CompiledPolicy, make_policy
from runtime.loadgen import Slos
from traces import Trace

from . import live
from .live import Seen

PROBE = "round_robin+none"  # by which the gym says how busy prefill would be
BATCH = 8  # requests that decode together within the TBT SLO
DECODE_SHARE = 1.5
TTFT_SLO_PREFILLS = 10.0  # TTFT SLO, in prefills of the mean request: the papers' ([A] 8.1)


def run(options: live.Options) -> dict[str, Any]:
    """The comparison."""
    policies = options.policies
    *others, ours = policies
    compiled = [
        name for name in policies if isinstance(make_policy(name), CompiledPolicy)
    ]  # what is wrong is said at once
    with live.live_workers(options.cluster, 1, 1) as workers:
        found = live.measured(workers, Plan(options.longest_tokens, options.most_requests), options.say)
        trace = live.trace_of(options)
        sent = live.sent(trace, options.requests, options.longest_tokens)
        unlimited = live.spec_of(live.calibrated(workers, found, {}))
        prefill_s = live.prefill_busy_s(unlimited, sent, PROBE)
        step_s = full_step_s(found.profile.decode, sent)
        longer = DECODE_SHARE * prefill_s / (sent.output_tokens.sum() * step_s / BATCH)
        sent = replace(sent, output_tokens=np.maximum(1, np.rint(longer * sent.output_tokens)).astype(np.int32))
        slo = {"ttft_s": TTFT_SLO_PREFILLS * prefill_s / sent.n_requests, "tbt_s": step_s}
        decode_s = decode_time_s(live.parts_of(options.trace).train, options.longest_tokens, longer * step_s)
        cluster = live.calibrated(workers, found, slo) | {"decode_time_s": decode_s}
        spec = live.spec_of(cluster)
        sent = sent.speed_up(options.load * sent.duration_s / (DECODE_SHARE * prefill_s))
        slos = Slos(spec.slo.ttft_s, spec.slo.tbt_s, spec.slo.tbt_tail_share)
        told: dict[str, list[Seen]] = {policy: [] for policy in policies}
        fallbacks: dict[str, list[dict[str, int]]] = {policy: [] for policy in policies}
        for repeat in range(options.repeats):
            for place in range(len(policies)):  # who comes first changes from repeat to repeat
                policy = policies[(place + repeat) % len(policies)]
                seed = 1 + repeat * len(policies) + place
                what = f"repeat {repeat + 1}, {policy}"
                options.say(f"{what}: the gateway starts")
                with live.gateway(cluster, policy, calibrates=True) as front:
                    told[policy].append(live.replayed(front.url, sent, slos, seed, options.say, what))
                    fallbacks[policy].append(front.fallbacks())
    counted = {policy: [counts(seen, slos) for seen in told[policy]] for policy in policies}
    clean = {policy: [count["clean"] for count in counted[policy]] for policy in policies}
    return {
        "trace": trace.name,
        "requests": sent.n_requests,
        "load": options.load,
        "slo": slo,
        "decode_time_s": decode_s,
        "live": counted,
        "fallbacks": fallbacks,
        "gym": {name: counts(live.simulated(spec, sent, name), slos) for name in compiled},
        "ours": ours,
        "more_clean": {name: paired(clean[ours], clean[name]) for name in others},
        "calibration": found.report(),
    }


def counts(seen: Seen, slos: Slos) -> dict[str, int]:
    """How many requests were clean, served, and of these late (TTFT) and slow (TBT)."""
    return {
        "clean": int(seen.good.sum()),
        "served": int(seen.served.sum()),
        "late": int((seen.ttft_s > slos.ttft_s).sum()),
        "slow": int((seen.tbt_s > slos.tbt_s).sum()),
    }


def decode_time_s(known: Trace, longest_tokens: int, token_s: float) -> float:
    """t_d of [A] 7.4, from a trace that is known beforehand: what 95 % of the answers take at `token_s` per token as
    sent. With their mean, half of a batch would be counted as gone that is still there (docs/live.md)."""
    return float(token_s * np.quantile(live.sent(known, known.n_requests, longest_tokens).output_tokens, 0.95))


def full_step_s(decode: DecodeTimes, sent: Trace) -> float:
    """Seconds of an iteration of `BATCH` requests in the middle of their answers."""
    context = BATCH * float(np.mean(sent.input_tokens + sent.output_tokens / 2))
    return decode.base_s + decode.per_request_s * BATCH + decode.per_token_s * context


def paired(ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Mean of ours minus theirs over repeats, Student's 95 % interval, and whether it is above 0."""
    apart = np.subtract(ours, theirs).astype(float)
    mean, count = float(apart.mean()), len(apart)
    half = float(student.ppf(0.975, count - 1) * apart.std(ddof=1) / np.sqrt(count)) if count > 1 else float("inf")
    return {"mean": mean, "low": mean - half, "high": mean + half, "repeats": count, "holds": mean - half > 0}
