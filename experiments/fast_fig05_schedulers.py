"""FAST Fig 5: TTFT under four schedulers, 16 nodes, conversation.

The paper replays its conversation trace on 16 nodes under global cache-aware scheduling (Conductor), local cache-aware
scheduling (no transfers), load balancing and random choice. The split into pools is not stated: 8 + 8 here, and no
admission control, so that all four serve the same requests. All of the paper's times are more than twice ours, though
its prefills take as long (FAST Fig 8): its nodes were busier than the trace at its own speed explains. So order and
ratios have verdicts, seconds have none.
"""

from __future__ import annotations

from .experiment import Between, Result, Setting, Within, paper
from .schedulers import ROUTERS, box_panel, order_rows, ratio_rows, time_rows, ttft_s

CLUSTER = "8p8d"


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig05")
    times = ttft_s(setting, CLUSTER, setting.trace("conversation"))
    means = {router: float(times[router].mean()) for router in ROUTERS}
    theirs = dict(zip(ROUTERS, numbers["mean"]))
    rows = order_rows(means)
    tolerances: dict[str, Within | Between] = {
        "conductor": Within(0.08),
        "load_balancing": Between(low=1.25),
        "random": Between(low=3.0),
    }
    rows += ratio_rows(means, theirs, tolerances)
    rows += time_rows(times, numbers)
    return Result(rows, [box_panel(f"conversation, {CLUSTER}", times, numbers)])
