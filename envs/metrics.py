"""Scores of replays: what became of requests, as one row with confidence intervals.

Pure functions from `OUTCOME` records and the requests they belong to. Times are seconds, shares are 0..1.

Intervals are 95 %. Requests close in time share queues and caches, so they are not independent:
what is drawn again is blocks of time (a moving-block bootstrap, blocks of `BLOCK_S` seconds of
arrivals), and with several seeds the seeds too. The bootstrap's standard error is widened for the
number of blocks (Student t). Where nothing varies at all, the interval is Wilson's over requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .state import Records, Status

BLOCK_S = 60.0
"""Length of a bootstrap block, seconds of arrivals on the simulated clock."""
FEWEST_BLOCKS, MOST_BLOCKS = 10, 200
"""Blocks are shorter, or longer, than `BLOCK_S` where there would be fewer or more of them."""
BINS_PER_BLOCK = 6
REPLICATES = 2000
QUANTILES = 50
"""Of a distribution kept: the least value, the greatest, and what lies evenly between them in rank."""
_Z = NormalDist().inv_cdf(0.975)
METHOD = (
    f"95 % intervals: moving-block bootstrap over time (blocks of {BLOCK_S:.0f} s of arrivals, "
    f"{FEWEST_BLOCKS} to {MOST_BLOCKS} of them) and over seeds, {REPLICATES} replicates, fixed "
    "seed; standard error times Student's t for the number of blocks. Wilson's over requests where "
    "no request differs. Paired differences use the same blocks and seeds."
)


class Replay(NamedTuple):
    """A drained replay: R requests that count, and what became of each.

    `arrival_s` float64[R] is on the simulated clock, as the times in `outcomes` (`OUTCOME`[R]) are.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    outcomes: Records
    block_tokens: int

    @property
    def good(self) -> NDArray[np.int32]:
        """1 where a request completed within both SLOs: int32[R]."""
        return self.outcomes["good"]


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class Blocks(NamedTuple):
    """Time cut into bins; a bootstrap block is `BINS_PER_BLOCK` bins in a row."""

    bin_of: NDArray[np.int64]  # [R]
    bins: int
    block_s: float


class Highest(NamedTuple):
    """The highest load found that meets a target; `load` is None where none does (`note` says why)."""

    load: float | None
    note: str


# --- counts and times ----------------------------------------------------------------------------


def counts(replay: Replay) -> dict[str, float]:
    """How many requests were offered and where each ended; `wasted_prefill_s` is the prefill time
    (seconds, summed) of those rejected at decode.

    offered = completed + rejected_at_arrival + rejected_at_decode; completed = good + violated.

    Raises:
        ValueError: a request has not ended: the replay is not drained.
    """
    status = replay.outcomes["status"]
    by_status = np.bincount(status, minlength=len(Status))
    if by_status[Status.OPEN]:
        raise ValueError(f"{by_status[Status.OPEN]} requests are still open: the replay is not drained")
    good = int(replay.good.sum())
    wasted = replay.outcomes["prefill_s"][status == Status.REJECTED_AT_DECODE]
    return {
        "offered": len(status),
        "completed": int(by_status[Status.COMPLETED]),
        "good": good,
        "violated": int(by_status[Status.COMPLETED]) - good,
        "rejected_at_arrival": int(by_status[Status.REJECTED_AT_ARRIVAL]),
        "rejected_at_decode": int(by_status[Status.REJECTED_AT_DECODE]),
        "wasted_prefill_s": float(wasted.sum()),
    }


def score(replays: Sequence[Replay], seeds: Sequence[int] | None = None) -> dict[str, Any]:
    """One row: the same requests under one policy, replayed once per seed.

    - counts (see `counts`) are means over the replays; `runs` lists them per replay;
    - `goodput` = `slo_attainment` = good / offered, with `goodput_low`, `goodput_high`;
    - `ttft_*_s`, `e2e_*_s` (arrival to last token): completed requests of all replays;
    - `tbt_*_s`: completed requests with more than one output token, TBT as the SLO counts it;
    - of each of these, `*_quantiles_s` are `QUANTILES` values, ascending (none where nothing is counted);
    - `prefill_mean_s`: seconds a prefill took, requests that were prefilled;
    - `hit_rate`: reused tokens / input tokens of requests that were prefilled, split into
      `hit_rate_device`, `hit_rate_host` (loaded from host memory) and `hit_rate_fetched` (from
      another instance).

    A figure with nothing to count is NaN.
    """
    runs = [counts(replay) for replay in replays]
    row: dict[str, Any] = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
    blocks = time_blocks(replays[0].arrival_s)
    goodput = interval(np.stack([replay.good for replay in replays]), blocks)
    row |= {
        "goodput": goodput.mean,
        "goodput_low": goodput.low,
        "goodput_high": goodput.high,
        "slo_attainment": goodput.mean,
        "block_s": blocks.block_s,
    }
    row |= _times(replays) | _reuse(replays)
    seeds = range(len(runs)) if seeds is None else seeds
    row["runs"] = [{"seed": int(seed)} | run for seed, run in zip(seeds, runs, strict=True)]
    return row


def violations(replays: Sequence[Replay], ttft_slo_s: float, tbt_slo_s: float) -> dict[str, float]:
    """Which SLO the violated requests of `counts` missed, means over the replays: `violated_ttft`, and `violated_tbt`
    of those that had met the TTFT. They add up to `violated`.

    Raises:
        ValueError: a violated request is within both SLOs: they are not those of the replays.
    """
    ttft = tbt = 0
    for replay in replays:
        outcomes = replay.outcomes[(replay.outcomes["status"] == Status.COMPLETED) & (replay.good == 0)]
        late, slow = outcomes["ttft_s"] > ttft_slo_s, outcomes["tbt_s"] > tbt_slo_s
        if not (late | slow).all():
            raise ValueError(f"a violated request is within TTFT {ttft_slo_s:g} s and TBT {tbt_slo_s:g} s")
        ttft += int(late.sum())
        tbt += int((slow & ~late).sum())
    return {"violated_ttft": ttft / len(replays), "violated_tbt": tbt / len(replays)}


def _times(replays: Sequence[Replay]) -> dict[str, Any]:
    outcomes = np.concatenate([replay.outcomes for replay in replays])
    arrival_s = np.concatenate([replay.arrival_s for replay in replays])
    several = np.concatenate([replay.output_tokens for replay in replays]) > 1
    completed = outcomes["status"] == Status.COMPLETED
    e2e_s = outcomes["finish_s"] - arrival_s
    return (
        _distribution("ttft", outcomes["ttft_s"][completed])
        | _distribution("tbt", outcomes["tbt_s"][completed & several])
        | _distribution("e2e", e2e_s[completed])
        | {"prefill_mean_s": _mean(outcomes["prefill_s"][_prefilled(outcomes)])}
    )


def _prefilled(outcomes: Records) -> NDArray[np.bool_]:
    return np.isfinite(outcomes["prefill_end_s"])  # type: ignore[no-any-return]


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _distribution(name: str, values: NDArray[np.float64]) -> dict[str, Any]:
    found = np.percentile(values, (50, 90, 99)) if len(values) else np.full(3, np.nan)
    figures: dict[str, Any] = {f"{name}_mean_s": _mean(values)}
    figures |= {f"{name}_p{q}_s": float(v) for q, v in zip((50, 90, 99), found, strict=True)}
    spread = np.quantile(values, np.linspace(0, 1, QUANTILES)).tolist() if len(values) else []
    return figures | {f"{name}_quantiles_s": spread}


def _reuse(replays: Sequence[Replay]) -> dict[str, float]:
    """Hit rates. A reused token counts as on the device if it was, else as fetched as far as the
    request's fetched blocks go, else as loaded from host memory."""
    total = device = fetched = inputs = 0
    for replay in replays:
        used = replay.outcomes[_prefilled(replay.outcomes)]
        tokens = used["reused_tokens"].astype(np.int64)
        on_device = np.minimum(used["device_tokens"], tokens)
        moved = used["fetched_blocks"].astype(np.int64) * replay.block_tokens
        total += int(tokens.sum())
        device += int(on_device.sum())
        fetched += int(np.minimum(moved, tokens - on_device).sum())
        inputs += int(replay.input_tokens[_prefilled(replay.outcomes)].astype(np.int64).sum())

    def share(part: int) -> float:
        return part / inputs if inputs else math.nan

    return {
        "hit_rate": share(total),
        "hit_rate_device": share(device),
        "hit_rate_host": share(total - device - fetched),
        "hit_rate_fetched": share(fetched),
    }


# --- intervals -----------------------------------------------------------------------------------


def time_blocks(arrival_s: NDArray[np.float64], block_s: float = BLOCK_S) -> Blocks:
    """Cut requests (ascending arrivals, float64[R]) into bins of time for the bootstrap."""
    duration = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    if duration <= 0:
        return Blocks(np.zeros(len(arrival_s), np.int64), 1, 0.0)
    block_s = min(max(block_s, duration / MOST_BLOCKS), duration / FEWEST_BLOCKS)
    width = block_s / BINS_PER_BLOCK
    bins = math.ceil(duration / width)
    bin_of = np.minimum((arrival_s - arrival_s[0]) / width, bins - 1).astype(np.int64)
    return Blocks(bin_of, bins, block_s)


def interval(good: NDArray[Any], blocks: Blocks) -> Interval:
    """Mean of 0/1 values [S, R] of S replays of the same R requests, with its interval in 0..1."""
    mean, half = _bootstrap(good, blocks)
    if not 0.0 < half < math.inf:
        return _wilson(mean, good.shape[1])
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))


def difference(ours: NDArray[Any], theirs: NDArray[Any], blocks: Blocks) -> Interval:
    """Mean of ours minus theirs (0/1 values [S, R] each), paired by request and seed."""
    mean, low, high = difference_of_means(ours, theirs, blocks)
    return Interval(mean, max(-1.0, low), min(1.0, high))


def difference_of_means(ours: NDArray[Any], theirs: NDArray[Any], blocks: Blocks) -> Interval:
    """As `difference`, of any values."""
    mean, half = _bootstrap(ours.astype(np.float64) - theirs, blocks)
    return Interval(mean, mean - half, mean + half)


def _bootstrap(values: NDArray[Any], blocks: Blocks) -> tuple[float, float]:
    """Mean over all values [S, R] and the half-width of its interval.

    The half-width is 0 where nothing varies, infinite where all requests arrive at once.
    """
    seeds, requests = values.shape
    if requests == 0:
        return math.nan, 0.0
    mean = float(values.mean())
    if values.min() == values.max():
        return mean, 0.0
    if blocks.bins <= BINS_PER_BLOCK:
        return mean, math.inf
    sums = np.stack([np.bincount(blocks.bin_of, row, blocks.bins) for row in values])
    sizes = np.bincount(blocks.bin_of, minlength=blocks.bins)
    rng = np.random.default_rng(0)
    draws = math.ceil(blocks.bins / BINS_PER_BLOCK)
    starts = rng.integers(blocks.bins, size=(REPLICATES, draws, 1))
    # Round the end of time back to its start: every bin is drawn equally often.
    picked = ((starts + np.arange(BINS_PER_BLOCK)) % blocks.bins).reshape(REPLICATES, -1)
    picked = picked[:, : blocks.bins]
    weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), REPLICATES) / seeds
    drawn_sizes = sizes[picked].sum(axis=1)
    # Summed seed by seed, not by matrix product, so that figures agree on every machine.
    drawn_sums = sum(weights[:, s] * sums[s][picked].sum(axis=1) for s in range(seeds))
    error = float(np.std(drawn_sums / np.maximum(drawn_sizes, 1)))
    count = blocks.bins / BINS_PER_BLOCK
    return mean, _student_t(count - 1) * error * math.sqrt(count / (count - 1))


def _student_t(freedom: float) -> float:
    """97.5 % point of Student's t, 5 or more degrees of freedom (Cornish-Fisher, error < 0.3 %)."""
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _wilson(mean: float, requests: int) -> Interval:
    if requests == 0:
        return Interval(math.nan, math.nan, math.nan)
    spread = _Z**2 / requests
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(mean * (1 - mean) / requests + spread / (4 * requests))
    return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


# --- the highest load that meets a target ----------------------------------------------------------


def highest_load(
    attainment: Callable[[Sequence[float]], Sequence[float]],
    target: float,
    *,
    tolerance: float = 0.02,
    lowest: float = 1 / 64,
    highest: float = 64.0,
) -> Highest:
    """The highest load at which `attainment` (share of good requests) is at least `target`.

    From load 1, doubled or halved until the target lies between two loads, then cut in four until
    they are within `tolerance` of each other; the answer is the lower one, which was measured to
    meet the target. Attainment is taken to fall with load: of several crossings one is found.

    Args:
        attainment: for several loads at once; called again with loads it has seen.
    """

    def meets(load: float) -> bool:
        return attainment([load])[0] >= target

    low = 1.0
    if meets(low):
        while meets(low * 2):
            low *= 2
            if low >= highest:
                return Highest(None, f"met at every load up to {highest:g}")
    else:
        while not meets(low / 2):
            low /= 2
            if low <= lowest:
                return Highest(None, f"not met at any load down to {lowest:g}")
        low /= 2
    high = low * 2
    while high / low > 1 + tolerance:
        inner = [low * (high / low) ** (i / 4) for i in (1, 2, 3)]
        met = [share >= target for share in attainment(inner)]
        first_miss = met.index(False) if False in met else 3
        edges = [low, *inner, high]
        low, high = edges[first_miss], edges[first_miss + 1]
    return Highest(low, "")
