"""arXiv Fig 7: how long storing a prompt's KV takes, after prefill or layer by layer during it.

The paper stores the KV of 8k to 128k tokens either when the prefill has ended (serialised) or layer by layer while it
runs: then what is left at its end does not grow with the prompt. Ours is one simulated request: the time from the end
of its prefill until its KV has landed on the decode node, which streams layer by layer; serialised is the time the same
bytes take alone, both with the fixed latency of a transfer. The paper's layer-wise times contain an overhead of about
0.1 s that we do not model, its serialised ones up to 0.4 s, so the comparison is of growth.
"""

from __future__ import annotations

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import alone


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_fig07")
    cluster = setting.parameters.mooncake("1p1d")
    bytes_per_s = cluster.decode[0].profile.nic_bytes_per_s
    ours: dict[str, list[float]] = {"serialized": [], "layerwise": []}
    for tokens in numbers["len"]:
        request = alone(cluster, tokens, 2)
        ours["layerwise"].append(float(request["kv_ready_s"] - request["prefill_end_s"]))
        ours["serialized"].append(tokens * cluster.model.kv_bytes_per_token / bytes_per_s + cluster.transfer_latency_s)
    rows = [
        Row("layer-wise, 128k over 8k tokens", _growth(ours["layerwise"]), _growth(numbers["layerwise"]), Within(0.5)),
        Row(
            "serialised, 128k over 8k tokens",
            _growth(ours["serialized"]),
            _growth(numbers["serialized"]),
            Within(share=0.5),
        ),
    ]
    rows += [
        Row(f"{kind} s, {tokens // 1000}k tokens", o, e)
        for kind in ours
        for tokens, o, e in zip(numbers["len"], ours[kind], numbers[kind])
    ]
    panel = Panel(
        "KV store",
        "tokens",
        "s",
        [
            series
            for kind in ours
            for series in (
                Series(kind, numbers["len"], ours[kind]),
                Series(kind, numbers["len"], numbers[kind], of_paper=True),
            )
        ],
    )
    return Result(rows, [panel])


def _growth(seconds: list[float]) -> float:
    return seconds[-1] / seconds[0]
