"""How the three built-in profiles were made: `python -m traces.profiles.build FOLDER`.

FOLDER holds Mooncake's released `conversation` and `synthetic` traces and the 1,000-row start of
its tool&agent trace that Dynamo publishes, under the names given in `SOURCES`.

The whole tool&agent trace was not at hand; its profile is put together from what is published:

- Three system prompts of 1, 12 and 5 blocks open 10,938, 9,203 and 3,449 of the 23,608 requests;
  the lengths behind the latter two come from the sample's requests.
- Requests behind the first are chat: in the sample as many of them continue an earlier one, after
  the same time and as deep, as in the conversation trace's first three minutes. They take the
  conversation trace's strata, lengths scaled so that the published means come out.
- Over the hour the rate rises, as in the conversation trace; the sample's first three minutes
  are slower than the hour's mean by about as much.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import numpy as np

from traces.formats import load, write_whole
from traces.statistics import statistics_of
from traces.synthesis import Arrivals, Stratum, WorkloadProfile, fit, synthesize
from traces.trace import Trace

SOURCES = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "toolagent": "dynamo_mooncake_trace_1000.jsonl.gz",
}
REQUESTS = 23_608
DURATION_S = 3_537.0
PROMPT_BLOCKS = (1, 12, 5)
PROMPT_USES = (10_938, 9_203, 3_449 + 18)
INPUT_MEAN, OUTPUT_MEAN = 8_596.0, 182.0
LRU_UNBOUNDED, NEVER_REUSED = 0.553, 0.785
PROMPT_HITS = 0.339
"""Hit rate of the prompts' blocks alone: their uses over all requested blocks."""
ROUNDS = 8


def toolagent(sample: Trace, conversation: WorkloadProfile) -> WorkloadProfile:
    """The tool&agent profile; see the module's text.

    Four factors on the parts (chat's input and output lengths, its propensity to continue, its
    share of requests that extend) are set until synthesised traces have the published means,
    unbounded hit rate and share of blocks never reused.
    """
    tools = fit(sample)
    if tuple(len(t.blocks()) for t in tools.trunks) != PROMPT_BLOCKS:
        raise SystemExit(f"expected the sample's prompts to have {PROMPT_BLOCKS} blocks")
    factor = {"input": 1.0, "output": 1.0, "reuse": 1.0, "extends": 1.0}
    for _ in range(ROUNDS):
        profile = _put_together(tools, conversation, factor)
        seen = [statistics_of(synthesize(profile, seed=2000 + k)) for k in range(2)]
        unbounded = fmean(s.lru_hit["inf"] for s in seen if s.lru_hit)
        never = fmean(s.never_reused_share or 0.0 for s in seen)
        # Only chat's part of each figure moves with its factor.
        factor["input"] *= 1 + (INPUT_MEAN / fmean(s.input_mean for s in seen) - 1) / 0.64
        factor["output"] *= OUTPUT_MEAN / fmean(s.output_mean for s in seen)
        factor["reuse"] *= 1 + (LRU_UNBOUNDED - unbounded) / (LRU_UNBOUNDED - PROMPT_HITS)
        factor["extends"] *= (1 - NEVER_REUSED) / (1 - never)
    return profile


def _put_together(tools: WorkloadProfile, chat: WorkloadProfile, factor: dict[str, float]) -> WorkloadProfile:
    chat_share, *tool_shares = [uses / REQUESTS for uses in PROMPT_USES]
    curve = [c * chat_share * factor["reuse"] for c in chat.reuse_curve]
    reuse = float(np.mean(curve))
    extends = sum(s.share for s in chat.strata if s.kind == "extends")
    shares = {
        "extends": factor["extends"],
        "rereads": (1 - extends * factor["extends"]) / (1 - extends),
        "fresh": 1.0,
    }
    strata = [_scaled(s, factor).model_copy(update={"share": round(s.share * shares[s.kind], 6)}) for s in chat.strata]
    # Continuing requests are all chat; the fresh ones of chat are what is left of its share.
    fresh_chat = (chat_share - reuse) / (1 - reuse)
    strata = [
        s.model_copy(update={"share": round(s.share * fresh_chat, 6)}) if s.kind == "fresh" else s for s in strata
    ]
    for stratum in tools.fresh:
        (trunk,) = stratum.trunk_shares
        if trunk > 0:
            share = round(float(tool_shares[trunk - 1]) / (1 - reuse), 6)
            strata.append(stratum.model_copy(update={"share": share}))
    ramp = np.linspace(0.86, 1.14, 20)
    return WorkloadProfile(
        name="toolagent",
        source="published figures of Mooncake's tool&agent trace; see traces/profiles/build.py",
        block_tokens=512,
        n_requests=REQUESTS,
        max_input_tokens=chat.max_input_tokens,
        arrivals=Arrivals(
            rate=round(REQUESTS / DURATION_S, 6),
            gap_cv=tools.arrivals.gap_cv,
            tick_s=tools.arrivals.tick_s,
            curve=[round(float(c), 4) for c in ramp],
            segment_s=round(DURATION_S / len(ramp), 4),
        ),
        trunks=tools.trunks,
        reuse_curve=[round(c, 4) for c in curve],
        strata=strata,
    )


def _scaled(stratum: Stratum, factor: dict[str, float]) -> Stratum:
    """Chat lengths by a factor; matched depths stay, so new text takes all of the change."""
    tables = dict(stratum.tables)
    for label, by in (
        ("input_tokens", "input"),
        ("new_tokens", "input"),
        ("output_tokens", "output"),
    ):
        if label in tables:
            tables[label] = [float(f"{v * factor[by]:.6g}") for v in tables[label]]
    return stratum.model_copy(update={"tables": tables})


def main(folder: Path) -> None:
    source = {name: load(folder / file) for name, file in SOURCES.items()}
    profiles = {name: fit(source[name], name=name) for name in ("conversation", "synthetic")}
    profiles["toolagent"] = toolagent(source["toolagent"], profiles["conversation"])
    for name, profile in profiles.items():
        write_whole(Path(__file__).parent / f"{name}.yaml", profile.to_yaml().encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
