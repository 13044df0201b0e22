"""FAST Fig 10: what a global cache adds to local ones, 10 prefill nodes of 3M tokens.

The paper forces outputs to one token and forbids transfers between nodes for the local case; how requests were routed
then is not said. A router that looks for the longest local prefix (cache_aware) nearly closes the gap; one that only
balances load is below the paper's local rates, by a third on conversation and synthetic; those are about the rates of
one cache of 3M tokens. Both are shown. Hits are tokens reused. The paper counted in finer blocks (see FAST Fig 9).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import hit_rate, prefill_seconds, replay

NAMES = ("conversation", "toolagent", "synthetic")
ROUTERS = {"global": "conductor", "local": "cache_aware", "local, load only": "load_balancing"}
THEIRS = {"local": 0, "local, load only": 0, "global": 1}
NODE_TOKENS = 3_000_000


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig10")
    cluster = setting.parameters.mooncake("10p10d", host_kv_tokens=NODE_TOKENS)
    hits: dict[str, list[float]] = {case: [] for case in ROUTERS}
    seconds: dict[str, list[float]] = {case: [] for case in ROUTERS}
    for name in NAMES:
        trace = setting.trace(name)
        trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
        for case, router in ROUTERS.items():
            result = replay(cluster, trace, setting.parameters.policy(router))
            hits[case].append(hit_rate(result))
            seconds[case].append(prefill_seconds(result))
    their_hits = {c: [numbers["hit_pct_local_global"][n][i] / 100 for n in NAMES] for c, i in THEIRS.items()}
    their_seconds = {c: [numbers["gpu_s_local_global"][n][i] for n in NAMES] for c, i in THEIRS.items()}
    rows = [
        Row(f"{name} {what}, {case}", ours[case][i], theirs[case][i], tolerance if case == "global" else None)
        for what, ours, theirs, tolerance in (
            ("hit rate", hits, their_hits, Within(0.045)),
            ("prefill s", seconds, their_seconds, Within(share=0.15)),
        )
        for i, name in enumerate(NAMES)
        for case in ROUTERS
    ]
    panels = [
        Panel(
            what,
            "",
            what,
            [
                series
                for case in ROUTERS
                for series in (Series(case, NAMES, ours[case]), Series(case, NAMES, theirs[case], of_paper=True))
            ],
        )
        for what, ours, theirs in (("hit rate", hits, their_hits), ("prefill s", seconds, their_seconds))
    ]
    return Result(rows, panels)
