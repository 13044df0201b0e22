"""Workload profiles: fitted to a trace, stored as small YAML, sampled into new traces.

The model, and where each part comes from:

- **Arrivals** are a renewal process with gamma gaps (`gap_cv`; 1 is Poisson) under a rate curve
  over the trace's time, rounded down to a clock grid where the source has one (Mooncake: 3 s).
- **Trunks** are the shared system prompts: prefix chains that at least 1 % of requests open with.
- **Strata** are classes of requests: `fresh` ones continue nothing; `extends` continue a prefix
  whose deepest block one request used before (a conversation that grows); `rereads` come back to
  a prefix that several used (a document asked about again). Fresh ones are split by trunk, the
  others by the time since their prefix was last used. Each stratum has quantile tables of its
  variables, tied together by a Gaussian copula.
- A **continuing** request draws the time to reuse, the matched depth, how often that was used
  before, and the new tokens; the compiled kernel then finds the earlier request that fits.
  Sessions grow turn by turn because most matches end where a prompt ended.

A reuse whose time reaches back before the trace's start cannot be seen in it, so a trace starts
with less reuse than it ends with. The model has both parts: the propensity to continue
(`reuse_curve`, over the trace's requests) times the chance that the time to reuse fits into the
time since the start. A longer synthesised trace therefore warms up no slower than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from traces.trace import Trace, TraceError

# Dense where distributions bend: both tails.
LEVELS = (
    *(0.0, 0.01, 0.025),
    *(round(0.05 * k, 2) for k in range(1, 19)),
    *(0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 1.0),
)
TRUNK_SHARE = 0.01
TRUNK_USES = 8
OWN_STRATUM_SHARE = 0.02
GAP_STRATA = 6
RATE_SEGMENTS = 20
SEARCH_REACH = 128
CALIBRATED_REQUESTS = 100_000
CALIBRATION_ROUNDS = 8
CALIBRATED_SAMPLE = 60_000
BUILTIN_NAMES = ("conversation", "toolagent", "synthetic")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arrivals(_Part):
    """When requests come."""

    rate: float = Field(gt=0, description="requests per second, mean")
    gap_cv: float = Field(gt=0, description="coefficient of variation of gaps; 1 is Poisson")
    tick_s: float | None = Field(default=None, gt=0, description="clock grid, seconds")
    curve: list[float] = Field(min_length=1, description="rate over time, relative to the mean")
    segment_s: float = Field(gt=0, description="seconds per entry of `curve`; it repeats")


class Trunk(_Part):
    """A shared system prompt, as ranges [start, stop) over the profile's trunk blocks."""

    path: list[tuple[int, int]] = Field(default=[])

    def blocks(self) -> list[int]:
        return [block for start, stop in self.path for block in range(start, stop)]


Kind = Literal["fresh", "extends", "rereads"]
CONTINUING: tuple[Kind, ...] = ("extends", "rereads")
FRESH_VARIABLES = ("input_tokens", "output_tokens")
REUSE_VARIABLES = ("gap_s", "covered", "once", "uses", "tail", "new_tokens", "output_tokens")
REUSE_MARGINS = ("matched", "input_tokens")


class Stratum(_Part):
    """A class of requests: quantile tables over `LEVELS`, and their copula's correlations.

    Variables, in the copula's order. Fresh: `input_tokens, output_tokens`. Others: `gap_s` (time
    since the last use of the deepest matched block), `covered` and `once` (matched blocks
    beyond the trunk that two or more, or just one request used before), `uses` (of the deepest
    one before), `tail` (blocks of the continued request beyond the match), `new_tokens`,
    `output_tokens`. Besides, `matched` and `input_tokens`, which follow from these, keep their own
    distribution: what the copula makes of them is mapped onto it by rank.
    """

    kind: Kind
    share: float = Field(ge=0, le=1, description="of the fresh, or of the continuing requests")
    whole: float = Field(default=1.0, ge=0, le=1, description="share whose match no other branch touched since")
    trunk_shares: dict[int, float] = Field(description="trunk index -> share within the stratum")
    tables: dict[str, list[float]]
    correlation: list[list[float]]

    @model_validator(mode="after")
    def _complete(self) -> Stratum:
        want = FRESH_VARIABLES if self.kind == "fresh" else REUSE_VARIABLES
        tables = want if self.kind == "fresh" else want + REUSE_MARGINS
        if tuple(self.tables) != tables:
            raise ValueError(f"tables must be {', '.join(tables)}, in this order")
        for label, table in self.tables.items():
            if len(table) != len(LEVELS) or any(np.diff(table) < 0):
                raise ValueError(f"table {label}: expected {len(LEVELS)} ascending values")
        if [len(row) for row in self.correlation] != [len(want)] * len(want):
            raise ValueError(f"correlation must be {len(want)} x {len(want)}")
        return self


class WorkloadProfile(_Part):
    """A workload to sample traces from; see the module's text for the model."""

    version: Literal[1] = 1
    name: str
    source: str = Field(default="", description="what the profile was fitted to")
    block_tokens: int = Field(ge=1)
    n_requests: int = Field(ge=1, description="default length of a synthesised trace")
    max_input_tokens: int = Field(ge=1)
    arrivals: Arrivals
    trunks: list[Trunk] = Field(min_length=1, description="trunk 0 may be empty")
    reuse_curve: list[float] = Field(
        min_length=1, description="propensity to continue, over equal parts of the requests"
    )
    output_tokens: list[float] | None = Field(
        default=None,
        min_length=len(LEVELS),
        max_length=len(LEVELS),
        description="quantile table of all outputs; the strata's are mapped onto it by rank",
    )
    strata: list[Stratum] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadProfile:
        for label, part in (("fresh", self.fresh), ("continuing", self.continuing)):
            total = sum(s.share for s in part)
            if (part or label == "fresh") and abs(total - 1) > 1e-3:
                raise ValueError(f"shares of the {label} strata sum to {total:.4f}, expected 1")
        if not all(0 <= p <= 1 for p in self.reuse_curve):
            raise ValueError("reuse_curve: expected propensities from 0 to 1")
        for stratum in self.strata:
            if not set(stratum.trunk_shares) <= set(range(len(self.trunks))):
                raise ValueError("a stratum names a trunk that the profile lacks")
        return self

    @property
    def fresh(self) -> list[Stratum]:
        return [s for s in self.strata if s.kind == "fresh"]

    @property
    def continuing(self) -> list[Stratum]:
        return [s for s in self.strata if s.kind != "fresh"]

    def to_yaml(self) -> str:
        import yaml

        return str(yaml.safe_dump(self.model_dump(), sort_keys=False, default_flow_style=None, width=98))

    @classmethod
    def from_yaml(cls, text: str, file: str | Path | None = None) -> WorkloadProfile:
        """Parse YAML (or JSON, which is YAML).

        Raises:
            TraceError: naming the file and the first bad field.
        """
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            return cls.model_validate(yaml.load(text, Loader=loader))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise TraceError(
                f"not YAML ({getattr(error, 'problem', error)})",
                file=file,
                line=None if mark is None else mark.line + 1,
                expected="a workload profile",
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            raise TraceError(
                f"{first['msg']}",
                file=file,
                field=".".join(str(part) for part in first["loc"]) or None,
                expected="a workload profile, as `python -m traces fit` writes it",
            ) from None


# -- fitting ----------------------------------------------------------------------------------


def fit(trace: Trace, name: str | None = None) -> WorkloadProfile:
    """Measure a profile from a trace (see the module's text).

    Raises:
        TraceError: fewer than two requests, or all at one time.
    """
    n = trace.n_requests
    if n < 2 or trace.duration_s <= 0:
        raise TraceError(
            f"cannot fit {n} requests over {trace.duration_s:g} s",
            expected="two or more requests at different times",
        )
    trunks, trunk_of, depth, matched, covered, uses, owner, whole = _prefix_reuse(trace)
    since_s = trace.arrival_s - trace.arrival_s[0]
    rows = np.arange(n)
    continuing = (owner >= 0) & (owner < rows)
    gap_s = np.where(continuing, trace.arrival_s - trace.arrival_s[owner], 0.0)
    b = trace.block_tokens
    n_blocks = np.diff(trace.block_offsets)
    variables = {
        "input_tokens": trace.input_tokens.astype(np.float64),
        "output_tokens": trace.output_tokens.astype(np.float64),
        "gap_s": gap_s,
        "matched": matched.astype(np.float64),
        "covered": covered.astype(np.float64),
        "uses": np.maximum(uses, 1).astype(np.float64),
        "once": (matched - covered).astype(np.float64),
        "tail": (n_blocks[owner] - depth - matched).clip(0).astype(np.float64),
        "new_tokens": trace.input_tokens - b * (depth + matched).astype(np.float64),
    }
    extends = continuing & (uses <= 1)
    classes: dict[Kind, Ints] = {
        "extends": np.flatnonzero(extends),
        "rereads": np.flatnonzero(continuing & ~extends),
    }
    weight, curve = _correct_for_start(since_s, gap_s, continuing)
    strata: list[Stratum] = []
    for kind, chosen in classes.items():
        if not len(chosen):
            continue
        order = chosen[np.argsort(gap_s[chosen], kind="stable")]
        parts = max(1, min(GAP_STRATA, len(order) // 40))
        for rows_of in np.array_split(order, parts):
            share = float(weight[rows_of].sum() / weight.sum())
            stratum = _stratum(variables, rows_of, share, kind, trunk_of)
            alone = round(float(whole[rows_of].mean()), 4)
            strata.append(stratum.model_copy(update={"whole": alone}))
    fresh = np.flatnonzero(~continuing)
    # Some of them would continue something, had the trace begun earlier.
    segment = np.arange(n) * len(curve) // n
    lost = max(float(np.sum(np.array(curve)[segment])) - int(continuing.sum()), 0.0)
    lost_by_trunk = lost * np.bincount(trunk_of[continuing], minlength=len(trunks))
    lost_by_trunk = lost_by_trunk / max(int(continuing.sum()), 1)
    groups = [fresh[trunk_of[fresh] == k] for k in range(len(trunks))]
    true_fresh = np.array([max(len(g) - x, 0.02 * len(g)) for g, x in zip(groups, lost_by_trunk)])
    small = [g for g in groups if 0 < len(g) < OWN_STRATUM_SHARE * n]
    large = [g for g in groups if len(g) >= OWN_STRATUM_SHARE * n]
    for rows_of in large + ([np.concatenate(small)] if small else []):
        share = float(true_fresh[np.unique(trunk_of[rows_of])].sum() / true_fresh.sum())
        strata.append(_stratum(variables, rows_of, share, "fresh", trunk_of))
    profile = WorkloadProfile(
        name=name or trace.name or "fitted",
        source=f"fitted to {n} requests, sha256 {trace.checksum}",
        block_tokens=b,
        n_requests=n,
        max_input_tokens=int(trace.input_tokens.max()),
        arrivals=_fit_arrivals(since_s),
        trunks=trunks,
        reuse_curve=curve,
        output_tokens=_quantiles(variables["output_tokens"]),
        strata=strata,
    )
    if strata[0].kind != "fresh" and n <= CALIBRATED_REQUESTS:
        profile = _calibrate(profile, trace)
    return profile


@dataclass(frozen=True)
class _Reuse:
    """What calibration compares: reuse as it came out."""

    continuing: float
    """Share of requests that match blocks beyond their trunk."""
    matched: float
    """Blocks these match beyond it, mean."""
    reused: float
    """Distinct blocks used again, per request."""
    figures: Floats
    """What is held against the source: LRU hit rates at several sizes, blocks never reused."""
    gaps_s: Floats
    """Gap levels, and at each the cache size in blocks that a hit after this gap needs."""
    sizes: Floats


def _measure_reuse(trace: Trace, caches: Floats) -> _Reuse | None:
    """None where nothing is reused."""
    from traces import kernels

    _, _, depth, matched, covered, _, owner, _ = _prefix_reuse(trace)
    rows = np.flatnonzero(owner >= 0)
    if not len(rows):
        return None
    every = kernels.reach_distances(trace.block_offsets, trace.block_ids, trace.n_distinct_blocks)
    needed = every[trace.block_offsets[rows] + depth[rows] + matched[rows] - 1]
    hits = np.searchsorted(np.sort(every), caches, side="right") / len(every)
    counts = kernels.use_counts(trace.block_ids, trace.n_distinct_blocks)
    gap_s = trace.arrival_s[rows] - trace.arrival_s[owner[rows]]
    order = np.argsort(gap_s, kind="stable")
    figures = np.append(hits, (counts == 1).mean())
    parts = np.array_split(order, max(1, min(16, len(order) // 25)))
    return _Reuse(
        continuing=len(rows) / trace.n_requests,
        matched=float(matched[rows].mean()),
        reused=float((matched - covered).sum()) / trace.n_requests,
        figures=figures,
        gaps_s=np.array([gap_s[p].mean() for p in parts]),
        sizes=np.maximum.accumulate([needed[p].mean() for p in parts]),
    )


def _calibrate(profile: WorkloadProfile, trace: Trace) -> WorkloadProfile:
    """Correct a profile by what it gives: the search for fitting requests finds no exact ones.

    Four things are set so that synthesised traces agree with the source: the propensity to
    continue (by the share of requests that do), the depth (by matched blocks), the split into requests that extend
    and that reread (by blocks ever reused), and the gaps (by the cache size that a hit needs: branches of a session
    touch shared blocks in between, so the same gap may need less cache). The gaps in seconds move
    by some percent for it.
    """
    caches = np.geomspace(250, max(trace.n_distinct_blocks, 500), 12)
    goal = _measure_reuse(trace, caches)
    if goal is None:
        return profile
    original = profile
    curve = depth = first = 1.0
    gap_from, gap_to = np.array([1e-6, 1e9]), np.array([1e-6, 1e9])
    best, least = profile, np.inf
    # Short traces differ more from seed to seed.
    seeds = int(np.clip(CALIBRATED_SAMPLE // trace.n_requests, 2, 16))
    for _ in range(CALIBRATION_ROUNDS):
        samples = (synthesize(profile, seed=1000 + k) for k in range(seeds))
        got = [g for g in (_measure_reuse(sample, caches) for sample in samples) if g is not None]
        if not got:
            break
        miss = float(np.abs(np.mean([g.figures for g in got], axis=0) - goal.figures).max())
        if miss < least:
            best, least = profile, miss
        curve *= goal.continuing / fmean(g.continuing for g in got)
        depth *= goal.matched / fmean(g.matched for g in got)
        first *= goal.reused / fmean(g.reused for g in got)
        curve, depth = min(max(curve, 0.8), 1.25), min(max(depth, 0.9), 1.1)
        first = min(max(first, 0.5), 2.0)
        # The gap after which a synthesised hit needs as much cache as one of the source's.
        sizes = np.mean([np.interp(goal.gaps_s, g.gaps_s, g.sizes) for g in got], axis=0)
        wanted = np.interp(goal.sizes, sizes, goal.gaps_s)
        beyond = goal.sizes > sizes[-1]
        wanted[beyond] = goal.gaps_s[-1] * goal.sizes[beyond] / sizes[-1]
        now = np.interp(goal.gaps_s, gap_from, gap_to)
        gap_to = np.maximum.accumulate((now + np.clip(wanted, now / 2, 2 * now)) / 2)
        gap_from = goal.gaps_s
        gap_from = np.concatenate([[0.0], gap_from, [gap_from[-1] * 100]])
        gap_to = np.concatenate([[0.0], gap_to, [gap_to[-1] * 100]])
        profile = _adjusted(original, curve, depth, first, gap_from, gap_to)
    return best


def _adjusted(
    profile: WorkloadProfile,
    curve: float,
    depth: float,
    first: float,
    gap_from: Floats,
    gap_to: Floats,
) -> WorkloadProfile:
    strata = []
    share = {kind: sum(s.share for s in profile.strata if s.kind == kind) for kind in CONTINUING}
    # Requests that extend are the ones that make blocks reused which were not before.
    extends = min(share["extends"] * first, 1.0) if share["rereads"] > 0 else 1.0
    wanted = {"extends": extends, "rereads": 1 - extends}
    for stratum in profile.strata:
        if stratum.kind == "fresh":
            strata.append(stratum)
            continue
        factor = wanted[stratum.kind] / max(share[stratum.kind], 1e-9)
        tables = dict(stratum.tables)
        tables["matched"] = _tidy(depth * np.array(tables["matched"]))
        tables["gap_s"] = _tidy(np.interp(tables["gap_s"], gap_from, gap_to))
        weight = round(stratum.share * factor, 6)
        strata.append(stratum.model_copy(update={"tables": tables, "share": weight}))
    propensity = [round(min(p * curve, 1.0), 4) for p in profile.reuse_curve]
    return profile.model_copy(update={"strata": strata, "reuse_curve": propensity})


def _tidy(table: Floats) -> list[float]:
    return [float(f"{v:.6g}") for v in table]


def _correct_for_start(since_s: Floats, gap_s: Floats, continuing: NDArray[np.bool_]) -> tuple[Floats, list[float]]:
    """Weights of the continuing requests, and the propensity to continue over the trace.

    A reuse of gap g can only be seen in requests g or more after the start, so it stands for
    more than itself; which requests could have been its place depends on their propensity, and
    the propensity on the weights: three rounds settle both.
    """
    n = len(since_s)
    segments = int(np.clip(n // 150, 1, RATE_SEGMENTS))
    segment = np.arange(n) * segments // n
    propensity = np.full(n, 0.5)
    rows = np.flatnonzero(continuing)
    weight = np.zeros(n)
    curve = np.zeros(segments)
    if not len(rows):
        return weight, [0.0]
    order = rows[np.argsort(gap_s[rows], kind="stable")]
    for _ in range(3):
        # Propensity left from each request to the end, normalised.
        later = np.append(np.cumsum(propensity[::-1])[::-1], 0.0)
        seen = later[np.searchsorted(since_s, gap_s[rows], side="left")] / later[0]
        weight[rows] = 1 / np.maximum(seen, 0.05)
        within = np.append(0.0, np.cumsum(weight[order]) / weight.sum())
        fits = within[np.searchsorted(gap_s[order], since_s, side="right")]
        possible = np.bincount(segment, fits, segments)
        happened = np.bincount(segment, continuing, segments)
        curve = np.clip(happened / np.maximum(possible, 1e-9), 0, 1)
        propensity = np.maximum(curve[segment], 1e-6)
    return weight, [round(float(c), 4) for c in curve]


def _prefix_reuse(
    trace: Trace,
) -> tuple[list[Trunk], Ints, Ints, Ints, Ints, Ints, Ints, NDArray[np.bool_]]:
    n = trace.n_requests
    zeros = np.zeros(n, np.int64)
    if not trace.has_blocks:
        return [Trunk()], zeros, zeros, zeros, zeros, zeros, zeros - 1, zeros > 0
    from traces import kernels

    counts = kernels.use_counts(trace.block_ids, trace.n_distinct_blocks)
    popular = counts >= max(TRUNK_USES, TRUNK_SHARE * n)
    depth, matched, covered, uses, owner, whole = kernels.walk_prefixes(
        trace.block_offsets, trace.block_ids, trace.n_distinct_blocks, popular
    )
    # A trunk is named by its last block: ids are chained, so that tells the whole path.
    last = np.where(depth > 0, trace.block_ids[trace.block_offsets[:-1] + depth - 1], -1)
    _, first_row, trunk_of = np.unique(last, return_index=True, return_inverse=True)
    number: dict[int, int] = {}
    trunks = []
    for row in first_row:
        path = [number.setdefault(int(x), len(number)) for x in trace.blocks(row)[: depth[row]]]
        trunks.append(Trunk(path=_as_ranges(path)))
    return trunks, trunk_of.astype(np.int64), depth, matched, covered, uses, owner, whole


def _as_ranges(path: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for block in path:
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return ranges


def _stratum(variables: dict[str, Floats], rows: Ints, share: float, kind: Kind, trunk_of: Ints) -> Stratum:
    labels = FRESH_VARIABLES if kind == "fresh" else REUSE_VARIABLES
    margins = () if kind == "fresh" else REUSE_MARGINS
    columns = [variables[label][rows] for label in labels]
    trunks, uses = np.unique(trunk_of[rows], return_counts=True)
    return Stratum(
        share=round(share, 6),
        kind=kind,
        trunk_shares={int(k): round(float(u) / len(rows), 6) for k, u in zip(trunks, uses)},
        tables={label: _quantiles(variables[label][rows]) for label in labels + margins},
        correlation=_normal_correlation(columns),
    )


def _quantiles(values: Floats) -> list[float]:
    table = np.quantile(values, LEVELS)
    return _tidy(np.maximum.accumulate(table))


def _normal_correlation(columns: list[Floats]) -> list[list[float]]:
    """Correlation of the columns' normal scores (average ranks for ties)."""
    scores = np.stack([_normal_scores(c) for c in columns])
    scores -= scores.mean(axis=1, keepdims=True)
    norm = np.sqrt((scores**2).sum(axis=1))
    norm[norm == 0] = 1
    matrix = (scores @ scores.T) / np.outer(norm, norm)
    np.fill_diagonal(matrix, 1.0)
    return [[round(float(v), 3) for v in row] for row in matrix]


def _normal_scores(values: Floats) -> Floats:
    """Standard normal quantiles of the values' ranks; ties get their middle rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2
    grid = (np.arange(4096) + 0.5) / 4096
    normal = [NormalDist().inv_cdf(float(p)) for p in grid]
    return np.interp(middle[inverse] / len(values), grid, normal)


def _fit_arrivals(since_s: Floats) -> Arrivals:
    n, duration_s = len(since_s), float(since_s[-1])
    ticks = np.unique(since_s)
    gaps = np.diff(ticks)
    tick_s = None
    # Several requests per timestamp and near-equal gaps: a clock grid.
    if len(ticks) >= 10 and n > 1.5 * len(ticks):
        step = float(np.median(gaps))
        if step > 0 and np.mean(np.abs(gaps / step - np.rint(gaps / step)) < 0.02) > 0.95:
            tick_s = round(step, 3)
    span_s = duration_s + (tick_s or 0.0)
    segments = int(np.clip(n // 100, 1, RATE_SEGMENTS))
    counts, _ = np.histogram(since_s, bins=segments, range=(0.0, span_s))
    curve = counts / counts.mean()
    # Time in which the rate is constant; the spread of gaps there is the burstiness.
    at = np.linspace(0, span_s, segments + 1)
    flat = np.interp(since_s, at, np.concatenate([[0.0], np.cumsum(counts)]))
    if tick_s is None:
        steps = np.diff(flat)
        gap_cv = float(steps.std() / steps.mean())
    else:
        # Requests per tick have a variance of gap_cv**2 times their mean (renewal theory).
        number = np.rint(since_s / tick_s).astype(np.int64)
        per_tick = np.bincount(number).astype(np.float64)
        expected = np.diff(np.interp(np.arange(len(per_tick) + 1) * tick_s, at, np.append(0, np.cumsum(counts))))
        residual = per_tick - expected
        gap_cv = float(np.sqrt((residual**2).mean() / per_tick.mean()))
    return Arrivals(
        rate=round(n / duration_s, 6),
        gap_cv=round(min(max(gap_cv, 0.05), 20.0), 4),
        tick_s=tick_s,
        curve=[round(float(c), 4) for c in curve],
        segment_s=round(span_s / segments, 4),
    )


# -- sampling ---------------------------------------------------------------------------------


def synthesize(
    profile: WorkloadProfile,
    *,
    n_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    rate: float | None = None,
    name: str | None = None,
) -> Trace:
    """A new trace from a profile; the same arguments give the same trace.

    Args:
        n_requests: how many; or `duration_s`: how long. Default: as many as the profile's source.
        seed: of every random draw.
        rate: requests per second, default the profile's. More users, not hastier ones: the times
            between a session's turns stay.

    Raises:
        TraceError: contradictory or impossible arguments.
    """
    rate = profile.arrivals.rate if rate is None else rate
    if not (np.isfinite(rate) and rate > 0):
        raise TraceError(f"rate {rate}", expected="requests per second > 0")
    if n_requests is not None and duration_s is not None:
        raise TraceError("both n_requests and duration_s", expected="one of them")
    if duration_s is not None:
        if not (np.isfinite(duration_s) and duration_s > 0):
            raise TraceError(f"duration_s {duration_s}", expected="seconds > 0")
        n_requests = max(1, round(duration_s * rate))
    n = profile.n_requests if n_requests is None else n_requests
    if n < 1:
        raise TraceError(f"n_requests {n}", expected="an integer >= 1")
    rng = np.random.default_rng(seed)
    arrival_s = _sample_arrivals(profile.arrivals, n, rate, rng)
    draw = _sample_requests(profile, arrival_s, rng)
    return _grow(profile, arrival_s, draw, name or profile.name)


def _sample_arrivals(arrivals: Arrivals, n: int, rate: float, rng: np.random.Generator) -> Floats:
    """float64[n], from 0 to about n / rate."""
    if n == 1:
        return np.zeros(1)
    shape = 1 / arrivals.gap_cv**2
    work = np.cumsum(rng.gamma(shape, 1 / shape, n))
    work = (work - work[0]) / max(work[-1] - work[0], 1e-300)
    duration_s = n / rate
    # The expected count up to each time, from the rate curve repeated as long as needed.
    segments = int(np.ceil(duration_s / arrivals.segment_s))
    curve = np.resize(np.asarray(arrivals.curve), segments)
    edges = np.minimum(np.arange(segments + 1) * arrivals.segment_s, duration_s)
    expected = np.concatenate([[0.0], np.cumsum(curve * np.diff(edges))])
    arrival_s = np.interp(work * expected[-1], expected, edges)
    if arrivals.tick_s is not None:
        # The last request would open a tick of its own.
        last = np.nextafter(duration_s, 0)
        arrival_s = np.floor(np.minimum(arrival_s, last) / arrivals.tick_s) * arrivals.tick_s
    rounded: Floats = np.round(arrival_s, 6)
    return rounded


def _sample_requests(profile: WorkloadProfile, arrival_s: Floats, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Trunk, lengths and wanted reuse of every request."""
    n = len(arrival_s)
    out: dict[str, NDArray[Any]] = {
        "trunk": np.zeros(n, np.int64),
        "input_tokens": np.ones(n),
        "output_tokens": np.ones(n),
        "gap_s": np.full(n, -1.0),
        "covered": np.zeros(n),
        "matched": np.zeros(n),
        "uses": np.ones(n),
        "once": np.zeros(n),
        "tail": np.zeros(n),
        "whole": np.ones(n, bool),
        "new_tokens": np.zeros(n),
    }
    lengths = np.array([len(t.blocks()) for t in profile.trunks], np.int64)
    b = profile.block_tokens
    continuing, lost = _continuing_rows(profile, arrival_s, rng)
    for stratum, rows, gap_level in continuing:
        levels = _copula(stratum, len(rows), rng)
        # The gap is drawn already; give each row the levels that go with a gap of its rank.
        levels = levels[:, np.argsort(levels[0])][:, np.argsort(np.argsort(gap_level))]
        levels[0] = gap_level
        for label, u in zip(REUSE_VARIABLES, levels):
            out[label][rows] = np.interp(u, LEVELS, stratum.tables[label])
        tables = stratum.tables
        # Random ties: equal sums must not all move the same way.
        depth = _even(out["covered"][rows] + out["once"][rows] + rng.random(len(rows)))
        matched = np.maximum(np.rint(np.interp(depth, LEVELS, tables["matched"])), 1)
        out["matched"][rows] = matched
        out["whole"][rows] = rng.random(len(rows)) < stratum.whole
        trunk = _labels(stratum.trunk_shares, len(rows), rng)
        out["trunk"][rows] = trunk
        least = (lengths[trunk] + matched - 1) * b + 1
        length = _even((lengths[trunk] + matched) * b + out["new_tokens"][rows])
        tokens = np.rint(np.interp(length, LEVELS, tables["input_tokens"]))
        out["input_tokens"][rows] = np.maximum(tokens, least)
    # What a lost request would have continued lies before the start; its trunk it keeps.
    lost_trunk = _labels(_continuing_trunks(profile), len(lost), rng)
    given = {k: lost[lost_trunk == k] for k in np.unique(lost_trunk).tolist()}
    free = np.flatnonzero(out["gap_s"] < 0)
    free = np.setdiff1d(free, lost, assume_unique=True)
    parts: list[tuple[int | None, Ints]] = [(None, free), *given.items()]
    for trunk_given, part in parts:
        shares = [
            s.share * (1.0 if trunk_given is None else s.trunk_shares.get(trunk_given, 0.0)) for s in profile.fresh
        ]
        of = _by_share(shares if sum(shares) > 0 else [s.share for s in profile.fresh], len(part), rng)
        for k, stratum in enumerate(profile.fresh):
            _draw_fresh(out, stratum, part[of == k], trunk_given, lengths, b, rng)
    most = profile.max_input_tokens
    out["input_tokens"] = np.clip(out["input_tokens"], 1, most).astype(np.int64)
    if profile.output_tokens is not None:
        # Calibration moves shares between strata; the outputs of all must not move with them.
        level = _even(out["output_tokens"] + rng.random(n))
        out["output_tokens"] = np.interp(level, LEVELS, profile.output_tokens)
    out["output_tokens"] = np.maximum(np.rint(out["output_tokens"]), 1).astype(np.int64)
    return out


def _draw_fresh(
    out: dict[str, NDArray[Any]],
    stratum: Stratum,
    rows: Ints,
    trunk_given: int | None,
    lengths: Ints,
    block_tokens: int,
    rng: np.random.Generator,
) -> None:
    for label, u in zip(FRESH_VARIABLES, _copula(stratum, len(rows), rng)):
        out[label][rows] = np.interp(u, LEVELS, stratum.tables[label])
    if trunk_given is None:
        trunk = _labels(stratum.trunk_shares, len(rows), rng)
    else:
        trunk = np.full(len(rows), trunk_given, np.int64)
    out["trunk"][rows] = trunk
    least = np.maximum((lengths[trunk] - 1) * block_tokens + 1, 1)
    out["input_tokens"][rows] = np.maximum(np.rint(out["input_tokens"][rows]), least)


def _continuing_trunks(profile: WorkloadProfile) -> dict[int, float]:
    """Trunk -> share of the continuing requests."""
    shares: dict[int, float] = {}
    for stratum in profile.continuing:
        for trunk, share in stratum.trunk_shares.items():
            shares[trunk] = shares.get(trunk, 0.0) + stratum.share * share
    return shares or {0: 1.0}


def _continuing_rows(
    profile: WorkloadProfile, arrival_s: Floats, rng: np.random.Generator
) -> tuple[list[tuple[Stratum, Ints, Floats]], Ints]:
    """Which requests continue an earlier one: (stratum, rows, level of each row's gap).

    Also the lost ones: rows that would continue something, had the trace begun earlier.
    """
    n = len(arrival_s)
    since_s = arrival_s - arrival_s[0]
    # By position, not time: the number of requests in each part is then the same for all seeds.
    propensity = np.asarray(profile.reuse_curve)[np.arange(n) * len(profile.reuse_curve) // n]
    groups = [[s for s in profile.continuing if s.kind == kind] for kind in CONTINUING]
    shares = [sum(s.share for s in group) for group in groups]
    fits = np.stack([_gap_cdf(group, since_s) for group in groups])
    chance = propensity * (np.array(shares)[:, None] * fits)
    order = rng.permutation(n)
    found: list[tuple[Stratum, Ints, Floats]] = []
    taken = np.zeros(n, bool)
    for group, fit_by_start, probability in zip(groups, fits, _exclusive(chance[:, order], rng)):
        rows = np.sort(order[probability])
        if not len(rows):
            continue
        # Even levels, shuffled, squeezed into what fits since the start.
        level = rng.permutation((np.arange(len(rows)) + rng.random()) / len(rows))
        level *= fit_by_start[rows]
        edges = np.append(0.0, np.cumsum([s.share for s in group]))
        edges /= edges[-1]
        of = np.clip(np.searchsorted(edges, level, side="right") - 1, 0, len(group) - 1)
        for k, stratum in enumerate(group):
            mine = of == k
            within = (level[mine] - edges[k]) / max(edges[k + 1] - edges[k], 1e-12)
            found.append((stratum, rows[mine], within))
        taken[rows] = True
    happens = chance.sum(axis=0)
    missed = propensity * sum(shares) - happens
    lost = ~taken & (rng.random(n) * (1 - happens) < missed)
    return found, np.flatnonzero(lost)


def _exclusive(chance: Floats, rng: np.random.Generator) -> list[NDArray[np.bool_]]:
    """Per row of `chance`, the columns it wins; at most one row wins a column.

    Systematic sampling: the totals come out as expected, whatever the seed.
    """
    total = np.cumsum(chance.sum(axis=0)) + rng.random()
    hit = np.floor(total) > np.floor(total - chance.sum(axis=0))
    pick = rng.random(chance.shape[1]) * chance.sum(axis=0)
    below = np.cumsum(chance, axis=0)
    return [hit & (pick < below[k]) & (pick >= below[k] - chance[k]) for k in range(len(chance))]


def _gap_cdf(group: list[Stratum], since_s: Floats) -> Floats:
    """Chance that a gap of the group's strata (in order of gap) is at most `since_s`."""
    shares = np.array([s.share for s in group])
    if not shares.sum() > 0:  # nothing is ever reused this way
        return np.zeros(len(since_s))
    edges = np.append(0.0, np.cumsum(shares)) / shares.sum()
    gaps = np.concatenate([s.tables["gap_s"] for s in group])
    levels = np.concatenate([low + np.array(LEVELS) * (high - low) for low, high in pairwise(edges)])
    at = np.searchsorted(gaps, since_s, side="right")
    # Linear between table entries, as in sampling.
    low, high = np.maximum(at - 1, 0), np.minimum(at, len(gaps) - 1)
    width = np.maximum(gaps[high] - gaps[low], 1e-12)
    inside = levels[low] + (since_s - gaps[low]) / width * (levels[high] - levels[low])
    return np.where(at == 0, 0.0, np.where(at == len(gaps), 1.0, inside))


def _by_share(shares: Any, n: int, rng: np.random.Generator) -> Ints:
    """int64[n] of class numbers, in shares as exact as whole numbers allow, shuffled."""
    edges = np.cumsum(np.asarray(shares, np.float64))
    # One random shift for all: systematic sampling keeps every class within one of its share.
    at = (np.arange(n) + rng.random()) / n * edges[-1] if n else np.zeros(0)
    classes = np.minimum(np.searchsorted(edges, at, side="right"), len(edges) - 1)
    shuffled: Ints = rng.permutation(classes.astype(np.int64))
    return shuffled


def _labels(shares: dict[int, float], n: int, rng: np.random.Generator) -> Ints:
    keys = np.array(list(shares), np.int64)
    return keys[_by_share(list(shares.values()), n, rng)]


def _even(values: Floats) -> Floats:
    """The same order, on evenly spread levels in (0, 1): no luck of the draw in the margins."""
    n = len(values)
    out = np.empty(n)
    out[np.argsort(values, kind="stable")] = (np.arange(n) + 0.5) / n
    return out


def _copula(stratum: Stratum, n: int, rng: np.random.Generator) -> Floats:
    """float64[variables, n] of levels in (0, 1), correlated as the stratum says."""
    matrix = np.asarray(stratum.correlation, np.float64)
    values, vectors = np.linalg.eigh(matrix)
    root = vectors * np.sqrt(np.maximum(values, 0))
    normal = root @ rng.standard_normal((len(matrix), n))
    return np.stack([_even(row) for row in normal])


def _grow(profile: WorkloadProfile, arrival_s: Floats, draw: dict[str, NDArray[Any]], name: str) -> Trace:
    from traces import kernels

    b = profile.block_tokens
    n_blocks = -(-draw["input_tokens"] // b)
    offsets = np.concatenate([[0], np.cumsum(n_blocks)]).astype(np.int64)
    if offsets[-1] >= 2**31:
        raise TraceError(f"{offsets[-1]} blocks in all", expected="below 2**31", hint="ask for fewer requests")
    paths = [t.blocks() for t in profile.trunks]
    path_offsets = np.concatenate([[0], np.cumsum([len(p) for p in paths])]).astype(np.int64)
    flat = np.array([x for p in paths for x in p], np.int64)
    ids, session = kernels.grow_prefix_tree(
        arrival_s,
        offsets,
        draw["trunk"],
        path_offsets,
        flat,
        int(flat.max(initial=-1)) + 1,
        draw["gap_s"],
        draw["matched"].astype(np.int64),
        np.maximum(draw["uses"], 1.0),
        np.minimum(draw["once"] / np.maximum(draw["matched"], 1), 1),
        np.rint(draw["tail"]).astype(np.int64),
        draw["whole"],
        SEARCH_REACH,
    )
    return Trace(
        arrival_s=arrival_s,
        input_tokens=draw["input_tokens"].astype(np.int32),
        output_tokens=draw["output_tokens"].astype(np.int32),
        block_offsets=offsets,
        block_ids=ids,
        block_tokens=b,
        session_id=session,
        name=name,
    )


def synthesise_blocks(trace: Trace, profile: WorkloadProfile, seed: int = 0) -> Trace:
    """Invented sessions for a trace that has none: arrivals and lengths stay, blocks are drawn.

    Which requests continue which, and after what time, follow the profile; the matched part of a
    prompt is the profile's share of it, since the lengths are the trace's own.
    """
    rng = np.random.default_rng(seed)
    draw = _sample_requests(profile, trace.arrival_s, rng)
    lengths = np.array([len(t.blocks()) for t in profile.trunks], np.int64)
    own = -(-trace.input_tokens.astype(np.int64) // profile.block_tokens)
    beyond = np.maximum(own - lengths[draw["trunk"]], 0)
    drawn = -(-draw["input_tokens"] // profile.block_tokens) - lengths[draw["trunk"]]
    share = draw["matched"] / np.maximum(drawn, 1)
    draw["matched"] = np.rint(np.minimum(share, 1) * beyond)
    draw["input_tokens"] = trace.input_tokens.astype(np.int64)
    draw["output_tokens"] = trace.output_tokens.astype(np.int64)
    return _grow(profile, trace.arrival_s, draw, trace.name)


# -- profiles by name -------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _shipped(name: str) -> WorkloadProfile:
    resource = files("traces") / "profiles" / f"{name}.yaml"
    return WorkloadProfile.from_yaml(resource.read_text(encoding="utf-8"), file=f"{name}.yaml")


def profile(name_or_path: str | Path) -> WorkloadProfile:
    """A built-in profile by name (`conversation`, `toolagent`, `synthetic`) or a YAML file.

    Raises:
        TraceError: no such profile or file, or a bad field in it.
    """
    text = str(name_or_path).removeprefix("builtin:")
    if text in BUILTIN_NAMES:
        return _shipped(text)
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise TraceError(
            f"no workload profile {text!r}",
            expected=f"one of {', '.join(BUILTIN_NAMES)}, or a YAML file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot be read ({error})", file=path) from None
    return WorkloadProfile.from_yaml(content, file=path)


def builtin(
    name: str,
    seed: int = 0,
    n_requests: int | None = None,
    *,
    duration_s: float | None = None,
    rate: float | None = None,
) -> Trace:
    """A synthesised stand-in for one of Mooncake's released traces; needs no download.

    Raises:
        TraceError: no such workload.
    """
    if name not in BUILTIN_NAMES:
        raise TraceError(f"no built-in workload {name!r}", expected=", ".join(BUILTIN_NAMES))
    return synthesize(_shipped(name), n_requests=n_requests, duration_s=duration_s, seed=seed, rate=rate)
