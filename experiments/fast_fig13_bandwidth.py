"""FAST Fig 13: TTFT by network bandwidth, synthetic.

The paper throttles the NICs of its nodes from 400 to 24 Gbps while it replays the synthetic trace: from 100 Gbps on
more bandwidth hardly helps, below 40 recomputing would be faster. Number and split of nodes are not stated: 8 + 8 here.
In the paper the transfer of a whole prompt takes as long as 5 to 6 GB do (11 GB at 24 Gbps), and its TTFT is about that
at 400 Gbps plus this transfer: it ends when the KV has arrived at the decode node. Ours is shown to that point too, and
to the end of the prefill. The recompute line is cache-aware routing, which moves no KV between prefill nodes. Below 80
Gbps ours is far longer than the paper's: Conductor sends requests with long cached prefixes to the few nodes that have
them, where they cost little compute, but all their KV has to leave over one NIC, and it does not look at that queue.
"""

from __future__ import annotations

import numpy as np

from envs.state import Records

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import replay

CLUSTER = "8p8d"
KNEE_GBPS = 100


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig13")
    gbps = numbers["gbps"]
    outcomes = [_outcomes(setting, "conductor", bandwidth) for bandwidth in gbps]
    ttft_s = [float(o["ttft_s"].mean()) for o in outcomes]
    arrived_s = [float(np.nanmean(o["kv_ready_s"] - o["arrival_s"])) for o in outcomes]
    moved_s = [float(np.nanmean(o["kv_ready_s"] - o["prefill_end_s"])) for o in outcomes]
    recompute = _outcomes(setting, "cache_aware", gbps[-1])
    recompute_s = float(np.nanmean(recompute["kv_ready_s"] - recompute["arrival_s"]))
    theirs = numbers["avg_ttft_s"]
    knee = gbps.index(KNEE_GBPS)
    rows = [
        Row(
            "with transfer, 100 over 400 Gbps", arrived_s[knee] / arrived_s[-1], theirs[knee] / theirs[-1], Within(0.3)
        ),
        Row(
            "with transfer, 40 over 100 Gbps",
            arrived_s[1] / arrived_s[knee],
            theirs[1] / theirs[knee],
            Within(0.5),
        ),
    ]
    measures = (
        ("mean TTFT with transfer s", arrived_s, theirs),
        ("mean transfer after prefill s", moved_s, numbers["real_s"]),
        ("mean TTFT s", ttft_s, [None] * len(gbps)),
    )
    rows += [Row(f"{what}, {b} Gbps", o, t) for what, ours, ts in measures for b, o, t in zip(gbps, ours, ts)]
    rows.append(Row("mean TTFT with transfer s, recompute", recompute_s, numbers["recompute_ttft_s"]))
    panel = Panel(
        f"synthetic, {CLUSTER}",
        "Gbps",
        "mean s",
        [
            Series("TTFT with transfer", gbps, arrived_s),
            Series("TTFT with transfer", gbps, theirs, of_paper=True),
            Series("transfer after prefill", gbps, moved_s),
            Series("transfer after prefill", gbps, numbers["real_s"], of_paper=True),
            Series("TTFT to the end of prefill", gbps, ttft_s),
        ],
        log_x=True,
        log_y=True,
    )
    return Result(rows, [panel])


def _outcomes(setting: Setting, router: str, gbps: float) -> Records:
    cluster = setting.parameters.mooncake(CLUSTER, nic_bytes_per_s=gbps * 1e9 / 8)
    return replay(cluster, setting.trace("synthetic"), setting.parameters.policy(router)).outcomes
