"""Where everything is that a live decision reads and changes: one record of addresses, so that kernels take one number.

Passing a header or an array to a compiled function takes about a microsecond, as long as many of them run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.kernel.compile import compiled
from envs.kernel.memory import OBSERVATION, PARAMETERS, STATE, record_at

from .block_table import index_at

LEDGER = np.dtype(
    [
        (name, "i8")
        for name in (
            *("state", "parameters", "observation"),  # headers (envs.kernel.memory)
            *("matched", "forecast"),  # int64[4, P], float64[D, 2] of `envs.observe.observe`
            "index",  # header of the prefix index
            "fetching",  # int64[P]: blocks on their way to each prefill instance
            "told",  # uint8[P + D]: NICs that are told by their engines and need no reckoning
        )
    ]
)

_ledger_at: Any = record_at(LEDGER)
_state_at: Any = record_at(STATE)
_parameters_at: Any = record_at(PARAMETERS)
_observation_at: Any = record_at(OBSERVATION)


@compiled
def ledger_of(at):
    return _ledger_at(at, 0)


@compiled
def state_of(ledger):
    return _state_at(ledger.state, 0)


@compiled
def parameters_of(ledger):
    return _parameters_at(ledger.parameters, 0)


@compiled
def observation_of(ledger):
    return _observation_at(ledger.observation, 0)


@compiled
def index_of(ledger):
    return index_at(ledger.index, 0)
