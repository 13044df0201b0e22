"""A plugin of vLLM's for workers that share a machine without a GPU.

It has NIXL's progress thread sleep between two looks at its connections: NIXL's Python API fixes that delay at 0, so
that every idle worker keeps a core busy; on two cores one request then takes 41 s, not 6. And it leaves workers the
cores that they were given: vLLM's NixlConnector puts the engine of each on the machine's last core, where they starve
one another while the other cores idle; a prefill of .3 s then takes up to 40 s beside one stream of tokens.

Not imported here: `runtime.vllm_workers` gives it to workers, which run in an environment of vLLM's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

DELAY_US = 500


def register() -> None:
    """Called by vLLM in each of its processes."""
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does, which is too late after this import
    from nixl import _api

    create = _api.nixlBind.nixlAgent

    def create_calm(name: str, config: Any) -> Any:
        config.pthrDelay = DELAY_US
        return create(name, config)

    def stay(process: int, cores: Iterable[int]) -> None:
        """Instead of `os.sched_setaffinity`."""

    _api.nixlBind.nixlAgent = create_calm
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity = stay
