"""P90 of TTFT and TBT by request rate, and the highest rate within the SLOs, as arXiv Figs 11 and 12 have them.

The SLOs are 10 times the P90 TTFT and 5 times the P90 TBT of the same system at the lowest rate. TBT of a request is
the mean of its intervals, which the paper leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import traces
from envs.spec import ClusterSpec, CoupledSpec

from .experiment import Between, Panel, Row, Series, Setting, paper
from .replays import replay

TTFT_TIMES, TBT_TIMES = 10.0, 5.0
TOP = 1.2  # above it the paper's pictures end
SEED = 1


class Curve(NamedTuple):
    """P90 over the SLO at ascending rates, NaN where unknown; a passing system has a TTFT and none above 1."""

    ttft: Sequence[float]
    tbt: Sequence[float]

    @property
    def passing(self) -> int:
        """How many of the rates pass, from the lowest on."""
        within = (np.array(self.ttft) <= 1) & ~(np.array(self.tbt) > 1)
        return len(within) if within.all() else int(np.argmin(within))


def sweep(setting: Setting, lengths: Mapping[str, str], vllm: CoupledSpec) -> tuple[list[Row], list[Panel]]:
    """Rows and panels of vLLM, 3P + 1D and 2P + 2D on sets of lengths, by their names in paper.yaml."""
    clusters: dict[str, ClusterSpec | CoupledSpec] = {
        "vLLM-4M": vllm,
        "3P+1D": setting.parameters.mooncake("3p1d"),
        "2P+2D": setting.parameters.mooncake("2p2d"),
    }
    rows: list[Row] = []
    panels: list[Panel] = []
    for key, name in lengths.items():
        setting.say(name)
        rates = rates_of(key)
        ours = {system: curve(setting, name, cluster, rates) for system, cluster in clusters.items()}
        theirs = {system: published(key, system, rates) for system in clusters}
        more_rows, more_panels = compare(name, rates, ours, theirs)
        rows += more_rows
        panels += more_panels
    return rows, panels


def curve(setting: Setting, lengths: str, cluster: ClusterSpec | CoupledSpec, rates: Sequence[float]) -> Curve:
    """Ours, for a set of lengths sent as a Poisson process at each rate."""
    requests = round(setting.parameters.requests_per_rate.value)
    drawn = traces.lengths(lengths, requests, SEED)
    p90 = []
    for rate in rates:
        trace = traces.at_rate(drawn, rate, SEED)
        outcomes = replay(cluster, trace, setting.parameters.policy("conductor")).outcomes
        p90.append([np.percentile(outcomes[name], 90) for name in ("ttft_s", "tbt_mean_s")])
    over_slo = np.array(p90) / (np.array([TTFT_TIMES, TBT_TIMES]) * p90[0])
    return Curve(*over_slo.T.tolist())


def published(key: str, system: str, rates: Sequence[float]) -> Curve:
    """The paper's, NaN where its picture has no point: a TTFT is above it then, a TBT behind other curves."""
    numbers: dict[str, Any] = paper("arxiv_fig11_12")
    ttft, tbt = (dict(map(tuple, numbers[f"{key}_{measure}"][system])) for measure in ("ttft", "tbt"))
    return Curve([ttft.get(rate, np.nan) for rate in rates], [tbt.get(rate, np.nan) for rate in rates])


def rates_of(key: str) -> list[float]:
    """The rates the paper tested."""
    return [rate for rate, _ in paper("arxiv_fig11_12")[f"{key}_ttft"]["vLLM-4M"]]


def compare(
    name: str, rates: Sequence[float], ours: Mapping[str, Curve], theirs: Mapping[str, Curve]
) -> tuple[list[Row], list[Panel]]:
    """The last passing rates, judged to one step of the paper's grid for the first two systems, and the curves."""

    def last(curve: Curve) -> float:
        return rates[curve.passing - 1] if curve.passing else 0.0

    rows = []
    for place, system in enumerate(ours):
        step = theirs[system].passing - 1
        one_step = Between(rates[max(0, step - 1)], rates[min(len(rates) - 1, step + 1)])
        rows.append(
            Row(
                f"{name}, last RPS within the SLOs, {system}",
                last(ours[system]),
                last(theirs[system]),
                one_step if place < 2 else None,
            )
        )
    first, second = list(ours)[:2]
    gain, theirs_gain = (
        100 * (last(of[second]) / last(of[first]) - 1) if of[first].passing else np.nan for of in (ours, theirs)
    )
    highest, theirs_highest = (of[second].tbt[-1] for of in (ours, theirs))
    rows += [
        Row(f"{name}, gain % of {second} over {first}", gain, theirs_gain),
        Row(f"{name}, P90 TBT / SLO at the highest rate, {second}", highest, theirs_highest),
    ]
    panels = [
        Panel(
            name,
            "requests per second",
            f"P90 {measure.upper()} / SLO",
            [
                Series(system, rates, np.minimum(getattr(of[system], measure), TOP).tolist(), of_paper)
                for system in ours
                for of, of_paper in ((ours, False), (theirs, True))
            ],
        )
        for measure in ("ttft", "tbt")
    ]
    return rows, panels
