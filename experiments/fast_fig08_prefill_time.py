"""FAST Fig 8: mean prefill GPU time of a request, Mooncake and three ways to run vLLM.

16 nodes each: Mooncake with a global cache, vLLM plain, with prefix caching in VRAM, and with chunked prefill. The
split of Mooncake's nodes is not stated: 8 + 8 here. Prefill time is compute; chunked prefill pays the fixed part of a
prefill in every iteration. On synthetic every system takes longer here than in the paper, plain vLLM too, which reuses
nothing: there the prefill times fitted on single requests (FAST Fig 14) are too long.
"""

from __future__ import annotations

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import prefill_seconds, replay

SYSTEMS = ("mooncake", "vllm", "prefix", "chunked")
VLLM = {"vllm": "16m", "prefix": "16m-prefix", "chunked": "16m-chunked"}
TOLERANCES = {"conversation": Within(share=0.10), "synthetic": Within(share=0.10), "toolagent": Within(share=0.15)}


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig08")
    rows, ratios, panels = [], [], []
    for name, tolerance in TOLERANCES.items():
        trace = setting.trace(name)
        policy = setting.parameters.policy("conductor")
        ours = {"mooncake": prefill_seconds(replay(setting.parameters.mooncake("8p8d"), trace, policy))}
        ours |= {s: prefill_seconds(replay(setting.parameters.vllm(kind), trace)) for s, kind in VLLM.items()}
        theirs = dict(zip(SYSTEMS, numbers[name]))
        rows += [Row(f"{name} s, {s}", ours[s], theirs[s], tolerance) for s in SYSTEMS]
        ratios += [
            Row(f"{name}, {s} / mooncake", ours[s] / ours["mooncake"], theirs[s] / theirs["mooncake"]) for s in VLLM
        ]
        panels.append(
            Panel(
                name,
                "",
                "prefill s",
                [
                    Series("ours", SYSTEMS, [ours[s] for s in SYSTEMS]),
                    Series("ours", SYSTEMS, [theirs[s] for s in SYSTEMS], of_paper=True),
                ],
            )
        )
    return Result(rows + ratios, panels)
