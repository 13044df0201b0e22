"""The papers' four schedulers side by side: arXiv Fig 8 and FAST Fig 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import Trace

from .experiment import Between, Panel, Row, Series, Setting, Within
from .replays import replay

ROUTERS = ("conductor", "cache_aware", "load_balancing", "random")
"""In the papers' order: KVCache-centric or global, cache-aware or local, load balancing, random."""
QUANTILES = {"median": 50, "q1": 25, "q3": 75}

Times = dict[str, NDArray[np.float64]]


def ttft_s(setting: Setting, cluster: str, trace: Trace, speed: float = 1.0) -> Times:
    """TTFT of every request under each scheduler, without admission: float64[requests], seconds."""
    spec = setting.parameters.mooncake(cluster)
    policies = {router: setting.parameters.policy(router) for router in ROUTERS}
    return {router: replay(spec, trace, policy, speed=speed).outcomes["ttft_s"] for router, policy in policies.items()}


def order_rows(means: dict[str, float]) -> list[Row]:
    """Each scheduler's place, shortest mean TTFT first."""
    order = sorted(ROUTERS, key=lambda router: means[router])
    return [
        Row(f"place by mean TTFT, {router}", order.index(router) + 1, i, Within())
        for i, router in enumerate(ROUTERS, 1)
    ]


def ratio_rows(
    means: dict[str, float], theirs: dict[str, float], tolerances: Mapping[str, Within | Between]
) -> list[Row]:
    """Mean TTFT of some schedulers over that of cache-aware."""
    return [
        Row(
            f"mean TTFT, {router} / cache_aware",
            means[router] / means["cache_aware"],
            theirs[router] / theirs["cache_aware"],
            tolerance,
        )
        for router, tolerance in tolerances.items()
    ]


def time_rows(times: Times, numbers: dict[str, Any]) -> list[Row]:
    """Means, medians and quartiles beside the paper's, in seconds."""
    rows = [Row(f"mean TTFT s, {r}", float(times[r].mean()), numbers["mean"][i]) for i, r in enumerate(ROUTERS)]
    return rows + [
        Row(f"{name} TTFT s, {r}", float(np.percentile(times[r], percent)), numbers[name][i])
        for name, percent in QUANTILES.items()
        for i, r in enumerate(ROUTERS)
    ]


def box_panel(title: str, times: Times, numbers: dict[str, Any]) -> Panel:
    """Means and quartiles."""
    series = []
    for name in ("mean", *QUANTILES):
        found = times.values()
        ours = [float(t.mean() if name == "mean" else np.percentile(t, QUANTILES[name])) for t in found]
        series += [Series(name, ROUTERS, ours), Series(name, ROUTERS, numbers[name], of_paper=True)]
    return Panel(title, "", "TTFT s", series, log_y=True)
