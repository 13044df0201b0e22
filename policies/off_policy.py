"""Off-policy evaluation: what another policy would have made of logged decisions, and where that cannot be told.

All estimators but the replay are one-step: they ask what would have become of each request had this one decision been
another, the cluster being as it was logged. What a policy's decisions do to later requests (queues, caches) is not in
them. `agreement` says how far that matters: a policy that decides as the logged one did sees the same cluster.

Intervals are those of `envs.metrics` (blocks of time drawn again); ratios are linearised first.
Sources: Swaminathan & Joachims 2015 (self-normalised weights), Dudík et al. 2014 (doubly robust).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs import metrics
from envs.metrics import Interval, Replay
from envs.simulator import empty_observation
from envs.state import Observation, Source, Status

Float = NDArray[np.float64]
Actions = NDArray[np.int64]

FEWEST_EFFECTIVE = 50
"""Effective sample size below which a weighted estimate is not given."""
MOST_UNSUPPORTED = 0.05
"""Share of requests whose choice the log never takes, above which a weighted estimate is not given; below, the
interval is widened by what they could be."""
LEAST_WEIGHT = 0.9
"""The mean weight is 1 where the log covers the policy's choices; its interval must reach this."""
ROWS_PER_BIN, MOST_BINS, ERRORS_PER_BIN = 200, 10, 1024
BATCH = 4096


class Observed(NamedTuple):
    """Observations of K rows of a log, all with the same pool sizes: `rows` int64[K] ascending, leading axis K."""

    rows: NDArray[np.int64]
    observation: Observation


@dataclass(frozen=True, eq=False)
class Logged:
    """Logged decisions of N requests in order of arrival, and what became of them; float64[N] unless said otherwise.

    `action` int64[N] as the gym encodes it. `propensity`: probability of that action. `good` 1, 0, or NaN where it is
    not known. `completed` bool[N]. `observed`: what was seen; rows may lack it.
    """

    arrival_s: Float
    action: Actions
    propensity: Float
    good: Float
    ttft_s: Float
    tbt_s: Float
    ttft_slo_s: Float
    tbt_slo_s: Float
    completed: NDArray[np.bool_]
    observed: tuple[Observed, ...]

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Rows with an observation: bool[N]."""
        seen = np.zeros(len(self.arrival_s), np.bool_)
        for group in self.observed:
            seen[group.rows] = True
        return seen

    def tail(self, first: int) -> Logged:
        """Rows from `first` on."""
        groups = []
        for rows, observation in self.observed:
            kept = rows >= first
            groups.append(Observed(rows[kept] - first, Observation(*(table[kept] for table in observation))))
        columns = {name: getattr(self, name)[first:] for name in self.__dataclass_fields__ if name != "observed"}
        return Logged(**columns, observed=tuple(groups))


class Estimate(NamedTuple):
    """An estimate, or why there is none."""

    interval: Interval | None
    why_not: str = ""
    effective: float = math.nan  # sample size
    unsupported: float = math.nan  # share of requests whose choice the log never takes


# --- what a policy would have decided ----------------------------------------------------------------------------


def choices(logged: Logged, decide: Callable[[Observation], Actions], *, batched: bool) -> Actions:
    """A policy's actions on the logged observations: int64[N], -1 where there is none.

    Args:
        decide: actions int64[C] for observations of C clusters.
        batched: it keeps nothing between decisions, so that
            many rows may be decided at once; otherwise one at a time in order of arrival, as one cluster.
    """
    actions = np.full(len(logged.arrival_s), -1, np.int64)
    if batched:
        for rows, observation in logged.observed:
            for first in range(0, len(rows), BATCH):
                part = slice(first, first + BATCH)
                actions[rows[part]] = decide(Observation(*(table[part] for table in observation)))
        return actions
    ones = [empty_observation(1, *_sizes(group)) for group in logged.observed]
    # As bytes: copying records field by field would take longer than deciding.
    pairs = [
        [(_as_bytes(one)[0], _as_bytes(stored)) for one, stored in zip(ones[g], group.observation)]
        for g, group in enumerate(logged.observed)
    ]
    places = [(int(row), g, k) for g, group in enumerate(logged.observed) for k, row in enumerate(group.rows)]
    for row, g, k in sorted(places):
        for one, stored in pairs[g]:
            one[:] = stored[k]
        actions[row] = decide(ones[g])[0]
    return actions


def _as_bytes(table: NDArray[Any]) -> NDArray[np.uint8]:
    """Rows as bytes: uint8[C, bytes], a view where the table is contiguous."""
    return np.ascontiguousarray(table).reshape(len(table), -1).view(np.uint8)


def _sizes(group: Observed) -> tuple[int, int]:
    return group.observation.prefill.shape[1], group.observation.decode.shape[1]


class Parts(NamedTuple):
    """Actions taken apart: prefill -1 rejects."""

    prefill: Actions
    decode: Actions
    source: Actions


def parts_of(logged: Logged, actions: Actions) -> Parts:
    """Prefill, decode and source of actions on the logged observations; -1 where rejected or not observed."""
    parts = Parts(*(np.full(len(actions), -1, np.int64) for _ in range(3)))
    for group in logged.observed:
        decodes = _sizes(group)[1]
        rows = group.rows[actions[group.rows] > 0]
        pair, parts.source[rows] = np.divmod(actions[rows] - 1, len(Source))
        parts.prefill[rows], parts.decode[rows] = np.divmod(pair, decodes)
    return parts


def agreement(logged: Logged, actions: Actions) -> dict[str, Interval]:
    """Share of logged decisions in which a policy makes the same choice.

    `all`: the whole action; `accept`: whether to take the request; `prefill`, `decode`, `source`: of the requests that
    both take.
    """
    seen = logged.seen
    ours, theirs = parts_of(logged, actions), parts_of(logged, logged.action)
    both = seen & (ours.prefill >= 0) & (theirs.prefill >= 0)
    same = {
        "all": (seen, actions == logged.action),
        "accept": (seen, (ours.prefill >= 0) == (theirs.prefill >= 0)),
        **{name: (both, getattr(ours, name) == getattr(theirs, name)) for name in Parts._fields},
    }
    return {name: mean_of(logged, where, equal) for name, (where, equal) in same.items()}


def takes(logged: Logged, actions: Actions) -> Interval:
    """Share of observed requests that are not rejected at arrival."""
    return mean_of(logged, logged.seen, actions > 0)


def mean_of(logged: Logged, where: NDArray[np.bool_], values: NDArray[Any]) -> Interval:
    """Mean of 0/1 values [N] over some rows, with its interval."""
    return metrics.interval(values[where][None], metrics.time_blocks(logged.arrival_s[where]))


# --- importance weights ------------------------------------------------------------------------------------------


def weighted(logged: Logged, actions: Actions) -> Estimate:
    """Goodput of a policy by self-normalised importance weights.

    A row counts where the policy makes the logged choice, by one over the logged probability of that choice. A request
    that the policy rejects is not good, whatever was logged. No number is given without support; see the constants.
    """
    return _weighted(logged, actions, None, None)


def doubly_robust(logged: Logged, actions: Actions, calibration: Calibration) -> Estimate:
    """Goodput of a policy by the direct method, corrected by its weighted error on the logged choices."""
    return _weighted(logged, actions, calibration.good(logged, actions), calibration.good(logged, logged.action))


def _weighted(logged: Logged, actions: Actions, ours: Float | None, theirs: Float | None) -> Estimate:
    rows = np.flatnonzero(logged.seen & np.isfinite(logged.good))
    if not len(rows):
        return Estimate(None, "no support: no row has both an observation and an outcome")
    blocks = metrics.time_blocks(logged.arrival_s[rows])
    good, propensity = logged.good[rows], logged.propensity[rows]
    match = actions[rows] == logged.action[rows]
    takes = actions[rows] > 0
    never = takes & ~match & (propensity >= 1.0)
    unsupported = float(never.mean())
    covered = takes & ~never
    weight = np.where(covered & match, 1.0 / propensity, 0.0)
    effective = float(weight.sum() ** 2 / np.square(weight).sum()) if weight.any() else 0.0

    def none(why: str) -> Estimate:
        return Estimate(None, f"no support: {why}", effective, unsupported)

    if unsupported > MOST_UNSUPPORTED:
        return none(f"the log never takes the policy's choice on {unsupported:.0%} of requests")
    values = np.zeros(len(rows))
    if covered.any():
        if effective < FEWEST_EFFECTIVE:
            return none(f"effective sample size {effective:.0f}, below {FEWEST_EFFECTIVE}")
        largest = float(weight.max())
        mean = metrics.interval(weight[covered][None] / largest, metrics.time_blocks(logged.arrival_s[rows][covered]))
        if mean.high * largest < LEAST_WEIGHT:
            return none(f"weights average {weight[covered].mean():.2f} where full support gives 1")
        share = weight / weight[covered].mean()
        if ours is None or theirs is None:
            value = float((share[covered] * good[covered]).mean())
            values[covered] = value + share[covered] * (good[covered] - value)
            values[never] = value
        else:
            model, at_logged = np.nan_to_num(ours[rows]), np.nan_to_num(theirs[rows])
            values = np.where(takes, model, 0.0)
            values[covered] += share[covered] * (good - at_logged)[covered]
    found = _interval(values, blocks)
    if unsupported:
        value = float(values[never].mean())
        found = Interval(
            found.mean, max(0.0, found.low - unsupported * value), min(1.0, found.high + unsupported * (1.0 - value))
        )
    return Estimate(found, "", effective, unsupported)


def _interval(values: Float, blocks: metrics.Blocks) -> Interval:
    """Mean of linearised values [R], which may lie outside 0..1, with its interval cut to 0..1."""
    found = metrics.interval(values[None], blocks)
    return Interval(*(min(1.0, max(0.0, part)) for part in found))


# --- the direct method -------------------------------------------------------------------------------------------


def predictions(logged: Logged, actions: Actions) -> tuple[Float, Float]:
    """Predicted TTFT and TBT of actions on the logged observations: float64[N], NaN where rejected or not observed."""
    parts = parts_of(logged, actions)
    ttft_s, tbt_s = (np.full(len(actions), np.nan) for _ in range(2))
    for rows, observation in logged.observed:
        at = np.flatnonzero(parts.prefill[rows] >= 0)
        chosen = rows[at]
        tables = [observation.prefill[f"ttft_{source.name.lower()}_s"] for source in Source]
        by_source = np.stack([table[at, parts.prefill[chosen]] for table in tables])
        ttft_s[chosen] = by_source[parts.source[chosen], np.arange(len(at))]
        tbt_s[chosen] = observation.decode["tbt_assigned_s"][at, parts.decode[chosen]]
    return ttft_s, tbt_s


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measured over predicted TTFT and TBT of the requests that were taken, by predicted TTFT.

    `edges` [B - 1] part the predicted TTFT into bins; `errors[b]` is [K, 2], ratios of TTFT and TBT, infinite for a
    request that was taken and did not complete.
    """

    edges: Float
    errors: tuple[Float, ...]
    largest_s: float

    @classmethod
    def of(cls, logged: Logged) -> Calibration | None:
        """The prediction errors of a log; None where no request was taken, observed and has ended."""
        ttft_s, tbt_s = predictions(logged, logged.action)
        ended = ~np.isnan(ttft_s) & np.isfinite(logged.good)
        measured = logged.completed & ~np.isnan(logged.ttft_s)
        rows = np.flatnonzero(ended & (measured | ~logged.completed))
        if not len(rows):
            return None
        measured_tbt = np.nan_to_num(logged.tbt_s[rows])  # a single token has no TBT
        ratios = np.stack([logged.ttft_s[rows] / ttft_s[rows], measured_tbt / tbt_s[rows]], axis=1)
        ratios[~logged.completed[rows]] = np.inf
        bins = int(np.clip(len(rows) // ROWS_PER_BIN, 1, MOST_BINS))
        edges = np.unique(np.quantile(ttft_s[rows], np.arange(1, bins) / bins)) if bins > 1 else np.zeros(0)
        bin_of = np.searchsorted(edges, ttft_s[rows], side="right")
        errors = []
        for b in range(len(edges) + 1):
            here = ratios[bin_of == b]
            # Evenly over the log, at most so many.
            errors.append(here[np.linspace(0, len(here) - 1, min(len(here), ERRORS_PER_BIN)).astype(np.int64)])
        return cls(edges, tuple(errors), float(ttft_s[rows].max()))

    def good(self, logged: Logged, actions: Actions) -> Float:
        """Probability that a request would be good: float64[N]; 0 where rejected, NaN where not observed."""
        return self._good(logged, actions)[0]

    def sampling_error(self, logged: Logged, actions: Actions) -> float:
        """Standard error of the mean of `good` over observed rows that is due to the number of measured errors."""
        return self._good(logged, actions)[1]

    def _good(self, logged: Logged, actions: Actions) -> tuple[Float, float]:
        ttft_s, tbt_s = predictions(logged, actions)
        result = np.where(logged.seen, 0.0, np.nan)
        total = max(1, int(logged.seen.sum()))
        variance = 0.0
        taken = np.flatnonzero(~np.isnan(ttft_s))
        bin_of = np.searchsorted(self.edges, ttft_s[taken], side="right")
        for b, errors in enumerate(self.errors):
            here = taken[bin_of == b]
            if not len(errors):
                result[here] = np.nan
                continue
            by_error = np.zeros(len(errors))
            for first in range(0, len(here), BATCH):
                rows = here[first : first + BATCH]
                within = errors[None, :, 0] <= (logged.ttft_slo_s[rows] / ttft_s[rows])[:, None]
                within &= errors[None, :, 1] <= (logged.tbt_slo_s[rows] / tbt_s[rows])[:, None]
                result[rows] = within.mean(axis=1)
                by_error += within.sum(axis=0)
            variance += float(np.var(by_error / total)) / len(errors)
        return result, math.sqrt(variance)

    def beyond(self, logged: Logged, actions: Actions) -> float:
        """Share of a policy's choices with a predicted TTFT longer than any that was logged."""
        ttft_s = predictions(logged, actions)[0]
        taken = ~np.isnan(ttft_s)
        return float((ttft_s[taken] > self.largest_s).mean()) if taken.any() else 0.0


def direct(logged: Logged, actions: Actions, calibration: Calibration) -> Estimate:
    """Share of requests within both SLOs by the predictions for a policy's choices and the errors such predictions had.

    What the method gets wrong on requests where the policy makes the logged choice (on all that were taken, where
    there are few such) is added to it; `effective` is how many there were. The interval is that of the mean over
    requests together with that of this correction and that of having measured so many errors only.
    """
    rows = logged.seen
    takes = rows & (actions > 0)
    ours = np.nan_to_num(calibration.good(logged, actions)[rows])
    found = metrics.interval(ours[None], metrics.time_blocks(logged.arrival_s[rows]))
    known = rows & (logged.action > 0) & np.isfinite(logged.good)
    matched = known & (actions == logged.action)
    if matched.sum() < FEWEST_EFFECTIVE:
        matched, why = known, "corrected on all requests that were taken: the choices hardly agree"
    else:
        why = ""
    theirs = np.nan_to_num(calibration.good(logged, logged.action)[matched])
    blocks = metrics.time_blocks(logged.arrival_s[matched])
    error = metrics.difference(logged.good[matched][None], theirs[None], blocks)
    share = float(takes.sum() / rows.sum())
    sampled = 1.96 * calibration.sampling_error(logged, actions)
    mean = found.mean + share * error.mean
    low = mean - math.hypot(found.mean - found.low, share * (error.mean - error.low), sampled)
    high = mean + math.hypot(found.high - found.mean, share * (error.high - error.mean), sampled)
    interval = Interval(*(min(1.0, max(0.0, part)) for part in (mean, low, high)))
    return Estimate(interval, why, float(matched.sum()))


# --- replay ------------------------------------------------------------------------------------------------------


def model_bias(logged: Logged, replays: Sequence[Replay]) -> dict[str, Any]:
    """The logged policy in the simulator against what was logged, request by request.

    `goodput_logged`, `goodput_simulated`, `bias` (simulated minus logged), and the same for the mean TTFT of requests
    that completed in both.
    """
    known = np.isfinite(logged.good)
    blocks = metrics.time_blocks(logged.arrival_s[known])
    simulated = np.stack([replay.good for replay in replays])[:, known].astype(np.float64)
    actual = np.repeat(logged.good[known][None], len(replays), axis=0)
    ours = np.stack([replay.outcomes["ttft_s"] for replay in replays])
    done = np.stack([replay.outcomes["status"] == Status.COMPLETED for replay in replays])
    done &= (logged.completed & np.isfinite(logged.ttft_s))[None]
    measured = np.broadcast_to(logged.ttft_s, ours.shape)
    return {
        "goodput_logged": metrics.interval(actual, blocks),
        "goodput_simulated": metrics.interval(simulated, blocks),
        "bias": metrics.difference(simulated, actual, blocks),
        "ttft_logged_s": float(measured[done].mean()) if done.any() else math.nan,
        "ttft_simulated_s": float(ours[done].mean()) if done.any() else math.nan,
        "requests": int(known.sum()),
    }


def by_replay(logged: Logged, ours: Sequence[Replay], theirs: Sequence[Replay]) -> dict[str, Interval | None]:
    """A policy against the logged one, both in the simulator.

    `goodput`: as simulated. `difference`: ours minus theirs, paired. `corrected`: the logged goodput plus that
    difference, for a model that is wrong by the same amount for both; None where it is no share, so that it is not.
    """
    known = np.isfinite(logged.good)
    blocks = metrics.time_blocks(logged.arrival_s[known])
    mine, base = (np.stack([r.good for r in replays])[:, known].astype(np.float64) for replays in (ours, theirs))
    corrected = (logged.good[known][None] + mine - base).mean(axis=0)
    return {
        "goodput": metrics.interval(mine, blocks),
        "difference": metrics.difference(mine, base, blocks),
        "corrected": _interval(corrected, blocks) if 0.0 <= corrected.mean() <= 1.0 else None,
    }


NOTES = {
    "one_step": (
        "agreement, IPS, DR and direct are one-step: each decision is judged on the cluster as it was logged. What a "
        "policy's decisions do to later requests (queues, caches, admission) is not in them; the replay has it."
    ),
    "agreement": (
        "agreement: share of logged decisions in which the policy, given the logged observation, makes the same "
        "choice; prefill, decode and source among requests that both take."
    ),
    "weighted": (
        "IPS: self-normalised importance weights 1/propensity where the choices agree; DR adds the direct method. "
        f"Not given where the log never takes the policy's choice on more than {MOST_UNSUPPORTED:.0%} of requests, "
        f"where the effective sample size is below {FEWEST_EFFECTIVE}, or where weights average clearly below 1. A "
        "policy that draws at random is judged by one draw per request."
    ),
    "direct": (
        "direct: predicted TTFT and TBT of the policy's choice times the errors such predictions had in this log, "
        "corrected by what that gets wrong where the choices agree. Assumes that choices the log did not take are "
        "predicted as well as those it took."
    ),
    "replay": (
        "replay: the logged requests in the simulator, caches cold at the start unless --warmup is given, outputs "
        "that are not known as long as was expected. 'corrected' is the logged goodput plus the simulated difference: "
        "right if the model's bias is the same for both policies."
    ),
}
