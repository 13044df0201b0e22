"""FAST Fig 5: TTFT under four schedulers, 16 nodes, conversation.

The paper replays its conversation trace on 16 nodes under global cache-aware scheduling (Conductor), local cache-aware
scheduling (no transfers), load balancing and random choice. The split into pools is not stated: 8 + 8 here, and no
admission control, so that all four serve the same requests.
"""

from __future__ import annotations

import numpy as np

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import replay

ROUTERS = ("conductor", "cache_aware", "load_balancing", "random")
CLUSTER = "8p8d"


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig05")
    cluster, trace = setting.parameters.mooncake(CLUSTER), setting.trace("conversation")
    ttft_s = [replay(cluster, trace, setting.parameters.policy(router)).outcomes["ttft_s"] for router in ROUTERS]
    means = [float(np.mean(times)) for times in ttft_s]
    order = np.argsort(np.argsort(means))
    rows = [
        Row(f"place by mean TTFT, {router}", int(order[i]) + 1, i + 1, Within()) for i, router in enumerate(ROUTERS)
    ]
    rows += [
        Row("mean TTFT, conductor / cache_aware", means[0] / means[1], 0.86, Within(0.08)),
        Row("mean TTFT, load_balancing / cache_aware", means[2] / means[1], numbers["mean"][2] / numbers["mean"][1]),
        Row("mean TTFT, random / cache_aware", means[3] / means[1], numbers["mean"][3] / numbers["mean"][1]),
    ]
    for name, figure in (("mean", means), *quartiles(ttft_s)):
        rows += [Row(f"{name} TTFT s, {router}", figure[i], numbers[name][i]) for i, router in enumerate(ROUTERS)]
    panel = Panel(
        f"conversation, {CLUSTER}",
        "",
        "mean TTFT s",
        [Series("ours", ROUTERS, means), Series("ours", ROUTERS, numbers["mean"], of_paper=True)],
    )
    return Result(rows, [panel])


def quartiles(ttft_s: list[np.ndarray]) -> list[tuple[str, list[float]]]:
    """Medians and quartiles as the papers' boxes have them."""
    found = np.array([np.percentile(times, (50, 25, 75)) for times in ttft_s])
    return [(name, found[:, i].tolist()) for i, name in enumerate(("median", "q1", "q3"))]
