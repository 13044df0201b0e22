"""arXiv Fig 9, with Fig 10: the loads of both pools over time under early rejection.

The paper shows 20 minutes of a live cluster of 20 machines under early rejection: where prefill's load is high decode's
is low and the other way round, because decode's load is read a whole prefill before it matters; its Fig 10 says,
without numbers, that a forecast evens this out. Neither the split of the machines nor their load is stated: ours is the
overload of Table 3. The load of a prefill node is the queue a request would meet over the TTFT SLO, that of a decode
node the TBT it would have there over the TBT SLO; a pool's is the mean of its nodes, over 15 s as in the figure.
Besides, 20 nodes split and loaded such that the mean loads are the figure's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arxiv_table3_overload import CLUSTER, SPEED
from .experiment import Between, Panel, Result, Row, Series, Setting, paper
from .replays import started

EVERY = 10  # requests between two looks at the cluster
WARM_UP_S = 60.0
ALIKE = "conversation", "5p15d", 1.5  # trace, cluster and speed at which the mean loads are about the figure's
LAG_S = 30.0  # by which decode follows prefill in the paper
SHOWN_S = 1200.0


class Loads(NamedTuple):
    """Loads of the pools, over the SLO, means of equal intervals of time: float64[intervals]."""

    time_s: NDArray[np.float64]
    prefill: NDArray[np.float64]
    decode: NDArray[np.float64]

    def correlation(self, lag: int = 0) -> float:
        """Of prefill's load and decode's `lag` intervals later."""
        last = len(self.prefill) - lag
        return float(np.corrcoef(self.prefill[:last], self.decode[lag:])[0, 1])


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_fig09")
    interval_s = numbers["dt_s"]
    theirs = Loads(
        interval_s * np.arange(len(numbers["prefill"])), np.array(numbers["prefill"]), np.array(numbers["decode"])
    )
    baseline, early, predictive = (
        loads_over_time(setting, "toolagent", CLUSTER, SPEED, admission, interval_s)
        for admission in ("baseline", "early", "predictive")
    )
    lag = round(LAG_S / interval_s)
    rows = [
        Row("correlation of the loads, early", early.correlation(), theirs.correlation(), Between(-0.7, -0.3)),
        Row("correlation of the loads, predictive", predictive.correlation()),
        Row("correlation of the loads, baseline", baseline.correlation()),
        Row(
            "size of the correlation, predictive less early",
            abs(predictive.correlation()) - abs(early.correlation()),
            None,
            Between(high=0),
        ),
        Row(f"correlation, decode {LAG_S:.0f} s later, early", early.correlation(lag), theirs.correlation(lag)),
    ]
    for pool in ("prefill", "decode"):
        spread = {name: float(getattr(loads, pool).std()) for name, loads in (("e", early), ("p", predictive))}
        rows += [
            Row(f"spread of {pool}'s load, predictive / early", spread["p"] / spread["e"], None, Between(high=1)),
            Row(f"standard deviation of {pool}'s load, early", spread["e"], float(getattr(theirs, pool).std())),
            Row(f"mean of {pool}'s load, early", getattr(early, pool).mean(), getattr(theirs, pool).mean()),
        ]
    panels = [
        Panel(title, "s", "load", _series(loads, False))
        for title, loads in (("early rejection", early), ("predictive early rejection", predictive))
    ]
    name, cluster, speed = ALIKE
    where = f"{cluster}, {name} x {speed:g}"
    early, predictive = (
        loads_over_time(setting, name, cluster, speed, admission, interval_s) for admission in ("early", "predictive")
    )
    rows += [
        Row(f"{where}, correlation, early", early.correlation(), theirs.correlation(), Between(-0.7, -0.3)),
        Row(
            f"{where}, size of the correlation, predictive less early",
            abs(predictive.correlation()) - abs(early.correlation()),
            None,
            Between(high=0),
        ),
    ]
    for pool in ("prefill", "decode"):
        ours, published = getattr(early, pool), getattr(theirs, pool)
        rows += [
            Row(f"{where}, mean of {pool}'s load, early", ours.mean(), published.mean()),
            Row(f"{where}, standard deviation of {pool}'s load, early", ours.std(), published.std()),
            Row(f"{where}, standard deviation of {pool}'s load, predictive", getattr(predictive, pool).std()),
        ]
    panels += [
        Panel(f"{where}, {title}", "s", "load", [*_series(loads, False), *papers])
        for title, loads, papers in (("early", early, _series(theirs, True)), ("predictive", predictive, []))
    ]
    return Result(rows, panels, [LEVELS])


def loads_over_time(setting: Setting, name: str, sizes: str, speed: float, admission: str, interval_s: float) -> Loads:
    """Loads of the pools of a cluster on a trace, from `WARM_UP_S` to the last arrival."""
    trace = setting.trace(name)
    cluster = setting.parameters.mooncake(sizes)
    simulator, policy = started(cluster, trace, setting.parameters.policy("conductor", admission), speed=speed)
    observed, clock = simulator.observation_tables, simulator.batch.state.clock
    looks = np.zeros((trace.n_requests // EVERY, 3))
    for look in looks:
        policy.replay(simulator, 0, limit=EVERY)
        look[:] = (
            clock["now_s"][0, 0],
            observed.prefill["queue_s"][0].mean() / cluster.slo.ttft_s,
            observed.decode["tbt_now_s"][0].mean() / cluster.slo.tbt_s,
        )
    looks = looks[looks[:, 0] >= WARM_UP_S]
    interval = (looks[:, 0] // interval_s).astype(int)
    intervals, which, count = np.unique(interval, return_inverse=True, return_counts=True)
    prefill, decode = (np.bincount(which, looks[:, i]) / count for i in (1, 2))
    return Loads(intervals * interval_s, prefill, decode)


def _series(loads: Loads, of_paper: bool) -> list[Series]:
    shown = loads.time_s <= SHOWN_S
    return [
        Series(pool, loads.time_s[shown].tolist(), getattr(loads, pool)[shown].tolist(), of_paper)
        for pool in ("prefill", "decode")
    ]


LEVELS = (
    "The loads are anti-phased as in the paper, but at other levels: decode is full all the time, since half of the "
    "requests are too many (Table 3), and swings by a few percent only; prefill's queues are short. In three ways to "
    "spread the arrivals within their ticks the correlation is -0.60, -0.59 and -0.39 under early rejection, -0.44, "
    "-0.38 and -0.26 under predictive, and -0.41, -0.35 and -0.40 under Baseline: that decode turns down what it "
    "cannot take is anti-phase enough. The forecast halves the spread of prefill's load; decode's, small as it is, "
    "grows. Where the mean loads are the paper's (5p15d) early rejection is anti-phased too, with half "
    "the paper's spread, and the forecast does not help."
)
