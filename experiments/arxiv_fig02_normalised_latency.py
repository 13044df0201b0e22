"""arXiv Fig 2: how prefill grows with the prompt, and a decode step with the batch.

The paper times LLaMA2-70B on one node: prefill of 8k to 128k tokens, and a decode iteration of 1 to 16 sequences of 8k
tokens each, both normalised to the largest. Ours is the prefill of a single simulated request, and the simulator's
formula for an iteration (docs/physics.md). Its terms are those of a loaded system, where an iteration grows faster with
its batch than in isolation: this figure shows by how much. Prefill throughput is judged loosely because this figure and
FAST Fig 14, on which prefill was fitted, differ by a tenth at 8k tokens.
"""

from __future__ import annotations

import numpy as np

from .experiment import Panel, Result, Row, Series, Setting, Within, paper
from .replays import alone

SHOWN_K = {0: "8k tokens", 1: "16k tokens", 3: "32k tokens", 7: "64k tokens", 15: "128k tokens"}
SHOWN_BATCHES = {0: "batch 1", 3: "batch 4", 7: "batch 8", 15: "batch 16"}
CONTEXT_TOKENS = 8 * 1024


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_fig02")
    cluster = setting.parameters.mooncake("1p1d")
    tokens_k = np.array(numbers["prefill_len_k"])
    prefill = np.array([alone(cluster, 1024 * k, 1)["prefill_s"] for k in numbers["prefill_len_k"]])
    batches = np.array(numbers["decode_batch"])
    step = cluster.decode[0].profile.decode
    decode = step.base_s + batches * (step.per_request_s + step.per_token_s * CONTEXT_TOKENS)
    ours = {
        "prefill_norm_latency": prefill / prefill[-1],
        "prefill_norm_throughput": (tokens_k / prefill) / (tokens_k[0] / prefill[0]),
        "decode_norm_latency_seq8k": decode / decode.max(),
        "decode_norm_throughput": (batches / decode) / (batches[-1] / decode[-1]),
    }
    rows = [
        Row(f"{what}, {label}", ours[key][i], numbers[key][i], tolerance)
        for what, key, tolerance, shown in (
            ("prefill latency", "prefill_norm_latency", Within(0.03), SHOWN_K),
            ("prefill throughput", "prefill_norm_throughput", Within(share=0.1), SHOWN_K),
            ("decode latency", "decode_norm_latency_seq8k", Within(share=0.1), SHOWN_BATCHES),
            ("decode throughput", "decode_norm_throughput", None, SHOWN_BATCHES),
        )
        for i, label in shown.items()
    ]
    panels = [
        Panel(
            title,
            label,
            "of the largest",
            [
                series
                for name, key in (("latency", latency), ("throughput", throughput))
                for series in (Series(name, x, ours[key].tolist()), Series(name, x, numbers[key], of_paper=True))
            ],
        )
        for title, label, x, latency, throughput in (
            ("prefill", "thousand tokens", tokens_k.tolist(), "prefill_norm_latency", "prefill_norm_throughput"),
            (
                "decode, 8k tokens each",
                "batch",
                batches.tolist(),
                "decode_norm_latency_seq8k",
                "decode_norm_throughput",
            ),
        )
    ]
    return Result(rows, panels)
