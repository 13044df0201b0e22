"""FAST Fig 11: copies of popular blocks over time.

The paper samples every 30 s on how many nodes a block lies, for blocks of several ranks by their uses over the trace.
Its curves end at 8 copies, so it has 8 prefill nodes. Popular blocks are copied by use: a busy node's prefix is
fetched, and kept, by another one. Copies in host memory are counted. The most copies a block ever has are compared; the
paper's are read off the plots. Copies come of queues: ours are fewer than the paper's, and come near them where nodes
are busier, be it that requests of a tick all come at its start (`arrivals: recorded`) or that the replay is half as
fast again. The paper's TTFT says the same of its nodes (FAST Fig 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traces import Trace

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import started

NEAR = 2


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig11")
    nodes = numbers["prefill_nodes"]
    rows, panels = [], []
    for name, most in numbers["most"].items():
        ranks = [int(rank) for rank in most]
        setting.say(name)
        times, copies = copies_over_time(setting, setting.trace(name), nodes, ranks, numbers["every_s"])
        rows += [
            Row(f"{name}, most copies of the {rank}th block", int(copies[:, i].max()), most[str(rank)], Within(NEAR))
            for i, rank in enumerate(ranks)
        ]
        series = [Series(f"{rank}th", times, copies[:, i].tolist()) for i, rank in enumerate(ranks)]
        series += [Series(f"{rank}th", times[-1:], [most[str(rank)]], of_paper=True) for rank in ranks]
        panels.append(Panel(f"{name}, {nodes}p{nodes}d; at the end the paper's most", "s", "copies", series))
    return Result(rows, panels)


def copies_over_time(
    setting: Setting, trace: Trace, nodes: int, ranks: Sequence[int], every_s: float
) -> tuple[list[float], NDArray[np.int32]]:
    """Times, and the copies of the blocks of given ranks by uses then, int32[times, ranks], under Conductor."""
    by_uses = np.argsort(-np.bincount(trace.block_ids), kind="stable")
    blocks = by_uses[np.array(ranks) - 1]
    cluster = setting.parameters.mooncake(f"{nodes}p{nodes}d")
    simulator, policy = started(cluster, trace, setting.parameters.policy("conductor"))
    times = np.arange(every_s, trace.duration_s, every_s)
    copies = np.zeros((len(times), len(ranks)), np.int32)
    for i, time_s in enumerate(times):
        policy.replay(simulator, 0, until_s=time_s)
        copies[i] = simulator.replicas(0)[blocks]
    return times.tolist(), copies
