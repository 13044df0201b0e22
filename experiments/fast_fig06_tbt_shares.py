"""FAST Fig 6, with Figs 1 and 7: share of requests by TBT, Mooncake and three ways to run vLLM.

The paper replays its three traces on 16 nodes and counts the requests whose TBT, the mean of the longest tenth of
intervals, is within 100, 200 and 300 ms; TTFT is within 30 s. The split of Mooncake's nodes is not stated: 8 + 8 here,
and Algorithm 1's own admission. A request that was rejected, or came too late with its first token, counts as outside.

Decode was fitted here, on conversation and synthetic. Isolated decode times (arXiv Fig 2, FAST Fig 14) cannot give
these curves: hardly any request of vLLM on conversation or tool&agent is below 50 ms in the paper, interrupted by a
prefill or not, so an iteration must take that long with the 5 to 8 sequences a node then has.
"""

from __future__ import annotations

import numpy as np

from envs.metrics import Replay
from envs.state import Status

from .experiment import Between, Panel, Result, Row, Series, Setting, Within, paper
from .replays import replay

TTFT_SLO_S = 30.0
VLLM = {"vllm": "16m", "prefix": "16m-prefix", "chunked": "16m-chunked"}
JUDGED_MS = (100, 200, 300)
BEST_BASELINE = {"conversation": "vllm", "toolagent": "prefix", "synthetic": "vllm"}


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig01_06_07")
    limits_ms = numbers["ms"]
    rows, gains, panels = [], [], []
    for name, best in BEST_BASELINE.items():
        setting.say(name)
        trace, theirs = setting.trace(name), numbers[name]
        policy = setting.parameters.policy("conductor", "slo")
        replays = {"mooncake": replay(setting.parameters.mooncake("8p8d"), trace, policy)}
        replays |= {system: replay(setting.parameters.vllm(kind), trace) for system, kind in VLLM.items()}
        ours = {system: [share_within(result, ms) for ms in limits_ms] for system, result in replays.items()}
        rows += [
            Row(f"{name}, % within TTFT SLO, {system}", share_within(result, np.inf))
            for system, result in replays.items()
        ]
        for system, shares in ours.items():
            for ms in JUDGED_MS:
                i = limits_ms.index(ms)
                tolerance: Within | Between | None = Within(12) if system == "vllm" else None
                if system == "mooncake" and ms == min(JUDGED_MS) and name != "toolagent":
                    tolerance = Between(low=95)
                rows.append(Row(f"{name}, % within {ms} ms, {system}", shares[i], theirs[system][i], tolerance))
                if system == best:
                    gain = [100 * (shares_of["mooncake"][i] / shares_of[best][i] - 1) for shares_of in (ours, theirs)]
                    gains.append(Row(f"{name}, gain % over {best} within {ms} ms", *gain))
        series = [(system, of, of is theirs) for system in ours for of in (ours, theirs)]
        panels.append(
            Panel(
                name,
                "TBT ms",
                "% of requests",
                [Series(system, limits_ms, of[system], of_paper) for system, of, of_paper in series],
                log_x=True,
            )
        )
    return Result(rows + gains, panels, [DECODE, PREFIX, CHUNKED, TOOLAGENT])


def share_within(result: Replay, tbt_ms: float, ttft_s: float = TTFT_SLO_S) -> float:
    """Percent of all requests that completed with TTFT and TBT within limits."""
    outcomes = result.outcomes
    within = (outcomes["ttft_s"] <= ttft_s) & (outcomes["tbt_s"] <= tbt_ms / 1000)
    return 100 * float(np.mean((outcomes["status"] == Status.COMPLETED) & within))


DECODE = (
    "What decides vLLM's shares on conversation is how long its requests are there to be interrupted, so what an "
    "iteration takes. With isolated decode times 53, 80 and 90 % are within 100, 200 and 300 ms; with both load terms "
    "4 times that 36, 65 and 81 %. VRAM (150,000 tokens instead of 1.3 million: 1 point), arrivals as recorded (2 to "
    "3 points) and round-robin instead of least outstanding requests (0 to 9 points) do not come near. Routing at "
    "random would, but leaves synthetic 31 to 34 points short of the paper."
)
PREFIX = (
    "In the paper prefix caching does vLLM harm on conversation, though it prefills less (FAST Fig 8). Ours costs "
    "nothing but VRAM, so it gains."
)
CHUNKED = (
    "An iteration with 2,048 tokens of prefill takes 280 to 350 ms, so shares within 300 ms turn on the chunk: with "
    "1,536 tokens they are 58, 31 and 68 % on conversation, tool&agent and synthetic, but those within 200 ms 26, 18 "
    "and 37 %."
)
TOOLAGENT = (
    "On tool&agent the paper's vLLM has 43 % within 100 ms and hardly more within 200: requests that no prefill "
    "interrupted. Ours has 27 % such. Lengths and arrivals are a stand-in's there; with arrivals on its ticks of 3 s "
    "it is 20 %, with at most 16 sequences in a batch 35 %, but then a sixth of the requests wait more than 30 s for "
    "their first token. Mooncake on 8 + 8 rejects 5 % there, which the paper's does not."
)
