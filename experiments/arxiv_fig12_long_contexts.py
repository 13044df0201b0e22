"""arXiv Fig 12: P90 of TTFT and TBT by request rate, simulated prompts of 16k to 128k tokens.

The paper sends prompts of one length with 512 output tokens and a cache ratio of 50 %, as a Poisson process, to vLLM on
4 nodes, which runs requests one at a time there, and to Mooncake with 3P + 1D and 2P + 2D. Its claim of 50 % to 525 %
more throughput is the ratio of the last rates within both SLOs, without 128k, where that is 17 % and the last rate is
the highest tested. The SLOs are 10 times the P90 TTFT and 5 times the P90 TBT at the lowest rate: of the same system
here, which makes every curve of ours start at 0.1 and 0.2; of which system in the paper is not said. Pictures end at
1.2, as the paper's do. Ours replays the same number of requests at each rate without admission control.
"""

from __future__ import annotations

from .experiment import Result, Setting
from .rate_sweep import sweep

LENGTHS = {"sim16k": "simulated-16k", "sim32k": "simulated-32k", "sim64k": "simulated-64k", "sim128k": "simulated-128k"}


def run(setting: Setting) -> Result:
    rows, panels = sweep(setting, LENGTHS, setting.parameters.vllm("4m", max_batch=1))
    return Result(rows, panels, [QUEUE, RUN_LENGTH])


QUEUE = (
    "TTFT ends with the prefill, and TBT leaves out the wait between prefill and decode. At the highest rates the one "
    "decode node of 3P + 1D is saturated here, and its queue, which neither measure shows, grows. In the paper too "
    "the TBT of 3P + 1D stops rising with the rate; but its TTFT does rise there, and more than with 2P + 2D, so "
    "decode held prefill up. Without a limit on the batch 3P + 1D would break the TBT SLO at 0.5 requests per second "
    "of 16k: with isolated decode times it would not, but those do not fit any replay of a trace (FAST Fig 6)."
)
RUN_LENGTH = (
    "vLLM cannot sustain 0.2 requests per second of 64k or 0.12 of 128k, one at a time on 4 nodes, and passes for as "
    "long as the queue has not grown: with 60 requests per rate the last ones are 0.2 and 0.12, with 300 they are 0.1 "
    "and 0.1."
)
