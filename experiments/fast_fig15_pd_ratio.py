"""FAST Fig 15: how 16 nodes should be split between prefill and decode, synthetic.

The paper replays the synthetic trace on 5P11D to 11P5D and counts the requests within 10 s TTFT and 100 ms TBT: the
best split is near 1 : 1; with too few prefill nodes TTFT breaks, with too few decode nodes TBT. Without admission
control here. Whether a request counts goes by the mean of its longest tenth of intervals, as in the paper; mean TBT is
over all intervals, which is what fits the paper's.
"""

from __future__ import annotations

import numpy as np

from envs.spec import Slo

from .experiment import Between, Panel, Result, Row, Series, Setting, Within, paper
from .replays import replay

SLO = Slo(ttft_s=10.0, tbt_s=0.1)
EVEN = "8P8D"


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig15")
    splits = numbers["pd"]
    effective, ttft_s, tbt_ms = [], [], []
    for split in splits:
        cluster = setting.parameters.mooncake(split.lower(), slo=SLO)
        result = replay(cluster, setting.trace("synthetic"), setting.parameters.policy("conductor"))
        outcomes = result.outcomes
        effective.append(100 * float(result.good.mean()))
        ttft_s.append(float(outcomes["ttft_s"].mean()))
        tbt_ms.append(1000 * float(outcomes["tbt_mean_s"][result.output_tokens > 1].mean()))
    even = splits.index(EVEN)
    theirs = numbers["effective_pct"]
    rows = [
        Row(
            "P of the best split",
            _p(splits[int(np.argmax(effective))]),
            _p(splits[int(np.argmax(theirs))]),
            Between(7, 9),
        ),
        Row(
            "effective %, best split less 8P8D",
            max(effective) - effective[even],
            max(theirs) - theirs[even],
            Between(0, 2),
        ),
        Row("effective %, 8P8D less 5P11D", effective[even] - effective[0], theirs[even] - theirs[0], Between(low=5)),
        Row("effective %, 8P8D less 11P5D", effective[even] - effective[-1], theirs[even] - theirs[-1], Between(low=5)),
    ]
    measures: tuple[tuple[str, list[float], list[float], Within | None], ...] = (
        ("effective %", effective, theirs, None),
        ("mean TTFT s", ttft_s, numbers["avg_ttft_s"], None),
        ("mean TBT ms", tbt_ms, numbers["avg_tbt_ms"], Within(share=0.15)),
    )
    rows += [
        Row(f"{what}, {split}", o, t, tolerance)
        for what, ours, ts, tolerance in measures
        for split, o, t in zip(splits, ours, ts)
    ]
    panels = [
        Panel(what, "", what, [Series("ours", splits, ours), Series("ours", splits, ts, of_paper=True)])
        for what, ours, ts, _ in measures
    ]
    return Result(rows, panels)


def _p(split: str) -> int:
    return int(split.partition("P")[0])
