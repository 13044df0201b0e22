"""Traces of LLM serving: what came in. Columns, readers, transforms, synthesis, statistics.

    >>> import traces
    >>> trace = traces.builtin("conversation", seed=0)      # no download needed
    >>> trace = traces.load("conversation_trace.jsonl")     # any public format, by content
    >>> trace = traces.load("builtin:arxiv-summarization@2.5")    # a set of lengths, at 2.5 requests/s
    >>> trace = traces.load("mooncake:conversation")        # as released, or a stand-in that says so
    >>> train, validation, test = trace.split()

Names are loaded on first use, so `import traces` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.arrivals import at_rate, builtin, gamma, lengths, poisson
    from traces.formats import load, save
    from traces.formats.servegen import servegen
    from traces.statistics import (
        Statistics,
        length_aware_hit_rate,
        lfu_hit_rate,
        lru_hit_curve,
        lru_hit_rate,
        statistics_of,
    )
    from traces.synthesis import (
        WorkloadProfile,
        fit,
        profile,
        synthesise_blocks,
        synthesize,
    )
    from traces.trace import Split, Trace, TraceError, merge

_HOME = {
    "Split": "trace",
    "Trace": "trace",
    "TraceError": "trace",
    "merge": "trace",
    "at_rate": "arrivals",
    "builtin": "arrivals",
    "gamma": "arrivals",
    "lengths": "arrivals",
    "poisson": "arrivals",
    "servegen": "formats.servegen",
    "load": "formats",
    "save": "formats",
    "WorkloadProfile": "synthesis",
    "fit": "synthesis",
    "profile": "synthesis",
    "synthesise_blocks": "synthesis",
    "synthesize": "synthesis",
    "Statistics": "statistics",
    "length_aware_hit_rate": "statistics",
    "lfu_hit_rate": "statistics",
    "lru_hit_curve": "statistics",
    "lru_hit_rate": "statistics",
    "statistics_of": "statistics",
}

__all__ = [
    "Split",
    "Statistics",
    "Trace",
    "TraceError",
    "WorkloadProfile",
    "at_rate",
    "builtin",
    "fit",
    "gamma",
    "length_aware_hit_rate",
    "lengths",
    "lfu_hit_rate",
    "load",
    "lru_hit_curve",
    "lru_hit_rate",
    "merge",
    "poisson",
    "profile",
    "save",
    "servegen",
    "statistics_of",
    "synthesise_blocks",
    "synthesize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'traces' has no attribute {name!r}")
    value = getattr(import_module(f"traces.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
