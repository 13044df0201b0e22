"""FAST Fig 14: what a single request's time consists of, by prompt length and cached share.

The paper sends one request with 8k to 128k prompt tokens and 128 output tokens to an idle cluster, with none or 95 % of
its prompt cached. Ours is one simulated request, its prefix in host memory. Prefill, decode and the time from the end
of the prefill to the first decode step (transfer and load) are compared; scheduling takes no time here, and the
transfer overlaps the prefill layer by layer, so that only the load and the last layer are left of it. Where the decode
terms are those of a loaded system, a single request decodes too slowly, the more the longer it is.
"""

from __future__ import annotations

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import alone

OUTPUT_TOKENS = 128
CASES = {"0 %": (0.0, "prefill_s_0pct", "decode128_s_0pct"), "95 %": (0.95, "prefill_s_95pct", "decode128_s_95pct")}


def run(setting: Setting) -> Result:
    numbers = paper("fast_fig14")
    lengths = numbers["len_k"]
    cluster = setting.parameters.mooncake("1p1d", device_kv_tokens=0)
    rows, panels = [], []
    for case, (share, prefill_key, decode_key) in CASES.items():
        requests = [alone(cluster, 1024 * k, OUTPUT_TOKENS, share) for k in lengths]
        prefill = [float(r["prefill_s"]) for r in requests]
        decode = [float(r["finish_s"] - r["join_s"]) for r in requests]
        moved = [float(r["join_s"] - r["prefill_end_s"]) for r in requests]
        for k, ours, theirs in zip(lengths, prefill, numbers[prefill_key]):
            rows.append(
                Row(f"prefill s, {k}k, {case} cached", ours, theirs, Within(share=0.05 if share == 0 else 0.25))
            )
        for k, ours, theirs in zip(lengths, decode, numbers[decode_key]):
            rows.append(Row(f"decode s, {k}k, {case} cached", ours, theirs, Within(share=0.10)))
        rows += [
            Row(f"transfer and load s, {k}k, {case} cached", ours, theirs)
            for k, ours, theirs in zip(lengths, moved, numbers["transfer_plus_load_s"])
        ]
        panels.append(
            Panel(
                f"{case} cached",
                "thousand prompt tokens",
                "s",
                [
                    series
                    for name, ours, theirs in (
                        ("prefill", prefill, numbers[prefill_key]),
                        ("decode of 128 tokens", decode, numbers[decode_key]),
                        ("transfer and load", moved, numbers["transfer_plus_load_s"]),
                    )
                    for series in (Series(name, lengths, ours), Series(name, lengths, theirs, of_paper=True))
                ],
                log_x=True,
                log_y=True,
            )
        )
    return Result(rows, panels)
