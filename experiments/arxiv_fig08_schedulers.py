"""arXiv Fig 8: TTFT under four schedulers, 8P + 8D, the arXiv trace.

The paper replays 23,000 requests under KVCache-centric scheduling (Conductor), cache-aware scheduling, load balancing
and random choice. Its trace is the tool&agent trace but for a few tokens. How fast it is replayed and what is admitted
are not stated. At the trace's own speed TTFT is a few seconds at most under any of the four, so the paper's cluster was
near saturation: the replay is as fast as gives load balancing the paper's mean (`arxiv_replay_speed`), and the other
three schedulers are to be held to it. Without admission, so that all four serve the same requests. Near saturation a
mean changes by half with a few percent of load, so the verdicts are of order and gaps.
"""

from __future__ import annotations

from .experiment import Between, Panel, Result, Row, Series, Setting, Within, paper
from .schedulers import ROUTERS, box_panel, order_rows, ratio_rows, time_rows, ttft_s

CLUSTER = "8p8d"
SLO_S = 30.0
SPEEDS = (1.0, 1.25, 1.5, 2.0)


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_fig08")
    trace = setting.trace("toolagent")
    speed = setting.parameters.arxiv_replay_speed.value
    times = ttft_s(setting, CLUSTER, trace, speed)
    means = {router: float(times[router].mean()) for router in ROUTERS}
    theirs = dict(zip(ROUTERS, numbers["mean"]))
    rows = order_rows(means)
    tolerances: dict[str, Within | Between] = {
        "conductor": Within(0.15),
        "load_balancing": Between(low=3.0),
        "random": Between(low=3.0),
    }
    rows += ratio_rows(means, theirs, tolerances)
    rows += time_rows(times, numbers)
    rows += [Row(f"share within {SLO_S:.0f} s, {router}", float((times[router] <= SLO_S).mean())) for router in ROUTERS]
    by_speed = {speed: times}
    for other in () if setting.quick else SPEEDS:
        setting.say(f"speed {other:g}")
        by_speed[other] = ttft_s(setting, CLUSTER, trace, other)
    speeds = sorted(by_speed)
    curves = [Series(router, speeds, [float(by_speed[s][router].mean()) for s in speeds]) for router in ROUTERS]
    points = [Series(router, [speed], [theirs[router]], of_paper=True) for router in ROUTERS]
    panels = [
        box_panel(f"toolagent, {CLUSTER}, speed {speed:g}", times, numbers),
        Panel(f"toolagent, {CLUSTER}", "speed of the replay", "mean TTFT s", curves + points, log_y=True),
    ]
    return Result(rows, panels)
