"""arXiv Table 1: hit rate of one global cache, by eviction policy and capacity.

The paper sends a sample of its requests, in order, to one cache of blocks of 512 tokens, under LRU, LFU and an eviction
that prefers blocks late in their requests. The trace it released (23,608 requests) has longer prompts than the sample
in the text and gives another table, measured by a reader of the repository; the tool&agent trace is the same requests
with lengths a few tokens apart. So LRU on tool&agent is judged by that measured row, the printed table by its shape.
For the conversation and synthetic traces, which the table does not have, "paper" is an independent count on the
released files. Hits are blocks, up to the first miss of each request. LFU evicts the least recently used of the blocks
with fewest uses, LengthAwareCache the deepest of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traces import Trace, length_aware_hit_rate, lfu_hit_rate, lru_hit_rate
from traces.statistics import capacity_label

from .experiment import Between, Panel, Result, Row, Series, Setting, Within, paper

POLICIES: dict[str, Callable[[Trace, float], float]] = {
    "LRU": lru_hit_rate,
    "LFU": lfu_hit_rate,
    "LengthAware": length_aware_hit_rate,
}
RELEASED = ("conversation", "synthetic")
COUNTED = Within(0.005)
STAND_IN = Within(0.02)
"""Of the synthesised tool&agent trace: it has the statistics of the released one, not its requests."""


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_table1")
    capacities = numbers["capacities"]
    labels = [f"{capacity_label(capacity)} blocks" for capacity in capacities]
    rows: list[Row] = []
    panels = []
    for name, counted in numbers["measured"].items():
        trace = setting.trace(name)
        ours = {policy: [rate(trace, capacity) for capacity in capacities] for policy, rate in POLICIES.items()}
        tolerance = COUNTED if name in RELEASED else STAND_IN
        for policy, theirs in counted.items():
            rows += [Row(f"{name} {policy}, {x}", o, t, tolerance) for x, o, t in zip(labels, ours[policy], theirs)]
        bounded = capacities[1:]  # a curve has no place for an unlimited cache
        curves = [Series(policy, bounded, rates[1:]) for policy, rates in ours.items()]
        points = [Series(policy, bounded, theirs[1:], of_paper=True) for policy, theirs in counted.items()]
        panels.append(Panel(f"{name}, as counted", "blocks", "hit rate", curves + points, log_x=True))
    rows += _as_printed(ours, numbers, labels)
    points = [Series(policy, bounded, numbers[policy][1:], of_paper=True) for policy in POLICIES]
    panels.append(Panel(f"{name}, as printed", "blocks", "hit rate", curves + points, log_x=True))
    return Result(rows, panels)


def _as_printed(ours: dict[str, list[float]], numbers: dict[str, Any], labels: list[str]) -> list[Row]:
    """The printed table beside tool&agent's, and its shape: the order of policies, no gain above 50,000 blocks."""
    rows = [
        Row(f"as printed, {policy}, {x}", o, t)
        for policy in POLICIES
        for x, o, t in zip(labels, ours[policy], numbers[policy])
    ]
    at = labels.index("30000 blocks")
    for better, worse in (("LRU", "LFU"), ("LFU", "LengthAware")):
        gap, printed = (rates[better][at] - rates[worse][at] for rates in (ours, numbers))
        rows.append(Row(f"{better} less {worse}, {labels[at]}", gap, printed, Between(0)))
    large = labels.index("50000 blocks")
    gain, printed = (rates["LRU"][0] - rates["LRU"][large] for rates in (ours, numbers))
    return [*rows, Row(f"LRU, unlimited less {labels[large]}", gain, printed, Within(0.01))]
